"""The OpenAI API's requests and errors, as this gateway takes and gives them.

Fields that are unknown are ignored, as the API's clients expect. Fields that are known and would
change the answer, but that the engine cannot honour (`unsupported`), are refused: a client is never
given something else than it asked for. docs/api.md lists what is what.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from services.gateway.unsupported import Unsupported, refusal
from shared import grammar
from shared.errors import BadInput, BusError, CapacityExceeded, LambdaScaleError, NotFound
from shared.messages.serving import LogitRules, Sampling

MAX_STOPS = 64
MAX_TOKEN_ID = (1 << 31) - 1
MAX_STOP_CHARS = 1024
MAX_TOP_K = 1 << 30
MAX_LOGPROBS = 20
MAX_BIASED = 1024
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100
ROLES = ("system", "developer", "user", "assistant")
ANY_OBJECT = {"type": "object"}


class ApiError(Exception):
    """An answer other than 200, with the API's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.body = msgspec.json.encode({"error": error})


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def of_error(error: LambdaScaleError) -> ApiError:
    match error:
        case BadInput():
            return ApiError(400, str(error))
        case NotFound():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case CapacityExceeded():
            return ApiError(429, str(error), code="capacity", retry_after=1)
        case BusError():
            return ApiError(503, str(error), code=error.code, retry_after=1)
    return ApiError(500, str(error), code=error.code)


def invalid(param: str, message: str) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None
    """Has no effect: the answer keeps to the schema in any case."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field. Exactly one of its fields is given."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in llguidance's Lark syntax."""


class _Common(Unsupported, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    """Accepted if it equals `n`."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to every choice: the generated tokens themselves."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt is a text or a list of token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        texts = [item for item in given if isinstance(item, str)]
        ids = [item for item in given if isinstance(item, int)]
        lists = [item for item in given if isinstance(item, list)]
        if not given:
            invalid("prompt", "must not be empty")
        if max(len(texts), len(ids), len(lists)) < len(given):
            invalid("prompt", "use one kind: texts, token ids, or lists of token ids")
        if ids:
            return [ids]
        return [*texts, *lists]


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # Known, and refused.
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None

    def for_template(self, index: int, *, developer: str) -> dict[str, str]:
        """The message for a template. `developer`: the template's name for this role."""
        role = developer if self.role == "developer" else self.role
        fields = {"role": role, "content": self._text(index)}
        if self.name is not None:
            fields["name"] = self.name
        if self.reasoning_content is not None:
            fields["reasoning_content"] = self.reasoning_content
        return fields

    def _text(self, index: int) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for position, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                where = f"messages[{index}].content[{position}]"
                invalid(where, f"only parts of type 'text' can be read, not {part.type!r}")
        return "\n".join(part.text or "" for part in self.content)


class ChatRequest(_Common, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest)
Json = TypeVar("Json", bound=msgspec.Struct)
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$")


def parse(raw: bytes, kind: type[Body]) -> Body:
    """The request. ApiError 400 names the field that does not fit, or that is not supported."""
    body = decoded(raw, kind)
    _check_common(body)
    if isinstance(body, CompletionRequest):
        _check_completion(body)
    else:
        _check_chat(body)
    return body


def decoded(raw: bytes, kind: type[Json]) -> Json:
    """A JSON body. ApiError 400 names the field that does not fit."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        if match is None:
            raise ApiError(400, str(error), param=_missing(str(error))) from error
        message = f"{match['path']}: {match['what']}"
        raise ApiError(400, message, param=match["path"] or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error


def _missing(message: str) -> str | None:
    found = re.search(r"missing required field `(\w+)`", message)
    return found[1] if found else None


def _check_common(body: _Common) -> None:
    _check_range(body, "n", 1)
    _check_range(body, "max_tokens", 0 if echoes(body) else 1)
    _check_range(body, "min_tokens", 0)
    if len(stops_of(body)) > MAX_STOPS:
        invalid("stop", f"at most {MAX_STOPS} strings")
    for stop in stops_of(body):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            invalid("stop", f"every string must have 1 to {MAX_STOP_CHARS} characters")
    ids = body.stop_token_ids or ()
    if len(ids) > MAX_STOPS or not all(0 <= token <= MAX_TOKEN_ID for token in ids):
        invalid("stop_token_ids", f"at most {MAX_STOPS} ids between 0 and {MAX_TOKEN_ID}")
    _check_range(body, "temperature", 0, 100)
    if body.top_p is not None and not 0 < body.top_p <= 1:
        invalid("top_p", "must be above 0 and at most 1")
    if body.top_k is not None and not -1 <= body.top_k <= MAX_TOP_K:
        invalid("top_k", f"must be between 0 (no limit) and {MAX_TOP_K}, or -1 (no limit)")
    _check_range(body, "min_p", 0, 1)
    _check_range(body, "presence_penalty", -2, 2)
    _check_range(body, "frequency_penalty", -2, 2)
    penalty = body.repetition_penalty
    if penalty is not None and not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        message = f"must be {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}"
        invalid("repetition_penalty", f"{message} (1: no penalty)")
    _check_bias(body.logit_bias or {})
    if body.best_of is not None and body.best_of != (body.n or 1):
        invalid("best_of", "is not supported; leave it out")
    if refused := refusal(body):
        invalid(*refused)


def _check_range(body: _Common, field: str, least: float, most: float | None = None) -> None:
    value = getattr(body, field)
    if value is None or (value >= least and (most is None or value <= most)):
        return
    invalid(field, f"must be at least {least}" if most is None else f"must be {least} to {most}")


def _check_bias(bias: Mapping[str, float]) -> None:
    if len(bias) > MAX_BIASED:
        invalid("logit_bias", f"at most {MAX_BIASED} tokens")
    for token, value in bias.items():
        if not (
            token.isascii() and token.isdecimal() and len(token) < 11 and int(token) <= MAX_TOKEN_ID
        ):
            invalid("logit_bias", f"the keys are token ids, which {token[:20]!r} is not")
        if not -100 <= value <= 100:
            invalid("logit_bias", f"must be -100 to 100, which that of token {token} is not")


def _check_completion(body: CompletionRequest) -> None:
    _check_range(body, "logprobs", 0, MAX_LOGPROBS)


def _check_chat(body: ChatRequest) -> None:
    if not body.messages:
        invalid("messages", "must not be empty")
    _check_range(body, "max_completion_tokens", 1)
    _check_range(body, "top_logprobs", 0, MAX_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        invalid("top_logprobs", "needs logprobs: true")
    if body.echo:
        invalid("echo", "is for /v1/completions; leave it out")
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: "ChatMessage", where: str) -> None:
    """Refuses content that would not be passed to the template, and so would be lost."""
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        field = "role" if message.role in ("tool", "function") else "tool_calls"
        invalid(f"{where}.{field}", "tool calls and their results are not supported yet")
    if message.role not in ROLES:
        invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {message.role[:40]!r}")
    for field in ("refusal", "audio"):
        if getattr(message, field) is not None:
            invalid(f"{where}.{field}", "is not supported; send the answer's content")


def stops_of(body: _Common) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def echoes(body: _Common) -> bool:
    """Whether the prompt is repeated in the answer, which may then have no token of its own."""
    return isinstance(body, CompletionRequest) and bool(body.echo)


def logprobs_of(body: _Common) -> int | None:
    """How many alternatives each token comes with. None: no log probabilities at all."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if isinstance(body, ChatRequest) and body.logprobs:
        return body.top_logprobs or 0
    return None


def sampling_of(body: _Common, seed: int) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=seed,
        logprobs=logprobs_of(body),
    )


