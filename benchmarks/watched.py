"""A cluster of real processes on this machine, for as long as a benchmark measures it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.watch import Watch
from shared.bus.base import Bus
from shared.bus.nats import NatsBus


@asynccontextmanager
async def watched(spec: ClusterSpec) -> AsyncIterator[tuple[Cluster, Bus, Watch]]:
    """The cluster, which is up and ends with the context, a connection to its bus, and what is
    published about its model."""
    cluster = Cluster(spec)
    await cluster.start()
    try:
        async with NatsBus(bus_config(cluster.state), "bench") as bus:
            watch = Watch()
            await watch.follow(bus)
            yield cluster, bus, watch
    finally:
        await cluster.stop()
