"""`lambdascale bench engine`, small: the engine under its scheduler, transformers beside it."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.commands import run_here

SMALL = ["--layers", "2", "--hidden", "192", "--vocab", "512", "--batch", "3", "--prompt", "24",
         "--tokens", "2", "--rounds", "1", "--threads", "1"]  # fmt: skip
CASES = [
    "decode, batch 1",
    "decode, batch 3, mixed lengths",
    "prefill",
    "engine overhead",
    "shared prefix, second request",
    "one sweep for four block ranges",
    "an answer that repeats itself",
]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", "engine", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_small_run() -> None:
    done = bench(*SMALL, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = document["rows"]
    assert [row["case"] for row in rows] == [
        f"{case}, {dtype}" for dtype in ("float32", "bfloat16") for case in CASES
    ]
    assert (document["threads"], document["machine"] != "") == (1, True)
    for row in rows:
        assert row["device"] == "cpu"
        assert row["rounds"] == 1
        assert row["ours"] > 0
        timed = row["case"].startswith(("engine", "shared"))
        assert (row["peer"] is None) == timed
        if row["limit"] is not None:
            assert row["of_limit"] == pytest.approx(row["ours"] / row["limit"], rel=0.01)
    assert "decode, batch 1, float32" in done.stderr
    assert "of the roofline" in done.stderr


def test_without_the_peer() -> None:
    done = bench(*SMALL, "--dtypes", "float32", "--no-peer")
    assert done.returncode == 0, done.stderr
    assert "no peer: left out (--no-peer)" in done.stdout
    assert "no peer: llama.cpp is left out (--llama-cpp PYTHON measures it)" in done.stdout
    assert "transformers" not in done.stdout


@pytest.mark.skipif(
    "LLAMA_CPP_PYTHON" not in os.environ,
    reason="LLAMA_CPP_PYTHON names no Python with llama.cpp (`bench engine --help`)",
)
def test_beside_llama_cpp() -> None:
    dtypes = ["float32", "bfloat16", "int8"]
    python = os.environ["LLAMA_CPP_PYTHON"]
    done = bench(*SMALL, "--json", "--dtypes", ",".join(dtypes), "--llama-cpp", python)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row["peers"] for row in json.loads(done.stdout)["rows"]}
    for dtype in dtypes:
        assert all(rows[f"{case}, {dtype}"]["llama.cpp"] > 0 for case in CASES[:3])
        assert ("transformers" in rows[f"prefill, {dtype}"]) == (dtype != "int8")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--hidden", "100"], "multiple of 192"),
        (["--dtypes", "int4"], "int4"),
        (["--llama-cpp", "no-python"], "no-python cannot import llama_cpp"),
        (["--prompt", "4000"], "positions"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("bench", "engine", *arguments) == 2
    assert word in capsys.readouterr().err
