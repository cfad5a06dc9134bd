"""From tokens to what a client reads: the choices of one call, as text with an end."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NamedTuple, Self

from services.gateway.catalog import Lingo
from services.gateway.core import admission
from services.gateway.core.commands import Emit, End
from services.gateway.core.requests import Request
from services.gateway.frontend import Call, Frontend
from services.gateway.metrics import Metrics
from services.gateway.openai import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    echoes,
    invalid,
    logprobs_of,
    of_error,
    rules_of,
    sampling_of,
    stops_of,
)
from services.gateway.text import DecodeStream, StopStrings, TextStream
from shared import telemetry
from shared.clock import now, wall_ns
from shared.errors import BadInput, LambdaScaleError
from shared.ids import RequestId, new_id
from shared.messages.pool import ModelRecord
from shared.messages.serving import Logprobs

COMPLETION_TOKENS = 16
"""The API's default of `max_tokens` for completions. Chats may fill the context."""
CONTEXT = 4
"""How many prompt tokens the first generated tokens are decoded with."""


class Choice:
    def __init__(
        self,
        index: int,
        request: Request,
        decode: TextStream,
        stops: StopStrings,
        *,
        prompt: int = 0,
        echo: str = "",
        min_tokens: int = 0,
        silent: bool = False,
    ) -> None:
        """`prompt`: the number of its prompt in the call. `echo` goes before the generated text.
        Stop strings are not looked for in the text of the first `min_tokens` tokens. `silent`:
        nothing is to be generated. One token shows that the prompt ran, but nobody is told of
        it."""
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
        self.first_at = 0.0
        self._decode = decode
        self._stops = stops
        self._min_tokens = min_tokens
        self._silent = silent

    def push(self, token: int, finish: str, logprobs: Logprobs | None) -> str:
        """Takes a token and returns the text that became certain. Sets `finish` with the last
        token."""
        if self._silent:
            self.finish = "length"
            return ""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        text = "" if finish == "stop" else self._decode.step(token)
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
        return text


class Delta(NamedTuple):
    """One token, and the text that became certain with it."""

    choice: Choice
    text: str
    token: int | None
    """None if the choice is silent and has ended."""
    logprobs: Logprobs | None
    finish: str | None
    """Why the choice ends with this token; None if it goes on."""
    generated: int
    """Number of tokens of all choices, up to this one."""


class Generation:
    """The completions of one HTTP request. Leaving the context cancels those that have not
    ended."""

    def __init__(
        self,
        frontend: Frontend,
        metrics: Metrics,
        record: ModelRecord,
        choices: list[Choice],
        prompt_tokens: int,
        trace: str,
    ) -> None:
        """`trace`: the client's traceparent, or ""."""
        self.record = record
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self._frontend = frontend
        self._metrics = metrics
        self._trace = trace
        self._arrived, self._arrived_ns = now(), wall_ns()
        self._by_id: dict[RequestId, Choice] = {choice.request.id: choice for choice in choices}
        self._call = Call([choice.request for choice in choices])
        self._open = len(choices)
        self._failed = "cancelled"
        """What ended the choices that did not end by themselves: the code of an error, or the
        client."""
        self.generated = 0
        """Number of tokens of all choices."""

    async def __aenter__(self) -> Self:
        try:
            self._frontend.begin(self._call)
        except LambdaScaleError as error:
            raise of_error(error) from error
        self._metrics.prompt_tokens.labels(self.record.name).inc(self.prompt_tokens)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._frontend.end(self._call)
        if self._open:
            self._metrics.requests.labels(self.record.name, self._failed).inc(self._open)
        self._record_span()

    def _record_span(self) -> None:
        """Records the `request` span, linked to the scaling events whose instances served it."""
        requests = [choice.request for choice in self.choices]
        telemetry.record(
            "request",
            start_ns=self._arrived_ns,
            end_ns=wall_ns(),
            parent=self._trace,
            attributes={
                "model": self.record.name,
                "requests": " ".join(request.id for request in requests),
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.generated,
                "attempts": sum(request.attempt for request in requests),
                "ended": not self._open,
            },
            links=[trace for request in requests for trace in request.traces],
        )

    async def deltas(self, patience_s: float | None) -> AsyncIterator[list[Delta]]:
        """The pieces that came since the last time, until all choices have ended. ApiError if a
        choice fails.

        An empty list means that there is nothing to tell yet, or that nothing came for
        `patience_s`.
        """
        call = self._call
        while self._open:
            try:
                async with asyncio.timeout(patience_s):
                    piece = await call.pieces.get()
            except TimeoutError:
                yield []
                continue
            pieces = [piece]
            while not call.pieces.empty():
                pieces.append(call.pieces.get_nowait())
            deltas = []
            for piece in pieces:
                if isinstance(piece, End):
                    error = of_error(piece.error)
                    self._failed = error.code or "error"
                    raise error
                choice = self._by_id[piece.request]
                if not isinstance(piece, Emit):
                    choice.prompt_logprobs += piece.logprobs
                elif choice.finish is None:
                    text = self._push(choice, piece)
                    token = piece.token if choice.tokens else None
                    delta = Delta(
                        choice, text, token, piece.logprobs, choice.finish, self.generated
                    )
                    deltas.append(delta)
            yield deltas

    @property
    def scored(self) -> bool:
        """Whether prompts have log probabilities."""
        return self.choices[0].request.score_from > 0

    def usage(self, generated: int | None = None) -> dict[str, object]:
        """Token counts. `generated`: for the moment when this many tokens were generated; None:
        now."""
        completion = self.generated if generated is None else generated
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
        }

    def _cached_tokens(self) -> int:
        """Prompt tokens that no choice had to compute. The choices of a prompt begin together, and
        all but the first may find what the first computed, so the least of them counts."""
        least: dict[int, int] = {}
        for choice in self.choices:
            if choice.cached is not None:
                least[choice.prompt] = min(choice.cached, least.get(choice.prompt, choice.cached))
        return sum(least.values())

    def _push(self, choice: Choice, piece: Emit) -> str:
        if choice.cached is None:
            choice.cached = piece.cached
        before = len(choice.tokens)
        text = choice.push(piece.token, piece.finish, piece.logprobs)
        self.generated += len(choice.tokens) - before
        name, count = self.record.name, len(choice.tokens)
        if count == 1:
            choice.first_at = now()
            self._metrics.ttft.labels(name).observe(choice.first_at - self._arrived)
        if choice.finish:
            self._open -= 1
            if not piece.finish:
                self._frontend.finish(piece.request)
            self._metrics.tokens.labels(name).inc(count)
            self._metrics.requests.labels(name, choice.finish).inc()
            if count > 1:
                mean = (now() - choice.first_at) / (count - 1)
                self._metrics.tpot.labels(name).observe(mean)
        return text


