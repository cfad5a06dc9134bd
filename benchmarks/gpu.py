"""The engine on a GPU, beside what the GPU can do and transformers, in one run. Weights are random,
of real shapes, made on the device.

    python -m benchmarks.gpu [--shape llama-3-8b] [--runs 7] [--no-peer] [--json]

Bars: decode of one sequence >= 0.75 of the rate at which memory is read; of 64 >= 3 x transformers;
prefill >= 0.55 of the largest matrix product's rate. How fast blocks come: benchmarks.device.
Needs a GPU; without one it says so and exits with 2. It has been run on a CPU only, with a tiny
shape, to see that it works.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from services.node.core.kv import whole_pages
from services.node.engine.base import Draw, Row, StagePart
from services.node.engine.engine import TorchEngine
from services.node.model.config import ModelConfig
from services.node.model.packing import UnitTensor, lay_out
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages.serving import Sampling

MODEL = ModelId("bench")
SHAPES: dict[str, dict[str, int]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
    },
}
CONTEXT = 4096
BATCH, BATCH_PROMPT = 64, 512
PROMPT = 2048
STEPS = 32
"""Decode steps of a run."""
READ_BYTES = 4 << 30
PRODUCT = 8192
CHUNK = 2048
"""Most positions of a prefill at a time."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    ours: float
    unit: str
    of: str = ""
    """What it is compared with."""
    other: float | None = None
    bar: float | None = None
    """Of `other`, at least."""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.other if self.other else None

    @property
    def met(self) -> bool:
        return self.bar is None or self.ratio is None or self.ratio >= self.bar


def raw_config(shape: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **shape,
    }


