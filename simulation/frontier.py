"""What latency costs: TTFT against device seconds, by how long replicas are kept and how many stay.

A system's *frontier* are the points that no other of its points beats in both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import msgspec

from simulation.measures import Measures
from simulation.report import described
from simulation.setting import Setting


@dataclass(frozen=True, slots=True)
class Knobs:
    """What an operator chooses. `Setting` says what each means."""

    keep_alive_s: float
    min_instances: int
    target: float | None
    ttft_ms: float | None = None
    """Every model's objective for TTFT. 0: no model has an objective. None: as the setting has
    them. Scalers of other systems know no objectives."""

    def on(self, setting: Setting) -> Setting:
        if self.ttft_ms is not None:
            ttft_s = self.ttft_ms / 1000
            objectives = tuple((name, ttft_s, 0.0) for name, _ in setting.models)
            setting = replace(setting, objectives=objectives)
        return replace(
            setting,
            keep_alive_s=self.keep_alive_s,
            min_instances=self.min_instances,
            target=self.target,
        )

    @property
    def words(self) -> str:
        aim = "" if not self.ttft_ms else f", {self.ttft_ms:g} ms"
        return f"{self.keep_alive_s:g} s, {self.min_instances}{aim}"


@dataclass(frozen=True, slots=True)
class Point:
    system: str
    knobs: Knobs
    device_s: float
    ttft_s: float
    """p90, in seconds."""


def all_knobs(
    keep_alives_s: Iterable[float],
    buffers: Iterable[int],
    ttft_ms: Iterable[float | None],
    target: float | None,
) -> tuple[Knobs, ...]:
    every = product(keep_alives_s, buffers, ttft_ms)
    return tuple(Knobs(kept_s, buffer, target, aim) for kept_s, buffer, aim in every)


def point(system: str, knobs: Knobs, measures: Measures) -> Point | None:
    """None if not all requests completed: a percentile of the others would flatter the system."""
    p90 = measures.ttft_ms.p90
    if p90 is None or measures.completed < measures.requests:
        return None
    return Point(system, knobs, measures.gpu_seconds, p90 / 1000)


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other beats in both, the cheapest first."""
    best: list[Point] = []
    for each in sorted(points, key=lambda p: (p.device_s, p.ttft_s)):
        if not best or each.ttft_s < best[-1].ttft_s:
            best.append(each)
    return tuple(best)


def ttft_at(points: Iterable[Point], device_s: float) -> float | None:
    """The TTFT that the frontier reaches with that many device seconds, straight between its
    points. Beyond its dearest point it gets no better. None: it has no point as cheap."""
    best = frontier(points)
    if not best or device_s < best[0].device_s:
        return None
    for one, other in pairwise(best):
        if device_s < other.device_s:
            share = (device_s - one.device_s) / (other.device_s - one.device_s)
            return one.ttft_s + share * (other.ttft_s - one.ttft_s)
    return best[-1].ttft_s


def lines(points: Sequence[Point]) -> Iterator[str]:
    """A table of all points, each system's cheapest first."""
    yield f"{'system':<18}  {'kept for, min, aim':>18}  {'device s':>9}  {'TTFT p90 ms':>12}"
    for name, own in by_system(points).items():
        on = frontier(own)
        for each in sorted(own, key=lambda p: p.device_s):
            mark = "*" if each in on else " "
            yield (
                f"{name:<18}  {each.knobs.words:>18}  {each.device_s:>9.0f}  "
                f"{each.ttft_s * 1000:>11.0f}{mark}"
            )
    yield ""
    yield "* on the frontier: no other point of the system is better in both"


def swept(setting: Setting, points: Sequence[Point]) -> dict[str, object]:
    """The points for programs."""
    on = {each for own in by_system(points).values() for each in frontier(own)}
    found = [msgspec.to_builtins(each) | {"frontier": each in on} for each in points]
    varied = Knobs.__dataclass_fields__
    fixed = {key: value for key, value in described(setting).items() if key not in varied}
    return {"setting": fixed, "points": found}


def by_system(points: Iterable[Point]) -> Mapping[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for each in points:
        found.setdefault(each.system, []).append(each)
    return found
