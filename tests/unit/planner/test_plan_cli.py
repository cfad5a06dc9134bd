"""`lambdascale plan`: its two forms, and how it refuses."""

import argparse
import json

import pytest

from services.cli import plan
from services.planner.core.multicast.schedule import Move, Schedule, check
from services.planner.core.multicast.strategies import STRATEGIES
from shared.errors import BadInput
from tests.unit.planner.step_model import independent_checker


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *words])
    return int(args.run(args))


@pytest.mark.parametrize("algorithm", sorted(STRATEGIES.keys() - {"local"}))
def test_json_is_a_valid_schedule(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "11", "--blocks", "8", "--sources", "2", "--algorithm", algorithm]
    assert run(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    moves = tuple(
        Move(step, move["src"], move["dst"], move["block"])
        for step, batch in enumerate(document["steps"], 1)
        for move in batch
    )
    check(Schedule(document["n"], document["blocks"], tuple(document["sources"]), moves))
    assert sorted(node for pipeline in document["pipelines"] for node in pipeline) == list(
        range(2, 11)
    )


def test_the_independent_checker_reads_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    checker = independent_checker()
    assert run("--nodes", "16", "--blocks", "16", "--sources", "2", "--json") == 0
    verdict = checker.check(json.loads(capsys.readouterr().out))
    assert verdict["valid"]
    assert verdict["complete"]
    assert verdict["gap"] == 0
    assert verdict["first_complete_set"] == verdict["first_complete_set_lower_bound"] == 8
    assert max(verdict["pipeline_complete"]) == 11


def test_the_report_says_what_arrives_where_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "4", "--blocks", "3") == 0
    out = capsys.readouterr().out
    assert "binomial: 3 blocks from 1 to 4 nodes" in out
    assert "    0*   .   .   .   ." in out
    assert "steps:              4 (the lower bound), 9 transfers" in out
    assert "first complete set: step 3" in out
    assert "step   0:   1.00 on   1 paths; new: 0[0-2]" in out
    assert "step   4:   4.00 on   4 paths" in out
    assert "predicted" not in out


def test_seconds_are_predicted_from_size_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "8", "--blocks", "16", "--link-mbit", "400", "--size-mb", "64") == 0
    assert "all 1.458 s (physical limit 1.440 s)" in capsys.readouterr().out


def test_a_worse_algorithm_is_held_against_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "8", "--blocks", "4", "--algorithm", "chain") == 0
    assert "10 (lower bound 6)" in capsys.readouterr().out


def test_a_wide_schedule_is_a_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run("--nodes", "80", "--blocks", "32") == 0
    out = capsys.readouterr().out
    assert "step 1: 0>1:0" in out
    assert "fixed pipelines" in out
    assert "what can serve" not in out


def test_nothing_moves_where_all_are_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "2", "--blocks", "2", "--sources", "2") == 0
    assert "nothing moves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--nodes", "2", "--blocks", "2", "--sources", "3"], "--sources 3 is more than --nodes 2"),
        (["--nodes", "2", "--blocks", "2", "--size-mb", "1"], "both or neither"),
        (
            ["--nodes", "2", "--blocks", "2", "--size-mb", "1", "--link-mbit", "nan"],
            "more than 0",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_bad_input(words: list[str], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        run(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0", "--blocks", "2"],
        ["--nodes", "two", "--blocks", "2"],
        ["--nodes", "2"],
        ["--nodes", "2", "--blocks", "2", "--algorithm", "magic"],
    ],
)
def test_words_that_make_no_sense_exit_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(*words)
    assert exit_info.value.code == 2
