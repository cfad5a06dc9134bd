"""Simulated services look at their own state."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.gateway.core.dispatch import Dispatch
from services.node.core.batching import Batcher
from services.node.core.pulling import Pulls
from services.planner.core.planner import Planner
from services.registry.core.holdings import Holdings
from services.registry.core.pool import Pool
from services.registry.core.reservations import Reservation, Reservations
from shared.ids import EventId, Generation, NodeId
from simulation import checked
from simulation.checked import (
    CheckedBatcher,
    CheckedCore,
    CheckedDispatch,
    CheckedPool,
    CheckedPulls,
)
from simulation.cluster import Cluster, ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.systems import named
from tests.unit.registry.builders import MODEL, info, status


def test_a_registry_that_keeps_the_reservation_of_a_node_that_is_gone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = CheckedPool()
    pool.lease_put(info("a"), 0.0)
    held = Reservation(
        node=NodeId("a"), generation=Generation(1), event=EventId("ev"), model_id=MODEL
    )
    pool.reservations.add(held)
    monkeypatch.setattr(Reservations, "lose", lambda *args: None)
    pool.lease_dropped(NodeId("a"), 1.0)
    with pytest.raises(AssertionError):
        pool.tick(1000.0)


def test_a_registry_is_checked_when_nodes_report(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = CheckedPool()
    pool.lease_put(info("a"), 0.0)
    monkeypatch.setattr(Holdings, "validate", raising)
    with pytest.raises(AssertionError, match="injected"):
        pool.status(status("a"), 0.5)
    with pytest.raises(AssertionError, match="contradictions in cores"):
        checked.raise_found()
    checked.raise_found()


def raising(_: object) -> None:
    raise AssertionError("injected")


SPEC = ClusterSpec(
    system=named("lambdascale"),
    hardware=hardware("paced-laptop"),
    models=(model("demo"),),
    nodes=2,
    min_instances=2,
    disk_copies=1,
)


@pytest.mark.virtual_time
async def test_every_core_of_a_simulated_cluster_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: set[type] = set()
    for kind in (Planner, Pool, Dispatch, Batcher, Pulls):
        monkeypatch.setattr(kind, "validate", lambda core: looked.add(type(core)))
    async with Cluster(SPEC) as cluster:
        await cluster.serving()
    assert looked == {CheckedCore, CheckedPool, CheckedDispatch, CheckedBatcher, CheckedPulls}


@pytest.mark.virtual_time
async def test_a_core_that_contradicts_itself_fails_the_run_whatever_contains_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(SPEC)
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.raises(AssertionError, match="contradictions in cores"))
        await stack.enter_async_context(cluster)
        await cluster.serving()
        with monkeypatch.context() as broken:
            broken.setattr(Dispatch, "validate", raising)
            await asyncio.sleep(1.0)
