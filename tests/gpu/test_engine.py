"""The engine on a GPU, and a node around it.

The kernels beside the CPU's attention: tests/unit/node/engine/test_paged_attention.py, which is
compiled and run on the GPU where there is one.
"""

import random
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.local.demo_model import make_checkpoint
from services.node.core.kv import PAGE
from services.node.core.kv_host import ASSUMED_BYTES_PER_S, CopyRate
from services.node.engine.base import Draw, Row
from services.node.engine.budget import KvBudget
from services.node.engine.engine import TorchEngine
from services.node.engine.sampling import sample
from services.node.engine.warmup import RANDOM
from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from shared.messages.pool import Tier
from shared.messages.serving import Sampling
from tests.gpu import NEEDS_GPU
from tests.support.models import TINY
from tests.unit.node.cluster import ALL, nodes
from tests.unit.node.engine.conftest import Logits, logits
from tests.unit.node.engine.models import GREEDY, MODEL, Model, make_model, part, row, run
from tests.unit.node.engine.models import Path as Stages
from tests.unit.node.engine.test_encoder import expected_logits, image, make_vit
from tests.unit.node.engine.test_encoder import row as image_row

__all__ = ["logits"]  # a fixture

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")
FAMILIES: Sequence[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 1},
    {"model_type": "mistral", "sliding_window": 40},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 16},
    {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
    },
]


def on_gpu(model: Model, *, graphs: bool = True, kv_tokens: int = 4096) -> TorchEngine:
    """An engine with all of the model."""
    engine = TorchEngine("cuda:0", kv_tokens, threads=1)
    engine.open_model(MODEL, model.manifest)
    if not graphs:
        engine._models[MODEL] = replace(engine._models[MODEL], graphs=None)
    for block, buffer in enumerate(model.buffers):
        engine.attach(MODEL, block, torch.frombuffer(buffer, dtype=torch.uint8).to(CUDA))
    return engine


class Batch:
    """Requests on an engine."""

    def __init__(
        self,
        model: Model,
        engine: TorchEngine,
        prompts: Sequence[list[int]],
        sampling: Sampling = GREEDY,
    ) -> None:
        self._engine, self._blocks, self._sampling = engine, model.n_blocks, sampling
        self.tokens = [list(prompt) for prompt in prompts]
        self._done = [0] * len(prompts)

    def step(self, members: Sequence[int]) -> None:
        rows = [self._row(number) for number in members]
        sampled = run(self._engine, part(rows, 0, self._blocks)).sampled
        for number, one, (token,) in zip(members, rows, sampled, strict=True):
            self._done[number] += one.count
            self.tokens[number].append(token)

    def _row(self, number: int) -> Row:
        done = self._done[number]
        plain = row(f"s{number}", done, self.tokens[number][done:])
        return msgspec.structs.replace(plain, draw=Draw(done, self._sampling))


@pytest.mark.parametrize("changes", FAMILIES, ids=str)
def test_the_tokens_of_transformers(changes: dict[str, Any]) -> None:
    """fp32, greedy, a prompt of several pages, then decode steps as graphs."""
    model = make_model(seed=2, **changes)
    prompt = random.Random(1).choices(range(96), k=70)
    path = Stages(model)
    path.stages = [(on_gpu(model), 0, model.n_blocks)]
    assert path.generate(prompt, 128) == model.expected_tokens(prompt, 128)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float32", {}), ("float16", {}), ("bfloat16", {}), ("float32", FAMILIES[-1])],
    ids=str,
)
def test_graphs_give_what_launches_one_by_one_give(
    dtype: str, changes: dict[str, Any], logits: Logits
) -> None:
    """Batches of every size, that grow and shrink; some sequences come to new pages."""
    model = make_model(dtype=dtype, **changes)
    rng = random.Random(5)
    prompts = [rng.choices(range(96), k=rng.randint(1, 60)) for _ in range(70)]
    steps = [rng.sample(range(70), k=k) for k in (1, 70, 2, 64, 3, 33, 8, 5, 1, 16, 64)]
    seen = []
    for graphs in (True, False):
        batch = Batch(model, on_gpu(model, graphs=graphs, kv_tokens=8192), prompts)
        for number in range(70):
            batch.step([number])
        for members in steps:
            for number in members:  # one may be drawn otherwise where two were nearly tied
                batch.tokens[number][-1] = number
            batch.step(members)
        seen.append(logits.take())
    torch.testing.assert_close(*seen, atol=1e-4 if dtype == "float32" else 0.1, rtol=0.05)


