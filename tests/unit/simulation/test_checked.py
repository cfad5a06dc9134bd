"""Simulated services look at their own state."""

import pytest

from services.registry.core.reservations import Reservation, Reservations
from shared.ids import EventId, Generation, NodeId
from simulation.checked import CheckedPool
from simulation.cluster import REGISTRY, Cluster, ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.systems import named
from tests.unit.registry.builders import MODEL, info


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


@pytest.mark.virtual_time
async def test_a_simulated_clusters_registry_is_checked() -> None:
    spec = ClusterSpec(
        system=named("lambdascale"),
        hardware=hardware("paced-laptop"),
        models=(model("demo"),),
        nodes=1,
    )
    async with Cluster(spec) as cluster:
        assert isinstance(cluster.processes[REGISTRY].running.pool, CheckedPool)
