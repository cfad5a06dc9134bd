"""How fast several processes decode one sequence together: two ranks on two cores over one core,
beside two threads of one process, and beside what the memory gives two cores over one.

    python -m benchmarks.tensor_parallel [--rounds 9] [--steps 24] [--dtype float32]

What `node.tensor_parallel = "auto"` expects of it, and would choose, is printed first.

The model is that of `bench engine`. All sides take turns in every round, so that a drift of the
machine affects all alike; ratios are taken within a round. Medians are printed, with the range of
the middle half; then the fastest step of all rounds, which other programs disturb least.
"""

import services.node  # isort: skip  # noqa: F401 - before torch: threads wait as a node's do

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.engine.bench import spec
from benchmarks.engine.memory import Memory
from benchmarks.engine.ours import Ours
from benchmarks.engine.results import Settings
from benchmarks.machine import machine
from services.local.demo_model import make_checkpoint
from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import ModelConfig
from services.node.checkpoints.store import Imported, Store
from services.node.engine.huge_pages import HugePages
from services.node.engine.ops import TorchOps
from services.node.engine.rehearsal import measure
from services.node.engine.share import WHOLE, Share
from services.node.engine.weights import DecoderTensors

BAR = 1.6
"""Times the rate of one core that two ranks should reach, or what the memory allows."""
PACKINGS = 15
PROMPT = tuple(range(3, 67))
MODEL = Settings(
    layers=12, hidden=768, vocab=32_000, dtypes=(), batch=1, prompt=len(PROMPT), tokens=0, rounds=1,
    threads=0, peer=False,
)  # fmt: skip


Measure = Callable[[], tuple[float, float]]
"""Returns a rate and the highest rate: tokens/s, or bytes/s."""


def packing(store: Store, imported: Imported) -> str:
    """How long one core takes to pack a layer, whole and the half of either rank."""
    torch.set_num_threads(1)
    config, spec = read_config(imported.manifest.config), imported.manifest.blocks[1]
    assert isinstance(config, ModelConfig)
    block = bytearray(spec.nbytes)
    store.fill(imported.model_id, spec.index, memoryview(block))

    def milliseconds(share: Share) -> float:
        times = []
        for _ in range(1 + PACKINGS):
            pages = HugePages(spec.nbytes)
            began = time.perf_counter()
            tensors = DecoderTensors(
                spec, memoryview(block), "packed", TorchOps().silu_times, pages, share
            )
            tensors.unit(config, spec.first_unit)
            times.append(time.perf_counter() - began)
        return min(times) * 1e3

    whole, *halves = (milliseconds(share) for share in (WHOLE, Share(0, 2), Share(1, 2)))
    return (
        f"packing a layer of {spec.nbytes >> 20} MiB: {whole:.1f} ms; its halves "
        f"{halves[0]:.1f} and {halves[1]:.1f} ms (the fastest of {PACKINGS})"
    )


def sides(folder: Path, dtype: str, steps: int) -> dict[str, Measure]:
    make_checkpoint(folder / "model", replace(spec(MODEL), dtype=getattr(torch, dtype)))
    store = Store(folder / "store")
    imported = store.import_checkpoint(folder / "model")
    print(packing(store, imported))
    auto = Ours(store, imported, slots=1, threads=2, tensor_parallel=2, measure=measure)
    print(f"node.tensor_parallel = auto, two cores: {auto.engine.division(auto.model)}")

    def decoder(threads: int, degree: int) -> Measure:
        ours = Ours(store, imported, slots=1, threads=threads, tensor_parallel=degree)
        own = threads // degree

        def rate() -> tuple[float, float]:
            torch.set_num_threads(own)
            seconds = ours.decode([PROMPT], steps)
            return 1 / median(seconds), 1 / min(seconds)

        return rate

    def reader(threads: int) -> Measure:
        torch.set_num_threads(threads)
        memory = Memory()
        return lambda: 2 * (memory.measure(),)

    return {
        "one core": decoder(1, 1),
        "two threads": decoder(2, 1),
        "two ranks": decoder(2, 2),
        "memory, one core": reader(1),
        "memory, two cores": reader(2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as folder:
        measured = sides(Path(folder), args.dtype, args.steps)
        for measure in measured.values():
            measure()
        rounds = [{k: measure() for k, measure in measured.items()} for _ in range(args.rounds)]
    print(f"{machine()}; {args.dtype}, batch 1, {args.rounds} rounds of {args.steps} steps")
    best: dict[str, float] = {}
    for side in measured:
        unit, scale = ("GB/s", 1e-9) if side.startswith("memory") else ("tokens/s", 1)
        best[side] = scale * max(fastest for _, fastest in (each[side] for each in rounds))
        rates = _middle([scale * each[side][0] for each in rounds])
        print(f"{side}: {rates} {unit}; fastest {best[side]:.2f}")

    def over(two: str, one: str) -> list[float]:
        ratios = [each[two][0] / each[one][0] for each in rounds]
        print(f"{two} over {one}: {_middle(ratios)} x; fastest {best[two] / best[one]:.2f} x")
        return ratios

    limit = median(over("memory, two cores", "memory, one core"))
    over("two threads", "one core")
    reached = median(over("two ranks", "one core"))
    met = "met" if reached >= min(BAR, limit) else "not met"
    print(f"bar, {BAR} x or what the memory gives ({limit:.2f} x): {met}")


def _middle(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else 3 * values
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
