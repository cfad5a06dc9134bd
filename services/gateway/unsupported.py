"""Parameters of the API, of vLLM and of SGLang that would change the answer, and are refused.

Each is accepted with the values that change nothing, because some clients always send them.
"""

from functools import cache
from typing import Any, ClassVar

import msgspec

CHATS = "use /v1/chat/completions"
SILENT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "store": (False,),
    "modalities": (["text"],),
    "suffix": ("",),
    "continue_final_message": (False,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "documents": ([],),
    "no_stop_trim": (False,),
    "typical_p": (1,),
    "logits_processors": ([],),
}
"""For each parameter, the values that change nothing. For all others that is null only."""
INSTEAD = {
    "tools": CHATS,
    "tool_choice": CHATS,
    "functions": "use tools",
    "function_call": "use tool_choice",
    "reasoning_effort": CHATS,
    "continue_final_message": CHATS,
    "verbosity": "say it in a message",
    "store": "nothing is stored",
    "regex": 'use structured_outputs: {"regex": ...}',
    "ebnf": 'use structured_outputs: {"grammar": ...}, in Lark syntax',
    "json_schema": "use response_format",
    "chat_template": "render the prompt yourself and use /v1/completions",
}
"""What a client can do, besides leaving the parameter out."""


class Unsupported(msgspec.Struct, kw_only=True):
    refused: ClassVar[tuple[str, ...]] = ()
    """Fields of a body of its own that are refused beside these."""
    functions: Any = None
    function_call: Any = None
    verbosity: Any = None
    store: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    suffix: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    use_beam_search: Any = None
    early_stopping: Any = None
    length_penalty: Any = None
    chat_template: Any = None
    documents: Any = None
    priority: Any = None
    cache_salt: Any = None
    no_stop_trim: Any = None
    stop_regex: Any = None
    typical_p: Any = None
    logits_processors: Any = None


@cache
def refused_by(body: type[Unsupported]) -> tuple[str, ...]:
    """The fields of a body that are known in order to be refused."""
    return (*Unsupported.__struct_fields__, *body.refused)


def refusal(body: Unsupported) -> tuple[str, str] | None:
    """The first parameter that cannot be honoured, and what to do about it."""
    for name in refused_by(type(body)):
        value = getattr(body, name)
        if value is not None and value not in SILENT.get(name, ()):
            hint = INSTEAD.get(name)
            return name, f"is not supported; leave it out{f' ({hint})' if hint else ''}"
    return None
