"""A seed does the same thing every time, in every process; and its replay says what went wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation import chaos
from simulation.chaos import Verdict, play
from simulation.scenario import Scenario, scenario
from tests.support.amounts import cases

SEED = 13
"""Many faults, many events."""


def test_in_one_process_and_in_others_that_hash_differently(tmp_path: Path) -> None:
    logs = [tmp_path / f"{hashed}.log" for hashed in cases("1", thorough="2")]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "simulation.chaos", str(SEED), "--log", str(log)],
            env={**os.environ, "PYTHONHASHSEED": log.stem},
            stdout=subprocess.DEVNULL,
        )
        for log in logs
    ]
    own = list(play(scenario(SEED)).log)  # this process has drawn how it hashes
    for process, log in zip(running, logs, strict=True):
        assert process.wait() == 0
        assert log.read_text().splitlines() == own


def test_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(played: Scenario) -> Verdict:
        return Verdict(("1.0 something", "2.0 more"), ("2.0 s: this is wrong",), 0.0, ())

    monkeypatch.setattr(chaos, "play", wrong)
    assert chaos.main(["13"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(scenario(SEED).in_words())] == scenario(SEED).in_words()
    assert printed[-4:] == [
        "1.0 something",
        "2.0 more",
        "VIOLATED 2.0 s: this is wrong",
        "1 violation",
    ]


def test_the_log_may_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    assert chaos.main(["1", "--log", str(log)]) == 0
    assert "begins" in log.read_text()
    assert capsys.readouterr().out.splitlines()[-1] == "no violation"
