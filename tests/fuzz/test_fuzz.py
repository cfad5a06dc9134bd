"""The fuzzers run, a little, where atheris is; for longer runs start them by hand."""

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris is not installed: the fuzzers are not run")

FORKED = ("sh", "-c", '"$@"; exit $?', "sh")
"""A command that a shell forks for. A process that is started from here would begin with the most
memory that this one ever had as its own most, and libFuzzer ends when that is above 2 GB."""


@pytest.mark.parametrize(
    ("target", "runs"), [("wire", 20_000), ("connection", 1000), ("headers", 5000)]
)
async def test_nothing_is_found_at_once(tmp_path: Path, target: str, runs: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *FORKED,
        sys.executable,
        "-m",
        f"tests.fuzz.{target}",
        f"-runs={runs}",
        "-seed=1",
        f"-artifact_prefix={tmp_path}/",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")
