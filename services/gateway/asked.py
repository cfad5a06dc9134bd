"""What a client asks for, in one form for completions and chats, checked and with defaults filled
in.

A body is decoded and checked here, once. Everything after this works on `Asked`.
"""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from services.gateway.api_error import ApiError, invalid
from services.gateway.bodies import ChatBody, Common, CompletionBody, decoded
from services.gateway.core.admission import MAX_CHOICES
from services.gateway.history import Dialogue, dialogue_of
from services.gateway.replies.tools import tool_use
from services.gateway.structure import check_ends, grammar_field, grammar_of
from services.gateway.unsupported import refusal
from shared.errors import ModelError
from shared.messages.access import ServiceTier
from shared.messages.serving import LogitRules, Sampling

COMPLETION_TOKENS = 16
"""The API's default of `max_tokens` for completions. Chats may fill the context."""
MAX_STOPS = 64
MAX_TOKEN_ID = (1 << 31) - 1
MAX_STOP_CHARS = 1024
MAX_STOPS_CHARS = 8192
"""Of all stop strings together."""
MAX_TOP_K = 1 << 30
MAX_LOGPROBS = 20
MAX_BIASED = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED = 8192
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100


TIERS = {"auto": ServiceTier.DEFAULT, **{tier.value: tier for tier in ServiceTier}}
Prompt = str | list[int] | Dialogue


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    chat: bool
    """Whether it is answered as a chat."""
    prompts: tuple[Prompt, ...]
    n: int
    """How many completions each prompt gets."""
    max_tokens: int | None
    """Limit on generated tokens. None: `default_tokens` holds."""
    default_tokens: int | None
    """None: as many as the context has room for."""
    limit_field: str
    """The field that gave the limit, for errors."""
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    """Ids that end a text, beside those of the model."""
    ignore_eos: bool
    """Whether the model's own ids do not end a text."""
    seed: int | None
    """None: any seed will do."""
    sampling: Sampling
    """For all choices; its seed is not set yet."""
    left_open: frozenset[str]
    """Fields of `sampling` and `rules` that the client did not give; the model may have its own
    defaults for them."""
    rules: LogitRules
    """Its grammar and its token ids are not checked against the model yet."""
    grammar_field: str
    """The field that gave the grammar, for errors."""
    bad_words: tuple[str, ...]
    """Texts that are not generated."""
    shows_special: bool
    """Whether special tokens are text."""
    keeps_stop: bool
    """Whether the text has what ended it: the stop string, or the token."""
    truncated: int | None
    """The most tokens of a prompt, of which the first are left out. None: none are."""
    echo: bool
    """Whether the prompt is repeated in the answer, which may then have no token of its own."""
    prompt_logprobs: int | None
    """How many of the most probable tokens are told for each token of the prompt, beside the
    answer. None: none, and no log probability."""
    token_ids: bool
    """Whether every choice carries the ids of its generated tokens."""
    session: str
    """What the client calls the conversation, so that it finds its KV again; empty: nothing."""
    tier: ServiceTier
    stream: bool
    usage_at_end: bool
    usage_in_chunks: bool

    @property
    def logprobs(self) -> bool:
        """Whether tokens come with their log probabilities."""
        return self.sampling.logprobs is not None

    @property
    def scored(self) -> bool:
        """Whether the prompt's tokens have log probabilities."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs)

    @property
    def alternatives(self) -> int | None:
        """How many of the most probable tokens nodes tell with each token: as many as are told for
        an answer's or for a prompt's. None: nothing has log probabilities."""
        wanted = (self.sampling.logprobs, self.prompt_logprobs)
        return max((count for count in wanted if count is not None), default=None)


def completion(raw: bytes) -> Asked:
    """The body of a completion. ApiError 400 names the field that does not fit, or that is not
    supported."""
    body = decoded(raw, CompletionBody)
    _check_common(body)
    _check_range(body, "max_tokens", 0 if body.echo else 1)
    _check_range(body, "logprobs", 0, MAX_LOGPROBS)
    if body.echo and body.truncate_prompt_tokens is not None:
        invalid("truncate_prompt_tokens", "can't be used with echo")
    return _asked(
        body,
        prompts=prompts_of(body.prompt, "prompt", MAX_CHOICES),
        logprobs=body.logprobs,
        chat=False,
        max_tokens=body.max_tokens,
        default_tokens=COMPLETION_TOKENS,
        limit_field="max_tokens",
        echo=bool(body.echo),
    )


def chat(raw: bytes) -> Asked:
    """The body of a chat. Errors as of `completion`."""
    return of_chat(decoded(raw, ChatBody))


def of_chat(body: ChatBody) -> Asked:
    """A chat, whatever it came as. Errors as of `completion`."""
    _check_common(body)
    _check_range(body, "max_tokens", 1)
    _check_chat(body)
    tools = tool_use(body)
    if tools is not None and tools.required:
        check_ends(body, "tool_choice")
    dialogue = dialogue_of(body, tools)
    newer = body.max_completion_tokens
    return _asked(
        body,
        prompts=(dialogue,),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        chat=True,
        max_tokens=body.max_tokens if newer is None else newer,
        default_tokens=None,
        limit_field="max_tokens" if newer is None else "max_completion_tokens",
        echo=False,
    )


def _asked(
    body: Common,
    *,
    prompts: tuple[Prompt, ...],
    logprobs: int | None,
    chat: bool,
    max_tokens: int | None,
    default_tokens: int | None,
    limit_field: str,
    echo: bool,
) -> Asked:
    options = body.stream_options
    return Asked(
        model=body.model,
        chat=chat,
        prompts=prompts,
        n=body.n or 1,
        max_tokens=max_tokens,
        default_tokens=default_tokens,
        limit_field=limit_field,
        stops=_stops(body),
        stop_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=body.seed,
        sampling=_sampling(body, logprobs),
        left_open=frozenset(name for name in MODEL_DEFAULTS if getattr(body, name) is None),
        rules=_rules(body),
        grammar_field=grammar_field(body),
        bad_words=tuple(body.bad_words or ()),
        shows_special=body.skip_special_tokens is False,
        keeps_stop=bool(body.include_stop_str_in_output),
        truncated=body.truncate_prompt_tokens,
        echo=echo,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
        session=body.prompt_cache_key or body.user or "",
        tier=TIERS[body.service_tier or "auto"],
        stream=bool(body.stream),
        usage_at_end=bool(options and options.include_usage),
        usage_in_chunks=bool(options and options.continuous_usage_stats),
    )


def prompts_of(
    given: str | list[str | int | list[int]], field: str, most: int
) -> tuple[Prompt, ...]:
    """At most `most` prompts, each a text or a list of token ids. `field`: for errors."""
    if isinstance(given, str):
        return (given,)
    if not given:
        invalid(field, "must not be empty")
    if not isinstance(given[0], int) and len(given) > most:
        invalid(field, f"at most {most} in a request, not {len(given)}")
    if len(set(map(type, given))) > 1:
        invalid(field, "use one kind: texts, token ids, or lists of token ids")
    if isinstance(given[0], int):
        return (cast("list[int]", given),)
    return tuple(cast("list[str | list[int]]", given))


def _stops(body: Common) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _sampling(body: Common, logprobs: int | None) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        logprobs=logprobs,
    )


def _rules(body: Common) -> LogitRules:
    biased = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    return LogitRules(
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=tuple(sorted(biased.items())),
        min_tokens=body.min_tokens or 0,
        allowed=tuple(sorted(set(body.allowed_token_ids or ()))),
        grammar=grammar_of(body),
    )


# --- checks --------------------------------------------------------------------


MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may give defaults for."""


