"""A dozen runs of `lambdascale bench chaos`: nothing is lost, hung or wrong, and all gets well."""

import json

import pytest

from tests.support.commands import run_here

RUNS = 12


def test_a_dozen_runs(capsys: pytest.CaptureFixture[str]) -> None:
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
