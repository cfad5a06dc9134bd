"""How fast a node's port, disk and engine are, as seen from what they did.

Nothing is measured for its own sake. Transfers and sweeps that happen anyway are observed, and most
of them say only that the node is *at least* that fast, because a relay that waits for its source is
not slow. So a port's rate is the best that was seen lately, and its fixed time for each transfer
the least. A single wild value (from a clock that was set) counts in neither.
"""

from collections import deque
from collections.abc import Iterable
from itertools import combinations
from statistics import median

from shared.ids import ModelId
from shared.messages.pool import ModelProfile, Profile

PERIODS = 8
"""The number of busy periods for which a rate is remembered."""
SHORTEST_S = 0.01
"""A rate over less time would be that of a buffer, not of a link."""
WAITS = 64
MODELS = 8
"""The most models that a profile reports: the models that ran last."""
REDRAW = 32
"""After this many new passes, the line through them is computed anew."""
ABOUT = 1.25
"""Shares of a model that differ by less than this factor are about the same."""
APART = 2.0
"""Two passes tell what further tokens cost if one has this many times the other's tokens. The line
through passes of 40 and 50 tokens says nothing about a pass of one."""
FEW = 16
"""Passes of so many tokens or fewer are about as fast as a pass of one."""
DECODING = 64
"""In a pass of at most this number of tokens, sequences nearly always decode."""
SAMPLES = 5
"""How many passes of each size are kept. Counting sizes apart, many passes of one token do not push
out passes of many."""


class Throughput:
    """bytes/s of one direction of a port, or of a disk.

    A busy period is a time in which some transfer was under way. The bytes of the transfers that
    began and ended in it, over the time since it began, are never more than the port can do, and
    come close to that if the port was the limit.
    """

    def __init__(self) -> None:
        self._best: deque[float] = deque(maxlen=PERIODS)
        """One rate for each period; 0 for a period that was too short."""
        self._began = self._ended = float("-inf")
        self._bytes = 0

    def add(self, began: float, ended: float, nbytes: int) -> None:
        """Adds a transfer that has ended. Times are in seconds, in about the order of the
        transfers' ends."""
        if ended <= began:
            return
        if began > self._ended:
            self._began, self._ended, self._bytes = began, ended, 0
            self._best.append(0.0)
        self._began, self._ended = min(self._began, began), max(self._ended, ended)
        self._bytes += nbytes
        if (seconds := self._ended - self._began) >= SHORTEST_S:
            self._best[-1] = max(self._best[-1], self._bytes / seconds)

    @property
    def bytes_per_s(self) -> float:
        """0: not known yet."""
        rates = sorted(filter(None, self._best), reverse=True)
        return rates[1] if len(rates) > 2 else max(rates, default=0.0)


