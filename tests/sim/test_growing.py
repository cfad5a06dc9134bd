"""Events that grow, in virtual time. The planner's core is validated after every stimulus and the
registry's after every change (`simulation.checked`)."""

from dataclasses import replace

import msgspec
import pytest

from services.planner.core.multicast.strategies import STRATEGIES
from shared.messages.scaling import EventRecord, EventState
from simulation.chaos import play
from simulation.faults import Corrupt, Crash, Fault, PeerCut, Role, Whom
from simulation.scenario import Arrival, Scenario
from tests.sim.test_faults import SPEC
from tests.support.amounts import cases

NODES = 8
SPEC_8 = replace(SPEC, nodes=NODES)
FIRST = tuple(Arrival(1.0, "model", 20, 60) for _ in range(5))
MORE = tuple(Arrival(2.5 + 0.001 * number, "model", 20, 60) for number in range(5))
MOST = tuple(Arrival(4.0 + 0.001 * number, "model", 20, 60) for number in range(40))
GROWN_S = 4.5
"""When all nodes load."""


def grown(*faults: Fault, strategy: str = "auto") -> list[EventRecord]:
    system = replace(SPEC_8.system, transfer=strategy)
    spec = replace(SPEC_8, system=system)
    verdict = play(Scenario(0, spec, (*FIRST, *MORE, *MOST), faults))
    assert not verdict.violations
    return [record for _, record in verdict.ended if record.growths]


@pytest.mark.parametrize("strategy", cases(["auto", "chain"], thorough=["binomial", "tree"]))
def test_an_event_grows_twice_and_takes_every_node(strategy: str) -> None:
    assert strategy in ("auto", *STRATEGIES)
    (record,) = grown(strategy=strategy)
    assert record.state is EventState.COMPLETE
    assert len(record.growths) == 2
    assert len(record.targets) == NODES - 1
    assert not record.repairs


@pytest.mark.parametrize(
    "fault",
    [
        Corrupt(at=GROWN_S, lasts=0, whom=Whom(Role.RELAY, "node-1"), reads=10),
        PeerCut(at=GROWN_S, lasts=10, whom=Whom(Role.RELAY, "node-1"), other="node-0"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_pull_that_fails_after_growth_concerns_its_own_node_only(fault: Fault) -> None:
    (record,) = grown(fault)
    assert record.state is EventState.COMPLETE
    assert record.repairs
    for repair in record.repairs:
        assert len(repair.nodes) < NODES - 1, repair


def test_a_node_dies_while_a_grown_event_loads() -> None:
    records = grown(Crash(at=GROWN_S, lasts=20, whom=Whom(Role.RELAY, "node-1")))
    assert records
    assert records[0].state is EventState.COMPLETE
    assert records[0].repairs


def test_an_event_grows_while_sleeping_copies_wake() -> None:
    slow = SPEC_8.hardware.nic_bytes_per_s
    hardware = msgspec.structs.replace(SPEC_8.hardware, pcie_bytes_per_s=slow)
    spec = replace(SPEC_8, hardware=hardware, anticipate=True)
    again = [replace(each, at=each.at + 40.0) for each in (*FIRST, *MORE)]
    verdict = play(Scenario(0, spec, (*FIRST, *MORE, *MOST, *again), ()))
    assert not verdict.violations
    woken = [record for _, record in verdict.ended if record.targets and not record.transfers]
    assert any(record.growths for record in woken), verdict.ended
