"""The engine with a model whose weights are random and made on the device, sweep by sweep."""

import random
import time
from collections.abc import Iterator
from statistics import median

import msgspec
import torch

from benchmarks.gpu.scale import Sizes, raw_config, scale_of
from services.node.checkpoints.config import ModelConfig
from services.node.checkpoints.packing import UnitTensor, lay_out
from services.node.core.kv import whole_pages
from services.node.core.microbatches import Forward, Path
from services.node.engine.base import Draw, Row, StagePart
from services.node.engine.bell import Bell
from services.node.engine.budget import KvBudget
from services.node.engine.engine import TorchEngine
from services.node.execution import activations
from services.node.execution.sweeps import AT_ONCE_S
from shared.ids import ModelId, NodeId
from shared.layout import Manifest
from shared.messages.instances import Stage
from shared.messages.serving import Sampling

MODEL = ModelId("bench")
CHUNK = 2048
"""The most positions of a prefill at a time."""
GREEDY = Sampling()
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=1)


class Ours:
    def __init__(self, name: str, device: torch.device) -> None:
        """`name`: the name of the shape."""
        self._scale, raw = scale_of(name), raw_config(name)
        self._config = config = ModelConfig.from_hf(raw)
        units = [
            [
                UnitTensor(tensor, config.dtype, size)
                for tensor, size in config.unit_tensors(unit).items()
            ]
            for unit in range(config.n_units)
        ]
        manifest = Manifest("LlamaForCausalLM", raw, 1 << 22, lay_out(units))
        scale = self._scale
        each = whole_pages(scale.batch_prompt + scale.steps)
        # Sequences that are divided into two stages have pages for each stage.
        positions = 2 * (scale.context + scale.batch * each)
        room = KvBudget(positions * Sizes(config).position)
        self.engine = TorchEngine(str(device), room, threads=0)
        self.engine.open_model(MODEL, manifest)
        for index, block in enumerate(manifest.blocks):
            values = torch.randn(-(-block.nbytes // 2), dtype=torch.bfloat16, device=device)
            self.engine.attach(MODEL, index, values.mul_(0.02).view(torch.uint8))
        self._blocks, self._vocab = manifest.n_blocks, config.vocab_size
        self._random = random.Random(0)
        self._bell = Bell()

    def warm_up(self) -> float:
        """Seconds of the warm-up."""
        began = time.perf_counter()
        for _ in self.engine.warm_up(MODEL):
            pass
        synchronize()
        return time.perf_counter() - began

    def first(self) -> float:
        """Seconds to the first token of a prompt."""
        began = time.perf_counter()
        self._prefill("first", self._scale.prompt, self._blocks)
        took = time.perf_counter() - began
        self.engine.free(("first",))
        return took

    def step(self, batch: int, prompt: int, sampling: Sampling = GREEDY, cut: int = 0) -> float:
        """Median seconds of a decode step. `cut`: divides the model into two stages, the second
        from this block on, with everything that one stage tells the other except the transport."""
        keys = [f"s{number}" for number in range(batch)]
        for key in keys:
            self._prefill(key, prompt, cut or self._blocks)
        times = []
        for at in range(prompt, prompt + self._scale.steps):
            draw = Draw(at - prompt, sampling)
            rows = [self._row(key, at, 1, draw) for key in keys]
            began = time.perf_counter()
            self._run(rows, cut or self._blocks)
            times.append(time.perf_counter() - began)
        self.engine.free((*keys, *map(_second, keys)))
        return median(times)

    @property
    def half(self) -> int:
        """The block in the middle."""
        return self._blocks // 2

    def _prefill(self, key: str, prompt: int, cut: int) -> None:
        for at in range(0, prompt, CHUNK):
            count = min(CHUNK, prompt - at)
            ends = at + count == prompt
            self._run([self._row(key, at, count, Draw(0, GREEDY) if ends else None)], cut)

    def _row(self, key: str, at: int, count: int, draw: Draw | None) -> Row:
        tokens = tuple(self._random.choices(range(self._vocab), k=count))
        return Row(key, at, count, self._scale.context, tokens, draw)

    def _run(self, rows: list[Row], cut: int) -> None:
        """Runs the blocks before `cut`, then the others if there are any."""
        hidden = self._sweep(StagePart(0, cut, tuple(rows)))
        if cut == self._blocks:
            return
        stages = (
            Stage(NodeId("a"), "tcp://a:1", 0, cut),
            Stage(NodeId("b"), "tcp://b:1", cut, self._blocks),
        )
        later = tuple(
            msgspec.structs.replace(row, sequence=_second(row.sequence), tokens=()) for row in rows
        )
        message = Forward(Path(MODEL, stages), 1, 0, later)
        header, (payload,) = activations.encode(message, hidden)
        received = memoryview(bytearray(payload))
        told, hidden, _ = activations.decode(memoryview(header), received)
        assert isinstance(told, Forward)
        self._sweep(StagePart(cut, self._blocks, told.rows, hidden))

    def _sweep(self, part: StagePart) -> torch.Tensor | None:
        sweep = self.engine.begin(MODEL)
        number = sweep.join(part)
        while number not in (left := sweep.advance(AT_ONCE_S, self._bell)):
            pass
        if all(row.draw is None for row in part.rows):
            synchronize()
        return left[number].hidden


def _second(key: str) -> str:
    return f"{key} at the second stage"


def figures(name: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    """Seconds, by name."""
    scale, ours = scale_of(name), Ours(name, torch.device(device))
    many = max(1, runs // 3)

    def one(cut: int = 0) -> float:
        return median(ours.step(1, scale.prompt, cut=cut) for _ in range(runs))

    def batch(sampling: Sampling = GREEDY, cut: int = 0) -> float:
        measured = (ours.step(scale.batch, scale.batch_prompt, sampling, cut) for _ in range(many))
        return median(measured)

    yield "warm-up", ours.warm_up()
    yield "decode one", one()
    yield "first token", median([ours.first() for _ in range(runs + 1)][1:])
    yield "decode many", batch()
    yield "draw many", batch(DRAWN)
    yield "decode one, two stages", one(ours.half)
    yield "decode many, two stages", batch(cut=ours.half)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
