"""Measures against values worked out by hand, and the report made of them."""

import json
from dataclasses import replace

import pytest

from simulation.measures import (
    Objective,
    Percentiles,
    measure,
    measure_all,
    percentiles,
    ratios,
    steepest_burst,
)
from simulation.report import comparison, document, title, words
from simulation.results import EventResult, RequestResult, Sample, SystemRun
from tests.unit.simulation.runs import END_S, made_up, setting

OBJECTIVE = Objective(lambda r: r.prompt_tokens / 100, lambda r: 0.1, "in words")


def request(
    ttft_s: float | None, tpot_s: float = 0.05, *, prompt: int = 100, tokens: int = 11,
    error: str = "",
) -> RequestResult:  # fmt: skip
    last_s = None if ttft_s is None else 5 + ttft_s + tpot_s * (tokens - 1)
    first_s = None if ttft_s is None else 5 + ttft_s
    return RequestResult("m", 5.0, prompt, 11, tokens, first_s, last_s, error)


def event(complete_s: float | None) -> EventResult:
    return EventResult("m", "complete", "binomial", 1, 3, 5.0, 5.5, 5.8, complete_s, 1.0, 3e9)


RUN = SystemRun(
    "lambdascale",
    (
        request(0.5),
        request(1.5),
        request(1.5, prompt=200),
        request(0.5, 0.2),
        request(0.2, tokens=4, error="node lost"),
        request(None, tokens=0, error="no room"),
    ),
    (event(7.0), event(None)),
    (Sample(0.0, 1, 1, 2e9), Sample(4.0, 4, 1, 4e9), Sample(10.0, 0, 0, 0.0)),
    1.0,
    (0,) * 20,
    20.0,
    0.5,
)


def test_measures() -> None:
    found = measure(RUN, OBJECTIVE, RUN.virtual_s)
    assert (found.requests, found.completed) == (6, 4)
    assert found.slo_attainment == pytest.approx(2 / 6)
    assert found.ttft_ms.p50 == pytest.approx(500)
    assert found.ttft_ms.p90 == pytest.approx(1500)
    assert found.tpot_ms.p99 == pytest.approx(50 + 0.96 * 150)
    assert found.gpu_seconds == pytest.approx(4 * 1 + 6 * 4)
    assert found.host_cache_gb_mean == pytest.approx((4 * 2 + 6 * 4) / 20)
    assert (found.scale_events, found.gpus_most) == (2, 4)
    assert found.scale_ms.p50 == pytest.approx(2000)
    assert found.first_path_ms.p90 == pytest.approx(500)
    assert found.errors == {"node lost": 1, "no room": 1}
    assert found.bytes_moved == 6e9


def test_what_is_held_is_counted_until_the_last_system_is_done() -> None:
    held = replace(RUN, samples=(Sample(0.0, 1, 1, 2e9), Sample(5.0, 2, 2, 4e9)))
    late = replace(held, virtual_s=30.0)
    found = measure_all({"early": held, "late": late}, OBJECTIVE)
    assert found["early"].gpu_seconds == found["late"].gpu_seconds == 5 * 1 + 25 * 2
    assert found["early"].host_cache_gb_mean == pytest.approx((5 * 2 + 25 * 4) / 30)
    alone = measure_all({"early": held}, OBJECTIVE)
    assert alone["early"].gpu_seconds == 5 * 1 + 15 * 2


def test_a_request_of_one_token_has_only_a_ttft() -> None:
    single = RequestResult("m", 5.0, 100, 1, 1, 5.5, 5.5)
    assert OBJECTIVE.met(single)
    assert not OBJECTIVE.met(replace(single, first_token_s=6.5))


def test_nothing_to_measure() -> None:
    empty = SystemRun("ideal", (), (), (), 1.0, (), 0.0, 0.0)
    found = measure(empty, OBJECTIVE, 0.0)
    assert found.ttft_ms == percentiles([None, None]) == Percentiles(None, None, None)
    assert (found.gpu_seconds, found.host_cache_gb_mean, found.slo_attainment) == (0, 0, 0)