class Ours:
    """The engine with a model in bf16, driven sweep by sweep."""

    def __init__(self, shape: dict[str, int], device: torch.device) -> None:
        config = ModelConfig.from_hf(raw_config(shape))
        units = [
            [
                UnitTensor(name, config.dtype, size)
                for name, size in config.unit_tensors(unit).items()
            ]
            for unit in range(config.n_units)
        ]
        manifest = Manifest("LlamaForCausalLM", raw_config(shape), 1 << 22, lay_out(units))
        positions = CONTEXT + BATCH * whole_pages(BATCH_PROMPT + STEPS)
        self.engine = TorchEngine(str(device), positions, threads=0)
        self.engine.open_model(MODEL, manifest)
        for index, block in enumerate(manifest.blocks):
            values = torch.randn(-(-block.nbytes // 2), dtype=torch.bfloat16, device=device)
            self.engine.attach(MODEL, index, values.mul_(0.02).view(torch.uint8))
        for _ in self.engine.warm_up(MODEL):
            pass
        self.parameters = sum(t.nbytes for b in manifest.blocks for t in b.tensors) // 2
        self.read = 2 * (self.parameters - shape["vocab_size"] * shape["hidden_size"])
        """Bytes of weights that a decode step reads: all but the embedding's."""
        self.multiplied = self.read // 2 - shape["vocab_size"] * shape["hidden_size"]
        """Weights that each position of a prefill is multiplied with."""
        self._blocks, self._vocab = manifest.n_blocks, shape["vocab_size"]
        self._random = random.Random(0)

    def first(self, prompt: int) -> float:
        """Time to the first token of a prompt of so many, in seconds."""
        began = time.perf_counter()
        self._prefill("first", prompt)
        took = time.perf_counter() - began
        self.engine.free(("first",))
        return took

    def step(self, batch: int, prompt: int) -> float:
        """Median time of a decode step."""
        keys = [f"s{number}" for number in range(batch)]
        for key in keys:
            self._prefill(key, prompt)
        times = []
        for at in range(prompt, prompt + STEPS):
            began = time.perf_counter()
            self._sweep([self._row(key, at, 1, draw=True) for key in keys])
            times.append(time.perf_counter() - began)
        self.engine.free(tuple(keys))
        return median(times)

    def _prefill(self, key: str, prompt: int) -> None:
        for at in range(0, prompt, CHUNK):
            count = min(CHUNK, prompt - at)
            self._sweep([self._row(key, at, count, draw=at + count == prompt)])

    def _row(self, key: str, at: int, count: int, *, draw: bool) -> Row:
        tokens = tuple(self._random.choices(range(self._vocab), k=count))
        return Row(key, at, count, CONTEXT, tokens, Draw(0, Sampling()) if draw else None)

    def _sweep(self, rows: list[Row]) -> None:
        sweep = self.engine.begin(MODEL)
        number = sweep.join(StagePart(0, self._blocks, tuple(rows)))
        while number not in sweep.advance():
            pass
        if all(row.draw is None for row in rows):
            synchronize()


def peer_step(shape: dict[str, int], device: torch.device) -> float:
    """Median time of a decode step of transformers, of BATCH sequences."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**raw_config(shape))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(0, shape["vocab_size"], (BATCH, BATCH_PROMPT))
    times = []
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(STEPS):
            last = out.logits[:, -1].argmax(-1, keepdim=True)
            synchronize()
            began = time.perf_counter()
            out = model(last, past_key_values=out.past_key_values, use_cache=True)
            synchronize()
            times.append(time.perf_counter() - began)
    return median(times)


def memory_rate(device: torch.device, runs: int) -> float:
    """bytes/s that the GPU reads."""
    values = torch.ones(READ_BYTES // 2, dtype=torch.bfloat16, device=device)
    return READ_BYTES / fastest(values.sum, runs)


def product_rate(device: torch.device, runs: int) -> float:
    """FLOP/s of the largest product of bf16 matrices."""
    a, b = torch.randn(2, PRODUCT, PRODUCT, dtype=torch.bfloat16, device=device)
    return 2.0 * PRODUCT**3 / fastest(lambda: a @ b, runs)


def fastest(work: Callable[[], object], runs: int) -> float:
    """Seconds; the first run does not count."""
    times = []
    for _ in range(runs + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cases(shape: dict[str, int], device: torch.device, runs: int, *, peer: bool) -> Iterator[Case]:
    ours = Ours(shape, device)
    roofline = memory_rate(device, runs) / ours.read
    one = median(ours.step(1, PROMPT) for _ in range(runs))
    yield Case("decode, batch 1", 1 / one, "tokens/s", "the memory's rate", roofline, 0.75)
    first = median([ours.first(PROMPT) for _ in range(runs + 1)][1:])
    flops = 2.0 * ours.multiplied * PROMPT / first
    peak = product_rate(device, runs)
    yield Case("prefill", flops / 1e12, "TFLOP/s", "a large product", peak / 1e12, 0.55)
    yield Case(f"TTFT, a prompt of {PROMPT} tokens", first * 1e3, "ms")
    many = median(ours.step(BATCH, BATCH_PROMPT) for _ in range(max(1, runs // 3)))
    ours.engine.close_model(MODEL)
    del ours
    theirs = BATCH / peer_step(shape, device) if peer else None
    yield Case(f"decode, batch {BATCH}", BATCH / many, "tokens/s", "transformers", theirs, 3.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; torch finds none here", file=sys.stderr)
        return 2
    device = torch.device("cuda:0")
    shape = SHAPES[arguments.shape]
    found = list(cases(shape, device, arguments.runs, peer=not arguments.no_peer))
    if arguments.json:
        rows = [
            {
                "case": f"{case.name}, {arguments.shape}",
                "device": torch.cuda.get_device_name(device),
                "ours": case.ours,
                "peer": case.other if case.of == "transformers" else None,
                "unit": case.unit,
                "ratio": case.ratio if case.of == "transformers" else None,
                "limit": case.other if case.of != "transformers" else None,
                "of_limit": case.ratio if case.of != "transformers" else None,
            }
            for case in found
        ]
        print(json.dumps({"rows": rows}))
    else:
        print(f"{torch.cuda.get_device_name(device)}, {arguments.shape}, bf16")
        for case in found:
            ratio = "" if case.ratio is None else f"   {case.ratio:.2f} of {case.of}"
            print(f"{case.name:<32} {case.ours:10.1f} {case.unit}{ratio}")
    return 0 if all(case.met for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