def rules_of(body: _Common, vocab_size: int) -> LogitRules | None:
    """The rules; None if the model's logits are taken as they are. The grammar is not checked
    yet."""
    biased = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    if biased and max(biased) >= vocab_size:
        message = f"token id {max(biased)} is not one of the model's, 0 to {vocab_size - 1}"
        invalid("logit_bias", message)
    rules = LogitRules(
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=tuple(sorted(biased.items())),
        min_tokens=body.min_tokens or 0,
        grammar=_grammar_of(body),
    )
    return None if rules == LogitRules() else rules


def _grammar_of(body: _Common) -> str:
    """The grammar that the text must follow; empty if there is none."""
    asked, wanted = body.response_format, body.structured_outputs
    if asked is None or asked.type == "text":
        asked = None
    if asked is None and wanted is None:
        return ""
    param = grammar_field(body)
    if asked and wanted:
        invalid(param, "leave out either this or structured_outputs")
    if body.ignore_eos:
        invalid("ignore_eos", f"can't be used with {param}: its text has an end")
    if body.min_tokens:
        invalid("min_tokens", f"can't be used with {param}: its text may have to end before")
    try:
        return _of_format(asked) if asked else _of_structure(wanted or StructuredOutputs())
    except BadInput as error:
        invalid(param, str(error))


def grammar_field(body: _Common) -> str:
    """The field of the request that asks for a grammar."""
    asked = body.response_format
    return "structured_outputs" if asked is None or asked.type == "text" else "response_format"


def _of_format(asked: ResponseFormat) -> str:
    if asked.type == "json_object":
        return grammar.from_schema(ANY_OBJECT)
    if asked.json_schema is None:
        invalid("response_format.json_schema", "is needed for type 'json_schema'")
    return grammar.from_schema(asked.json_schema.schema)


def _of_structure(wanted: StructuredOutputs) -> str:
    given = {name: value for name, value in msgspec.structs.asdict(wanted).items() if value}
    if len(given) != 1:
        invalid("structured_outputs", f"give one of {', '.join(wanted.__struct_fields__)}")
    if wanted.json:
        return grammar.from_schema(_schema(wanted.json))
    if wanted.regex:
        return grammar.from_regex(wanted.regex)
    if wanted.choice:
        if not all(wanted.choice):
            invalid("structured_outputs.choice", "texts must not be empty")
        return grammar.from_choice(wanted.choice)
    return grammar.from_lark(wanted.grammar) if wanted.grammar else grammar.from_schema(ANY_OBJECT)


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        invalid("structured_outputs.json", f"is no JSON object: {error}")