async def prompts_of(body: CompletionRequest | ChatRequest, lingo: Lingo) -> list[list[int]]:
    """The token ids of every prompt. ApiError 400 if a prompt has none."""
    if isinstance(body, ChatRequest):
        return [await _chat_prompt(body, lingo)]
    prompts = []
    for prompt in body.prompts():
        ids = await lingo.codec.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            invalid("prompt", "has no tokens")
        if not 0 <= min(ids) <= max(ids) < lingo.vocab_size:
            invalid("prompt", f"token ids must be between 0 and {lingo.vocab_size - 1}")
        prompts.append(ids)
    return prompts


async def _chat_prompt(body: ChatRequest, lingo: Lingo) -> list[int]:
    if lingo.template is None:
        invalid("model", "has no chat template; use /v1/completions")
    rendered = lingo.template.render(
        [
            message.for_template(index, developer=lingo.template.developer)
            for index, message in enumerate(body.messages)
        ],
        add_generation_prompt=body.add_generation_prompt,
        arguments=body.chat_template_kwargs or {},
    )
    ids = await lingo.codec.encode_chat(rendered)
    if not ids:
        invalid("messages", "have no tokens")
    return ids


def choices_of(
    body: CompletionRequest | ChatRequest,
    record: ModelRecord,
    lingo: Lingo,
    prompts: list[list[int]],
) -> list[Choice]:
    """One choice for every prompt and each of its `n` completions, in the API's order."""
    n = body.n or 1
    try:
        admission.check_choices(len(prompts), n)
    except BadInput as error:
        raise ApiError(400, str(error), param="n") from error
    scores = logprobs_of(body) if echoes(body) else None
    try:
        admission.check_scores(n * sum(map(len, prompts)), scores)
    except BadInput as error:
        raise ApiError(400, str(error), param="logprobs") from error
    stop_ids = tuple(body.stop_token_ids or ()) + (() if body.ignore_eos else lingo.eos)
    stops = stops_of(body)
    rules = rules_of(body, lingo.vocab_size)
    if rules and rules.grammar and not lingo.eos:
        invalid("model", "names no token that ends a text, which structured output needs")
    choices = []
    for number, prompt in enumerate(prompts):
        limit = _limit(body, len(prompt), record.context_length)
        if (body.min_tokens or 0) > limit:
            invalid("min_tokens", f"must be at most the tokens that can be generated, {limit}")
        for i in range(n):
            index = number * n + i
            seed = secrets.randbits(63) if body.seed is None else body.seed
            request = Request(
                id=RequestId(new_id("req")),
                model_id=record.model_id,
                prompt=tuple(prompt),
                max_tokens=max(limit, 1),
                stop_ids=stop_ids,
                sampling=sampling_of(body, admission.derive_seed(seed, i)),
                rules=rules,
                score_from=int(scores is not None),
                waiting_since=now(),
            )
            context = () if isinstance(body, ChatRequest) else prompt[-CONTEXT:]
            choices.append(
                Choice(
                    index,
                    request,
                    DecodeStream(lingo.codec, context),
                    StopStrings(stops),
                    prompt=number,
                    echo=_echo(body, number, lingo),
                    min_tokens=body.min_tokens or 0,
                    silent=limit == 0,
                )
            )
    return choices


def _echo(body: CompletionRequest | ChatRequest, number: int, lingo: Lingo) -> str:
    """The text of the prompt with this number, if it is to be repeated."""
    if isinstance(body, ChatRequest) or not body.echo:
        return ""
    prompt = body.prompts()[number]
    return prompt if isinstance(prompt, str) else lingo.codec.decode(prompt)


def _limit(body: CompletionRequest | ChatRequest, prompt: int, context: int) -> int:
    asked, default, param = body.max_tokens, None, "max_tokens"
    if isinstance(body, CompletionRequest):
        default = COMPLETION_TOKENS
    elif body.max_completion_tokens is not None:
        asked, param = body.max_completion_tokens, "max_completion_tokens"
    try:
        return admission.output_limit(prompt, asked, default, context)
    except BadInput as error:
        code = "context_length_exceeded"
        raise ApiError(400, str(error), param=param, code=code) from error