class _Defaults(msgspec.Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def model_defaults(config: Mapping[str, Any]) -> dict[str, float]:
    """The defaults that a model's generation_config.json gives. ModelError names a field that no
    request could have either."""
    try:
        found = msgspec.convert(dict(config), _Defaults)
        _check_sampling(found)
    except (msgspec.ValidationError, ApiError) as error:
        raise ModelError(f"generation_config.json: {error}") from error
    return {name: value for name in MODEL_DEFAULTS if (value := getattr(found, name)) is not None}


def _check_common(body: Common) -> None:
    _check_range(body, "n", 1)
    _check_range(body, "min_tokens", 0)
    stops = _stops(body)
    if len(stops) > MAX_STOPS:
        invalid("stop", f"at most {MAX_STOPS} strings")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            invalid("stop", f"every string must have 1 to {MAX_STOP_CHARS} characters")
    if sum(map(len, stops)) > MAX_STOPS_CHARS:
        invalid("stop", f"at most {MAX_STOPS_CHARS} characters in all strings together")
    ids = body.stop_token_ids or ()
    if len(ids) > MAX_STOPS or not all(0 <= token <= MAX_TOKEN_ID for token in ids):
        invalid("stop_token_ids", f"at most {MAX_STOPS} ids between 0 and {MAX_TOKEN_ID}")
    _check_sampling(body)
    _check_range(body, "presence_penalty", -2, 2)
    _check_range(body, "frequency_penalty", -2, 2)
    _check_bias(body.logit_bias or {})
    words, allowed = body.bad_words or (), body.allowed_token_ids
    if len(words) > MAX_BAD_WORDS or not all(0 < len(w) <= MAX_BAD_WORD_CHARS for w in words):
        invalid(
            "bad_words", f"at most {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_WORD_CHARS} characters"
        )
    if allowed is not None and not 0 < len(allowed) <= MAX_ALLOWED:
        invalid("allowed_token_ids", f"1 to {MAX_ALLOWED} ids")
    if not all(0 <= token <= MAX_TOKEN_ID for token in allowed or ()):
        invalid("allowed_token_ids", f"ids must be between 0 and {MAX_TOKEN_ID}")
    _check_range(body, "truncate_prompt_tokens", 1)
    _check_range(body, "prompt_logprobs", 0, MAX_LOGPROBS)
    if body.prompt_logprobs is not None and body.stream:
        invalid("prompt_logprobs", "can't be used with stream")
    if body.best_of is not None and body.best_of != (body.n or 1):
        invalid("best_of", "is not supported; leave it out")
    if refused := refusal(body):
        invalid(*refused)


def _check_sampling(given: Common | _Defaults) -> None:
    _check_range(given, "temperature", 0, 100)
    if given.top_p is not None and not 0 < given.top_p <= 1:
        invalid("top_p", "must be above 0 and at most 1")
    if given.top_k is not None and not -1 <= given.top_k <= MAX_TOP_K:
        invalid("top_k", f"must be between 0 (no limit) and {MAX_TOP_K}, or -1 (no limit)")
    _check_range(given, "min_p", 0, 1)
    penalty = given.repetition_penalty
    if penalty is not None and not MIN_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        message = f"must be {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}"
        invalid("repetition_penalty", f"{message} (1: no penalty)")


def _check_range(
    body: Common | _Defaults, field: str, least: float, most: float | None = None
) -> None:
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


def _check_chat(body: ChatBody) -> None:
    _check_range(body, "max_completion_tokens", 1)
    _check_range(body, "top_logprobs", 0, MAX_LOGPROBS)
    if body.top_logprobs and not body.logprobs:
        invalid("top_logprobs", "needs logprobs: true")
    if body.echo:
        invalid("echo", "is for /v1/completions; leave it out")
