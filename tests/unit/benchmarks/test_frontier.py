"""The claims' table of `benchmarks.frontier`, from made-up runs."""

from pathlib import Path

import pytest

from benchmarks.frontier import (
    BASELINES,
    IDEAL,
    OURS,
    WINDOWS,
    Results,
    Run,
    against,
    report,
    setting,
    settings_of,
    spread,
)
from simulation.frontier import Knobs, Point

AZURE = next(at for at in WINDOWS if at.near_ideal)
A100 = next(at for at in WINDOWS if at.loads and not at.many)
MANY = next(at for at in WINDOWS if at.many)


def at(system: str, device_s: float, ttft_s: float) -> Point:
    return Point(system, Knobs(device_s, 1, 0.5), device_s, ttft_s)


MINE = (at(OURS, 100, 2.0), at(OURS, 200, 1.0))


def test_frontiers_are_compared_at_equal_device_seconds() -> None:
    theirs = [at("nccl-own", 50, 8.0), at("nccl-own", 150, 3.0), at("nccl-own", 200, 1.25)]
    assert against(MINE, theirs) == (0.5, 0.8)  # at 50 there is nothing of ours
    assert against(MINE, [at("nccl-own", 50, 8.0)]) is None
    assert against(MINE, [at("nccl-own", 50, 1.0)]) == (2.0, 2.0)  # cheaper and better
    assert against(MINE, [at(IDEAL, 100, 1.0)], more=1.5) == (1.5, 1.5)


def test_figures_are_medians_with_the_lowest_and_the_highest() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert spread([3.0]) == "3.00"


@pytest.mark.parametrize(("share", "verdict"), [(0.75, "met"), (0.9, "NOT met")])
def test_where_loads_matter_the_bar_is_lower(share: float, verdict: str) -> None:
    points = [*MINE, *(at(name, 200, 1.0 / share) for name in BASELINES)]
    runs = [Run(A100.name, 0, point, 10, 0, 1.0) for point in points]
    said = {line.split(":")[0].strip(): line for line in report(A100, runs)}
    assert said["as a share of nccl-own's"].endswith(f"bar 0.8: {verdict}")
    assert said["as a share of faasnet-own's"].endswith("bar 1: met")
    assert "ideal" not in " ".join(said)


def test_a_run_that_lost_requests_counts_for_nothing() -> None:
    runs = [Run(AZURE.name, 0, point, 10, 0, 1.0) for point in (*MINE, at(IDEAL, 200, 0.9))]
    lost = Run(AZURE.name, 0, at("nccl-own", 200, 0.1), 10, 3, 1.0)
    lines = list(report(AZURE, [*runs, lost]))
    assert "  as a share of nccl-own's: no point to compare" in lines
    assert any(line.endswith("bar 1.15: met") for line in lines)
    assert any(line.endswith("0.10  3") for line in lines)


def test_a_run_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "results"
    (knobs, *_) = settings_of(AZURE, OURS)
    run = Run(AZURE.name, 0, Point(OURS, knobs, 100.0, 1.0), 10, 0, 1.0)
    Results(path).add(run)
    again = Results(path)
    assert again.find(AZURE, 0, OURS, knobs) == run
    assert again.find(AZURE, 1, OURS, knobs) is None
    assert again.find(A100, 0, OURS, knobs) is None


def test_a_window_is_cut_fitted_and_jittered(tmp_path: Path) -> None:
    rows = "".join(f"{i / 4},500,20,m{i % 3}\n" for i in range(2000))
    (tmp_path / MANY.file).write_text(f"arrival_s,prompt_tokens,output_tokens,model\n{rows}")
    once, other = (setting(MANY, tmp_path, seed) for seed in (0, 1))
    assert once.trace[-1].arrival_s < MANY.seconds
    assert [name for name, _ in once.models] == ["m0", "m1", "m2"]
    assert (once.disk_copies, once.seed) == (2, 0)
    assert len(other.trace) == len(once.trace)
    assert other.trace != once.trace