class Latency:
    """Seconds from asking for a block to its first byte, when nothing else is waited for."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=WAITS)

    def add(self, seconds: float) -> None:
        if seconds > 0:
            self._waits.append(seconds)

    @property
    def seconds(self) -> float:
        """0: not known yet."""
        waits = sorted(self._waits)
        return waits[1] if len(waits) > 2 else min(waits, default=0.0)


class EngineTimes:
    """The times of one model: a line through (tokens in the pass, seconds of a pass through the
    whole model).

    A pass over a part of the model has the fixed costs of a pass over the whole, so that a small
    part makes the node look slow: only passes over about the largest part so far count.

    It is the line of Theil and Sen, with pairs weighted by their distance (Scholz 1978). A few wild
    passes (another process on the device, a page fault) leave it where it was.
    """

    def __init__(self) -> None:
        self._passes: dict[int, deque[tuple[float, float]]] = {}
        """Passes by the number of binary digits of their tokens."""
        self._share = 0.0
        """The part of the model that they ran, about."""
        self._line = (0.0, 0.0)
        self._new = 0
        """Passes since the line was computed."""

    def add(self, tokens: float, seconds: float, share: float = 1.0) -> None:
        """Adds a pass over a `share` of the model, which took `seconds` times that share."""
        if share * ABOUT < self._share:
            return
        if share > self._share * ABOUT:
            self._share = share
            self._passes.clear()
        size = int(tokens).bit_length()
        passes = self._passes.setdefault(size, deque(maxlen=SAMPLES))
        passes.append((tokens, seconds))
        self._new += 1

    @property
    def share(self) -> float:
        """The part of the model that the passes ran, about."""
        return self._share

    def line(self) -> tuple[float, float]:
        """(seconds of a pass of one token, seconds for each further token); 0: not known yet.

        If all passes have about the same number of tokens, the two cannot be told apart. The passes
        are then taken for decode steps of that batch. If none had few tokens, a pass of one token
        is said to take as long as the smallest: it reads the same weights, and the line would
        promise less.
        """
        if self._new >= min(REDRAW, sum(map(len, self._passes.values()))) > 0:
            self._line, self._new = self._draw(), 0
        return self._line

    def decode_s_per_token(self) -> float:
        """Seconds that a further sequence adds to a pass in which all decode; 0: not known yet."""
        passes = [one for some in self._passes.values() for one in some if one[0] <= DECODING]
        slopes = [
            ((y2 - y1) / (x2 - x1), abs(x2 - x1))
            for (x1, y1), (x2, y2) in combinations(passes, 2)
            if abs(x2 - x1) >= 1
        ]
        return max(0.0, _weighted_median(slopes)) if slopes else 0.0

    def _draw(self) -> tuple[float, float]:
        passes = [each for some in self._passes.values() for each in some]
        slopes = [
            ((y2 - y1) / (x2 - x1), abs(x2 - x1))
            for (x1, y1), (x2, y2) in combinations(passes, 2)
            if max(x1, x2) >= APART * min(x1, x2)
        ]
        slope = max(0.0, _weighted_median(slopes)) if slopes else 0.0
        least = min((x for x, _ in passes), default=1.0)
        start = 1.0 if least <= FEW else least
        # Passes of few tokens are bound by memory: the line through large ones lies below them.
        near = [(x, y) for x, y in passes if x <= FEW] or passes
        one = median(y - slope * (x - start) for x, y in near) if near else 0.0
        return max(0.0, one), slope


class Profiler:
    """Everything that one node measures. Times are in seconds of any one clock."""

    def __init__(self) -> None:
        self._in, self._out, self._load = Throughput(), Throughput(), Throughput()
        self._overhead = Latency()
        self._engine: dict[ModelId, EngineTimes] = {}
        """The model that ran last comes last."""

    def pulled(self, asked: float, first_byte: float, ended: float, nbytes: int) -> None:
        """Records a block that came from a peer."""
        self._in.add(first_byte, ended, nbytes)
        self._overhead.add(first_byte - asked)

    def sent(self, began: float, ended: float, nbytes: int) -> None:
        """Records bytes that went to a peer in one go."""
        self._out.add(began, ended, nbytes)

    def loaded(self, began: float, ended: float, nbytes: int) -> None:
        """Records a block that was brought up from the node's own lower tiers."""
        self._load.add(began, ended, nbytes)

    def ran(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        """Records a sweep: the engine took `tokens` tokens (their mean over the blocks) through a
        `share`, in (0, 1], of the model's blocks."""
        times = self._engine.pop(model, None) or EngineTimes()
        self._engine[model] = times
        times.add(tokens, seconds / share, share)
        if len(self._engine) > MODELS:
            del self._engine[next(iter(self._engine))]

    def profile(self) -> Profile:
        return Profile(
            out_bytes_per_s=rounded(self._out.bytes_per_s),
            in_bytes_per_s=rounded(self._in.bytes_per_s),
            overhead_s=rounded(self._overhead.seconds),
            load_bytes_per_s=rounded(self._load.bytes_per_s),
            models=tuple(self._models()),
        )

    def _models(self) -> Iterable[ModelProfile]:
        for model in sorted(self._engine):
            times = self._engine[model]
            one, more = times.line()
            yield ModelProfile(
                model_id=model,
                prefill_s_per_token=rounded(more),
                decode_s=rounded(one),
                decode_s_per_token=rounded(times.decode_s_per_token()),
                share=rounded(times.share),
            )


def token_s(profile: Profile, model_id: ModelId) -> float:
    """Seconds of prefill for a token; 0: not known."""
    return next((m.prefill_s_per_token for m in profile.models if m.model_id == model_id), 0.0)


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """The median of (value, weight) pairs: half of the weight lies on either side."""
    half, seen = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        seen += weight
        if seen >= half:
            return value
    raise ValueError("no values")


def rounded(value: float) -> float:
    """Rounds to two significant digits."""
    return float(f"{value:.2g}")
