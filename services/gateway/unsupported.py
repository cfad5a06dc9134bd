"""Parameters of the API, of vLLM and of SGLang that would change the answer, and are refused.

Each is accepted with the values that change nothing, because some clients always send them.
"""

from typing import Any, ClassVar

import msgspec

TOOLS = "use /v1/chat/completions"
SILENT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "store": (False,),
    "modalities": (["text"],),
    "suffix": ("",),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
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
    "tools": TOOLS,
    "tool_choice": TOOLS,
    "functions": "use tools",
    "function_call": "use tool_choice",
    "reasoning_effort": "give the template's own switch in chat_template_kwargs",
    "verbosity": "say it in a message",
    "store": "nothing is stored",
    "guided_json": 'use structured_outputs: {"json": ...}',
    "guided_regex": 'use structured_outputs: {"regex": ...}',
    "guided_choice": 'use structured_outputs: {"choice": ...}',
    "guided_grammar": 'use structured_outputs: {"grammar": ...}',
    "regex": 'use structured_outputs: {"regex": ...}',
    "ebnf": 'use structured_outputs: {"grammar": ...}, in Lark syntax',
    "json_schema": "use response_format",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "chat_template": "render the prompt yourself and use /v1/completions",
}
"""What a client can do, besides leaving the parameter out."""


class Unsupported(msgspec.Struct, kw_only=True):
    refused: ClassVar[tuple[str, ...]] = ()
    """Fields of a body of its own that are refused beside these."""
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    store: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    suffix: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    continue_final_message: Any = None
    prompt_logprobs: Any = None
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
