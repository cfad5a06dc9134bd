"""The figures are drawn, whatever a run lacks, and show what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.image import imread

from simulation import figures
from simulation.measures import integral
from simulation.systems import OWN, SYSTEMS
from tests.unit.simulation.runs import END_S, made_up, setting

RUNS = {system: made_up(system) for system in ("lambdascale", "serverlessllm", "ideal")}


def test_every_system_has_a_look_of_its_own() -> None:
    assert set(figures.LOOKS) == {name.removesuffix(OWN) for name in SYSTEMS}
    looks = list(figures.LOOKS.values())
    assert len({(look.colour, str(look.line)) for look in looks}) == len(looks)
    assert max(looks, key=lambda look: look.width) is figures.LOOKS["lambdascale"]


def test_all_are_written(tmp_path: Path) -> None:
    written = figures.draw_all(tmp_path / "new" / "folder", setting(), RUNS)
    assert [path.name for path in written] == [
        "throughput.png", "ttft.png", "gpus.png", "host-cache.png", "scale-events.png",
    ]  # fmt: skip
    for path in written:
        pixels = imread(path)
        assert pixels.shape[1] > 1000
        assert pixels.std() > 0.05
    assert plt.get_fignums() == []


def test_a_run_without_anything(tmp_path: Path) -> None:
    empty = replace(
        RUNS["ideal"], requests=(), events=(), samples=(), tokens_by_bin=(), virtual_s=1.0
    )
    failed = replace(
        RUNS["lambdascale"],
        requests=tuple(
            replace(request, first_token_s=None, last_token_s=None, tokens=0, error="lost")
            for request in RUNS["lambdascale"].requests
        ),
    )
    assert figures.draw_all(tmp_path, setting(), {"lambdascale": failed, "ideal": empty})


def drawn(axis: plt.Axes, label: str) -> tuple[list[float], list[float]]:
    line = next(line for line in axis.lines if line.get_label() == label)
    return list(line.get_xdata()), list(line.get_ydata())


def test_the_curves_are_the_measures() -> None:
    runs = list(RUNS.values())
    try:
        throughput = figures.throughput(runs).axes[0]
        at, rates = drawn(throughput, "lambdascale")
        tokens = sum(rates) * (at[1] - at[0])
        assert tokens == pytest.approx(sum(RUNS["lambdascale"].tokens_by_bin))

        total = figures.gpus(runs).axes[-1]
        for system, run in RUNS.items():
            at, minutes = drawn(total, system)
            assert at[-1] == END_S
            assert minutes[-1] == pytest.approx(integral(run, lambda s: s.gpus, END_S) / 60)

        cdf = figures.ttft(runs).axes[0]
        waits, shares = drawn(cdf, "serverlessllm")
        assert shares[-1] == 1
        middle = next(wait for wait, share in zip(waits, shares, strict=True) if share >= 0.5)
        ttfts = sorted(r.ttft_s or 0 for r in RUNS["serverlessllm"].requests)
        assert middle == pytest.approx(1000 * ttfts[len(ttfts) // 2], rel=0.01)
    finally:
        plt.close("all")
