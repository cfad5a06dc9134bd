"""The measurements of a path of stages, the bars that they are held to, and both in words."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar

MOST_IDLE = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    stages: tuple[int, ...]
    """The number of stages of each path."""
    stage_s: float
    """Least seconds of a stage's part of a step. 0: as fast as the machine computes."""
    batch: int
    """Sequences in a micro-batch."""
    hidden: int
    """Width of the hidden states that go from stage to stage, in fp32."""
    window_s: float
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period in which sequences were decoded and nothing else was done."""

    tokens_per_s: float
    idle: tuple[float, ...]
    """For each stage, the share of the time in which its engine was idle."""
    sweep_s: tuple[float, ...]
    """For each stage, the mean seconds of its sweeps."""
    hand_over_s: float
    """Median seconds from a sweep's end to the beginning of the next sweep at any stage."""


@dataclass(slots=True)
class Row:
    """A path, and the path without 2-D pipelining; a value for each round."""

    stages: int
    ours: list[Window] = field(default_factory=list)
    """With as many micro-batches in flight as there are stages."""
    one: list[Window] = field(default_factory=list)
    """With one micro-batch of the same size."""
    whole: list[Window] = field(default_factory=list)
    """With one micro-batch of all the sequences."""

    @property
    def tokens_per_s(self) -> float:
        return _rate(self.ours)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each stage."""
        return tuple(
            median(window.idle[stage] for window in self.ours) for stage in range(self.stages)
        )

    def ideal(self, batch: int) -> float:
        """tokens/s if the slowest stage were always busy with a micro-batch."""
        return median(batch / max(window.sweep_s) for window in self.ours)

    @property
    def over_one(self) -> float:
        return self.tokens_per_s / _rate(self.one)

    @property
    def over_whole(self) -> float:
        return self.tokens_per_s / _rate(self.whole)

    @property
    def hand_over_s(self) -> float:
        """With one micro-batch in flight, so that nothing else is waited for."""
        return median(window.hand_over_s for window in self.one)


@dataclass(frozen=True, slots=True)
class Results:
    settings: Settings
    rows: tuple[Row, ...]


def bars(results: Results) -> Iterator[Bar]:
    for row in results.rows:
        idle = max(row.idle)
        what = f"{row.stages} stages: the idlest is idle {idle:.1%}, at most {MOST_IDLE:.0%}"
        yield Bar(what, idle <= MOST_IDLE)


def document(results: Results) -> dict[str, object]:
    """The results as `--json` prints them."""
    settings = results.settings
    return {
        "rows": [
            {
                "stages": row.stages,
                "idle": [round(idle, 4) for idle in row.idle],
                "sweep_ms": [
                    round(1e3 * median(window.sweep_s[stage] for window in row.ours), 3)
                    for stage in range(row.stages)
                ],
                "tokens_per_s": round(row.tokens_per_s, 1),
                "ideal_tokens_per_s": round(row.ideal(settings.batch), 1),
                "of_ideal": round(row.tokens_per_s / row.ideal(settings.batch), 4),
                "one_micro_batch_tokens_per_s": round(_rate(row.one), 1),
                "over_one_micro_batch": round(row.over_one, 4),
                "whole_batch_tokens_per_s": round(_rate(row.whole), 1),
                "over_whole_batch": round(row.over_whole, 4),
                "hand_over_us": round(1e6 * row.hand_over_s, 1),
                "rounds": len(row.ours),
            }
            for row in results.rows
        ],
        "stage_ms": 1e3 * settings.stage_s,
        "batch": settings.batch,
        "hidden": settings.hidden,
        "machine": machine(),
    }


def table(results: Results) -> Iterator[str]:
    """The results for people."""
    settings = results.settings
    yield (
        f"stages of {_stage(settings.stage_s)}, micro-batches of {settings.batch} sequences, "
        f"hidden states {settings.hidden} wide; medians of {settings.rounds} rounds"
    )
    yield machine()
    yield (
        f"{'stages':>6}  {'tokens/s':>8} {'ideal':>8} {'of it':>6}  {'one in flight':>13} "
        f"{'ratio':>6}  {'all in one':>10} {'ratio':>6}  {'hand-over':>9}  idle, by stage"
    )
    for row in results.rows:
        ideal = row.ideal(settings.batch)
        yield (
            f"{row.stages:>6}  {row.tokens_per_s:>8.1f} {ideal:>8.1f} "
            f"{row.tokens_per_s / ideal:>6.3f}  {_rate(row.one):>13.1f} {row.over_one:>6.2f}  "
            f"{_rate(row.whole):>10.1f} {row.over_whole:>6.2f}  "
            f"{1e6 * row.hand_over_s:>6.0f} us  {' '.join(f'{idle:.1%}' for idle in row.idle)}"
        )


def _rate(windows: list[Window]) -> float:
    return median(window.tokens_per_s for window in windows)


def _stage(seconds: float) -> str:
    return f"{1e3 * seconds:g} ms" if seconds else "the machine's speed"
