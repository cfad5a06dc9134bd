"""A process with a mover: it holds a model of random bytes or, told of a source, pulls it from
there and relays it. It says where it listens, and then what arrived and what failed.

python -m tests.integration.relay HOST BYTES_PER_S [SOURCE_ADDRESS]
"""

import asyncio
import random
import sys

from services.node.core.residency import PlanId
from shared import telemetry
from shared.config import TelemetryConfig
from shared.ids import NodeId
from shared.messages.scaling import Pull
from tests.unit.node.moving.movers import EVENT, MODEL, Node

CHUNK = 512 * 1024
CONTENT = [random.Random(index).randbytes(4 * CHUNK) for index in range(2)]
EVERY = range(len(CONTENT))


def end(name: str, rate: int = 0, host: str = "127.0.0.1") -> Node:
    """An end of this process; others have the same model."""
    return Node(name, rate, host=host, content=CONTENT, chunk=CHUNK)


def pull_from(node: Node, address: str, *, revision: int = 1) -> None:
    source = NodeId("source")
    pulls = [Pull(1, block, source) for block in EVERY]
    node.mover.apply(MODEL, PlanId(EVENT, revision), pulls, {source: address})


async def relay(host: str, rate: int, source: str) -> None:
    telemetry.configure("relay", TelemetryConfig(log_level="off"))  # standard output is the test's
    node = end("relay", rate, host)
    async with node.transport:
        node.hold([] if source else EVERY)
        if source:
            pull_from(node, source)
        print(node.transport.address, flush=True)
        while True:
            await node.changed.wait()
            node.changed.clear()
            for arrival in node.arrivals:
                print("arrived", arrival.block, flush=True)
            for failure in node.failures:
                print("failed", failure.block, failure.error.code, flush=True)
            node.arrivals.clear()
            node.failures.clear()


if __name__ == "__main__":
    asyncio.run(relay(sys.argv[1], int(sys.argv[2]), "".join(sys.argv[3:])))
