"""`lambdascale bench multicast`, small: real nodes in namespaces, gloo beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed import check_able
from shared.errors import ConfigError
from tests.support.commands import run_here

SMALL = ["--nodes", "2", "--mib", "2", "--blocks", "4", "--runs", "1", "--link-mbit", "100"]


def skip_if_not_able() -> None:
    try:
        check_able()
    except ConfigError as error:
        pytest.skip(str(error))


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    skip_if_not_able()
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", "multicast", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_small_run(tmp_path: Path) -> None:
    figure = tmp_path / "bench.svg"
    done = bench(*SMALL, "--strategies", "auto,chain", "--racks", "1,1", "--json",
                 "--figure", str(figure))  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"rows", "link_mbit", "bytes"}
    assert document["link_mbit"] == 100
    assert 1.9 * (1 << 20) < document["bytes"] <= 2 << 20
    names = [row["strategy"] for row in document["rows"]]
    assert names == [
        "auto",
        "chain",
        "gloo-broadcast",
        "gloo-broadcast-with-group",
        "gloo-chain",
        "plain-chain",
        "auto@racks-1-1",
        "chain@racks-1-1",
    ]
    for row in document["rows"]:
        assert set(row) == {
            "n", "strategy", "makespan_s", "limit_s", "ratio", "cpu_s_per_gb", "runs",
        }  # fmt: skip
        assert (row["n"], row["runs"]) == (2, 1)
        # The links are real: nothing is faster, but for what their buckets let through at once.
        assert row["ratio"] > 0.85
    assert "faster than the binary tree" not in done.stderr
    assert "2 nodes: decision to first byte" in done.stderr
    assert figure.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nodes", "1"], "2 nodes"),
        (["--strategies", "auto,best"], "best"),
        (["--mib", "1", "--blocks", "128"], "blocks"),
        (["--nodes", "x"], "whole number"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_if_not_able()
    assert run_here("bench", "multicast", *arguments) == 2
    assert word in capsys.readouterr().err
