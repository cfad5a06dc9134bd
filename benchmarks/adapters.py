"""What a LoRA adapter costs: the first request that needs it on a node, and a batch of several.

Run: .venv/bin/python -m benchmarks.adapters [--adapters 12] [--steps 60]. Two real nodes on one
machine; the adapters, of rank 16 and for all linear layers, lie on one's disk, and requests go to
the other. A *cold* request is the first with its adapter there, a *warm* one the second. Then, in
one engine, the decode step of 8 sequences: without adapters, with one, and with 8 different ones.
Bar: a cold request takes 50 ms more until its first token than a warm one (median).
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar
from services.local.cluster import Cluster, ClusterSpec, bus_config, node_id
from services.local.credentials import User
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import import_model
from services.local.watch import Watch
from services.node.checkpoints.adapter import TARGETS
from services.node.checkpoints.store import Imported, Store
from services.node.engine.base import Draw, Row, StagePart
from services.node.engine.engine import TorchEngine
from shared import subjects
from shared.bus.base import On
from shared.bus.nats import NatsBus
from shared.ids import NO_ADAPTER, GatewayId, InstanceId, ModelId, ModelName, RequestId
from shared.messages import Ok
from shared.messages.instances import Stage
from shared.messages.pool import ModelRecord
from shared.messages.scaling import ImportModel
from shared.messages.serving import Sampling, Submit, Tokens
from shared.permissions import Role
from shared.pool_pages import read_pool

MODEL = CheckpointSpec(
    layers=8, hidden=1024, intermediate=2816, heads=16, kv_heads=8, vocab_size=4096,
    context_length=512,
)  # fmt: skip
NAME, GATEWAY = ModelName("base"), GatewayId("bench-adapters")
RANK, PROMPT, ROWS = 16, 32, 8
ADDED_S = 0.05
SETTINGS = {
    "LAMBDASCALE_NODE_THREADS": "1",
    "LAMBDASCALE_NODE_ARENA_BYTES": str(512 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
    "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
}
STEPS = ("no adapter", "one adapter", "8 adapters")


def make_adapter(path: Path, seed: int, base: Path) -> Path:
    """A random adapter of all linear layers, as PEFT saves it."""
    torch.manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            outputs, inputs = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.01
    path.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


# --- the first request ---


@dataclass
class Client:
    """Submits to the second node as a gateway does."""

    bus: NatsBus
    stage: Stage
    base: ModelId
    came: dict[RequestId, asyncio.Event] = field(default_factory=dict)

    async def take(self, message: Tokens) -> None:
        assert not message.failed, message.failed
        for token in message.tokens:
            self.came[token.request].set()

    async def first_token_s(self, adapter: ModelId) -> float:
        request = RequestId(f"r{len(self.came)}")
        came = self.came[request] = asyncio.Event()
        seed = len(self.came)
        submit = Submit(
            request=request, attempt=1, gateway=GATEWAY, model_id=self.base,
            instance=InstanceId("by-hand"), stages=(self.stage,),
            tokens=tuple((seed * 37 + 11 * i) % MODEL.vocab_size for i in range(PROMPT)),
            prompt_tokens=PROMPT, max_tokens=1, stop_ids=(), sampling=Sampling(), adapter=adapter,
        )  # fmt: skip
        to = subjects.node_adapted if adapter else subjects.node_submit
        began = time.monotonic()
        await self.bus.request(to(self.stage.node), submit, Ok, timeout=10.0)
        async with asyncio.timeout(10.0):
            await came.wait()
        return time.monotonic() - began


@asynccontextmanager
async def clients(
    folder: Path, adapters: list[Path]
) -> AsyncIterator[tuple[Client, list[ModelRecord]]]:
    cluster = Cluster(
        ClusterSpec(directory=folder / "cluster", nodes=2, gateway_port=0, settings=SETTINGS)
    )
    await cluster.start(print)
    try:
        async with NatsBus(bus_config(cluster.state), "bench") as bus:
            watch = Watch()
            await watch.follow(bus)
            add = partial(import_model, bus, say=lambda _: None)
            base = await add(ImportModel(path=str(folder / "base"), name=NAME, min_instances=2))
            records = [
                await add(ImportModel(path=str(path), name=ModelName(path.name), base=NAME))
                for path in adapters
            ]
            while len(watch.replicas) < 2:
                await watch.change()
            pool = await read_pool(partial(bus.request, timeout=10.0))
            address = next(v.info.address for v in pool.nodes if v.info.node == node_id(1))
        as_gateway = bus_config(cluster.state, user=User(Role.GATEWAY))
        async with NatsBus(as_gateway, GATEWAY) as bus:
            client = Client(bus, Stage(node_id(1), address, 0, base.n_blocks), base.model_id)
            await bus.subscribe(subjects.gateway_tokens(GATEWAY), On(Tokens, client.take))
            yield client, records
    finally:
        await cluster.stop()


async def first_requests(folder: Path, adapters: list[Path]) -> Bar:
    times: dict[str, list[float]] = {"base": [], "cold": [], "warm": []}
    async with clients(folder, adapters) as (client, records):
        for record in records:
            for kind in ("base", "cold", "warm"):
                adapter = NO_ADAPTER if kind == "base" else record.model_id
                times[kind].append(await client.first_token_s(adapter))
    size = records[0].nbytes / 1e6
    for kind, found in times.items():
        print(f"{kind}: {median(found) * 1e3:.1f} ms (at most {max(found) * 1e3:.1f})")
    added = median(times["cold"]) - median(times["warm"])
    text = f"the first request of an adapter of {size:.1f} MB takes {added * 1e3:.1f} ms more"
    return Bar(f"{text} (bar {ADDED_S * 1e3:.0f})", added <= ADDED_S)


# --- a batch ---


def steps(folder: Path, adapters: list[Path], count: int) -> dict[str, float]:
    """Median seconds of a decode step of ROWS sequences."""
    store = Store(folder / "store")
    base = store.import_checkpoint(folder / "base")
    engine = TorchEngine("cpu", ROWS * len(STEPS) * MODEL.context_length, threads=1)
    engine.open_model(base.model_id, base.manifest)
    buffers = [whole(store, base, block) for block in range(base.manifest.n_blocks)]
    for block, buffer in enumerate(buffers):
        engine.attach(base.model_id, block, buffer)
    names = []
    for path in adapters[:ROWS]:
        found = store.import_adapter(path, base.model_id, base.manifest)
        adapter = engine.make_adapter(found.manifest)()(whole(store, found, 0))
        engine.use_adapter(found.model_id, adapter)
        engine.settle_adapter(adapter)
        names.append(found.model_id)
    chosen = {
        "no adapter": [NO_ADAPTER] * ROWS,
        "one adapter": [names[0]] * ROWS,
        "8 adapters": [names[i % len(names)] for i in range(ROWS)],
    }
    took: dict[str, list[float]] = {kind: [] for kind in STEPS}
    for step in range(count):
        for kind, owners in chosen.items():
            rows = tuple(
                Row(
                    f"{kind} {i}", step, 1, MODEL.context_length, (step + i,),
                    Draw(step, Sampling()), adapter=owner,
                )
                for i, owner in enumerate(owners)
            )  # fmt: skip
            sweep = engine.begin(base.model_id)
            began = time.perf_counter()
            sweep.join(StagePart(0, base.manifest.n_blocks, rows))
            while not sweep.advance():
                pass
            took[kind].append(time.perf_counter() - began)
    return {kind: median(found) for kind, found in took.items()}


def whole(store: Store, imported: Imported, block: int) -> memoryview:
    buffer = memoryview(bytearray(imported.manifest.blocks[block].nbytes))
    store.fill(imported.model_id, block, buffer)
    return buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_checkpoint(folder / "base", MODEL)
        adapters = [
            make_adapter(folder / f"adapter-{i}", i, folder / "base") for i in range(args.adapters)
        ]
        found = steps(folder, adapters, args.steps)
        for kind, seconds in found.items():
            more = seconds / found[STEPS[0]] - 1
            print(f"a step of {ROWS} rows, {kind}: {seconds * 1e3:.2f} ms ({more:+.1%})")
        print(asyncio.run(first_requests(folder, adapters)))


if __name__ == "__main__":
    main()
