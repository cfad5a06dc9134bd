"""`lambdascale bench serving-source`, small: real nodes in namespaces, one of which serves."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.testbed import check_able, goodput
from shared.errors import ConfigError
from tests.support.commands import run_here

SMALL = ["--mib", "2", "--blocks", "4", "--batch", "2", "--rounds", "1", "--window", "1"]
LINK_MBIT = 100


def skip_if_not_able() -> None:
    try:
        check_able()
    except ConfigError as error:
        pytest.skip(str(error))


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    skip_if_not_able()
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", "serving-source", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.01"},  # else nodes use whole cores
    )


def test_small_run() -> None:
    done = bench(*SMALL, "--link-mbit", str(LINK_MBIT), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"rows", "link_mbit", "bytes", "batch", "machine"}
    assert (document["link_mbit"], document["batch"]) == (LINK_MBIT, 2)
    assert 1.9 * (1 << 20) < document["bytes"] <= 2 << 20
    rows = document["rows"]
    assert [(row["link"], row["way"]) for row in rows] == [
        ("half", "lambdascale"),
        ("half", "plain socket"),
        ("whole", "lambdascale"),
        ("whole", "plain socket"),
    ]
    for row in rows:
        assert row["rounds"] == len(row["losses"]) == 1
        assert min(row[f"{when}tokens_per_s"] for when in ("", "loading_", "again_")) > 0
        share = 0.5 if row["link"] == "half" else 1.0
        assert row["rate_bytes_per_s"] == pytest.approx(share * goodput(LINK_MBIT), rel=0.001)
        # Paced: nothing is faster, but for what a bucket lets through at once.
        assert 0 < row["load_bytes_per_s"] < 1.15 * row["rate_bytes_per_s"]
    assert "tokens/s lost while loading at half the link" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--mib", "1", "--blocks", "128"], "blocks"),
        (["--rounds", "0"], "whole number of at least 1"),
        (["--window", "-1"], "more than 0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_if_not_able()
    assert run_here("bench", "serving-source", *arguments) == 2
    assert word in capsys.readouterr().err
