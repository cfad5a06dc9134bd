"""Host caches in virtual time: each idle model has one copy in memory, and is back within the bound
that docs/design.md states."""

import asyncio
import math
from collections import Counter

import pytest

from services.registry.core.kept import LINK_SHARE
from services.registry.core.pool import HOST
from shared.ids import ModelId
from shared.messages.pool import Tier
from simulation.cluster import Cluster, ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.systems import named

pytestmark = pytest.mark.virtual_time
MODELS, NODES = 6, 7
MODEL = model("demo", "model-0")
SPEC = ClusterSpec(
    system=named("lambdascale"),
    hardware=hardware("paced-laptop"),
    models=tuple(model("demo", f"model-{index}") for index in range(MODELS)),
    nodes=NODES,
    blocks=4,
    chunks=4,
    min_instances=0,
    disk_copies=3,
    host_bytes=3 * MODEL.nbytes,
)
COPY_S = MODEL.nbytes / (SPEC.hardware.link_bytes_per_s / LINK_SHARE)


def cached(cluster: Cluster) -> Counter[ModelId]:
    """How many host caches hold each model."""
    return Counter(
        holding.model_id
        for node in cluster.nodes.values()
        for holding in node.in_memory()
        if holding.tier is Tier.CACHE
    )


async def until_cached(cluster: Cluster) -> float:
    """Waits until every model is in some host cache, and returns the seconds."""
    began = asyncio.get_running_loop().time()
    for _ in range(6000):
        if cached(cluster).keys() == set(cluster.model_ids.values()):
            return asyncio.get_running_loop().time() - began
        await asyncio.sleep(0.05)
    raise AssertionError(f"only {dict(cached(cluster))} are in memory")


async def test_one_copy_of_each_model_is_in_memory_whichever_node_is_lost() -> None:
    async with Cluster(SPEC) as cluster:
        rounds = math.ceil(MODELS / HOST.at_a_time)
        assert await until_cached(cluster) <= 1 + rounds * (COPY_S + 1)
        for lost in range(2):
            name = f"node-{lost}"
            held = {h.model_id for h in cluster.nodes[name].in_memory()}
            cluster.crash(name)
            took = await until_cached(cluster)
            assert set(cached(cluster).values()) == {1}
            assert took <= 4 + 1 + math.ceil(len(held) / HOST.at_a_time) * (COPY_S + 1)
        await asyncio.sleep(60.0)
        assert set(cached(cluster).values()) == {1}
