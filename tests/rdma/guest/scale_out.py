"""A cluster at the two ends of a wire: node-1 alone at the other, everything else at the first.

Starts nats-server, and runs the services of control in this process; the two nodes are started by
others. Arguments: a checkpoint; a file of prompts and of the tokens that must follow them (JSON).
Says "all tokens are right" if node-1 took the model by RDMA over the wire, and both the gateway and
node-1 itself gave the right tokens.
"""

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from services.cli.run_service import MAKERS
from services.local.nats_server import find_server
from services.local.publishing import import_model
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import On
from shared.bus.delivery import MAX_PAYLOAD
from shared.bus.nats import NatsBus
from shared.config import BusConfig, Config, GatewayConfig, RegistryConfig
from shared.ids import GatewayId, InstanceId, ModelName, NodeId, RequestId
from shared.messages import Ok
from shared.messages.instances import Stage
from shared.messages.pool import ModelRecord, NodeView
from shared.messages.scaling import ImportModel, ScaleAccepted, SetInstances
from shared.messages.serving import Sampling, Submit, Tokens
from shared.pool_pages import read_pool

HOST = "10.9.0.1"
BUS_PORT = 4222
BUS_URL = f"nats://{HOST}:{BUS_PORT}"
NODES = (NodeId("node-0"), NodeId("node-1"))
MODEL = ModelName("tiny")
LIMIT_S = 200.0


def node_settings(node: NodeId, host: str, device: str, gid_index: int) -> dict[str, str]:
    return {
        "LAMBDASCALE_BUS_URL": BUS_URL,
        "LAMBDASCALE_BUS_CONNECT_TIMEOUT_S": str(LIMIT_S),
        "LAMBDASCALE_NODE_ID": node,
        "LAMBDASCALE_NODE_HOST": host,
        "LAMBDASCALE_NODE_MACHINE": node,
        "LAMBDASCALE_NODE_DATA_DIR": f"/tmp/{node}",
        "LAMBDASCALE_NODE_ARENA_BYTES": str(16 << 20),
        "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
        "LAMBDASCALE_NODE_THREADS": "1",
        # An emulated processor would take minutes to compile kernels.
        "LAMBDASCALE_NODE_CPU_WEIGHTS": "stored",
        "LAMBDASCALE_NODE_LEASE_S": "10",
        "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": "0",  # a keeper is one more Python to start
        "LAMBDASCALE_NODE_RDMA_DEVICE": device,
        "LAMBDASCALE_NODE_RDMA_GID_INDEX": str(gid_index),
    }


def sent() -> int:
    """Bytes that have gone over the wire from the first end."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def start_server(directory: Path) -> None:
    """nats-server, which ends with the job."""
    config = directory / "nats.conf"
    config.write_text(
        json.dumps(
            {
                "host": HOST,
                "port": BUS_PORT,
                "max_payload": MAX_PAYLOAD,
                "jetstream": {"store_dir": str(directory / "nats")},
            }
        )
    )
    subprocess.Popen([find_server(), "-c", str(config), "-l", "/dev/null"])


@asynccontextmanager
async def control() -> AsyncIterator[NatsBus]:
    """Registry, planner and gateway, each with a bus of its own; and one for us."""
    config = Config(
        bus=BusConfig(url=BUS_URL, connect_timeout_s=LIMIT_S),
        # With a copy on its own disk, node-1 need not take the model over the wire.
        registry=RegistryConfig(durable_copies=1),
    )
    async with AsyncExitStack() as opened:
        for role in ("registry", "planner", "gateway"):
            bus = await opened.enter_async_context(NatsBus(config.bus, role))
            await opened.enter_async_context(MAKERS[role](bus, config))
        yield await opened.enter_async_context(NatsBus(config.bus, "test"))


async def both_nodes(bus: NatsBus) -> dict[NodeId, NodeView]:
    """Once they are there."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            pool = await read_pool(partial(bus.request, timeout=10.0))
            views = {view.info.node: view for view in pool.nodes}
            if set(views) == set(NODES):
                return views
            await asyncio.sleep(0.2)


async def until(watch: Watch, condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await watch.change()
    print(what, flush=True)


def by_gateway(prompt: list[int], count: int) -> list[int]:
    connection = http.client.HTTPConnection("127.0.0.1", GatewayConfig().port, timeout=LIMIT_S)
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def by_node(
    bus: NatsBus, record: ModelRecord, view: NodeView, prompt: list[int], count: int
) -> list[int]:
    """From that node alone, asked as a gateway does."""
    gateway = GatewayId("by-hand")
    got: list[int] = []
    over = asyncio.Event()

    async def receive(message: Tokens) -> None:
        for token in message.tokens:
            got.append(token.token)
            if token.finish:
                over.set()

    await bus.subscribe(subjects.gateway_tokens(gateway), On(Tokens, receive))
    submit = Submit(
        request=RequestId("by-hand"),
        attempt=0,
        gateway=gateway,
        model_id=record.model_id,
        instance=InstanceId("by-hand"),
        stages=(Stage(view.info.node, view.info.address, 0, record.n_blocks),),
        tokens=tuple(prompt),
        prompt_tokens=len(prompt),
        max_tokens=count,
        stop_ids=(),
        sampling=Sampling(),
    )
    await bus.request(subjects.node_submit(view.info.node), submit, Ok, timeout=10.0)
    async with asyncio.timeout(LIMIT_S):
        await over.wait()
    return got


async def main(checkpoint: Path, expected: dict[str, list[list[int]]]) -> None:
    start_server(Path("/tmp"))
    async with control() as bus:
        watch = Watch()
        await watch.follow(bus)
        print("control is up", flush=True)
        views = await both_nodes(bus)
        print("two nodes are there", flush=True)
        request = ImportModel(path=str(checkpoint), name=MODEL, min_instances=1)
        record = await import_model(bus, request, node=NODES[0], say=print)
        await until(watch, lambda: len(watch.replicas) == 1, "one replica")
        before = sent()
        two = SetInstances(name=MODEL, instances=2)
        await bus.request(subjects.PLANNER_SCALE, two, ScaleAccepted, timeout=10.0)
        await until(watch, lambda: len(watch.replicas) == 2, "two replicas")
        came = [arrival for arrival in watch.arrivals if arrival.node == NODES[1]]
        assert {arrival.block for arrival in came} == set(range(record.n_blocks))
        assert {(arrival.source, arrival.transport) for arrival in came} == {(NODES[0], "rdma")}
        wired = sent() - before
        assert wired > record.nbytes
        print(f"{len(came)} blocks by rdma, {wired} bytes over the wire", flush=True)
        for prompt, tokens in zip(expected["prompts"], expected["tokens"], strict=True):
            assert await asyncio.to_thread(by_gateway, prompt, len(tokens)) == tokens
        prompt, tokens = expected["prompts"][0], expected["tokens"][0]
        assert await by_node(bus, record, views[NODES[1]], prompt, len(tokens)) == tokens
        print("all tokens are right", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