def test_ratios() -> None:
    base = measure(RUN, OBJECTIVE, RUN.virtual_s)
    twice = replace(base, ttft_ms=Percentiles(1000, 3000, None), gpu_seconds=base.gpu_seconds * 2)
    found = ratios({"lambdascale": base, "faasnet": twice})
    assert found["lambdascale"]["TTFT p90"] == 1
    assert found["faasnet"]["TTFT p50"] == pytest.approx(2)
    assert found["faasnet"]["TTFT p99"] is None
    assert found["faasnet"]["GPU time"] == 2
    assert ratios({"faasnet": twice}) == {}


def test_the_steepest_burst() -> None:
    requests = [replace(request(1.0), arrival_s=at) for at in (1, 12, 55, 56, 57, 58, 66, 66.5, 71)]
    assert steepest_burst(requests) == 50
    assert steepest_burst([]) == 0


def test_the_document_has_the_agreed_keys() -> None:
    found = measure(made_up("ideal"), OBJECTIVE, END_S)
    made = json.loads(json.dumps(document(setting(), "in words", {"ideal": found})))
    assert list(made)[:2] == ["systems", "setting"]
    system = made["systems"]["ideal"]
    assert list(system)[:8] == [
        "requests", "completed", "ttft_ms", "tpot_ms", "slo_attainment", "gpu_seconds",
        "host_cache_gb_mean", "scale_events",
    ]  # fmt: skip
    assert list(system["ttft_ms"]) == list(system["tpot_ms"]) == ["p50", "p90", "p99"]
    assert made["setting"]["requests"] == len(setting().trace)
    assert made["setting"]["notes"] == list(setting().notes)
    assert "simulation" in made["setting"]["what"]


def test_the_table_marks_the_best_that_is_real() -> None:
    base = measure(RUN, OBJECTIVE, RUN.virtual_s)
    systems = {
        "lambdascale": base,
        "faasnet": replace(base, ttft_ms=Percentiles(400, 1600, 1700)),
        "nccl": replace(base, completed=3, ttft_ms=Percentiles(1, 1, 1)),
        "ideal": replace(base, ttft_ms=Percentiles(2, 2, 2), gpu_seconds=1.0),
    }
    lines = list(comparison(systems))
    by_system = {line.split()[0]: line.split() for line in reversed(lines) if line}
    assert by_system["lambdascale"][1:5] == ["4/6", "500", "1500*", "1500*"]
    assert by_system["faasnet"][1:5] == ["4/6", "400*", "1600", "1700"]
    assert by_system["nccl"][2:5] == ["1", "1", "1"]
    assert by_system["ideal"][2:5] == ["2", "2", "2"]
    assert "*" not in "".join(by_system["nccl"] + by_system["ideal"])
    table = lines[:5]
    assert len({line.rindex(" ", 0, len(line.rstrip("* "))) for line in table[1:]}) == 1
    assert "nccl: 1 requests failed: no room" in lines
    ratio = lines[lines.index(next(line for line in lines if "As multiples" in line)) + 2]
    assert ratio.split()[:2] == ["faasnet", "0.80"]


def test_one_system_has_no_best() -> None:
    assert "*" not in next(
        line
        for line in comparison({"nccl": measure(RUN, OBJECTIVE, RUN.virtual_s)})
        if line.startswith("nccl")
    )


def test_the_setting_in_words() -> None:
    made = replace(setting(), synthetic=True, racks=2, models=(("a", "x"), ("b", "x")))
    lines = list(words(made))
    assert lines[0].startswith(f"synthetic workload bursts.csv: {len(made.trace)} requests in ")
    assert lines[1] == "  rate scaled by 0.4 (so that the peak just fits)"
    assert "12 nodes in 2 racks, h800-400g" in lines[2]
    assert "a (x), b (x)" in lines[2]
    assert "simulation in virtual time" in lines[3]
    first, second = title(made).split("\n")
    assert "Simulated: synthetic bursts.csv" in first
    assert "2 x x on 12 nodes of h800-400g" in first
    assert second == setting().notes[0]