def waits(work: Callable[[], object]) -> int:
    """How often the host waits for the GPU meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("changes", [{}, FAMILIES[-1]], ids=["dense", "experts"])
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "at random"])
def test_a_step_waits_for_its_tokens_alone(sampling: Sampling, changes: dict[str, Any]) -> None:
    model = make_model(dtype="bfloat16", **changes)
    batch = Batch(model, on_gpu(model), [[1, 2, 3], [4, 5], [6] * 40], sampling)
    for members in ([0, 1, 2], [0, 1, 2], [2]):
        batch.step(members)
    assert waits(lambda: batch.step([0, 1, 2])) == 1
    assert waits(lambda: batch.step([2])) == 1


def test_a_gpu_draws_what_a_cpu_does() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(70, 1000, generator=generator) * 3
    draws = [Draw(index, msgspec.structs.replace(RANDOM, seed=index % 7)) for index in range(70)]
    draws[::3] = [Draw(0, Sampling(temperature=1.3))] * 24
    assert sample(logits.to(CUDA), draws) == sample(logits, draws)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_classes_of_transformers(dtype: str, logits: Logits) -> None:
    """A whole classifier, after its warm-up, and over two stages."""
    model = make_vit(seed=3, dtype=dtype)
    engine = TorchEngine("cuda:0", 64, threads=1)
    engine.open_model(MODEL, model.manifest)
    for block, buffer in enumerate(model.buffers):
        engine.attach(MODEL, block, torch.frombuffer(buffer, dtype=torch.uint8).to(CUDA))
    assert len(list(engine.warm_up(MODEL))) == 4
    images = [image(seed) for seed in range(5)]
    rows = [image_row(f"s{number}", one) for number, one in enumerate(images)]
    run(engine, part(rows, 0, model.n_blocks))
    later = [msgspec.structs.replace(one, sequence=f"{one.sequence}, later") for one in rows]
    hidden = run(engine, part(later, 0, 3)).hidden
    later = [msgspec.structs.replace(one, tokens=(), image=b"") for one in later]
    engine.free(tuple(one.sequence for one in later))
    run(engine, part(later, 3, model.n_blocks, hidden))
    got, expected = logits.take().cpu(), expected_logits(model, images).repeat(2, 1)
    limit = 1e-4 if dtype == "float32" else 0.05
    assert (got - expected).abs().max() <= limit * expected.abs().max()


async def test_blocks_arrive_while_steps_are_under_way() -> None:
    """A copy that waits for the engine's stream would end after what was queued there before."""
    on_gpu(make_model())  # this thread computes on the engine's stream from now on
    assert torch.cuda.current_stream(CUDA) != torch.cuda.default_stream(CUDA)
    arena = Arena(64 << 20)
    block = arena.allocate(32 << 20).memory
    with DeviceArena(arena.memory, CUDA) as on_device:
        await on_device.upload(block)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: seconds
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record()
        await on_device.upload(block)
        assert not computed.query()  # type: ignore[no-untyped-call]
        computed.synchronize()


def test_graphs_are_recorded_while_another_thread_uses_cuda() -> None:
    model = make_model()
    engine = on_gpu(model)
    over = threading.Event()

    def copy() -> None:
        stream = torch.cuda.Stream(CUDA)  # type: ignore[no-untyped-call]
        while not over.is_set():
            with torch.cuda.stream(stream):
                torch.empty(1 << 20, pin_memory=True).to(CUDA, non_blocking=True)
            stream.synchronize()

    other = threading.Thread(target=copy)
    other.start()
    try:
        for _ in engine.warm_up(MODEL):
            pass
        for _ in range(20):
            for block, buffer in enumerate(model.buffers):
                engine.attach(MODEL, block, torch.frombuffer(buffer, dtype=torch.uint8).to(CUDA))
    finally:
        over.set()
        other.join()
    prompt = [9, 8, 7]
    path = Stages(model)
    path.stages = [(engine, 0, model.n_blocks)]
    assert path.generate(prompt, 20) == model.expected_tokens(prompt, 20)


