"""The choices of one call: what each asks of the model, and its text as it grows."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import msgspec

from services.gateway.api_error import ApiError, invalid
from services.gateway.asked import Asked
from services.gateway.catalog import Lingo
from services.gateway.core import admission
from services.gateway.core.requests import Request
from services.gateway.prompts import Read
from services.gateway.replies.form import Form
from services.gateway.replies.parts import Part, Said
from services.gateway.replies.reading import ReplyReader
from services.gateway.text import DecodeStream, Stops, StopStrings, TextCodec, TextStream
from shared.clock import now
from shared.errors import BadInput
from shared.ids import RequestId, new_id
from shared.messages.pool import ModelRecord
from shared.messages.serving import LogitRules, Logprobs

CONTEXT = 4
"""How many prompt tokens the first generated tokens are decoded with."""


class Choice:
    def __init__(
        self,
        index: int,
        request: Request,
        decode: TextStream,
        stops: StopStrings,
        reader: ReplyReader | None = None,
        *,
        prompt: int = 0,
        echo: str = "",
        min_tokens: int = 0,
        keeps_stop: bool = False,
        silent: bool = False,
    ) -> None:
        """`reader`: finds what a chat's text consists of; None: all of it is content. `prompt`: the
        number of its prompt in the call. `echo` goes before the generated text. Stop strings are
        not looked for in the text of the first `min_tokens` tokens. `keeps_stop`: the token that
        ends the text belongs to it. `silent`: nothing is to be
        generated. One token shows that the prompt ran, but nobody is told of it."""
        self.index = index
        self.prompt = prompt
        self.request = request
        self.echo = echo
        self.finish: str | None = None
        self.tokens: list[int] = []
        self.prompt_logprobs: list[Logprobs] = []
        """Log probabilities of the prompt's tokens after the first, if they were asked for."""
        self.logprobs: list[Logprobs] = []
        """Log probabilities of each generated token, if they were asked for."""
        self.cached: int | None = None
        """Prompt tokens that were cached where it began. None: not known before its first token."""
        self.vector = b""
        """The prompt's vector (`Token.vector`). It is empty unless the client asked for vectors."""
        self.first_at = 0.0
        self.reasoning_tokens = 0
        """How many of its tokens are thoughts."""
        self._decode = decode
        self._stops = stops
        self._reader = reader
        self.plain = reader is None
        """Whether its text is content and nothing else."""
        self._min_tokens = min_tokens
        self._keeps_stop = keeps_stop
        self._silent = silent

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.found

    def ask_for_the_rest(self) -> None:
        """Has a request of its own for what is still missing."""
        one = self.request
        self.request = Request(
            id=RequestId(new_id("req")),
            model_id=one.model_id,
            adapter=one.adapter,
            call=one.call,
            prompt=one.prompt,
            max_tokens=one.max_tokens,
            stop_ids=one.stop_ids,
            sampling=one.sampling,
            session=one.session,
            rules=one.rules,
            score_from=len(self.prompt_logprobs) + 1 if one.score_from else 0,
            tokens=self.tokens.copy(),
            waiting_since=now(),
        )

    def push(self, token: int, finish: str, logprobs: Logprobs | None) -> Sequence[Part]:
        """Takes a token and returns what became certain. Sets `finish` with the last token."""
        if self._silent:
            self.finish = "length"
            return ()
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        left_out = finish == "stop" and not self._keeps_stop
        text = "" if left_out else self._decode.step(token)
        if finish:
            text += self._decode.flush()
        met = False
        if len(self.tokens) > self._min_tokens:
            text, met = self._stops.push(text)
        if met:
            self.finish = "stop"
        elif finish:
            self.finish = finish
            text += self._stops.flush()
        return self._read(text)

    def _read(self, text: str) -> Sequence[Part]:
        reader = self._reader
        if reader is None:
            return (Said(text),) if text else ()
        before = reader.thinking
        parts = reader.push(text)
        self.reasoning_tokens += before and reader.thinking
        if self.finish:
            parts += reader.flush()
            if self.finish == "stop" and reader.called:
                self.finish = "tool_calls"
        return parts


