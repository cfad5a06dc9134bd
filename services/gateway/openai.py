"""The OpenAI API's requests and errors, as this gateway takes and gives them.

Fields that are unknown are ignored, as the API's clients expect. Fields that are known and would
change the answer, but that the engine cannot honour, are refused: a client is never given
something else than it asked for.
"""

import math
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from shared.errors import BadInput, CapacityExceeded, LambdaScaleError, NotFound
from shared.messages.serving import Sampling

MAX_STOPS = 64
MAX_TOKEN_ID = (1 << 31) - 1
MAX_STOP_CHARS = 1024
MAX_TOP_K = 1 << 30


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
    return ApiError(500, str(error), code=error.code)


def invalid(param: str, message: str) -> NoReturn:
    raise ApiError(400, f"{param}: {message}", param=param)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str = "text"


class _Common(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to every choice: what was generated, before it was text."""
    # Known, and refused unless they change nothing.
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None

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
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each a text or a list of token ids."""
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

    def for_template(self, index: int) -> dict[str, str]:
        fields = {"role": self.role, "content": self._text(index)}
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
    tools: list[Any] | None = None
    functions: list[Any] | None = None


Body = TypeVar("Body", CompletionRequest, ChatRequest)
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$")


def parse(raw: bytes, kind: type[Body]) -> Body:
    """The request; ApiError 400 names the field that does not fit, or what is not supported."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        if match is None:
            raise ApiError(400, str(error), param=_missing(str(error))) from error
        message = f"{match['path']}: {match['what']}"
        raise ApiError(400, message, param=match["path"] or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    _check_common(body)
    if isinstance(body, CompletionRequest):
        _check_completion(body)
    else:
        _check_chat(body)
    return body


def _missing(message: str) -> str | None:
    found = re.search(r"missing required field `(\w+)`", message)
    return found[1] if found else None


def _check_common(body: _Common) -> None:
    if body.n is not None and body.n < 1:
        invalid("n", "must be at least 1")
    if body.max_tokens is not None and body.max_tokens < 1:
        invalid("max_tokens", "must be at least 1")
    if len(stops_of(body)) > MAX_STOPS:
        invalid("stop", f"at most {MAX_STOPS} strings")
    for stop in stops_of(body):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            invalid("stop", f"every string must have 1 to {MAX_STOP_CHARS} characters")
    ids = body.stop_token_ids or ()
    if len(ids) > MAX_STOPS or not all(0 <= token <= MAX_TOKEN_ID for token in ids):
        invalid("stop_token_ids", f"at most {MAX_STOPS} ids between 0 and {MAX_TOKEN_ID}")
    if body.min_tokens and not body.ignore_eos:
        invalid("min_tokens", "is supported only together with ignore_eos")
    sampling_of(body, 0)
    for name, neutral in _NEUTRAL:
        value = getattr(body, name)
        if value is not None and value != neutral:
            invalid(name, "is not supported; leave it out")
    if body.logit_bias:
        invalid("logit_bias", "is not supported; leave it out")
    if body.response_format is not None and body.response_format.type != "text":
        invalid("response_format", "only type 'text' is supported")


_NEUTRAL = (
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("min_p", 0.0),
)


def _check_completion(body: CompletionRequest) -> None:
    if body.logprobs is not None:
        invalid("logprobs", "log probabilities are not supported; leave it out")
    if body.echo:
        invalid("echo", "is not supported; leave it out")
    if body.suffix:
        invalid("suffix", "is not supported; leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        invalid("best_of", "is not supported; leave it out")


def _check_chat(body: ChatRequest) -> None:
    if not body.messages:
        invalid("messages", "must not be empty")
    if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
        invalid("max_completion_tokens", "must be at least 1")
    if body.logprobs or body.top_logprobs:
        invalid("logprobs", "log probabilities are not supported; leave it out")
    if body.tools or body.functions:
        invalid("tools", "tool calls are not supported; leave it out")


def stops_of(body: _Common) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def sampling_of(body: _Common, seed: int) -> Sampling:
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    top_k = 0 if body.top_k in (None, -1) else body.top_k or 0
    if not (math.isfinite(temperature) and 0 <= temperature <= 100):
        invalid("temperature", "must be between 0 and 100")
    if not 0 < top_p <= 1:
        invalid("top_p", "must be above 0 and at most 1")
    if not 0 <= top_k <= MAX_TOP_K:
        invalid("top_k", f"must be between 0 (no limit) and {MAX_TOP_K}, or -1 (no limit)")
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
