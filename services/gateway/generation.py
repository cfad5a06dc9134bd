"""From tokens to what a client reads: one call, until all its choices have ended."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from services.gateway.answer_bodies import CompletionTokensDetails, PromptTokensDetails, Usage
from services.gateway.api_error import ApiError, of_error
from services.gateway.books import Tab
from services.gateway.choices import Choice
from services.gateway.core.commands import Emit, End, Piece, Scored
from services.gateway.frontend import Frontend
from services.gateway.mailbox import Mailbox
from services.gateway.metrics import Metrics
from services.gateway.progress import path_text
from services.gateway.replies.parts import Part
from services.gateway.request_span import RequestSpan
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.messages.pool import ModelRecord
from shared.messages.serving import Logprobs


class Delta(NamedTuple):
    """One token, and what became certain with it."""

    choice: Choice
    parts: Sequence[Part]
    token: int | None
    """None if the choice is silent and has ended."""
    logprobs: Logprobs | None
    finish: str | None
    """Why the choice ends with this token; None if it goes on."""
    generated: int
    """Number of tokens of all choices, up to this one."""
    reasoning: int
    """How many of them are thoughts."""
    over: str = ""
    """With the first token from an instance: its nodes with their blocks, if the client is to see
    them."""


class Outlet(Protocol):
    """Where deltas go at once, without a task of the client's in between."""

    @property
    def ready(self) -> bool:
        """Whether it takes one now."""

    def put(self, delta: Delta) -> None:
        """Takes the next one."""


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
        span: RequestSpan,
        tab: Tab,
        at_once: int | None = None,
    ) -> None:
        """`span`: of the call that it is for. `at_once`: how many choices wait or run at a
        time; the others follow as these end. None: all."""
        self.record = record
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self._frontend = frontend
        self._metrics = metrics
        self._series = metrics.of(record.name)
        self._span = span
        self._tab = tab
        self._loop = asyncio.get_running_loop()
        self._arrived = now()
        self._pieces: Mailbox[tuple[Choice, Piece]] = Mailbox()
        self.outlet: Outlet | None = None
        """Takes deltas as they come, while it is ready and `deltas` has given all before them."""
        self._at_once = at_once or len(choices)
        self._later: deque[Choice] = deque()
        """Choices that have not begun."""
        self._ttft_s = self._tpot_s = self._queue_s = 0.0
        """See CallUsage."""
        self.shows_path = False
        """Whether the client sees over which nodes its tokens come."""
        self.scored = choices[0].request.score_from > 0
        """Whether prompts have log probabilities."""
        self._price = choices[0].request.price
        self._prompt_cost = prompt_tokens * (self._price if self.scored else 1)
        """What the prompts cost the tenant, in tokens."""
        self.open = len(choices)
        """How many choices have not ended."""
        self._failed = "cancelled"
        """What ended the choices that did not end by themselves: the code of an error, or the
        client."""
        self.generated = 0
        """Number of tokens of all choices."""
        self.reasoning = 0
        """How many of them are thoughts."""
        self._generated_before = 0
        """How many of them there were when it began here."""

    async def __aenter__(self) -> Self:
        try:
            self.begin(self._give)
        except LambdaScaleError as error:
            raise of_error(error) from error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self, take: Callable[[Choice, Piece], None]) -> None:
        """Begins the choices that have not ended; `take` is called with what comes of each.
        CapacityExceeded or NotFound as of `Frontend.begin`."""
        begun = [choice for choice in self.choices if choice.finish is None]
        self._generated_before = self.generated
        most = self._prompt_cost + sum(choice.request.unused for choice in begun)
        first, self._later = begun[: self._at_once], deque(begun[self._at_once :])
        self._tab.let_in(len(first), most)
        for choice in begun:
            choice.request.share = self._tab.share
            choice.request.trace = self._span.own
        try:
            self._frontend.begin({choice.request: partial(take, choice) for choice in first})
        except LambdaScaleError:
            self._tab.take_back()
            raise
        self._series.prompt_tokens.inc(self.prompt_tokens)

    def end(self) -> None:
        """Cancels the choices that have not ended."""
        self._pieces.close()
        self._frontend.end(choice.request for choice in self.choices)
        self._series.cached_tokens.inc(self._cached_tokens())
        requests = [choice.request for choice in self.choices]
        generated = self.generated - self._generated_before
        self._tab.close(
            self.record,
            requests,
            cost=self._prompt_cost + self._price * generated,
            prompt=self.prompt_tokens,
            cached=self._cached_tokens(),
            generated=generated,
            status=self._failed if self.open else "done",
            ttft_s=self._ttft_s,
            tpot_s=self._tpot_s,
            queue_s=self._queue_s,
        )
        if self.open:
            self._metrics.requests.labels(self.record.name, self._failed).inc(self.open)
        self._describe()

    def _describe(self) -> None:
        """Says in the call's span what became of it."""
        requests = [choice.request for choice in self.choices]
        finished = dict.fromkeys(choice.finish for choice in self.choices if choice.finish)
        self._span.attributes |= {
            "gen_ai.request.model": self.record.name,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.generated,
            "gen_ai.response.finish_reasons": ",".join(finished),
            "requests": " ".join(request.id for request in requests),
            "attempts": sum(request.attempt for request in requests),
            "cached_tokens": self._cached_tokens(),
        }
        if self.open:
            self._span.error = self._failed
        for request in requests:
            self._span.link(request.traces)

    async def deltas(self, patience_s: float | None) -> AsyncIterator[list[Delta]]:
        """The pieces that came since the last time, until all choices have ended. ApiError if a
        choice fails.

        An empty list means that there is nothing to tell yet, or that nothing came for
        `patience_s`.
        """
        while self.open:
            deltas = []
            for choice, piece in await self._pieces.take(patience_s):
                if isinstance(piece, End):
                    raise self.fail(piece.error)
                if delta := self.take(choice, piece):
                    deltas.append(delta)
            yield deltas

    @property
    def progress(self) -> str:
        """What a client is told that waits for the first token; empty: nothing."""
        return "" if self.generated else self._frontend.progress(self.record.served_by)

    def fail(self, error: LambdaScaleError) -> ApiError:
        """What ended the choices that are open. Returns it as the client gets it."""
        told = of_error(error)
        self._failed = told.code or "error"
        return told

    def take(self, choice: Choice, piece: Scored | Emit) -> Delta | None:
        """Takes what an instance gave. None: nothing that a client is told now."""
        if not isinstance(piece, Emit):
            choice.prompt_logprobs += piece.logprobs
            return None
        if choice.finish is not None:
            return None
        choice.vector = piece.vector
        delta = self.push(choice, piece.token, piece.finish, piece.logprobs, piece.cached)
        if self.shows_path and piece.begun:
            delta = delta._replace(over=path_text(piece.begun))
        self._measure(choice)
        if choice.finish and not piece.finish:
            self._frontend.finish(piece.request)
        if choice.finish and self._later:
            self._begin_next()
        return delta

    def _begin_next(self) -> None:
        choice = self._later.popleft()
        choice.request.waiting_since = now()
        take = partial(self._give, choice)
        try:
            self._frontend.begin({choice.request: take})
        except LambdaScaleError as error:
            raise self.fail(error) from error

    def _give(self, choice: Choice, piece: Piece) -> None:
        outlet = self.outlet
        if outlet is None or self._pieces or not isinstance(piece, Emit) or not outlet.ready:
            self._pieces.put((choice, piece))
            return
        try:
            if delta := self.take(choice, piece):
                outlet.put(delta)
        except Exception as error:  # the boundary of one client's answer: `deltas` raises it
            self.outlet = None
            self._pieces.fail(error)
        if not self.open:
            self._pieces.wake()

    @property
    def generation(self) -> Self:
        """What gives the deltas, as of a `Reader`."""
        return self

    def usage(self, at: Delta | None = None) -> Usage:
        """Token counts. `at`: for the moment when this came; None: now."""
        completion, reasoning = (at or self).generated, (at or self).reasoning
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            total_tokens=self.prompt_tokens + completion,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens()),
            completion_tokens_details=CompletionTokensDetails(reasoning),
        )

    def _cached_tokens(self) -> int:
        """Prompt tokens that no choice had to compute. The choices of a prompt begin together, and
        all but the first may find what the first computed, so the least of them counts."""
        least: dict[int, int] = {}
        for choice in self.choices:
            if choice.cached is not None:
                least[choice.prompt] = min(choice.cached, least.get(choice.prompt, choice.cached))
        return sum(least.values())

    def push(
        self, choice: Choice, token: int, finish: str, logprobs: Logprobs | None, cached: int
    ) -> Delta:
        """Takes the next token of a choice that has not ended, wherever it was generated."""
        if choice.cached is None:
            choice.cached = cached
        before = len(choice.tokens)
        thoughts = choice.reasoning_tokens
        parts = choice.push(token, finish, logprobs)
        self.generated += len(choice.tokens) - before
        self.reasoning += choice.reasoning_tokens - thoughts
        self.open -= choice.finish is not None
        told = token if choice.tokens else None
        return Delta(choice, parts, told, logprobs, choice.finish, self.generated, self.reasoning)

    def _measure(self, choice: Choice) -> None:
        """The series are told in the loop's next turn: the token goes to the client first."""
        count, tell = len(choice.tokens), self._loop.call_soon
        if count == 1:
            choice.first_at = now()
            trace = self._span.exemplar
            tell(self._series.ttft.observe, choice.first_at - self._arrived, trace)
            waited_s = max(0.0, choice.request.submitted_at - self._arrived)
            tell(self._series.queue_s.observe, waited_s, trace)
            if not self._ttft_s:
                self._ttft_s, self._queue_s = choice.first_at - self._arrived, waited_s
        if choice.finish:
            tell(self._series.tokens.inc, count)
            tell(self._metrics.requests.labels(self.record.name, choice.finish).inc)
            if count > 1:
                mean = (now() - choice.first_at) / (count - 1)
                self._tpot_s = max(self._tpot_s, mean)
                tell(self._series.tpot.observe, mean, self._span.exemplar)
            tell(self._series.duration.observe, now() - self._arrived, self._span.exemplar)
