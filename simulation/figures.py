"""Figures of a comparison, one PNG for each question, all under one setting.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; line styles differ too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from simulation.frontier import Point, by_system, frontier
from simulation.measures import REFERENCE, cumulative, steepest_burst
from simulation.report import title
from simulation.results import EventResult, Sample, SystemRun
from simulation.setting import Setting
from simulation.systems import OWN

matplotlib.use("Agg")

from matplotlib import pyplot as plt


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    line: Any = "-"
    width: float = 1.5
    order: int = 3

    def of_line(self) -> dict[str, Any]:
        return {
            "color": self.colour, "linestyle": self.line, "linewidth": self.width,
            "zorder": self.order,
        }  # fmt: skip


LOOKS: Mapping[str, Look] = {
    "lambdascale": Look("#D55E00", width=2.8, order=5),
    "lambdapipe": Look("#E69F00", (0, (6, 1.5, 1, 1.5)), 2.0, 4),
    "serverlessllm": Look("#0072B2"),
    "faasnet": Look("#009E73", (0, (5, 1.5))),
    "nccl": Look("#56B4E9", (0, (3, 1, 1, 1))),
    "blitzscale": Look("#CC79A7"),
    "allcache": Look("0.45", (0, (7, 2))),
    "ideal": Look("black", (0, (1, 1.5)), order=4),
}
OTHER = Look("0.5")
OFFERED = {"color": "0.88", "linewidth": 0, "zorder": 1, "label": "asked for on arrival"}
POINTS = 300
"""The most bins for the whole run."""
ZOOM_S = (-5.0, 45.0)
"""The window around the steepest burst, in seconds."""


def draw_all(folder: Path, setting: Setting, runs: Mapping[str, SystemRun]) -> list[Path]:
    """Writes the PNGs into `folder`, which is made if necessary, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = list(runs.values())
    written: list[Path] = []
    for name, draw in _FIGURES.items():
        figure = draw(ordered)
        figure.suptitle(title(setting), fontsize=8.5, color="0.3", x=0.01, ha="left")
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


# --- throughput -------------------------------------------------------------


def throughput(runs: Sequence[SystemRun]) -> plt.Figure:
    """Tokens per second: the whole run, and the steepest burst enlarged."""
    figure, (whole, zoom) = _panels(2, 1, (11, 7.5))
    burst = steepest_burst(runs[0].requests)
    start, end = max(0.0, burst + ZOOM_S[0]), burst + ZOOM_S[1]
    width = _end_s(runs) / POINTS
    whole.axvspan(start, end, color="#FFF3D6", zorder=0, label="enlarged below")
    for axis, bin_s in ((whole, width), (zoom, 0.5)):
        axis.fill_between(*_asked(runs[0], max(bin_s, 1.0)), step="post", **OFFERED)
        tops = [_rates(axis, run, bin_s) for run in runs]
        axis.set_ylabel("tokens a second")
        axis.set_ylim(0, 1.15 * max(tops, default=1.0))
    whole.set_xlim(0, _end_s(runs))
    whole.set_title("Tokens that clients received: the whole run", loc="left")
    zoom.set_xlim(start, end)
    zoom.set_title("The steepest burst", loc="left")
    zoom.set_xlabel("seconds")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)  # fmt: skip
    return figure


def _rates(axis: plt.Axes, run: SystemRun, bin_s: float) -> float:
    """Draws a system's rate over bins of at least `bin_s`, and returns the highest rate."""
    together = max(1, round(bin_s / run.token_bin_s))
    tokens = np.array(run.tokens_by_bin, dtype=float)
    padded = np.pad(tokens, (0, -len(tokens) % together))
    rates = padded.reshape(-1, together).sum(axis=1) / (together * run.token_bin_s)
    axis.step(np.arange(len(rates)) * together * run.token_bin_s, rates, where="post",
              label=run.system, **_look(run.system).of_line())  # fmt: skip
    return float(rates.max(initial=0.0))