@pytest.mark.parametrize("portion", [1, 1000])
def test_kv_comes_back_from_host_memory(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence's pages are taken by another, come back while a third decodes, and give the tokens
    of transformers."""
    monkeypatch.setattr(CopyRate, "portion", lambda *_: portion)
    model = make_model()
    prompts = [random.Random(seed).choices(range(96), k=100) for seed in range(2)]
    engine = TorchEngine("cuda:0", 20 * PAGE, threads=1, kv_host_bytes=1 << 24)
    engine.open_model(MODEL, model.manifest)
    for block, buffer in enumerate(model.buffers):
        engine.attach(MODEL, block, torch.frombuffer(buffer, dtype=torch.uint8).to(CUDA))
    decoding = Batch(model, engine, [[5, 6, 7]])
    decoding.step([0])
    for turn in range(6):
        prompt, key = prompts[turn % 2], f"turn {turn}"
        found = engine.adopt(MODEL, key, tuple(prompt), 512)
        if (there := engine.restorable(MODEL, key, tuple(prompt), 512)) and there.worth:
            more = True
            while more:
                found, more = engine.restore(key)
                decoding.step([0])
        (drawn,) = run(
            engine, part([row(key, found, prompt[found:], draw=0)], 0, model.n_blocks)
        ).sampled
        assert list(drawn) == model.expected_tokens(prompt, 1)
        engine.free((key,))
        hog = f"hog {turn}"
        tokens = random.Random(10 + turn).choices(range(96), k=17 * PAGE)
        run(engine, part([row(hog, 0, tokens, draw=0)], 0, model.n_blocks))
        engine.free((hog,))
    torch.cuda.synchronize()
    load = engine.host_tier
    assert load.saved > 0
    assert load.restored > 0
    said = decoding.tokens[0]
    assert said == [5, 6, 7, *model.expected_tokens([5, 6, 7], len(said) - 3)]
    assert engine._kv.host is not None
    engine._kv.host.copies.copy([])
    assert engine._kv.host.copies.rate.bytes_per_s != ASSUMED_BYTES_PER_S


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_warm_up_is_a_few_pieces_and_leaves_nothing(dtype: str) -> None:
    model = make_model(dtype=dtype)
    engine = TorchEngine("cuda:0", KvBudget(1 << 24), threads=1)
    engine.open_model(MODEL, model.manifest)
    before = torch.cuda.memory_allocated(CUDA)
    assert len(list(engine.warm_up(MODEL))) > 1
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated(CUDA) <= before
    engine.open_model(other := type(MODEL)("other"), model.manifest)
    pieces = engine.warm_up(other)
    next(pieces)
    engine.close_model(other)
    assert list(pieces) == []


def test_a_closed_model_leaves_no_graphs() -> None:
    model = make_model(dtype="bfloat16")
    taken = []
    for _ in range(3):
        engine = on_gpu(model)
        for _ in engine.warm_up(MODEL):
            pass
        engine.close_model(MODEL)
        torch._C._cuda_clearCublasWorkspaces()  # one a stream, and each engine has its own
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved(CUDA))
    assert taken[2] <= taken[1]


async def test_a_node_on_a_gpu_says_what_one_on_a_cpu_says(tmp_path: Path) -> None:
    """fp32, greedy, random weights: rounding does not decide the first tokens."""
    checkpoint = tmp_path / "tiny"
    make_checkpoint(checkpoint, TINY)
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        await up.start("b", device="cuda:0")
        assert up.info("b").staging == "CUDA IPC, else pinned host arena"
        await up.apply("b", dict.fromkeys(ALL, "a"), event="ev-2")
        await up.until_arrived("b", ALL)
        tokens = await up.generate("a", request="on a")
        assert await up.generate("b", request="on b") == tokens
        assert await up.generate("a", "b", request="on both") == tokens
        assert await up.generate("b", "a", request="the other way") == tokens
        await up.release("b", keep=Tier.HOST)
        await up.apply("b", {}, event="ev-3")
        await up.until_arrived("b", ALL, "ev-3")
        assert await up.generate("b", request="awake") == tokens
        await up.release("b")
        await up.nothing_leaked("b")
