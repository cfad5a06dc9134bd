"""Predicted and actual: how long multicasts take on paper, over modelled links, and for real.

    python -m benchmarks.predictions [--real] [--nodes 3,5,8] [--rates 40,100] [--rounds 3]

Without --real: the planner's prediction over the time of the nodes' own movers in virtual time, by
fabric and strategy, for blocks of 1, 4 and 16 chunks. With --real: events of a cluster of processes
on this machine, with links paced to --rates (10^6 bits a second); medians of --rounds.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.watched import watched
from services.local.asking import ask
from services.local.cluster import ClusterSpec
from services.local.demo_model import make_random_model
from services.local.publishing import import_model
from services.local.watch import Watch
from services.planner.core.costs import arrival_times
from services.planner.core.multicast.fabric import Fabric, Port, Task, uniform
from services.planner.core.multicast.strategies import STRATEGIES
from shared import subjects
from shared.bus.base import Bus
from shared.ids import EventId, ModelName
from shared.messages.scaling import (
    EventRecord,
    EventState,
    ImportModel,
    ScaleAccepted,
    SetInstances,
    Timings,
)
from simulation.multicast import carry_out

NAMES = ("binomial", "head", "chain", "taps", "tree", "broadcast")
NODES = (2, 3, 5, 8, 12, 16)
CHUNKS = (1, 4, 16)
BLOCKS, BLOCK_BYTES = 16, 1 << 20
RATE = 1e9
MODEL = ModelName("demo")
ARENA_SPARE = 1.25
MEASURED = ("all_complete_s", "first_complete_s", "first_path_s")


def fabrics(nodes: int) -> Iterator[tuple[str, Fabric]]:
    """The fabrics by name: among them two racks whose trunks are as wide as one port, and a quarter
    of the nodes at a quarter of the speed."""
    yield "uniform", uniform(nodes, RATE)
    racks = tuple(Port(RATE, RATE, rack="ab"[node * 2 // nodes]) for node in range(nodes))
    yield "racks", Fabric(racks, 0.0, {"a": RATE, "b": RATE})
    slow = max(1, nodes // 4)
    fast = (Port(RATE, RATE),) * (nodes - slow)
    yield "mixed", Fabric(fast + (Port(RATE / 4, RATE / 4),) * slow, 0.0)


def modelled() -> None:
    print(f"predicted / actual over modelled links, N = {', '.join(map(str, NODES))}: least..most")
    print(f"{'fabric':10}{'strategy':11}" + "".join(f"{f'{c} chunks':>14}" for c in CHUNKS))
    ratios: dict[tuple[str, str], dict[int, list[float]]] = {}
    for nodes in NODES:
        for kind, fabric in fabrics(nodes):
            for name in NAMES:
                by_chunks = ratios.setdefault((kind, name), {})
                for chunks in CHUNKS:
                    task = Task(fabric, (BLOCK_BYTES,) * BLOCKS, (0,), BLOCK_BYTES // chunks)
                    by_chunks.setdefault(chunks, []).append(ratio(name, task))
    for (kind, name), by_chunks in sorted(ratios.items()):
        cells = (f"{min(found):.2f}..{max(found):.2f}" for found in by_chunks.values())
        print(f"{kind:10}{name:11}" + "".join(f"{cell:>14}" for cell in cells))


def ratio(name: str, task: Task) -> float:
    schedule = STRATEGIES[name](task)
    predicted = max(arrival_times(schedule.moves, task).values())
    return predicted / max(carry_out(schedule, task).values())


async def real(sizes: Sequence[int], rates: Sequence[float], rounds: int) -> None:
    print(f"events of real processes: seconds predicted / actual = ratio, medians of {rounds}")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_random_model(checkpoint)
        for nodes in sizes:
            for rate in rates:
                found = await events(Path(directory), checkpoint, nodes, rate, rounds)
                print(
                    f"  N = {nodes}, {rate:g} Mbit/s, {found[0].strategy}: {row(found)}", flush=True
                )


async def events(
    directory: Path, checkpoint: Path, nodes: int, mbit: float, rounds: int
) -> list[EventRecord]:
    """The records of `rounds` scalings from one node to all."""
    nbytes = (checkpoint / "model.safetensors").stat().st_size
    settings = {
        "LAMBDASCALE_NODE_LINK_BYTES_PER_S": str(int(mbit * 1e6 / 8)),
        "LAMBDASCALE_NODE_ARENA_BYTES": str(int(nbytes * ARENA_SPARE)),
        "LAMBDASCALE_NODE_THREADS": "1",
        "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",  # weights come over the links only
    }
    spec = ClusterSpec(
        directory=directory / f"{nodes}-{mbit:g}",
        nodes=nodes,
        gateway_port=0,
        settings=settings,
        apart=True,
    )
    async with watched(spec) as (_, bus, watch):
        await import_model(
            bus,
            ImportModel(path=str(checkpoint), name=MODEL, min_instances=1),
            say=lambda _: None,
        )
        await until_replicas(watch, 1)
        return [await scaled(bus, watch, nodes) for _ in range(rounds)]


async def scaled(bus: Bus, watch: Watch, nodes: int) -> EventRecord:
    """Scales from one node to all, and back. (The event begins once nodes have freed their
    memory.)"""
    before = set(watch.records)
    await ask(bus, subjects.PLANNER_SCALE, request(nodes), ScaleAccepted)
    while not (done := complete(watch, before)):
        await watch.change()
    await ask(bus, subjects.PLANNER_SCALE, request(1), ScaleAccepted)
    await until_replicas(watch, 1)
    return done[0]


def complete(watch: Watch, before: set[EventId]) -> list[EventRecord]:
    records = (record for event, record in watch.records.items() if event not in before)
    return [record for record in records if record.state is EventState.COMPLETE]


def request(nodes: int) -> SetInstances:
    return SetInstances(name=MODEL, instances=nodes)


async def until_replicas(watch: Watch, count: int) -> None:
    while len(watch.replicas) != count or len(watch.instances) != count:
        await watch.change()


def row(records: Sequence[EventRecord]) -> str:
    cells = []
    for name in MEASURED:
        predicted, actual = (
            median(timings, name)
            for timings in ([r.predicted for r in records], [r.actual for r in records])
        )
        label = name.removesuffix("_s").replace("_", " ")
        cells.append(f"{label} {predicted:.2f} / {actual:.2f} = {predicted / actual:.2f}")
    limit = statistics.median(record.physical_limit_s or 0.0 for record in records)
    return ", ".join([*cells, f"limit {limit:.2f}"])


def median(timings: Sequence[Timings], name: str) -> float:
    """NaN if some event lacks the value."""
    return statistics.median(
        float("nan") if (at := getattr(each, name)) is None else at for each in timings
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--nodes", default="3,5,8")
    parser.add_argument("--rates", default="40,100")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.real:
        sizes, rates = (
            [float(word) for word in text.split(",")] for text in (args.nodes, args.rates)
        )
        asyncio.run(real([int(size) for size in sizes], rates, args.rounds))
    else:
        modelled()


if __name__ == "__main__":
    main()
