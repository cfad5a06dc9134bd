"""A process that owns a lease and reports what it holds, until it is killed.

python -m tests.integration.lease_owner URL NODE TTL
"""

import asyncio
import sys

from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.messages.pool import Tier
from tests.unit.registry.builders import holding, info
from tests.unit.registry.cluster import Node


async def own_lease(url: str, name: str, ttl: int) -> None:
    async with NatsBus(BusConfig(url=url), name) as bus:
        node = Node(bus, info(name), holding(Tier.GPU, 0, 1, 2, 3), ttl=ttl)
        await node.join()
        while True:
            await asyncio.sleep(ttl / 3)
            await node.renew()
            await node.report()


if __name__ == "__main__":
    asyncio.run(own_lease(sys.argv[1], sys.argv[2], int(sys.argv[3])))
