"""Fits the rate of a recorded workload to a cluster of another size.

The time axis stays. A comparison is about how steep a burst is, and how long the lulls are, against
the seconds that a scale-out takes; stretching time would change both. A factor f below 1 keeps
every 1/f-th request of each model. So every stretch of n requests keeps f·n of them to within one,
where a random choice would smear small bursts. With a factor above 1, copies of a request follow
it, evenly spaced on the way to the next request of its model, at most a peak's window later. The
shape stays, with its noise, of which a larger service would have less. Order and lengths stay.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shared.errors import BadInput
from simulation.traces import Row, Workload

PEAK_WINDOW_S = 10.0
"""Long compared with a request's first token, short compared with a lull."""
ENOUGH = 0.005
"""A factor closer to 1 than this changes nothing worth a note."""


def peak(
    rows: Iterable[Row], work: Callable[[Row], float], window_s: float = PEAK_WINDOW_S
) -> float:
    """The most work that arrives in any `window_s`, per second. Rows are in order of arrival."""
    inside: deque[tuple[float, float]] = deque()
    total = most = 0.0
    for row in rows:
        cost = work(row)
        inside.append((row.arrival_s, cost))
        total += cost
        while inside[0][0] <= row.arrival_s - window_s:
            total -= inside.popleft()[1]
        most = max(most, total)
    return most / window_s


def fitting_factor(rows: Iterable[Row], work: Callable[[Row], float], capacity: float) -> float:
    """The factor at which the peak just fits.

    `work`: what a request takes. `capacity`: what the cluster does per second when every node
    serves (in node-seconds: the number of nodes).
    """
    return capacity / peak(rows, work)


def scale_rate(workload: Workload, factor: float, why: str = "") -> Workload:
    """The workload with `factor` times its requests. A note says so, and `why`."""
    if not 0 < factor < float("inf"):
        raise BadInput(f"a rate factor of {factor} leaves no workload: it must be more than 0")
    if abs(factor - 1) < ENOUGH:
        return workload
    rows = _copied(workload.rows, factor) if factor > 1 else _thinned(workload.rows, factor)
    if not rows:
        raise BadInput(
            f"a rate factor of {factor:.3g} leaves none of {len(workload.rows)} requests"
        )
    note = (
        f"rate scaled by {factor:.3g}{f' ({why})' if why else ''}: {len(rows)} requests of "
        f"{len(workload.rows)}, in the same time, "
        + ("thinned evenly" if factor < 1 else "copies behind their originals")
    )
    return replace(workload, rows=tuple(rows), notes=(*workload.notes, note))


def _copies(rows: Sequence[Row], factor: float) -> list[int]:
    """How many copies of each row stay: of the first n rows of a model factor·n in all, to within
    one half."""
    seen: dict[str, int] = defaultdict(int)
    counts: list[int] = []
    for row in rows:
        n = seen[row.model]
        counts.append(int((n + 1) * factor + 0.5) - int(n * factor + 0.5))
        seen[row.model] = n + 1
    return counts


def _thinned(rows: Sequence[Row], factor: float) -> list[Row]:
    return [row for row, count in zip(rows, _copies(rows, factor), strict=True) if count]


def _copied(rows: Sequence[Row], factor: float) -> list[Row]:
    following: dict[str, float] = {}
    copied: list[Row] = []
    for row, count in zip(reversed(rows), reversed(_copies(rows, factor)), strict=True):
        gap = following.get(row.model, row.arrival_s + PEAK_WINDOW_S) - row.arrival_s
        gap = min(gap, PEAK_WINDOW_S)
        copied.extend(
            row._replace(arrival_s=row.arrival_s + gap * i / count) for i in reversed(range(count))
        )
        following[row.model] = row.arrival_s
    copied.reverse()
    copied.sort(key=lambda row: row.arrival_s)
    return copied
