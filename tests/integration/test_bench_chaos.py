"""Several runs of `lambdascale bench chaos`: nothing is lost, hung or wrong, and all gets well."""

import json
from itertools import count

import pytest

from benchmarks.chaos import bench, harness
from benchmarks.chaos.faults import Kind, draw
from benchmarks.testbed import check_able
from shared.errors import ConfigError
from tests.support.commands import run_here

RUNS = 8


def test_several_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Without root or iproute2 faults of the network are left out, and the document says so. A
    client counts as hung only after a silence that no busy machine explains."""
    given = "--runs", str(RUNS), "--tokens", "20", "--lasting", "3", "--silence", "60"
    code = run_here("bench", "chaos", *given, "--json")
    said = capsys.readouterr()
    assert code == 0, said.err
    document = json.loads(said.out)
    assert [run["seed"] for run in document["runs"]] == list(range(RUNS))
    for run in document["runs"]:
        assert run["faults"]
        assert run["requests"]["right"] > 0
        assert run["requests"]["wrong"] == run["requests"]["lost"] == run["hung"] == 0
        assert run["well_s"] is not None


def test_a_node_whose_adapter_resets_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Its links go down and up and its connections are reset, amid a scale-out under load."""
    try:
        check_able()
    except ConfigError as error:
        pytest.skip(str(error))
    roles = harness.roles()
    seed = next(
        seed
        for seed in count()
        for faults in [draw(seed, roles, kinds=Kind, within_s=bench.WITHIN_S, lasting_s=4.0)]
        if [(fault.kind, fault.role) for fault in faults] == [(Kind.RESET, "node")]
    )
    given = "--runs", "1", "--seed", str(seed), "--tokens", "20", "--lasting", "4"
    code = run_here("bench", "chaos", *given, "--silence", "60", "--json")
    said = capsys.readouterr()
    assert code == 0, said.err
    (run,) = json.loads(said.out)["runs"]
    assert [fault["kind"] for fault in run["faults"]] == ["reset"]
    assert run["requests"]["right"] == sum(run["requests"].values())
    assert run["well_s"] is not None
