"""The ledgers of events in virtual time have all of their time, by the clients' own clocks.

Every other simulated event is checked against its record, faults or not
(`simulation.invariants.unaccounted`).
"""

from dataclasses import replace
from itertools import product

import pytest

from services.planner.core.events import TERMINAL
from shared.messages.ledger import Phase
from shared.messages.scaling import EventRecord, EventState
from simulation.chaos import Verdict, play
from simulation.cluster import PLANNER, REGISTRY, ClusterSpec
from simulation.faults import ClockJump, Fault, Restart
from simulation.scenario import Arrival, Scenario
from tests.sim.test_faults import SPEC
from tests.support.amounts import cases

AT = 3.0
SHARE = 0.999


def burst(spec: ClusterSpec, requests: int, *faults: Fault) -> Verdict:
    """All requests come at once, AT seconds after the scenario begins."""
    together = tuple(Arrival(AT, "model", 20, 30) for _ in range(requests))
    verdict = play(Scenario(0, spec, together, faults))
    assert not verdict.violations
    return verdict


def of_burst(verdict: Verdict) -> tuple[float, EventRecord]:
    return next(
        (at, record) for at, record in verdict.ended if at > verdict.began + AT and record.sources
    )


@pytest.mark.parametrize(
    ("nodes", "blocks", "min_instances"),
    cases(
        [(2, 1, 1), (3, 16, 0), (5, 16, 1)],
        thorough=product((2, 3, 8), (1, 16), (0, 1)),
    ),
)
def test_a_bursts_event_is_accounted_for_from_its_first_request_to_its_last_node(
    nodes: int, blocks: int, min_instances: int
) -> None:
    """All wait from the same moment on: the first that wait, too. The end is heard over the bus a
    little later."""
    spec = replace(SPEC, nodes=nodes, blocks=blocks, min_instances=min_instances)
    verdict = burst(spec, 12 * nodes)
    at, record = of_burst(verdict)
    assert record.state is EventState.COMPLETE
    whole = at - (verdict.began + AT)
    accounted = sum(spent.seconds for spent in record.ledger)
    assert SHARE * whole <= accounted <= whole


@pytest.mark.parametrize(
    ("process", "by_s"),
    cases(
        [(PLANNER, -3600.0), (REGISTRY, 1.5), ("node-0", 3600.0), ("node-1", -1.5)],
        thorough=product((PLANNER, REGISTRY, "node-0", "node-1"), (3600.0, -3600.0, 1.5, -1.5)),
    ),
)
def test_an_event_is_accounted_for_although_a_clock_jumps_while_it_runs(
    process: str, by_s: float
) -> None:
    jump = ClockJump(at=AT + 0.5, lasts=0, process=process, by_s=by_s)
    verdict = burst(replace(SPEC, nodes=3), 36, jump)
    at, record = of_burst(verdict)
    assert record.state is EventState.COMPLETE
    whole = at - (verdict.began + AT)
    accounted = sum(spent.seconds for spent in record.ledger)
    assert SHARE * whole <= accounted <= whole
    assert all(spent.seconds >= 0 for spent in record.ledger)


def test_a_planner_that_comes_late_finds_since_when_requests_wait() -> None:
    late_s = 2.0
    away = Restart(at=AT - 1, lasts=1 + late_s, role=PLANNER, killed=True)
    together = tuple(Arrival(AT, "model", 20, 30) for _ in range(24))
    verdict = play(Scenario(0, replace(SPEC, nodes=2), together, (away,)))
    assert not verdict.violations
    at, record = of_burst(verdict)
    whole = at - (verdict.began + AT)
    accounted = sum(spent.seconds for spent in record.ledger)
    assert SHARE * whole <= accounted <= whole
    found = {spent.phase: spent.seconds for spent in record.ledger}
    assert found[Phase.EVIDENCE] > late_s


def test_phases_have_the_time_that_what_they_name_takes() -> None:
    """Two nodes, a burst that is answered at once: nearly all of the event is the copying."""
    _, record = of_burst(burst(replace(SPEC, nodes=2), 24))
    found = {spent.phase: spent for spent in record.ledger}
    copying = (Phase.FIRST_PATH, Phase.FIRST_TOKEN, Phase.LAST_BLOCK)
    copied_s = sum(found[phase].seconds for phase in copying)
    assert copied_s == pytest.approx(record.physical_limit_s, rel=0.05)
    assert copied_s > SHARE * sum(spent.seconds for spent in record.ledger) - 0.05
    predicted = sum(found[phase].predicted_s or 0.0 for phase in copying)
    assert predicted == pytest.approx(copied_s, rel=0.05)


def test_events_that_grew_are_accounted_for_too() -> None:
    later = (Arrival(AT + 1 + 0.001 * i, "model", 20, 60) for i in range(60))
    first = (Arrival(AT, "model", 20, 60) for _ in range(12))
    verdict = play(Scenario(0, replace(SPEC, nodes=8), (*first, *later), ()))
    assert not verdict.violations
    grown = [record for _, record in verdict.ended if record.growths]
    assert grown
    assert {record.state for record in grown} <= TERMINAL
    assert any(spent.phase is Phase.GROW for record in grown for spent in record.ledger)
