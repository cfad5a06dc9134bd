"""`lambdascale plan`: its two forms, and how it refuses."""

import argparse
import json
from pathlib import Path

import pytest

from services.cli import plan
from services.planner.core.multicast.schedule import Move, Schedule, check
from services.planner.core.multicast.strategies import STRATEGIES
from shared.errors import BadInput, CapacityExceeded
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
    words = ["--nodes", "8", "--blocks", "16", "--link-mbit", "400", "--size-mb", "64"]
    assert run(*words, "--whole-blocks") == 0
    assert "all 1.458 s (physical limit 1.440 s)" in capsys.readouterr().out
    assert run(*words) == 0
    limit = (64e6 + 2 * (256 << 10)) / 50e6
    out = capsys.readouterr().out
    assert f"(physical limit {limit:.3f} s)" in out
    assert "22 (lower bound 18, where relays forward whole blocks only; here by chunks)" in out


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


SPEED = ["--size-mb", "64", "--link-mbit", "400"]
RACKS = ["--racks", "8,8", "--trunk-mbit", "400"]
WHOLE = "--whole-blocks"


def test_a_named_algorithm_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    run("--nodes", "8", "--blocks", "4", "--algorithm", "local")
    assert "nodes 1-7 load from their own host memory or disk" in capsys.readouterr().out
    run("--nodes", "8", "--blocks", "4", "--algorithm", "tree", "--explain")
    out = capsys.readouterr().out
    assert out.startswith("tree: 4 blocks from 1 to 8 nodes")
    assert "all complete         10 steps" in out


def test_racks_are_fed_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "16", "--blocks", "16", *SPEED, *RACKS, WHOLE) == 0
    out = capsys.readouterr().out
    assert out.startswith("taps: 16 blocks")
    assert "links are unequal: steps are an order, not times" in out
    assert "all 1.782 s" in out


def test_a_chain_through_racks_is_short_where_relays_forward_chunks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """16 blocks of 80 ms, 14 hops of a chunk of 256 KiB more, and alpha for each of the 15."""
    assert run("--nodes", "16", "--blocks", "16", *SPEED, *RACKS, "--explain") == 0
    out = capsys.readouterr().out
    assert out.startswith("chain: 16 blocks")
    assert f"all complete         {16 * 0.08 + 14 * (256 << 10) / 50e6 + 15 * 0.001:.3f} s" in out


def test_explain_names_everything_that_was_considered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "16", "--blocks", "16", *SPEED, *RACKS, WHOLE, "--explain") == 0
    out = capsys.readouterr().out
    assert "all complete         1.782 s, 17.2% above the physical limit (1.520 s)" in out
    assert "first path           0.081 s" in out
    assert "first node complete  1.458 s" in out
    rows = [line.split() for line in out.splitlines() if line[:3] in ("   ", "*  ")]
    named = {row[1] if row[0] == "*" else row[0] for row in rows}
    assert named >= {"binomial", "head", "taps", "chain"}
    assert [row[1] for row in rows if row[0] == "*"] == ["taps"]
    assert "later" in out
    assert "1.458 s  nodes 1, 2, 3, 4, 5, 6, 7" in out


def test_a_model_that_fits_on_no_node_is_cut_and_its_largest_part_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--blocks", "10", "--size-mb", "1000", "--link-mbit", "8000", "--arena-mb", "520"]
    assert run("--nodes", "8", "--sources", "2", *words, "--explain") == 0
    out = capsys.readouterr().out
    assert "groups of 2 nodes serve it, with blocks 0-4 (500.0 MB), blocks 5-9 (500.0 MB)" in out
    assert "each part goes from 1 to 4 nodes" in out
    assert "5 blocks from 1 to 4 nodes" in out
    with pytest.raises(BadInput, match="multiples"):
        run("--nodes", "7", *words)
    with pytest.raises(CapacityExceeded, match=r"takes 1000 MB .* 1 nodes have room for 520 MB"):
        run("--nodes", "1", *words)


def test_explain_who_runs_a_model_that_fits_on_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "4", "--sources", "2", "--blocks", "10", "--size-mb", "1000"]
    words += ["--link-mbit", "8000", "--arena-mb", "520", "--layers", "8", "--explain"]
    assert run(*words, "--step", "20,0.1,1") == 0
    assert "they run" not in capsys.readouterr().out
    for rate, chosen in (("36", "together"), ("21", "one after the other")):
        assert run(*words, "--step", "20,0.1,1", "--step-together", f"{rate},55,60") == 0
        out = capsys.readouterr().out
        assert f"they run: 2 devices of one machine {chosen}: a token is expected to take" in out
        assert "51.6 ms by 2 devices of one machine one after the other; " in out
    with pytest.raises(BadInput, match="needs --step"):
        run(*words, "--step-together", "36,55,60")
    with pytest.raises(BadInput, match="need --arena-mb"):
        run("--nodes", "4", "--blocks", "10", "--layers", "8")
    with pytest.raises(BadInput, match="three numbers: GB/s"):
        run(*words, "--step", "20,0.1")


def test_explain_where_nothing_moves(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "2", "--blocks", "2", "--sources", "2", "--explain") == 0
    assert "there is nothing to choose" in capsys.readouterr().out


def test_dear_transfers_move_many_blocks_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "32", "--blocks", "64", *SPEED, "--overhead-ms", "50", WHOLE]
    assert run(*words) == 0
    assert "64 blocks, moved 8 at a time" in capsys.readouterr().out
    assert run(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["blocks"], document["blocks_per_move"]) == (8, 8)


