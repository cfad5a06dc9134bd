"""Whole comparisons, small: run again they give the same, and many nodes and models are run too."""

import json
from collections.abc import Mapping
from dataclasses import replace
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


def test_requests_run_over_copies_that_wake() -> None:
    """A block is larger than what is meant to go to an engine at a time, although its bytes are
    modelled by few."""
    spec = ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware("h800-400g"),
        models=(model("llama-2-13b", "m"),),
        nodes=3,
    )
    bursts = (1.0, 32), (20.0, 16)
    rows = [Row(at + 0.001 * i, 2048, 8, "m") for at, count in bursts for i in range(count)]
    loads, wakes = run_cluster(spec, rows, seed=0).events
    assert loads.bytes_moved > 0
    assert wakes.bytes_moved == 0
    for event in (loads, wakes):
        assert event.first_path_s is not None
        assert event.first_complete_s is not None
        first_s = event.first_path_s - event.decided_s
        assert first_s < (event.first_complete_s - event.decided_s) / 4


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


@pytest.mark.parametrize("name", [name for name in systems.SYSTEMS if name.endswith(systems.OWN)])
def test_a_system_with_its_own_scaler_and_gateway(name: str) -> None:
    """A burst that one replica cannot take: more are loaded, and everything is answered."""
    spec = ClusterSpec(
        system=systems.named(name),
        hardware=hardware("h800-400g"),
        models=(model("llama-2-13b"),),
        nodes=4,
        slots=4,
        idle_s=0.5,
    )
    rows = [Row(1.0 + 0.02 * i, 256, 16, "llama-2-13b") for i in range(40)]
    run = run_cluster(spec, rows, seed=0)
    assert all(request.completed for request in run.requests)
    assert max(sample.serving for sample in run.samples) > 1
    assert run.samples[-1].gpus == 1


def test_a_model_is_loaded_where_host_memory_caches_it() -> None:
    """The second model was loaded on the second node, the first one being busy; by name and room
    the nodes are equal when it is loaded again."""
    models = tuple(model("llama-2-13b", name) for name in ("m1", "m2"))
    spec = ClusterSpec(
        system=systems.named("serverlessllm-own"),
        hardware=hardware("h800-400g"),
        models=models,
        nodes=3,
        min_instances=0,
        idle_s=0.5,
    )
    rows = [Row(1.0, 128, 400, "m1"), Row(8.0, 128, 4, "m2"), Row(22.0, 128, 4, "m2")]
    run = run_cluster(spec, rows, seed=0)
    first, again = (r.ttft_s or 0.0 for r in run.requests if r.model == "m2")
    node = spec.hardware
    read_s, copy_s = (
        models[1].nbytes / rate for rate in (node.ssd_bytes_per_s, node.pcie_bytes_per_s)
    )
    assert first > read_s
    assert again < copy_s + 0.5


def test_disks_hold_what_was_put_there_and_differ_by_the_seed() -> None:
    models = tuple(model("llama-3.1-8b", f"m{i}") for i in range(5))
    spec = ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware("h800-400g"),
        models=models,
        nodes=3,
        disk_copies=2,
    )
    held = [[i for i in range(5) if spec.on_disk(node, i)] for node in range(3)]
    assert held == [[0, 2, 3], [0, 1, 3, 4], [1, 2, 4]]
    assert [spec.disk_speed(node) for node in range(3)] == [1.0] * 3
    seeded = [replace(spec, seed=seed).disk_speed(0) for seed in (1, 2)]
    assert seeded[0] != seeded[1]
    assert all(0.9 <= speed <= 1.1 for speed in seeded)


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