def choices_of(
    asked: Asked,
    record: ModelRecord,
    lingo: Lingo,
    read: Read,
    call: str,
    seed: int | None = None,
) -> list[Choice]:
    """One choice for every prompt and each of its `n` completions, in the API's order. `call` is
    the id of the API call. `seed`: from which all choices have theirs, if the client gives none;
    None: random seeds."""
    prompts, form = read
    _check_size(asked, prompts)
    most = _most_generated(asked, len(prompts) * asked.n, record.context_length)
    stop_ids = asked.stop_ids + (() if asked.ignore_eos else lingo.eos)
    defaults = {name: lingo.defaults[name] for name in asked.left_open & lingo.defaults.keys()}
    rules = _rules_for(asked, lingo, defaults.pop("repetition_penalty", None))
    told = {"logprobs": asked.alternatives, **_of_sampling(defaults)}
    stops = Stops(asked.stops)
    codec = lingo.codec
    shown = codec.special_tokens if asked.shows_special else codec.special_ids(form.markers)
    names = secrets.randbits(63) if seed is None else seed
    choices = []
    for number, prompt in enumerate(prompts):
        limit = min(_limit(asked, len(prompt), record.context_length), most)
        for i in range(asked.n):
            if asked.seed is not None:
                drawn = admission.derive_seed(asked.seed, i)
            elif seed is not None:
                drawn = admission.derive_seed(seed, number * asked.n + i)
            else:
                drawn = secrets.randbits(63)
            sampling = msgspec.structs.replace(asked.sampling, **told, seed=drawn)
            request = Request(
                id=RequestId(new_id("req")),
                model_id=record.served_by,
                adapter=record.adapter,
                call=call,
                prompt=tuple(prompt),
                max_tokens=max(limit, 1),
                stop_ids=stop_ids,
                sampling=sampling,
                session=asked.session,
                rules=rules,
                # Of a chat's prompt the first choice alone tells.
                score_from=int(asked.scored and not (asked.chat and i)),
                waiting_since=now(),
            )
            choices.append(
                Choice(
                    number * asked.n + i,
                    request,
                    DecodeStream(lingo.codec, () if asked.chat else prompt[-CONTEXT:], shown),
                    StopStrings(stops, asked.keeps_stop),
                    _reader(form, f"{names} {number * asked.n + i}"),
                    prompt=number,
                    echo=_echo(asked, number, lingo),
                    min_tokens=asked.rules.min_tokens,
                    keeps_stop=asked.keeps_stop,
                    silent=limit == 0,
                )
            )
    return choices


def _reader(form: Form, name: str) -> ReplyReader | None:
    """`name`: of the choice. The ids of its calls are made of it, so that an answer that is
    generated again, elsewhere, has the same."""
    if form.plain:
        return None

    def new_id(number: int) -> str:
        return form.call_id(sha256(f"{name} {number}".encode()).digest())

    return ReplyReader(form, new_id)


def _check_size(asked: Asked, prompts: list[list[int]]) -> None:
    try:
        tokens = (1 if asked.chat else asked.n) * sum(map(len, prompts))
        admission.check_scores(tokens, asked.alternatives if asked.scored else None)
    except BadInput as error:
        raise ApiError(400, str(error), param=_scores_field(asked)) from error


def _scores_field(asked: Asked) -> str:
    """The field that asks for log probabilities, for errors."""
    return "logprobs" if asked.prompt_logprobs is None else "prompt_logprobs"


def _most_generated(asked: Asked, choices: int, context: int) -> int:
    """The most tokens of each choice that an answer has room for. A client that asks for more by
    number is refused; one that leaves the number to us gets no more."""
    alternatives = asked.alternatives
    if alternatives is None:
        return context
    try:
        admission.check_generated_scores(choices * (asked.max_tokens or 0), alternatives)
    except BadInput as error:
        raise ApiError(400, str(error), param=_scores_field(asked)) from error
    return admission.most_scored(alternatives) // choices


def _of_sampling(defaults: Mapping[str, float]) -> dict[str, float]:
    """A model's defaults as `Sampling` has them, where 0 alone means no limit of `top_k`."""
    top_k = defaults.get("top_k")
    return dict(defaults) if top_k is None else {**defaults, "top_k": max(int(top_k), 0)}


def _rules_for(asked: Asked, lingo: Lingo, penalty: float | None) -> LogitRules | None:
    """The rules; None if the model's logits are taken as they are. `penalty`: the model's own
    default for repetition."""
    rules = asked.rules
    if penalty is not None:
        rules = msgspec.structs.replace(rules, repetition_penalty=penalty)
    for field, largest in (
        ("logit_bias", rules.logit_bias[-1][0] if rules.logit_bias else 0),
        ("allowed_token_ids", rules.allowed[-1] if rules.allowed else 0),
    ):
        if largest >= lingo.vocab_size:
            last = lingo.vocab_size - 1
            invalid(field, f"token id {largest} is not one of the model's, 0 to {last}")
    if asked.bad_words:
        rules = msgspec.structs.replace(rules, bad_words=_bad_words(asked.bad_words, lingo.codec))
    if rules.grammar and not lingo.eos:
        invalid("model", "names no token that ends a text, which structured output needs")
    return None if rules == LogitRules() else rules


def _bad_words(words: Iterable[str], codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as it is and within a text, behind a space, as vLLM has them."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        try:
            bare = codec.tokens_of(word.lstrip())
            inner = codec.tokens_of(" " + word.lstrip())
        except BadInput as error:
            invalid("bad_words", str(error))
        if not bare:
            invalid("bad_words", f"{word!r} has no tokens")
        found[tuple(bare)] = None
        if inner[0] != bare[0] and len(inner) == len(bare):
            found[tuple(inner)] = None
    return tuple(found)


def _echo(asked: Asked, number: int, lingo: Lingo) -> str:
    """The text of the prompt with this number, if it is to be repeated."""
    match asked.prompts[number]:
        case str(text) if asked.echo:
            return text
        case list(ids) if asked.echo:
            return lingo.codec.decode(ids)
    return ""


def _limit(asked: Asked, prompt: int, context: int) -> int:
    """The most tokens to generate after a prompt of `prompt` tokens."""
    try:
        limit = admission.output_limit(prompt, asked.max_tokens, asked.default_tokens, context)
    except BadInput as error:
        code = "context_length_exceeded"
        raise ApiError(400, str(error), param=asked.limit_field, code=code) from error
    if asked.rules.min_tokens > limit:
        invalid("min_tokens", f"must be at most the tokens that can be generated, {limit}")
    return limit
