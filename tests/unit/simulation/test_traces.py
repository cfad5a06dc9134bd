"""Recorded workloads: every publisher's format, what is done to them, and files that are none."""

import math
import os
import re
from pathlib import Path

import pytest

from shared.errors import BadInput
from simulation.traces import Row, Workload, clip, read_trace, served_by, window

SHARED = Path(os.environ.get("LS_TRACES") or Path(__file__).parents[4] / "shared" / "traces")
"""Recorded traces, kept beside the repository or named by LS_TRACES (a folder)."""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:02.6805900,879,55
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_plain(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,model\n0.5,10,20,a\n\n1.25,30,40,b\n"
    workload = read_trace(written(tmp_path, text))
    assert workload.rows == (Row(0.5, 10, 20, "a"), Row(1.25, 30, 40, "b"))
    assert workload.models == ("a", "b")
    assert workload.notes == ()


def test_azure_starts_at_its_first_request(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, AZURE)).rows
    assert [row.arrival_s for row in rows] == pytest.approx([0, 4.314579, 16], abs=1e-6)
    assert rows[1][1:] == (396, 109, "azure")


def test_azure_with_time_zones_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = AZURE.replace(",374", "+00:00,374").replace(",396", "+00:00,396")
    rows = read_trace(written(tmp_path, "\ufeff" + text.replace(",879", "+00:00,879"))).rows
    assert rows[2].arrival_s == pytest.approx(16)


def test_burstgpt_drops_failures_and_says_so(tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path, BURSTGPT))
    assert workload.rows == (Row(5, 472, 18, "ChatGPT"), Row(118, 417, 276, "GPT-4"))
    assert workload.notes == ("1 of 3 requests (33.3 %) without output (failures) dropped",)


def test_mooncake(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path, MOONCAKE)).rows
    assert rows == (Row(0, 6758, 500, "mooncake"), Row(3, 7322, 490, "mooncake"))


def test_rows_out_of_order_are_sorted_and_it_is_said(tmp_path: Path) -> None:
    workload = read_trace(written(tmp_path, MOONCAKE + MOONCAKE))
    assert [row.arrival_s for row in workload.rows] == [0, 0, 3, 3]
    assert workload.notes == ("rows were not in order of time: sorted",)


def test_rounded_arrivals_are_spread_inside_their_ticks(tmp_path: Path) -> None:
    # As Mooncake's are: some ticks are a millisecond early.
    times = [3000 * tick - (tick % 5 == 2) for tick in range(40) for _ in range(7)]
    lines = "".join(
        f'{{"timestamp": {at}, "input_length": {n + 1}, "output_length": 1}}\n'
        for n, at in enumerate(times)
    )
    workload = read_trace(written(tmp_path, lines))
    assert [row.prompt_tokens for row in workload.rows] == list(range(1, 281))
    arrivals = [row.arrival_s for row in workload.rows]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 280
    assert [int(at // 3) for at in arrivals] == [tick for tick in range(40) for _ in range(7)]
    assert workload.notes == ("arrivals sit on ticks of 3 s: spread at random inside their ticks",)
    assert read_trace(tmp_path / "trace") == workload
    assert read_trace(tmp_path / "trace", seed=1) != workload


def test_whole_seconds_are_kept_where_few_share_them(tmp_path: Path) -> None:
    """As BurstGPT's are."""
    rows = "".join(f"{n - n % 7 // 6},ChatGPT,9,9,18,API log\n" for n in range(100))
    workload = read_trace(written(tmp_path, BURSTGPT.partition("\n")[0] + "\n" + rows))
    assert all(row.arrival_s.is_integer() for row in workload.rows)


def test_a_few_bursts_by_hand_stay_bursts(tmp_path: Path) -> None:
    rows = "".join(f"{at},1,1,m\n" for at in (0, 10, 20) for _ in range(8))
    workload = read_trace(written(tmp_path, f"arrival_s,prompt_tokens,output_tokens,model\n{rows}"))
    assert {row.arrival_s for row in workload.rows} == {0, 10, 20}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: no known header"),
        ("when,how\n1,2\n", "line 1: no known header; a trace is `arrival_s"),
        ("day,hour,all\n8,0,94\n", "counts by hour, not requests: --trace hourly:file="),
        (AZURE + "yesterday,1,2\n", "line 5: expected timestamp,contexttokens"),
        (AZURE + "2023-11-16 18:16:02,1\n", "line 5: .* (2 fields)"),
        (AZURE + "2023-11-16 18:16:02,1.5,2\n", "line 5: .*'1.5'"),
        (AZURE + "2023-11-16 18:16:02,1,-2\n", "line 5: .*less than 0 tokens"),
        (BURSTGPT + "nan,m,1,2,3,log\n", "line 5: .*not a number"),
        (MOONCAKE + "{}\n", 'line 3: expected {"timestamp": ms'),
        (MOONCAKE + "[1]\n", "line 3: expected"),
        (MOONCAKE + "{half a line\n", "line 3: expected"),
        (AZURE.partition("\n")[0], "has no requests"),
        (
            "arrival_s,prompt_tokens,output_tokens,model\n0,5,0,m\n",
            "no request with a prompt and an output",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    pattern = re.escape(str(path)) + ".*" + re.escape(says).replace(r"\.\*", ".*")
    with pytest.raises(BadInput, match=pattern):
        read_trace(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(BadInput, match="Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x93\xff\x00")
    with pytest.raises(BadInput, match="is not text"):
        read_trace(tmp_path / "binary")


def made(*rows: Row) -> Workload:
    return Workload("made", rows)


def test_a_window_starts_its_own_clock() -> None:
    workload = made(Row(1, 1, 1, "m"), Row(5, 2, 2, "m"), Row(9, 3, 3, "m"))
    cut = window(workload, 4, 9)
    assert cut.rows == (Row(1, 2, 2, "m"),)
    assert cut.notes == ("only 4 s to 9 s: 1 of 3 requests",)
    assert window(workload, 0, math.inf) is workload
    with pytest.raises(BadInput, match="no requests from 10 s to the end; they come from 1 s to 9"):
        window(workload, 10, math.inf)


def test_clipped_to_the_context_of_their_model() -> None:
    workload = made(
        Row(0, 60, 40, "a"), Row(1, 90, 40, "a"), Row(2, 10, 999, "a"), Row(3, 90, 40, "b")
    )
    clipped = clip(workload, {"a": 100, "b": 1000})
    lengths = [(row.prompt_tokens, row.output_tokens) for row in clipped.rows]
    assert lengths == [(60, 40), (60, 40), (10, 50), (90, 40)]
    assert clipped.notes == ("2 of 4 requests (50.0 %) clipped to the context of 100/1000 tokens",)
    assert clip(workload, {"a": 2000, "b": 1000}) is workload


def test_served_by_other_names() -> None:
    served = served_by(made(Row(0, 1, 1, "GPT-4"), Row(1, 1, 1, "x")), {"GPT-4": "m", "x": "x"})
    assert [row.model for row in served.rows] == ["m", "x"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded traces are not on this machine")
@pytest.mark.parametrize("path", sorted(SHARED.glob("[lw]*.csv")), ids=lambda path: path.stem)
def test_the_recorded_traces(path: Path) -> None:
    workload = read_trace(path)
    assert len(workload.rows) == len(path.read_text().splitlines()) - 1
    spread = [note for note in workload.notes if "ticks of 3 s" in note]
    assert bool(spread) == ("mooncake" in path.name)
