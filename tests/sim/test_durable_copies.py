"""Durable copies in virtual time: a machine is lost, and they are back within the stated bound."""

import asyncio
import math
from collections import Counter

import pytest

from services.registry.core.kept import LINK_SHARE
from services.registry.core.pool import DURABLE
from shared.ids import ModelId
from shared.messages.pool import Tier
from simulation.cluster import Cluster, ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.systems import named

pytestmark = pytest.mark.virtual_time
MODELS, NODES = 3, 7
SPEC = ClusterSpec(
    system=named("lambdascale"),
    hardware=hardware("paced-laptop"),
    models=tuple(model("demo", f"model-{index}") for index in range(MODELS)),
    nodes=NODES,
    blocks=4,
    chunks=4,
    min_instances=0,
    disk_copies=1,
)
SETTINGS = DURABLE


def stored(cluster: Cluster) -> Counter[ModelId]:
    """How many disks hold each model whole."""
    return Counter(
        holding.model_id
        for node in cluster.nodes.values()
        for holding in node.holdings()
        if holding.tier is Tier.DISK and len(holding.blocks) == SPEC.blocks
    )


async def until_copied(cluster: Cluster) -> float:
    """Waits until every model is on two disks, and returns the seconds. Never are more copies under
    way than may be."""
    began = asyncio.get_running_loop().time()
    while any(stored(cluster)[name] < SETTINGS.copies for name in cluster.model_ids.values()):
        under_way = [node for node in cluster.nodes.values() if node.copying()]
        assert len(under_way) <= SETTINGS.at_a_time
        await asyncio.sleep(0.05)
    return asyncio.get_running_loop().time() - began


async def test_a_machine_that_is_lost_takes_no_model_along() -> None:
    """Node 0 has a model of its own, and a copy of another; then nodes that come back go too."""
    async with Cluster(SPEC) as cluster:
        copy_s = SPEC.models[0].nbytes / (SPEC.hardware.link_bytes_per_s / LINK_SHARE)
        assert await until_copied(cluster) <= math.ceil(MODELS / SETTINGS.at_a_time) * (copy_s + 1)
        for lost in range(NODES - 2):
            name = f"node-{lost}"
            held = {h.model_id for h in cluster.nodes[name].holdings()}
            cluster.crash(name)
            took = await until_copied(cluster)
            assert set(stored(cluster)) == set(cluster.model_ids.values())
            rounds = math.ceil(len(held) / SETTINGS.at_a_time)
            bound = 4 + SETTINGS.after_s + rounds * (copy_s + 1)
            left = NODES - 1 - lost
            if left > SETTINGS.at_a_time:
                assert took <= bound, name


async def test_a_node_that_restarts_moves_nothing() -> None:
    async with Cluster(SPEC) as cluster:
        await until_copied(cluster)
        before = stored(cluster)
        cluster.crash("node-0")
        await asyncio.sleep(SETTINGS.after_s / 2)
        await cluster.begin("node-0")
        await asyncio.sleep(2 * SETTINGS.after_s)
        assert stored(cluster) == before