def _asked(run: SystemRun, bin_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Output tokens per second that arriving requests ask for. It is the same for every system."""
    bins = np.zeros(int(run.virtual_s / bin_s) + 1)
    for request in run.requests:
        bins[min(int(request.arrival_s / bin_s), len(bins) - 1)] += request.output_tokens
    return np.arange(len(bins)) * bin_s, bins / bin_s


# --- latency ----------------------------------------------------------------


def ttft(runs: Sequence[SystemRun]) -> plt.Figure:
    """The distribution of the time to the first token. Requests without a token keep a curve below
    1."""
    figure, (all_of_it, tail) = _panels(1, 2, (12, 5), width_ratios=(1.25, 1))
    for run in runs:
        values = sorted(r.ttft_s * 1000 for r in run.requests if r.ttft_s is not None)
        share = np.arange(1, len(values) + 1) / max(len(run.requests), 1)
        shown = np.maximum(values, 0.1)
        all_of_it.plot(shown, share, label=run.system, **_look(run.system).of_line())
        tail.plot(shown, np.maximum(1 - share, 0.5 / max(len(run.requests), 1)),
                  **_look(run.system).of_line())  # fmt: skip
    for axis in (all_of_it, tail):
        axis.set_xscale("log")
        axis.set_xlabel("time to first token, ms")
        axis.grid(axis="x", which="minor", alpha=0.12)
    all_of_it.set_ylim(0, 1.01)
    all_of_it.set_ylabel("share of requests")
    all_of_it.set_title("Time to first token", loc="left")
    tail.set_yscale("log")
    for quantile, at in (("p50", 0.5), ("p90", 0.1), ("p99", 0.01)):
        all_of_it.axhline(1 - at, color="0.6", linewidth=0.8, zorder=2)
        tail.axhline(at, color="0.6", linewidth=0.8, zorder=2)
        for axis, level in ((all_of_it, 1 - at), (tail, at)):
            axis.annotate(quantile, (0.003, level), xycoords=("axes fraction", "data"),
                          va="bottom", fontsize=8, color="0.4")  # fmt: skip
    tail.set_ylim(top=1)
    tail.set_ylabel("share of requests that waited longer")
    tail.set_title("Its tail", loc="left")
    _legend(all_of_it, "lower right")
    return figure


# --- cost -------------------------------------------------------------------


def gpus(runs: Sequence[SystemRun]) -> plt.Figure:
    """Nodes held over time, a strip for each system, and the sum."""
    figure = plt.figure(figsize=(13, max(4.0, 1.05 * len(runs) + 1.2)), layout="constrained")
    grid = figure.add_gridspec(len(runs), 2, width_ratios=(1.7, 1))
    most = max((sample.gpus for run in runs for sample in run.samples), default=1)
    strips: list[plt.Axes] = []
    for row, run in enumerate(runs):
        axis = figure.add_subplot(grid[row, 0], sharex=strips[0] if strips else None)
        _strip(axis, run, most)
        axis.set_xlim(0, _end_s(runs))
        axis.tick_params(labelbottom=row == len(runs) - 1)
        strips.append(axis)
    strips[0].set_title("Nodes held by models (dark: complete replicas that serve)", loc="left")
    strips[-1].set_xlabel("seconds")
    total = _plain(figure.add_subplot(grid[:, 1]))
    _totals(total, runs, lambda sample: sample.gpus / 60)
    total.set_title("GPU time until then", loc="left")
    total.set_ylabel("node-minutes")
    return figure


def _strip(axis: plt.Axes, run: SystemRun, most: int) -> None:
    look = _look(run.system)
    at, held = _steps(run, lambda sample: sample.gpus)
    _, serving = _steps(run, lambda sample: sample.serving)
    axis.fill_between(at, held, step="post", color=look.colour, alpha=0.3, linewidth=0)
    axis.fill_between(at, serving, step="post", color=look.colour, alpha=0.85, linewidth=0)
    _plain(axis)
    axis.set_ylim(0, most * 1.08)
    axis.set_yticks([0, most])
    axis.set_ylabel(run.system, rotation=0, ha="right", va="center", fontsize=9, labelpad=8,
                    fontweight="bold" if run.system == REFERENCE else "normal")  # fmt: skip


def host_cache(runs: Sequence[SystemRun]) -> plt.Figure:
    """Memory that copies of models take on hosts, over time."""
    figure, (axis,) = _panels(1, 1, (11, 4.8))
    for run in runs:
        at, held = _steps(run, lambda sample: sample.host_bytes / 1e9)
        axis.step(at, held, where="post", label=run.system, **_look(run.system).of_line())
    axis.set_yscale("symlog", linthresh=10.0)
    axis.set_ylim(0, max(10.0, axis.get_ylim()[1]))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlim(0, _end_s(runs))
    axis.set_ylabel("GB over all nodes (logarithmic above 10)")
    axis.set_xlabel("seconds")
    axis.set_title("Model copies in host memory", loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


# --- scaling events ---------------------------------------------------------


def events(runs: Sequence[SystemRun]) -> plt.Figure:
    """How long scaling events took, and how many there were."""
    figure, (times, counts) = _panels(1, 2, (13, max(3.8, 0.55 * len(runs) + 1.6)),
                                      width_ratios=(1.5, 1))  # fmt: skip
    least = 1e-2
    for row, run in enumerate(runs):
        look = _look(run.system)
        shift = np.linspace(-0.22, 0.22, max(len(run.events), 1))
        for fill, size, moment in (
            ("none", 26, lambda event: event.first_path_s),
            (look.colour, 20, lambda event: event.all_complete_s),
        ):
            points = list(_moments(run.events, moment))
            times.scatter(
                [max(seconds, least) for _, seconds in points],
                [row + shift[index] for index, _ in points],
                s=size, facecolors=fill, edgecolors=look.colour, linewidths=1.1, zorder=3,
                alpha=0.8,
            )  # fmt: skip
        at = [0.0, *sorted(event.decided_s for event in run.events), run.virtual_s]
        counts.step(at, [*range(len(run.events) + 1), len(run.events)], where="post",
                    label=run.system, **look.of_line())  # fmt: skip
    times.set_yticks(range(len(runs)), [run.system for run in runs])
    times.set_ylim(len(runs) - 0.5, -0.5)
    times.set_xscale("log")
    times.set_xlabel(f"seconds after the decision ({least * 1000:g} ms: that or less)")
    times.set_title("Scaling events: hollow, something new serves; filled, all complete",
                    loc="left")  # fmt: skip
    counts.set_title("Scaling events until then", loc="left")
    counts.set_xlabel("seconds")
    counts.set_ylim(bottom=0)
    counts.yaxis.get_major_locator().set_params(integer=True)
    counts.set_xlim(0, _end_s(runs))
    _legend(counts, "upper left")
    return figure


def _moments(
    found: Sequence[EventResult], moment: Callable[[EventResult], float | None]
) -> Iterator[tuple[int, float]]:
    for index, event in enumerate(found):
        at = moment(event)
        if at is not None:
            yield index, at - event.decided_s


_FIGURES: Mapping[str, Callable[[Sequence[SystemRun]], plt.Figure]] = {
    "throughput": throughput,
    "ttft": ttft,
    "gpus": gpus,
    "host-cache": host_cache,
    "scale-events": events,
}


# --- the frontier -----------------------------------------------------------


def draw_frontier(folder: Path, setting: Setting, points: Sequence[Point]) -> Path:
    """Writes `frontier.png`: TTFT p90 against device seconds. Points of lambdascale are named by
    their keep-alive time and their least number of instances."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, (axis,) = _panels(1, 1, (9, 6))
    for system, own in by_system(points).items():
        look, best = _look(system), frontier(own)
        axis.plot(*_places(best), label=system, marker="o", markersize=4, **look.of_line())
        axis.scatter(*_places(own), color=look.colour, s=10, alpha=0.5, zorder=2)
        for each in own if system == REFERENCE else ():
            axis.annotate(each.knobs.words, (each.device_s, each.ttft_s * 1000), fontsize=7,
                          xytext=(4, 4), textcoords="offset points")  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("device seconds")
    axis.set_ylabel("TTFT p90, ms")
    axis.set_title("What a better TTFT costs (kept for, least instances)", loc="left")
    axis.legend(frameon=False, fontsize=9)
    figure.suptitle(title(setting), fontsize=8.5, color="0.3", x=0.01, ha="left")
    path = folder / "frontier.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _places(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [each.device_s for each in points], [each.ttft_s * 1000 for each in points]


# --- shared -----------------------------------------------------------------


def _look(system: str) -> Look:
    return LOOKS.get(system.removesuffix(OWN), OTHER)


def _end_s(runs: Sequence[SystemRun]) -> float:
    """The end of the longest run: a system that is behind takes longer."""
    return max(run.virtual_s for run in runs)


def _panels(
    rows: int, columns: int, size: tuple[float, float], **grid: Any
) -> tuple[plt.Figure, list[plt.Axes]]:
    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", gridspec_kw=grid
    )
    return figure, [_plain(axis) for axis in axes.flat]


def _plain(axis: plt.Axes) -> plt.Axes:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, zorder=0)
    return axis


def _steps(run: SystemRun, value: Callable[[Sample], float]) -> tuple[list[float], list[float]]:
    """A line of steps, continued to the end of the run."""
    at = [sample.at_s for sample in run.samples]
    values = [value(sample) for sample in run.samples]
    return [*at, run.virtual_s], [*values, *values[-1:]] if values else [0.0]


def _totals(axis: plt.Axes, runs: Sequence[SystemRun], value: Callable[[Sample], float]) -> None:
    for run in runs:
        at, totals = cumulative(run, value, _end_s(runs))
        axis.plot(at, totals, label=run.system, **_look(run.system).of_line())
    axis.set_ylim(bottom=0)
    axis.set_xlim(0, _end_s(runs))
    axis.set_xlabel("seconds")
    _legend(axis, "upper left")


def _legend(axis: plt.Axes, loc: str) -> None:
    """A legend in a corner that these curves never reach."""
    axis.legend(loc=loc, frameon=False, fontsize=9)
