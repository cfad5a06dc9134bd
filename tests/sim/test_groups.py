"""A model that fits no device, in virtual time: groups come and go, and outlive their devices. All
cores are validated after every step."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from shared.ids import NodeId
from shared.messages.scaling import EventRecord, EventState
from shared.parts import Part
from simulation import systems
from simulation.chaos import Verdict, play
from simulation.cluster import PLANNER, REGISTRY, ClusterSpec
from simulation.faults import Crash, Drain, Fault, Restart, Role, Whom
from simulation.hardware import hardware
from simulation.models import model
from simulation.scenario import Arrival, Scenario
from tests.support.amounts import cases

DEVICES, MACHINES, TOKENS = 3, 3, 30
SPEC = ClusterSpec(
    system=systems.named("lambdascale"),
    hardware=msgspec.structs.replace(
        hardware("paced-laptop"), memory_bytes=45e6, ssd_bytes_per_s=4e7, nvlink_bytes_per_s=1e9
    ),
    models=(model("demo", "model"),),
    nodes=DEVICES * MACHINES,
    devices=DEVICES,
    blocks=8,
    chunks=4,
    slots=4,
    anticipate=False,
)
BURST = tuple(Arrival(1 + 0.02 * number, "model", 20, TOKENS) for number in range(20))
"""More than a group takes: the event takes a good 2 s."""
LOADING_S = 2.5
CUT = (Part(0, 3), Part(3, 6), Part(6, 8))


def run(*faults: Fault, requests: Sequence[Arrival] = BURST, spec: ClusterSpec = SPEC) -> Verdict:
    """A run in which no invariant may be violated: every request has all its tokens, and at rest
    there is one group, on as many devices as it needs."""
    verdict = play(Scenario(0, spec, tuple(requests), faults))
    assert not verdict.violations, "\n".join((*verdict.violations, *verdict.log))
    return verdict


@pytest.fixture(scope="module")
def undisturbed() -> list[EventRecord]:
    return events(run())


def events(verdict: Verdict) -> list[EventRecord]:
    return [record for _, record in verdict.ended]


def whoever(role: Role) -> Whom:
    return Whom(role, "node-0")


def test_groups_come_with_the_load_and_go(undisturbed: list[EventRecord]) -> None:
    first, *more = undisturbed
    assert first.state is EventState.COMPLETE
    assert [first.parts[node] for node in first.targets] == list(CUT)
    assert more
    for record in more:
        assert record.state is EventState.COMPLETE
        for part in CUT:
            alike = {node for node in record.targets if record.parts[node] == part}
            assert len(alike) * DEVICES == len(record.targets), "whole groups"
            senders = {t.src for t in record.transfers if t.dst in alike}
            held = {t.block for t in record.transfers if t.dst in alike}
            assert held == set(part.blocks), "nothing else moves"
            assert all(first.parts.get(node, record.parts.get(node)) == part for node in senders)


def test_a_group_lies_on_one_machine(undisturbed: list[EventRecord]) -> None:
    for record in undisturbed:
        groups = [record.targets[i : i + DEVICES] for i in range(0, len(record.targets), DEVICES)]
        for group in groups:
            assert len({SPEC.machine(int(node.removeprefix("node-"))) for node in group}) == 1


@pytest.mark.parametrize("role", cases([Role.TARGET], thorough=[Role.SOURCE]))
def test_a_device_dies_while_a_group_loads(role: Role) -> None:
    records = events(run(Crash(at=LOADING_S, lasts=6, whom=whoever(role))))
    assert any(record.state is EventState.COMPLETE for record in records[1:])


def test_a_group_that_lost_a_device_is_mended_by_another() -> None:
    slow = tuple(Arrival(1 + 0.5 * number, "model", 20, TOKENS) for number in range(8))
    first, *more = events(run(Crash(at=2.0, lasts=30, whom=Whom(None, "node-1")), requests=slow))
    lost = first.parts[NodeId("node-1")]
    mended = next(record for record in more if record.state is EventState.COMPLETE)
    assert [mended.parts[node] for node in mended.targets] == [lost], "only its part is loaded"


@pytest.mark.parametrize("devices", cases([4], thorough=[3, 5]))
def test_models_whose_groups_have_no_room_beside_each_other_take_turns(devices: int) -> None:
    """Neither may hold a part of what the other waits for: both would wait for ever."""
    models = tuple(model("demo", name) for name in ("model", "other"))
    spec = replace(SPEC, models=models, nodes=devices, min_instances=0)
    asked = (Arrival(1 + 0.5 * n, name.name, 20, 40) for n in range(30) for name in models)
    served = {record.name for record in events(run(requests=tuple(asked), spec=spec))}
    assert served == {"model", "other"}


def test_a_device_of_a_group_is_drained() -> None:
    run(Drain(at=LOADING_S, lasts=20, whom=Whom(None, "node-1"), limit_s=0.0))


@pytest.mark.parametrize("role", [PLANNER, REGISTRY])
def test_planner_and_registry_are_replaced_while_a_group_loads(role: str) -> None:
    run(Restart(at=LOADING_S, lasts=1, role=role, killed=True))
