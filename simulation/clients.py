"""Clients of the simulated cluster: requests enter through a gateway's front end, and tokens come
out.

Everything but HTTP and text is the gateway's own code: admission, queue, routing, streams,
resumption. Every token is compared with what the engine's model gives for (request, index), so that
a token that was lost, repeated or changed anywhere is found.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from services.gateway.core.commands import Emit, End, Piece
from services.gateway.core.requests import Request
from services.gateway.frontend import Frontend
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.ids import ModelId, RequestId
from shared.messages.serving import Sampling
from simulation.results import RequestResult

TokenOf = Callable[[RequestId, int], int]
"""(request, index) -> the token that a correct engine gives."""


@dataclass(slots=True)
class Bins:
    """Counts in bins of equal length from a start."""

    start: float
    bin_s: float
    counts: list[int] = field(default_factory=list)

    def add(self, at: float) -> None:
        index = max(0, int((at - self.start) / self.bin_s))
        if index >= len(self.counts):
            self.counts.extend([0] * (index + 1 - len(self.counts)))
        self.counts[index] += 1


_IDS = 1000
"""Every vocabulary has so many ids."""


class Replay:
    """One request of a trace, from its arrival to its end."""

    def __init__(
        self,
        request: RequestId,
        model: str,
        model_id: ModelId,
        prompt_tokens: int,
        output_tokens: int,
        token_of: TokenOf,
        bins: Bins,
        on_end: Callable[["Replay"], None],
    ) -> None:
        self.id = request
        self.model = model
        self.error = ""
        self.tokens = 0
        self.first_at: float | None = None
        self.second_at: float | None = None
        self.last_at: float | None = None
        self._model_id = model_id
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._token_of = token_of
        self._bins = bins
        self._on_end = on_end
        self._arrived = 0.0
        self._request: Request | None = None
        self._deaf = False

    def begin(self, frontend: Frontend) -> None:
        self._arrived = now()
        self._request = Request(
            id=self.id,
            model_id=self._model_id,
            prompt=_prompt(self.id, self._prompt_tokens),
            max_tokens=self._output_tokens,
            stop_ids=(),
            sampling=Sampling(),
            waiting_since=self._arrived,
        )
        try:
            frontend.begin({self._request: self.on_piece})
        except LambdaScaleError as error:
            self._end(f"{error.code}: {error}")

    def leave(self, frontend: Frontend) -> None:
        """Hangs up, as a client would."""
        if self._request is not None:
            request, self._request = self._request, None
            frontend.end([request])
            self._end("cancelled")

    def turn_away(self) -> None:
        """Its gateway is dead: nothing comes from there any more."""
        self._deaf = True

    def on_piece(self, piece: Piece) -> None:
        at = now()
        if self._deaf:
            return
        if isinstance(piece, End):
            self._end(f"{piece.error.code}: {piece.error}")
            return
        assert isinstance(piece, Emit)  # no prompt is scored
        if piece.token != self._token_of(self.id, self.tokens):
            self.error = f"token {self.tokens} is {piece.token}"
        self.tokens += 1
        if self.first_at is None:
            self.first_at = at
        elif self.second_at is None:
            self.second_at = at
        self.last_at = at
        self._bins.add(at)
        if piece.finish:
            self._end(self.error)

    def result(self, start: float) -> RequestResult:
        """The outcome, with times counted from `start`."""
        return RequestResult(
            model=self.model,
            arrival_s=self._arrived - start,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            tokens=self.tokens,
            first_token_s=None if self.first_at is None else self.first_at - start,
            last_token_s=None if self.last_at is None else self.last_at - start,
            error=self.error,
            second_token_s=None if self.second_at is None else self.second_at - start,
        )

    def _end(self, error: str) -> None:
        self.error, self._request = error, None
        self._on_end(self)


def _prompt(request: RequestId, tokens: int) -> tuple[int, ...]:
    """A prompt that begins like no other, since a simulated engine caches no prefixes."""
    number = crc32(request.encode())
    return (number % _IDS, number // _IDS % _IDS, *(0,) * tokens)[:tokens]
