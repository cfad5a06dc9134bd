"""Whole comparisons, small: run again they give the same, and many nodes and models are run too."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from services.cli.main import main
from simulation import systems
from simulation.cluster import ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.run import run_cluster, spec_of
from simulation.setting import Setting
from simulation.synthetic import synthesize
from simulation.traces import Row

COST = ("wall_s", "cpu_s", "peak_gb")
"""What a run costs is not the same every time."""


def simulated(capsys: pytest.CaptureFixture[str]) -> Mapping[str, Any]:
    words = ["--trace", "spike:rate=20,seconds=1,idle=0.5,output=8", "--nodes", "3", "--slots", "4"]
    assert main(["simulate", *words, "--systems", "lambdascale", "--seed", "3", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    cost = [document["systems"]["lambdascale"].pop(key) for key in COST]
    assert min(cost) > 0
    return document


def test_the_same_command_gives_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    once = simulated(capsys)
    assert once["systems"]["lambdascale"]["completed"] == once["setting"]["requests"] > 0
    assert simulated(capsys) == once


def test_many_nodes_and_models() -> None:
    workload = synthesize("poisson:rate=20,seconds=4,models=8,skew=1,prompt=256,output=8")
    setting = Setting(
        trace=workload.rows,
        models=tuple((name, "llama-3.1-8b") for name in workload.models),
        nodes=40,
        hardware="h800-400g",
        seed=0,
        racks=4,
        slots=16,
        min_instances=0,
        workload=workload.name,
        synthetic=True,
        notes=workload.notes,
    )
    spec = spec_of("lambdascale", setting)
    assert spec.nodes * spec.arena_bytes / spec.unit <= 1 << 30
    run = run_cluster(spec, setting.trace, setting.seed)
    assert all(request.completed for request in run.requests)
    assert len(run.requests) == len(setting.trace)
    assert {event.model for event in run.events} == set(workload.models)  # all were woken
    assert min(run.wall_s, run.cpu_s, run.peak_bytes) > 0


def test_models_that_sleep_give_way_to_one_that_is_asked_for() -> None:
    """Three models on two nodes that have memory for one each."""
    models = tuple(model("llama-2-13b", name) for name in ("m1", "m2", "m3"))
    spec = ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware("h800-400g"),
        models=models,
        nodes=2,
        min_instances=0,
    )
    asked = ("m1", "m2", "m3", "m1", "m3", "m2")
    rows = [Row(1.0 + 20.0 * i, 128, 16, name) for i, name in enumerate(asked)]
    run = run_cluster(spec, rows, seed=0)
    assert [request.error for request in run.requests] == [""] * len(rows)
    assert {event.state for event in run.events} == {"complete"}
    assert len(run.events) == len(rows)


def test_real_bytes_stand_for_as_many_as_it_takes() -> None:
    setting = Setting(
        trace=(),
        models=(("m", "llama-3.1-8b"),),
        nodes=12,
        hardware="h800-400g",
        seed=0,
        racks=1,
        slots=16,
        min_instances=1,
        workload="",
        synthetic=True,
        notes=(),
    )
    assert spec_of("ideal", setting).unit == 4096
