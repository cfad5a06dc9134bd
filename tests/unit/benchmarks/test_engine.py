"""What a run of the engine's benchmark says, and what it is held to."""

from dataclasses import replace

import pytest

from benchmarks.engine.results import (
    DECODE_ONE,
    MILLISECONDS,
    OVERHEAD,
    PREFILL,
    PREFIX,
    SWEEP,
    TOKENS_PER_S,
    Results,
    Row,
    Settings,
    bars,
    batched,
    document,
    table,
)

SETTINGS = Settings(
    layers=12,
    hidden=768,
    vocab=32000,
    dtypes=("float32",),
    batch=16,
    prompt=512,
    tokens=16,
    rounds=3,
    threads=0,
    peer=True,
)


def rate(case: str, ours: float, peer: float, limit: float | None = None) -> Row:
    limits = [] if limit is None else [limit - 1, limit, limit + 50]
    rounds = [ours / 2, ours, ours + 1]
    return Row(case, "float32", TOKENS_PER_S, rounds, {"peer": [peer, peer]}, limits)


def time(case: str, ours: float, limit: float) -> Row:
    return Row(case, "float32", MILLISECONDS, [ours], {}, [limit])


def results(*rows: Row) -> Results:
    return Results(SETTINGS, 124_657_000, 2, 31.5e9, rows)


def verdict(*rows: Row) -> list[bool]:
    return [bar.met for bar in bars(results(*rows))]


def test_medians_are_compared_and_with_the_best_peer() -> None:
    row = rate(DECODE_ONE, 40, 30, 50)
    row.peers["another"] = [35, 32, 20]
    assert (row.value, row.peer, row.limit) == (40, ("another", 32), 50)
    assert (row.ratio, row.of_limit) == (1.25, 0.8)


def test_the_best_time_is_the_least_and_a_ratio_over_one_is_faster() -> None:
    row = Row(SWEEP, "float32", MILLISECONDS, [20], {"apart": [30], "slower": [40]})
    assert row.peer == ("apart", 30)
    assert row.ratio == 1.5


def test_each_case_has_its_bar() -> None:
    many = batched(16)
    assert verdict(rate(DECODE_ONE, 130, 100, 173)) == [True, True]
    assert verdict(rate(DECODE_ONE, 129, 100, 174)) == [False, False]
    assert verdict(rate(many, 200, 100)) == [True]
    assert verdict(rate(many, 199, 100)) == [False]
    assert verdict(rate(PREFILL, 100, 100)) == [True]
    assert verdict(rate(PREFILL, 99, 100)) == [False]
    assert verdict(time(OVERHEAD, 10, 100), time(OVERHEAD, 11, 100)) == [True, False]
    assert verdict(time(PREFIX, 15, 100), time(PREFIX, 16, 100)) == [True, False]
    assert verdict(Row(SWEEP, "float32", MILLISECONDS, [20], {"apart": [30]})) == []


def test_llama_cpp_has_a_bar_of_its_own() -> None:
    row = rate(DECODE_ONE, 130, 100)
    row.peers["llama.cpp"] = [131, 140, 120]
    assert [str(bar) for bar in bars(results(row))] == [
        "met      decode, batch 1, float32: 1.30 x peer, at least 1.3",
        "NOT MET  decode, batch 1, float32: 0.99 x llama.cpp, at least 1.0",
    ]


def test_without_a_peer_only_the_machine_is_a_bar() -> None:
    alone = rate(DECODE_ONE, 130, 100, 173)
    alone.peers = {}
    (bar,) = bars(replace(results(alone), without=("it is not installed",)))
    assert str(bar) == "met      decode, batch 1, float32: 75% of the roofline, at least 75%"


def test_document() -> None:
    told = document(results(rate(DECODE_ONE, 40, 32, 50), time(OVERHEAD, 3, 60)))
    assert (told["parameters"], told["threads"]) == (124_657_000, 2)
    assert told["bandwidth_bytes_per_s"] == 31_500_000_000
    assert told["rows"] == [
        {
            "case": "decode, batch 1, float32",
            "device": "cpu",
            "ours": 40,
            "peer": 32,
            "unit": "tokens/s",
            "ratio": 1.25,
            "limit": 50,
            "of_limit": 0.8,
            "peer_name": "peer",
            "peers": {"peer": 32},
            "rounds": 3,
        },
        {
            "case": "engine overhead, float32",
            "device": "cpu",
            "ours": 3,
            "peer": None,
            "unit": "ms",
            "ratio": None,
            "limit": 60,
            "of_limit": 0.05,
            "peer_name": None,
            "peers": {},
            "rounds": 1,
        },
    ]


def test_table() -> None:
    head, machine, titles, decode, overhead = table(
        results(rate(DECODE_ONE, 40, 32, 50), time(OVERHEAD, 3, 60))
    )
    assert "124.7M parameters, 2 threads" in head
    assert "31.5 GB/s" in head
    assert "cores" in machine
    assert titles.split()[:3] == ["case", "unit", "ours"]
    assert decode.split() == [
        "decode,", "batch", "1,", "float32", "tokens/s", "40.0", "20.0", "..", "41.0", "32.0",
        "1.25", "50.0", "0.80", "peer",
    ]  # fmt: skip
    assert overhead.split()[-4:] == ["..", "3.0", "60.0", "0.05"]


def test_a_missing_peer_is_said() -> None:
    lines = list(table(replace(results(time(OVERHEAD, 3, 60)), without=("not installed",))))
    assert "no peer: not installed" in lines


@pytest.mark.parametrize("ours", [0.5, 2.0])
def test_a_rate_is_better_when_larger(ours: float) -> None:
    assert rate(PREFILL, ours, 1.0).ratio == ours
