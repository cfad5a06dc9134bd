"""Chat templates: Jinja2 as Hugging Face checkpoints use it, in a sandbox.

A template comes with the model, so it is not trusted. It can only read what it is given, and can
change nothing. It can take any time and memory, so it runs in a process of its own
(shared.confined).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import BadInput, ModelError

CHAT_TEMPLATE = "chat_template.jinja"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training. The text
    between is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON. Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token` and the like. ModelError if the template is malformed."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # foreign code: Python's own limits and jinja2's bugs as well
            raise ModelError(f"the model's chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt. BadInput if the template refuses the messages. `arguments`: the caller's own
        switches (`enable_thinking` and the like)."""
        variables = {"tools": None, "documents": None, **self._special_tokens, **arguments}
        if tools:
            variables["tools"] = tools
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except MemoryError:
            raise
        except Exception as error:  # a template is foreign code and may raise anything
            raise BadInput(f"the model's chat template refuses the messages: {error}") from error


def developer_role(source: str) -> str:
    """The template's role for the API's `developer`, which most templates do not know."""
    known = "'developer'" in source or '"developer"' in source
    return "developer" if known else "system"


def template_source(
    files: Mapping[str, bytes], tokenizer_config: Mapping[str, Any], name: str = "default"
) -> str | None:
    """The template with this name. The separate file goes first; it, and a template without a name,
    is the default."""
    if CHAT_TEMPLATE in files:
        return files[CHAT_TEMPLATE].decode(errors="replace") if name == "default" else None
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = [item for item in found if isinstance(item, dict) and item.get("name") == name]
        found = named[0].get("template") if named else None
    elif name != "default":
        return None
    return found if isinstance(found, str) else None
