"""Chats as prompts, by their model's template, and what the replies to them may consist of."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from services.gateway.api_error import ApiError, invalid
from services.gateway.aside import aside
from services.gateway.catalog import Lingo
from services.gateway.core import admission
from services.gateway.history import Dialogue
from services.gateway.quoting import Unquoted
from services.gateway.replies.dialects import SHORT_ID, Dialect, dialect_of
from services.gateway.replies.form import THINK, THOUGHT, Form
from shared.chat_template import developer_role
from shared.confined.jobs import Job, Learn, Refused, Render, Template
from shared.confined.pool import ConfinedPool
from shared.errors import BadInput, ModelError
from shared.messages.pool import ModelRecord
from shared.template_manner import Manner

MAX_WAITING = 1024
"""The most chats of one model that wait for its template."""
_INLINE_CHARS = 1 << 14
"""Longer chats are looked through on a thread, while streams go on."""
MAX_MANNERS = 1024
"""The number of templates whose manner is remembered."""
_CUT = "\ue000the reply goes on here\ue001 "
"""Stands behind the content of a message that is continued."""
_SHORT_ID = re.compile(f"[A-Za-z0-9]{{{SHORT_ID}}}")


class ChatRenderer:
    def __init__(self, pool: ConfinedPool) -> None:
        self._pool = pool
        self._word = f"quoted{secrets.token_hex(8)}x"
        """Begins what stands for special tokens while a template is rendered."""
        self._manners: dict[str, Manner] = {}
        """What templates do with tools, by their source."""

    async def render(
        self, dialogue: Dialogue, record: ModelRecord, lingo: Lingo
    ) -> tuple[Unquoted, Form]:
        """The prompt, and how the reply is read. ApiError 400: what does not fit, or what the
        template would leave out; 503: the template cannot be read. CapacityExceeded."""
        calling = dialogue.first("tool_calls") is not None
        template = lingo.template_for(calling or dialogue.tools is not None)
        if template is None:
            invalid("model", "has no chat template; use /v1/completions")
        admission.check_chars(dialogue.chars, lingo.codec.longest, record.context_length)
        messages, dialect = dialogue.messages, None
        if calling or dialogue.tools is not None:
            manner = await self._manner(template, record)
            _check_manner(dialogue, manner, record)
            dialect = dialect_of(manner.call)
            messages = tuple(_in_manner(message, manner, dialect) for message in messages)
        if dialogue.continued:
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _CUT})
        developer = developer_role(template.source)
        messages = tuple(
            {**message, "role": developer} if message["role"] == "developer" else message
            for message in messages
        )
        tools = dialogue.tools.described() if dialogue.tools else ()
        specials, given = lingo.codec.specials, (messages, tools, dialogue.arguments)
        quoted = partial(specials.quoted, given, self._word)
        long = dialogue.chars > _INLINE_CHARS
        messages, tools, arguments = await aside(quoted) if long else quoted()
        job = Render(
            template,
            tuple(messages),
            dialogue.add_generation_prompt,
            {**_effort(template, dialogue.effort), **arguments},
            lingo.codec.longest * record.context_length,
            tuple(tools),
        )
        text = await self._ask(job, record)
        if dialogue.continued:
            text = _before_cut(text, record)
        form = _form(text, dialogue, dialect, lingo)
        if dialect and form.calling:
            text += dialect.opening
        unquoted = partial(specials.unquoted, text, self._word)
        return await aside(unquoted) if long else unquoted(), form

    async def _manner(self, template: Template, record: ModelRecord) -> Manner:
        known = self._manners.get(template.source)
        if known is None:
            learned = await self._ask(Learn(template), record)
            known = msgspec.json.decode(learned, type=Manner)
            self._manners[template.source] = known
            if len(self._manners) > MAX_MANNERS:
                del self._manners[next(iter(self._manners))]
        return known

    async def _ask(self, job: Job, record: ModelRecord) -> str:
        outcome = await self._pool.run(job, key=record.served_by, most_waiting=MAX_WAITING)
        if isinstance(outcome, Refused):
            if not outcome.by_template:
                raise BadInput(outcome.why)
            message = f"model {record.name!r} can't be served now: {outcome.why}"
            raise ApiError(503, message, code=ModelError.code, retry_after=1)
        return outcome.text


def _before_cut(text: str, record: ModelRecord) -> str:
    """The prompt up to the end of the last message's content. A template that trims a message also
    trims what it would have had at its end."""
    before, found, after = text.rpartition(_CUT.strip())
    if not found:
        template = f"the chat template of model {record.name!r}"
        invalid("continue_final_message", f"{template} leaves out the last message")
    return before if after.startswith(" ") else before.rstrip()


def _effort(template: Template, effort: str | None) -> dict[str, Any]:
    """The template's own switch for how much the model thinks."""
    if effort is None:
        return {}
    if "reasoning_effort" in template.source:
        return {"reasoning_effort": effort}
    if "enable_thinking" not in template.source:
        invalid("reasoning_effort", "the model's chat template has no switch for it; leave it out")
    return {"enable_thinking": effort != "none"}


def _form(prompt: str, dialogue: Dialogue, dialect: Dialect | None, lingo: Lingo) -> Form:
    thinks = thinking = False
    if lingo.thinks and dialogue.add_generation_prompt:
        end = prompt.rstrip()
        thinks, thinking = not end.endswith((THINK, THOUGHT)), end.endswith(THINK)
    use = dialogue.tools
    if use is None or dialect is None:
        return Form(thinks=thinks, thinking=thinking)
    # No grammar can ask for a special token, so the prompt ends with it.
    special = bool(lingo.codec.special_ids([dialect.opening]))
    return Form(
        thinks=thinks,
        thinking=thinking,
        dialect=dialect,
        tools={tool.function.name: tool.function.schema for tool in use.callable},
        several=use.several,
        special=special,
        calling=special and use.required and not (thinks or thinking),
    )


def _check_manner(dialogue: Dialogue, manner: Manner, record: ModelRecord) -> None:
    """Refuses what the template would leave out of the prompt."""
    template = f"the chat template of model {record.name!r}"
    if dialogue.tools:
        if not manner.tools:
            invalid("tools", f"{template} takes no tools; leave them out")
        if dialect_of(manner.call) is None:
            invalid("tools", f"how {template} writes calls is not known here; leave them out")
    calling, answering = dialogue.first("tool_calls"), dialogue.first("tool_call_id")
    if calling is not None and not manner.call:
        invalid(f"messages[{calling}].tool_calls", f"{template} leaves out calls of tools")
    if answering is not None and not manner.results:
        invalid(f"messages[{answering}]", f"{template} leaves out results of tools")


def _in_manner(
    message: Mapping[str, Any], manner: Manner, dialect: Dialect | None
) -> Mapping[str, Any]:
    """The message as the template reads it."""
    short = dialect is not None and dialect.short_ids
    if short and "tool_call_id" in message:
        return {**message, "tool_call_id": _shortened(message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if short:
        calls = [{**call, "id": _shortened(call["id"])} for call in calls]
    if manner.text_arguments:
        calls = [{**call, "function": _with_text(call["function"])} for call in calls]
    content = message["content"] or (None if manner.no_content else "")
    return {**message, "content": content, "tool_calls": calls}


def _shortened(call: str) -> str:
    """The id of a call, which may come from elsewhere, as Mistral's templates take it."""
    if _SHORT_ID.fullmatch(call):
        return call
    return hashlib.sha256(call.encode(errors="surrogatepass")).hexdigest()[:SHORT_ID]


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
