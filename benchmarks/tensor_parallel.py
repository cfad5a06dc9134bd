"""How fast several processes decode one sequence together: two ranks on two cores over one core,
beside two threads of one process, and beside what the memory gives two cores over one.

    python -m benchmarks.tensor_parallel [--rounds 9] [--steps 24] [--dtype float32]

The model is that of `bench engine`. All sides take turns in every round, so that a drift of the
machine affects all alike; ratios are taken within a round. Medians are printed, with the range of
the middle half.
"""

import argparse
import tempfile
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
from services.node.checkpoints.store import Store

BAR = 1.6
"""Times the rate of one core that two ranks should reach, or what the memory allows."""
PROMPT = tuple(range(3, 67))
MODEL = Settings(
    layers=12, hidden=768, vocab=32_000, dtypes=(), batch=1, prompt=len(PROMPT), tokens=0, rounds=1,
    threads=0, peer=False,
)  # fmt: skip


def sides(folder: Path, dtype: str, steps: int) -> dict[str, Callable[[], float]]:
    """Functions that measure: tokens/s, or bytes/s."""
    make_checkpoint(folder / "model", replace(spec(MODEL), dtype=getattr(torch, dtype)))
    store = Store(folder / "store")
    imported = store.import_checkpoint(folder / "model")

    def decoder(threads: int, degree: int) -> Callable[[], float]:
        ours = Ours(store, imported, slots=1, threads=threads, tensor_parallel=degree)
        own = threads // degree

        def rate() -> float:
            torch.set_num_threads(own)
            return 1 / median(ours.decode([PROMPT], steps))

        return rate

    def reader(threads: int) -> Callable[[], float]:
        torch.set_num_threads(threads)
        return Memory().measure

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
    for side in measured:
        unit, scale = ("GB/s", 1e-9) if side.startswith("memory") else ("tokens/s", 1)
        print(f"{side}: {_middle([scale * each[side] for each in rounds])} {unit}")
    limit = [each["memory, two cores"] / each["memory, one core"] for each in rounds]
    for side in ("two ranks", "two threads"):
        ratios = [each[side] / each["one core"] for each in rounds]
        met = "met" if median(ratios) >= min(BAR, median(limit)) else "not met"
        bar = f"; bar {BAR} or the memory's: {met}" if side == "two ranks" else ""
        print(f"{side} over one core: {_middle(ratios)} x{bar}")
    print(f"memory: two cores over one: {_middle(limit)} x")


def _middle(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else 3 * values
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
