"""`lambdascale bench pipeline`, small: stages in processes of their own, over TCP."""

import json
import subprocess
import sys

import pytest

from tests.support.commands import run_here

SMALL = ["--hidden", "128", "--batch", "2", "--rounds", "1", "--window", "0.5"]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", "pipeline", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_small_run() -> None:
    done = bench(*SMALL, "--stages", "2,3", "--stage-ms", "10", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["stage_ms"], document["batch"], document["hidden"]) == (10, 2, 128)
    assert [row["stages"] for row in document["rows"]] == [2, 3]
    for row in document["rows"]:
        assert len(row["idle"]) == len(row["sweep_ms"]) == row["stages"]
        assert all(0 <= idle < 1 for idle in row["idle"])
        # A stage's part of a step takes its least time, and is waited for.
        assert min(row["sweep_ms"]) >= 10
        assert row["tokens_per_s"] <= row["stages"] * 2 / (row["stages"] * 0.010)
        assert row["one_micro_batch_tokens_per_s"] <= 2 / (row["stages"] * 0.010)
        assert row["hand_over_us"] > 0
    assert "3 stages: the idlest is idle" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--stages", "1"], "2 stages or more"),
        (["--hidden", "100"], "multiple of 64"),
        (["--stage-ms", "-1"], "less than 0"),
        (["--batch", "0"], "whole number of at least 1"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("bench", "pipeline", *arguments) == 2
    assert word in capsys.readouterr().err
