"""The benchmark of routing: its theory, and that its world agrees with it."""

from math import log

import pytest

from benchmarks.routing import theory
from benchmarks.routing.__main__ import exponential
from benchmarks.routing.decisions import decisions
from benchmarks.routing.policies import POLICIES, TWO, Policy
from benchmarks.routing.world import Measured, World

LOAD = 0.8


def run(policy: Policy, n: int, seconds: float, gateways: int = 1) -> Measured:
    return World([1.0] * n, gateways, policy, exponential, LOAD, 0).run(seconds, seconds)


def test_queues_of_one_instance() -> None:
    assert theory.erlang_c(1, LOAD) == pytest.approx(LOAD)
    assert theory.erlang_c(2, LOAD) == pytest.approx(2 * LOAD**2 / (1 + LOAD))
    assert theory.random_wait(LOAD) == pytest.approx(log(LOAD / 0.01) / (1 - LOAD))
    assert theory.one_queue_wait(1000, LOAD) == 0


def test_the_fixed_point_of_two_choices() -> None:
    """Mitzenmacher: load^(2^i - 1), so the longest queue grows with log log n."""
    assert theory.shares(LOAD)[:4] == pytest.approx([1, 0.8, 0.8**3, 0.8**7])
    assert [theory.two_choices_longest(n, LOAD) for n in (8, 64, 1000)] == [3, 4, 4]
    assert 0 < theory.two_choices_wait(LOAD) < theory.random_wait(LOAD) / 3


def test_two_choices_come_out_as_theory_has_them() -> None:
    found = run(POLICIES[TWO], 100, 60.0)
    assert found.wait(0.99) == pytest.approx(theory.two_choices_wait(LOAD), rel=0.15)
    assert found.usual_longest == pytest.approx(theory.two_choices_longest(100, LOAD), abs=1)


@pytest.mark.parametrize(
    ("policy", "n", "seconds"),
    [("random", 1, 8000.0), ("two choices and a queue (ours)", 8, 1500.0)],
)
def test_as_many_wait_as_in_theory(policy: str, n: int, seconds: float) -> None:
    """One server is an M/M/1. A queue at the gateway makes an M/M/n of n: nobody waits while
    one of them is free."""
    found = run(POLICIES[policy], n, seconds)
    waited = sum(each > 0 for each in found.waits_s) / len(found.waits_s)
    assert waited == pytest.approx(theory.erlang_c(n, LOAD), abs=0.06)
    assert (found.longest == 1) == (n > 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_runs_with_several_gateways(policy: str) -> None:
    found = run(POLICIES[policy], 8, 20.0, gateways=3)
    assert found.waits_s
    assert found.looks


def test_every_kind_of_decision_is_measured() -> None:
    assert all(us > 0 for _, us in decisions(10))
