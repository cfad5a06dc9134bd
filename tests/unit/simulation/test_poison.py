"""Requests that kill the nodes that run them."""

import asyncio

from services.node.core.rows import Row
from shared.ids import RequestId
from simulation.cluster import Cluster
from tests.sim.test_faults import SPEC


async def test_the_engine_of_a_killed_process_does_not_kill_the_next_one() -> None:
    cluster = Cluster(SPEC)
    killed: list[str] = []
    cluster.poison[RequestId("r")] = 2
    cluster.poisoned = lambda name, request: killed.append(name)
    cluster._node(0)
    before = cluster.parts["node-0"]
    cluster.network.kill("node-0")
    cluster._node(0)
    for parts in before, cluster.parts["node-0"]:
        cluster.aboard(parts, [Row("r#1", 0, 3, 9)])
        await asyncio.sleep(0)
    assert killed == ["node-0"]
