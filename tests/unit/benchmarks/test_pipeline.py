"""What a run of the pipeline benchmark makes of its stages' sweeps, and what it says."""

import pytest

from benchmarks.pipeline.bench import window
from benchmarks.pipeline.results import Results, Row, Settings, Window, bars, document, table
from benchmarks.pipeline.stage import Record, StageFailed, Sweep

SETTINGS = Settings(
    stages=(2,), stage_s=0.01, batch=8, hidden=512, window_s=2.0, rounds=1
)  # fmt: skip


def record(
    *began: float, tokens: list[tuple[float, int]] | None = None, failures: list[str] | None = None
) -> Record:
    """Sweeps of 2 s."""
    return Record([Sweep(at, 2.0) for at in began], tokens or [], failures or [])


TOKENS = [(9.0, 5), (12.0, 1), (14.0, 2), (16.0, 4), (20.0, 7)]


def test_busy_is_what_of_the_sweeps_lies_in_the_window() -> None:
    first = record(7, 9, 13, 19, 22, tokens=TOKENS)
    seen = window([first, record(11, 14)], 10.0, 20.0)
    assert seen.idle == pytest.approx((1 - 4 / 10, 1 - 4 / 10))
    assert seen.sweep_s == (2.0, 2.0)


def test_a_rate_is_from_arrival_to_arrival() -> None:
    seen = window([record(13, 19, tokens=TOKENS), record(15)], 10.0, 20.0)
    assert seen.tokens_per_s == pytest.approx((2 + 4) / (16 - 12))


def test_a_hand_over_is_from_an_end_to_the_next_beginning_anywhere() -> None:
    seen = window([record(10, 15.5, tokens=TOKENS), record(12.5, 18.2)], 10.0, 20.0)
    assert seen.hand_over_s == pytest.approx(0.7)  # of 0.5, 1.0 and 0.7


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([record(11, tokens=TOKENS), record(9)], "longer windows"),
        ([record(11, tokens=TOKENS[:2]), record(11)], "longer windows"),
        ([record(11, tokens=TOKENS, failures=["lost a peer"]), record(11)], "lost a peer"),
    ],
)
def test_a_window_that_says_nothing_is_refused(records: list[Record], word: str) -> None:
    with pytest.raises(StageFailed, match=word):
        window(records, 10.0, 20.0)


def shown(rate: float, *idle: float, hand_over_s: float = 0.001) -> Window:
    return Window(
        tokens_per_s=rate, idle=idle, sweep_s=(0.010, 0.016), hand_over_s=hand_over_s
    )  # fmt: skip


def row() -> Row:
    """A row that was measured in three rounds."""
    return Row(
        2,
        [shown(400, 0.05, 0.09), shown(480, 0.04, 0.10), shown(100, 0.50, 0.60)],
        [shown(200, 0.5, 0.5, hand_over_s=s) for s in (0.0002, 0.0004, 0.0010)],
        [shown(500, 0.5, 0.5)],
    )


def test_medians_and_ratios() -> None:
    one = row()
    assert one.tokens_per_s == 400
    assert one.idle == (0.05, 0.10)
    assert one.ideal(8) == pytest.approx(8 / 0.016)
    assert (one.over_one, one.over_whole) == (2.0, 0.8)
    assert one.hand_over_s == 0.0004


def test_every_stage_is_held_to_the_bar() -> None:
    one = row()
    assert [bar.met for bar in bars(Results(SETTINGS, (one,)))] == [True]
    one.ours[1] = shown(480, 0.04, 0.101)
    (bar,) = bars(Results(SETTINGS, (one,)))
    assert not bar.met
    assert "idle 10.1%" in str(bar)


def test_what_is_printed() -> None:
    results = Results(SETTINGS, (row(),))
    told = document(results)
    assert told["rows"] == [
        {
            "stages": 2,
            "idle": [0.05, 0.10],
            "sweep_ms": [10.0, 16.0],
            "tokens_per_s": 400,
            "ideal_tokens_per_s": 500.0,
            "of_ideal": 0.8,
            "one_micro_batch_tokens_per_s": 200,
            "over_one_micro_batch": 2.0,
            "whole_batch_tokens_per_s": 500,
            "over_whole_batch": 0.8,
            "hand_over_us": 400.0,
            "rounds": 3,
        }
    ]
    assert (told["stage_ms"], told["batch"], told["hidden"]) == (10.0, 8, 512)
    head, _, _, line = table(results)
    assert "stages of 10 ms" in head
    assert line.split() == [
        "2", "400.0", "500.0", "0.800", "200.0", "2.00", "500.0", "0.80", "400", "us", "5.0%",
        "10.0%",
    ]  # fmt: skip
