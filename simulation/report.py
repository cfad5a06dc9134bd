"""The comparison in words: the setting, a table, and multiples of lambdascale's values."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from simulation.measures import REFERENCE, Measures, ratios
from simulation.setting import Setting

BOUND = "ideal"
"""Loads in no time. No system can beat it, so it is never marked as the best."""
MODELLED = (
    "a simulation in virtual time: schedulers, planner and routing are the project's own code; "
    "links, memory and accelerators are models of the hardware named"
)
NONE = "-"


def document(
    setting: Setting, objective: str, systems: Mapping[str, Measures]
) -> dict[str, object]:
    """The comparison for programs. simulation/measures.py says what each key means."""
    return {
        "systems": msgspec.to_builtins(dict(systems)),
        "setting": described(setting) | {"slo": objective},
        "relative_to_lambdascale": ratios(systems),
    }


def described(setting: Setting) -> dict[str, object]:
    """The setting for programs."""
    return {
        "workload": setting.workload,
        "synthetic": setting.synthetic,
        "notes": list(setting.notes),
        "requests": len(setting.trace),
        "seconds": setting.trace[-1].arrival_s,
        "models": dict(setting.models),
        "nodes": setting.nodes,
        "racks": setting.racks,
        "slots": setting.slots,
        "min_instances": setting.min_instances,
        "keep_alive_s": setting.keep_alive_s,
        "target": setting.target,
        "disk_copies": setting.disk_copies,
        "hardware": setting.hardware,
        "seed": setting.seed,
        "what": MODELLED,
    }


def comparison(systems: Mapping[str, Measures]) -> Iterator[str]:
    """The measures side by side, and as multiples of the reference's."""
    yield from _table(list(_rows(systems)))
    yield ""
    yield f"* best of those that completed the most requests; {BOUND} is a bound, not a system"
    yield (
        "TTFT and TPOT in ms; GPU s: nodes held x seconds, until the last system is done; host GB: "
        "model copies in host memory, mean; scaled in s: median of an event"
    )
    yield from _failures(systems)
    yield ""
    yield "What the simulation itself took:"
    for system, m in systems.items():
        yield (
            f"{system}: {m.wall_s:.1f} s for {m.virtual_s:.0f} s of the cluster, "
            f"{m.cpu_s:.1f} s of CPU, {m.peak_gb:.2f} GB"
        )
    compared = ratios(systems)
    if len(compared) > 1:
        yield ""
        yield f"As multiples of {REFERENCE} (above 1: {REFERENCE} needs less):"
        names = list(compared[REFERENCE])
        rows = [
            [system, *(_multiple(values[name]) for name in names)]
            for system, values in compared.items()
            if system != REFERENCE
        ]
        yield from _table([["system", *names], *rows])


def words(setting: Setting) -> Iterator[str]:
    """The setting, line by line."""
    kind = "synthetic workload" if setting.synthetic else "workload"
    yield (
        f"{kind} {setting.workload}: {len(setting.trace)} requests in "
        f"{setting.trace[-1].arrival_s:.0f} s"
    )
    yield from (f"  {note}" for note in setting.notes)
    models = ", ".join(
        kind if kind == name else f"{name} ({kind})" for name, kind in setting.models[:4]
    )
    more = f" and {len(setting.models) - 4} more" if len(setting.models) > 4 else ""
    racks = f" in {setting.racks} racks" if setting.racks > 1 else ""
    yield (
        f"{setting.nodes} nodes{racks}, {setting.hardware}, {setting.slots} requests at once each; "
        f"{models}{more}; seed {setting.seed}"
    )
    yield MODELLED


def title(setting: Setting) -> str:
    """The setting for a figure: one line, and what was done to the workload."""
    kinds = ", ".join(sorted({kind for _, kind in setting.models}))
    count = f"{len(setting.models)} x " if len(setting.models) > 1 else ""
    name = textwrap.shorten(setting.workload, 60)
    line = (
        f"Simulated: {'synthetic ' if setting.synthetic else ''}{name}, {len(setting.trace)} "
        f"requests; {count}{kinds} on {setting.nodes} nodes of {setting.hardware}"
    )
    return "\n".join([line, *textwrap.wrap("; ".join(setting.notes), 130, max_lines=2)])


# --- the table --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    value: Callable[[Measures], float | None]
    digits: int = 0
    scale: float = 1.0
    best: Callable[[Iterable[float]], float] | None = min

    def text(self, measures: Measures) -> str:
        value = self.value(measures)
        return NONE if value is None else f"{value * self.scale:.{self.digits}f}"

    def best_text(self, measures: Sequence[Measures]) -> str | None:
        """The best value as it is printed, so that all values that look equal to it are marked."""
        known = [m for m in measures if self.value(m) is not None]
        if self.best is None or len(known) < 2:
            return None
        best = self.best(self.value(m) or 0.0 for m in known)
        return f"{best * self.scale:.{self.digits}f}"


_COLUMNS = (
    Column("TTFT p50", lambda m: m.ttft_ms.p50),
    Column("p90", lambda m: m.ttft_ms.p90),
    Column("p99", lambda m: m.ttft_ms.p99),
    Column("TPOT p50", lambda m: m.tpot_ms.p50, 1),
    Column("p90", lambda m: m.tpot_ms.p90, 1),
    Column("p99", lambda m: m.tpot_ms.p99, 1),
    Column("SLO %", lambda m: m.slo_attainment, 1, scale=100, best=max),
    Column("GPU s", lambda m: m.gpu_seconds),
    Column("host GB", lambda m: m.host_cache_gb_mean, 1),
    Column("events", lambda m: m.scale_events, best=None),
    Column("scaled in s", lambda m: m.scale_ms.p50, 2, scale=1e-3),
)


def _rows(systems: Mapping[str, Measures]) -> Iterator[list[str]]:
    able = {name: m for name, m in systems.items() if name != BOUND}
    most = max((m.completed for m in able.values()), default=0)
    fair = {name: m for name, m in able.items() if m.completed == most}
    best = [column.best_text(list(fair.values())) for column in _COLUMNS]
    yield ["system", "done", *(f"{column.head} " for column in _COLUMNS)]
    for name, measures in systems.items():
        texts = [column.text(measures) for column in _COLUMNS]
        yield [
            name,
            f"{measures.completed}/{measures.requests}",
            *(
                f"{text}{'*' if name in fair and text == top else ' '}"
                for text, top in zip(texts, best, strict=True)
            ),
        ]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _failures(systems: Mapping[str, Measures]) -> Iterator[str]:
    for name, measures in systems.items():
        for error, count in sorted(measures.errors.items(), key=lambda item: -item[1])[:3]:
            yield f"{name}: {count} requests failed: {error}"


def _multiple(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
