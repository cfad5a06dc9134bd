"""Decode steps of the engine: one sweep for many paths against a run each, and transformers.

Run: .venv/bin/python -m benchmarks.engine (one thread; CPU time, least of ROUNDS). The model is the
demo's (14 layers of 256, fp32). The peer, transformers' own decoding of the same checkpoint, is
left out, and said to be, where the tests' requirements are not installed.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from services.cli.demo_model import make_demo_model
from services.node.engine.base import Draw, Row, StagePart
from services.node.engine.engine import TorchEngine
from services.node.model.store import Imported, Store
from shared.messages.serving import Sampling

PROMPT = 128
LIMIT = 512
ROUNDS = 40
RANGES = (0, 2, 5, 9)
Ride = tuple[int, Sequence[str]]
"""(first block, sequences): the rows of one stage that goes on to the head."""


class Bench:
    def __init__(self, imported: Imported, store: Store) -> None:
        self.engine = TorchEngine("cpu", 32768, threads=1)
        self.model = imported.model_id
        self.blocks = imported.manifest.n_blocks
        self.width = int(imported.manifest.config["hidden_size"])
        self.engine.open_model(self.model, imported.manifest)
        for index, block in enumerate(imported.manifest.blocks):
            buffer = memoryview(bytearray(block.nbytes))
            store.fill(self.model, index, buffer)
            self.engine.attach(self.model, index, buffer)
        self.positions: dict[str, int] = {}

    def part(self, ride: Ride, count: int) -> StagePart:
        start, keys = ride
        tokens = (7,) * count if start == 0 else ()
        rows = tuple(
            Row(key, self.positions.get(key, 0), count, LIMIT, tokens, Draw(0, Sampling()))
            for key in keys
        )
        for key in keys:
            self.positions[key] = self.positions.get(key, 0) + count
        hidden = torch.randn(len(keys) * count, self.width) if start else None
        return StagePart(start, self.blocks, rows, hidden)

    def sweep(self, rides: Sequence[Ride], count: int) -> None:
        sweep = self.engine.begin(self.model)
        left = {sweep.join(self.part(ride, count)) for ride in rides}
        while left:
            left -= sweep.advance().keys()

    def step_ms(self, sweeps: Sequence[Sequence[Ride]]) -> float:
        """Least CPU time of a decode step of all `sweeps`, one after the other."""
        for rides in sweeps:
            self.sweep(rides, PROMPT)

        def step() -> None:
            for rides in sweeps:
                self.sweep(rides, 1)

        took = least_ms(step)
        self.engine.free(tuple(self.positions))
        self.positions.clear()
        return took


def least_ms(step: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        step()
        times.append(time.process_time() - started)
    return min(times) * 1e3


def peer_ms(checkpoint: Path, rows: int) -> float:
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.full((rows, PROMPT), 7), past_key_values=cache, use_cache=True)
        token = torch.full((rows, 1), 7)
        return least_ms(lambda: model(token, past_key_values=cache, use_cache=True))


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_demo_model(checkpoint)
        store = Store(Path(directory) / "store")
        bench = Bench(store.import_checkpoint(checkpoint), store)
        has_peer = importlib.util.find_spec("transformers") is not None
        for rows in (1, 8):
            ours = bench.step_ms([[(0, [f"s{i}" for i in range(rows)])]])
            print(f"decode, {rows} rows: {ours:5.1f} ms", end="")
            peer = peer_ms(checkpoint, rows) if has_peer else None
            print(f"; transformers {peer:.1f} ms, {peer / ours:.2f} x" if peer else "; no peer")
        rides: list[Ride] = [(start, [f"{start}-{i}" for i in range(6)]) for start in RANGES]
        together = bench.step_ms([rides])
        apart = bench.step_ms([[ride] for ride in rides])
        same = bench.step_ms([[(0, [f"s{i}" for i in range(24)])]])
        print(f"24 rows of four ranges, one sweep: {together:5.1f} ms")
        print(f"  as four runs: {apart:.1f} ms, {apart / together:.2f} x")
        print(f"  24 rows of one range: {same:.1f} ms, {same / together:.2f} x")


if __name__ == "__main__":
    main()
