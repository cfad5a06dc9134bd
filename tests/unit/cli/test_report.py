"""The demo's report: what counts as lost and wrong, percentiles, throughput, its words."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.cli.demo.burst import Ask, Outcome, asks
from services.cli.demo.command import gaps
from services.cli.demo.report import (
    as_text,
    good,
    headline,
    make_report,
    percentiles,
    requests_part,
    throughput,
)
from services.cli.demo.scenario import FIRST_WAVE
from services.local.watch import Watch
from tests.unit.cli.records import watched

ASK = Ask("p", 3, 0.0, seed=0)
RIGHT = {ASK: (1, 2, 3)}


def outcome(tokens: list[int], *, at: float = 0.0, done: bool = True) -> Outcome:
    """A token every 100 ms from 200 ms on."""
    times = [at + 0.2 + 0.1 * i for i in range(len(tokens))]
    return Outcome(ASK, at, token_at=times, tokens=tokens, done=done)


async def report(*outcomes: Outcome) -> dict[str, Any]:
    return make_report(await watched(), outcomes, RIGHT, 0.0, figure="event.png")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], {"p50": None, "p90": None, "p99": None}),
        ([0.25], {"p50": 250.0, "p90": 250.0, "p99": 250.0}),
        ([i / 1000 for i in range(100, 0, -1)], {"p50": 50.0, "p90": 90.0, "p99": 99.0}),
        ([0.001, 0.002], {"p50": 1.0, "p90": 2.0, "p99": 2.0}),
    ],
)
def test_percentiles_are_of_the_nearest_rank(
    values: list[float], expected: dict[str, float | None]
) -> None:
    assert percentiles(values) == expected


def test_throughput_counts_every_token_once() -> None:
    outcomes = [outcome([1, 2, 3]), outcome([1, 2, 3], at=1.0)]
    series = throughput(outcomes, 0.0)
    assert series == [(0.25, 6.0), (0.75, 0.0), (1.25, 6.0)]
    assert sum(rate * 0.5 for _, rate in series) == 6
    assert throughput([], 0.0) == []


def test_latencies_need_a_first_and_a_second_token() -> None:
    one = outcome([1], at=5.0, done=False)
    assert one.ttft_s == pytest.approx(0.2)
    assert one.tpot_s is None
    assert outcome([]).ttft_s is None
    assert outcome([1, 2, 3]).tpot_s == pytest.approx(0.1)


def test_lost_wrong_and_refused_are_told_apart() -> None:
    refused = outcome([], done=False)
    refused.refused = True
    outcomes = [
        outcome([1, 2, 3]),
        outcome([1, 2, 4]),  # wrong
        outcome([1, 2], done=False),  # lost
        refused,
    ]
    assert requests_part(outcomes, RIGHT) == {
        "accepted": 3,
        "completed": 2,
        "lost": 1,
        "wrong": 1,
        "refused": 1,
    }


async def test_the_report_holds_what_was_promised_and_what_happened() -> None:
    document = await report(outcome([1, 2, 3]))
    event = document["event"]
    assert event["id"] == "ev-1"
    assert (event["t_all_s"], event["physical_limit_s"]) == (2.0, 1.6)
    assert event["predicted_t_all_s"] == 1.9
    assert (event["first_partial_token_s"], event["decision_to_first_byte_s"]) == (0.5, 0.1)
    assert event["bytes_moved"] == 200
    assert document["ttft_ms"]["p50"] == 200.0
    assert document["tpot_ms"]["p99"] == 100.0
    assert document["scale_in"] == {"instances_before": 2, "instances_after": 1}
    assert good(document)


@pytest.mark.parametrize(
    "bad",
    [[outcome([1, 2], done=False)], [outcome([3, 2, 1])], []],
    ids=["lost", "wrong", "nothing at all"],
)
async def test_a_bad_end_is_not_good(bad: list[Outcome]) -> None:
    assert not good(await report(*bad))


async def test_a_cluster_that_does_not_shrink_is_not_good() -> None:
    document = await report(outcome([1, 2, 3]))
    assert not good(document | {"scale_in": {"instances_before": 2, "instances_after": 2}})


async def test_the_words_name_the_numbers() -> None:
    text = as_text(await report(outcome([1, 2, 3]), outcome([9, 9, 9])))
    assert "2 of 2 completed, 0 lost, 1 with wrong tokens" in text
    assert "ev-1 (complete): node-0 -> node-1" in text
    assert "after 2.00 s (predicted 1.90 s, physical limit 1.60 s: 1.250 x)" in text
    assert "after 0.50 s (0.25 of the whole)" in text
    assert "figure     event.png" in text


async def test_an_unfinished_event_and_none_have_words_too() -> None:
    document = await report(outcome([1, 2, 3]))
    unfinished = document | {"event": document["event"] | {"t_all_s": None}}
    assert "all complete" not in as_text(unfinished)
    quiet = make_report(Watch(), [outcome([1, 2, 3])], RIGHT, 0.0, figure="event.png")
    assert "one instance was enough" in as_text(quiet)
    assert headline(quiet) == "1 of 1 requests served, 0 lost, 0 wrong"


def test_the_burst_repeats_its_requests() -> None:
    """So that a few reference answers check them all."""
    burst = asks(100, 8)
    assert len(set(burst)) == 16
    assert {ask.temperature for ask in burst} == {0.0, 0.8}
    assert replace(burst[0], prompt="") == replace(burst[16], prompt="")


@pytest.mark.parametrize("count", [1, FIRST_WAVE, 200])
def test_a_first_wave_then_arrivals_at_a_steady_rate(count: int) -> None:
    spaced = gaps(count)
    assert len(spaced) == count
    assert spaced[:FIRST_WAVE] == [0.0] * min(count, FIRST_WAVE)
    assert all(gap > 0 for gap in spaced[FIRST_WAVE:])
    assert spaced == gaps(count)


async def test_the_way_from_the_first_request_that_waits_to_the_first_byte_has_two_parts() -> None:
    watch = await watched()
    record = watch.scale_out()
    assert record is not None
    assert record.actual.first_byte_s is not None
    watch.records[record.id] = msgspec.structs.replace(
        record, waiting_ns=record.decided_ns - 40_000_000
    )
    found = make_report(watch, [outcome([1, 2, 3])], RIGHT, 0.0, figure="event.png")
    event = found["event"]
    assert event["burst_to_decision_s"] == pytest.approx(0.04, abs=1e-6)
    assert event["burst_to_first_byte_s"] == pytest.approx(
        0.04 + record.actual.first_byte_s, abs=1e-6
    )
    assert "decided 40 ms after a request had to wait" in as_text(found)


async def test_the_text_names_the_phases_that_took_most() -> None:
    document = await report(outcome([1, 2, 3]))
    spent = {"evidence": 0.1, "hold": 0.0, "plan": 0.01, "first path": 0.9, "last block": 2.99}
    ledger = [{"phase": name, "seconds": took, "predicted_s": None} for name, took in spent.items()]
    document["event"]["ledger"] = ledger
    assert (
        "           4.00 s since the first request waited: last block 2990 ms (75%), first path "
        "900 ms (22%), evidence 100 ms (2%), plan 10 ms (0%)"
    ) in as_text(document).splitlines()
