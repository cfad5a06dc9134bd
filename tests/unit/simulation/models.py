"""A small model on hardware with round numbers, for the tests of this folder."""

from collections.abc import Sequence

import torch

from services.node.engine.base import Draw, PartResult, Row, StagePart
from shared.layout import Manifest, model_id
from shared.messages.serving import Sampling
from simulation.engine import ModelledEngine
from simulation.hardware import Hardware
from simulation.models import Model, block_content, modelled_manifest

MODEL = Model(
    name="small",
    architecture="LlamaForCausalLM",
    layers=10,
    hidden=64,
    intermediate=192,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=1000,
    context=4096,
    dtype="float16",
)
BLOCKS = 6
"""Two units each."""
MANIFEST = modelled_manifest(MODEL, blocks=BLOCKS, unit=64)
ID = model_id(MANIFEST)
HARDWARE = Hardware(
    name="round",
    memory_bytes=1e6,
    hbm_bytes_per_s=2e6,
    mbu=0.5,
    flops=2e9,
    mfu=0.5,
    sweep_overhead_s=0.5,
    layer_overhead_s=0.001,
    pcie_bytes_per_s=1e5,
    nic_bytes_per_s=1e5,
    nic_efficiency=1.0,
    alpha_s=0.001,
    ssd_bytes_per_s=1e4,
    host_bytes=1e6,
    nvlink_bytes_per_s=0.0,
)


def buffer(block: int, manifest: Manifest = MANIFEST) -> memoryview:
    return memoryview(bytearray(block_content(manifest, block)))


def engine(
    start: int = 0, stop: int = BLOCKS, *, kv_tokens: int = 1000, hardware: Hardware = HARDWARE
) -> ModelledEngine:
    """One that holds blocks start <= block < stop."""
    made = ModelledEngine(hardware, kv_tokens)
    made.open_model(ID, MANIFEST)
    for block in range(start, stop):
        made.attach(ID, block, buffer(block))
    return made


def row(key: str, position: int, count: int, *, limit: int = 50, draw: int | None = None) -> Row:
    """A row of tokens, as a part that begins at block 0 has it."""
    what = None if draw is None else Draw(draw, Sampling())
    return Row(key, position, count, limit, (0,) * count, what)


def part(rows: Sequence[Row], start: int = 0, stop: int = BLOCKS) -> StagePart:
    if start == 0:
        return StagePart(start, stop, tuple(rows))
    bare = tuple(Row(r.sequence, r.position, r.count, r.limit, (), r.draw) for r in rows)
    n = sum(r.count for r in rows)
    return StagePart(start, stop, bare, torch.zeros(n, MODEL.hidden, dtype=torch.float16))


def run(on: ModelledEngine, *parts: StagePart) -> tuple[list[PartResult], float]:
    """Runs the parts in one sweep. Returns what came of each, and the seconds that it took."""
    sweep = on.begin(ID)
    numbers = [sweep.join(one) for one in parts]
    left: dict[int, PartResult] = {}
    while len(left) < len(parts):
        left |= sweep.advance()
    return [left[number] for number in numbers], sweep.due_s
