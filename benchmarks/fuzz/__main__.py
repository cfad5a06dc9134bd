"""Fuzzes every parser and message, bodies of every HTTP call, and the frames of the data plane.

    python -m benchmarks.fuzz [--inputs 100000] [--seed N] [--parts parsers,gateway,node,bus]

Parsers are called in this process. A gateway, nodes, a planner and a registry are real processes of
a cluster that this starts. What may not be: an error that a parser does not document, an answer of
the gateway with a status of 500 or more, or one that its OpenAPI document does not declare, a
service that says that it failed, or logs a bug, or does not answer, or ends. Everything drawn
follows from the seed. The exit code is 1 if anything was found.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import structlog

from benchmarks.fuzz import parsers
from benchmarks.fuzz.bus import Services
from benchmarks.fuzz.gateway import Gateway
from benchmarks.fuzz.node import Node
from benchmarks.fuzz.report import Report
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import publish
from shared import subjects
from shared.bus.base import Bus, On
from shared.bus.nats import NatsBus
from shared.ids import GatewayId, ModelName
from shared.messages.load import GatewayLoad
from shared.messages.scaling import ImportModel
from shared.pool_pages import read_pool

MODEL = ModelName("fuzz")
SPEC = CheckpointSpec(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=128
)
SHARES = {"parsers": 0.6, "gateway": 0.2, "node": 0.15, "bus": 0.05}
"""Inputs of each part. Those of the last change what the cluster is: a model may be gone after."""
SETTINGS = {
    "LAMBDASCALE_NODE_THREADS": "1",
    "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
    "LAMBDASCALE_GATEWAY_CLIENT_TIMEOUT_S": "1",  # for requests that are cut off
}
_TRACEBACK = "Traceback (most recent call last)"


async def run_in_cluster(inputs: int, seed: int, parts: Sequence[str], report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_checkpoint(checkpoint, SPEC)
        spec = ClusterSpec(
            directory=Path(directory) / "cluster", nodes=2, gateway_port=0, settings=SETTINGS
        )
        cluster = Cluster(spec)
        await cluster.start()
        try:
            async with NatsBus(bus_config(cluster.state), "fuzz") as bus:
                model = ImportModel(path=str(checkpoint), name=MODEL, min_instances=1)
                record = await publish(bus, model, say=lambda _: None)
                pool = await read_pool(partial(bus.request, timeout=5.0))
                gateway = await _a_gateway(bus)
            infos = [view.info for view in pool.nodes]
            address = next(info.address for info in infos if info.node == "node-0")
            credentials = Path(cluster.state.credentials)
            url = cluster.state.gateway_url
            runs = {
                "gateway": Gateway(url, MODEL, seed, report).run,
                "node": Node(address, credentials, record.model_id, seed, report).run,
                "bus": Services(cluster.state, record, infos, gateway, seed, report).run,
            }
            processes = Processes(cluster, report)
            for part, run in runs.items():
                if part in parts:
                    await run(round(inputs * SHARES[part]))
                    processes.look(part)
        finally:
            await cluster.stop()


async def _a_gateway(bus: Bus) -> GatewayId:
    """The id of one that runs."""
    heard: asyncio.Future[GatewayId] = asyncio.get_running_loop().create_future()

    async def hear(message: GatewayLoad) -> None:
        if not heard.done():
            heard.set_result(message.gateway)

    subscription = await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
    try:
        return await heard
    finally:
        await subscription.close()


class Processes:
    """Those of the cluster: none may end, or log a bug."""

    def __init__(self, cluster: Cluster, report: Report) -> None:
        self._cluster = cluster
        self._report = report
        self._read: dict[Path, int] = {}
        """How many lines of each log were read."""

    def look(self, part: str) -> None:
        for process in self._cluster.state.processes:
            if process.state != "running":
                self._report.find(f"{part}: {process.name} ended", process.state)
        for log in sorted((self._cluster.spec.directory / "logs").glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            new = lines[self._read.get(log, 0) :]
            for number, line in enumerate(new):
                if line.startswith(_TRACEBACK):
                    where = "\n        ".join(new[max(0, number - 1) : number + 40])
                    last = next((each for each in new[number + 1 :] if each[:1] not in " |"), "")
                    self._report.find(f"{part}: a bug of {log.stem}: {last:.120}", where)
            self._read[log] = len(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(SHARES), help="default: %(default)s")
    args = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    report, began = Report(), time.monotonic()
    parts = args.parts.split(",")
    if "parsers" in parts:
        parsers.run(args.seed, round(args.inputs * SHARES["parsers"]), report)
    if set(parts) - {"parsers"}:
        asyncio.run(run_in_cluster(args.inputs, args.seed, parts, report))
    print("\n".join(report.lines()))
    print(f"seed {args.seed}, {time.monotonic() - began:.0f} s")
    return 1 if report.found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
