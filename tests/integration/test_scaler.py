"""A real planner tells KEDA how many nodes are wanted, and so does the one that takes over."""

import asyncio
from pathlib import Path

from benchmarks.takeover import lease_of, process_of
from services.local.nats_servers import free_ports
from tests.support.cluster import LIMIT_S, running
from tests.support.keda import asking


async def wanted(port: int) -> float:
    async with asyncio.timeout(LIMIT_S), asking(port) as keda:
        (spec,) = (await keda.spec()).metricSpecs
        (value,) = (await keda.metrics(spec.metricName)).metricValues
        assert await keda.is_active() == (value.metricValueFloat > 0)
        return float(value.metricValueFloat)


async def test_the_active_planner_says_it(tmp_path: Path, checkpoint: Path) -> None:
    (port,) = free_ports(1)
    settings = {"LAMBDASCALE_PLANNER_SCALER_PORT": str(port)}
    async with running(tmp_path, checkpoint, nodes=2, settings=settings, standbys=1) as up:
        await up.replicas(1)
        assert await wanted(port) == 1
        active = process_of(up.cluster, "planner", await lease_of(up.bus, "planner"))
        up.kill(active)
        await up.cluster.ended(active)
        assert await wanted(port) == 1