def test_nodes_that_only_receive_send_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--nodes", "6", "--blocks", "4", "--receive-only", "2,5", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {2, 5}.isdisjoint(move["src"] for step in document["steps"] for move in step)


def test_hosts_share_a_local_link(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "4", "--blocks", "4", *SPEED, "--hosts", "4", "--local-mbit", "4000", WHOLE]
    assert run(*words, "--explain") == 0
    assert "all complete         0.390 s" in capsys.readouterr().out


KV = ["--nodes", "4", "--blocks", "4", "--sources", "2", *SPEED, "--kv-mbit", "300"]


def test_a_node_that_prefills_sends_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*KV, "--prefill", "0", "--decode", "1,2"]
    assert run(*words, "--explain") == 0
    out = capsys.readouterr().out
    assert "node 0 sends no weights: KV takes 37.5 MB/s of 50 MB/s out of it\n" in out
    assert "node 2 receives at 31.2 MB/s: KV takes 18.8 MB/s of 50 MB/s into it\n" in out
    assert "node 1 " not in out  # a source takes no weights in
    assert run(*words, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert 0 not in {move["src"] for step in document["steps"] for move in step}


def test_the_only_sources_send_although_they_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*KV, "--prefill", "0,1", "--decode", "2,3", "--explain") == 0
    out = capsys.readouterr().out
    assert "node 0 sends at 12.5 MB/s: KV takes 37.5 MB/s" in out
    assert "nobody but node 0, node 1 can send it\n" in out


def test_a_node_that_prefills_sends_if_the_others_are_much_slower(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = ["--size-mb", "16", "--rates", "100,2,100", "--kv-mbit", "75"]
    words = ["--nodes", "3", "--blocks", "4", "--sources", "2", *rates]
    assert run(*words, "--prefill", "0", "--decode", "1", "--explain") == 0
    assert "without node 0 loading would take " in capsys.readouterr().out


@pytest.mark.parametrize("form", ["svg", "png"])
def test_the_picture_is_drawn(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"plan.{form}"
    words = ["--nodes", "5", "--blocks", "3", "--receive-only", "4", f"--{form}", str(path)]
    assert run(*words) == 0
    assert path.read_bytes().startswith(b"\x89PNG" if form == "png" else b"<?xml")
    assert capsys.readouterr().out == ""


def test_the_picture_can_go_with_the_explanation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.svg"
    words = ["--nodes", "4", "--blocks", "2", *SPEED, "--racks", "2,2", "--trunk-mbit", "100"]
    assert run(*words, "--svg", str(path), "--explain") == 0
    assert "considered" in capsys.readouterr().out
    assert "rack 1" in path.read_text()


def test_pictures_that_cannot_be_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="make no picture that can be read: 128 of each at most"):
        run("--nodes", "129", "--blocks", "2", "--png", str(tmp_path / "plan.png"))
    with pytest.raises(BadInput, match=r"nowhere/plan\.png: .*No such file or directory"):
        run("--nodes", "2", "--blocks", "2", "--png", str(tmp_path / "nowhere" / "plan.png"))


TWO = ["--nodes", "2", "--blocks", "2"]
KV_OF = ["--kv-mbit", "1", "--prefill", "0"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sources", "3"], "--sources 3 is more than --nodes 2"),
        (["--link-mbit", "1"], "--link-mbit needs --size-mb"),
        (["--racks", "1,1"], "--racks needs --size-mb"),
        (["--size-mb", "1"], "--size-mb needs either --link-mbit or --rates"),
        ([*SPEED, "--rates", "1,2"], "--size-mb needs either --link-mbit or --rates"),
        (["--size-mb", "1", "--rates", "1,2,3"], "--rates names 3 rates for 2 nodes"),
        (["--size-mb", "0.000001", "--link-mbit", "1"], "less than a byte for each block"),
        ([*SPEED, "--racks", "1,1"], "--racks and --trunk-mbit go together"),
        ([*SPEED, "--local-mbit", "1"], "--hosts and --local-mbit go together"),
        ([*SPEED, "--racks", "1,2", "--trunk-mbit", "9"], "--racks has 3 nodes, --nodes says 2"),
        (["--prefill", "0"], "--prefill and --decode need --kv-mbit"),
        (["--kv-mbit", "1"], "--kv-mbit needs --prefill, --decode and --size-mb"),
        ([*SPEED, *KV_OF, "--decode", "0"], r"nodes \[0\] are of --prefill and of --decode"),
        ([*SPEED, *KV_OF, "--decode", "2"], "--prefill, --decode: there is no node 2"),
        (["--receive-only", "0"], r"--receive-only 0: the nodes that receive are 1\.\.1"),
    ],
)
def test_arguments_that_do_not_fit_are_bad_input(words: list[str], complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint) as caught:
        run(*TWO, *words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0", "--blocks", "2"],
        ["--nodes", "two", "--blocks", "2"],
        ["--nodes", "2"],
        [*TWO, "--algorithm", "magic"],
        [*TWO, "--size-mb", "nan", "--link-mbit", "1"],
        [*TWO, "--size-mb", "1", "--rates", "1,-2"],
        [*TWO, "--racks", "2,0"],
        [*TWO, "--receive-only", "x"],
    ],
)
def test_words_that_make_no_sense_exit_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(*words)
    assert exit_info.value.code == 2
