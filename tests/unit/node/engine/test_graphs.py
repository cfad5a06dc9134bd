"""Decode steps in the buffers that CUDA graphs need: the same tokens as without.

Nothing is recorded here: the tests' capture repeats the work itself. That shows that a repetition
needs nothing but those buffers' contents, not that CUDA can record it (tests/gpu has that).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: its kernels are not tested")

from services.node.engine import warmup
from services.node.engine.base import Row
from services.node.engine.engine import TorchEngine
from services.node.engine.graphs import BATCHES, Replay
from tests.unit.node.engine.models import MODEL, Model, make_model, part, row, run

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's kernels are compiled here: see tests/gpu"
)
LAYERS = 2
"""Each in a block of its own. The interpreter is slow."""


@dataclass
class Recorder:
    """Repeats the work itself."""

    recorded: int = 0
    repeated: int = 0

    def __call__(self, work: Callable[[], None]) -> Replay:
        self.recorded += 1

        def replay() -> None:
            self.repeated += 1
            work()

        return replay


@pytest.fixture(scope="module")
def small() -> Model:
    return make_model(num_hidden_layers=LAYERS)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def fused(model: Model, recorder: Recorder, kv_tokens: int = 512) -> TorchEngine:
    """All of the model, with the kernels for GPUs."""
    engine = TorchEngine("cpu", kv_tokens, threads=1, capture=recorder)
    engine.open_model(MODEL, model.manifest)
    for block, buffer in enumerate(model.buffers):
        engine.attach(MODEL, block, memoryview(buffer))
    return engine


class Requests:
    """Greedy, each from a prompt of its own; run on two engines alike."""

    def __init__(self, model: Model, *engines: TorchEngine) -> None:
        self._model, self._engines = model, engines
        self._tokens: dict[str, list[int]] = {}
        self._done: dict[str, int] = {}

    def start(self, key: str, prompt: list[int]) -> None:
        self._tokens[key], self._done[key] = prompt, 0

    def step(self, *keys: str) -> None:
        """One sweep over what is new of these; all engines draw the same."""
        rows = [self._row(key) for key in keys]
        stage = part(rows, 0, self._model.n_blocks)
        first, *others = (run(engine, stage).sampled for engine in self._engines)
        assert all(other == first for other in others)
        for one, (token,) in zip(rows, first, strict=True):
            self._done[one.sequence] += one.count
            self._tokens[one.sequence].append(token)

    def end(self, *keys: str) -> None:
        for engine in self._engines:
            engine.free(keys)

    def _row(self, key: str) -> Row:
        tokens, done = self._tokens[key], self._done[key]
        return row(key, done, tokens[done:], draw=0)


def test_batches_that_grow_and_shrink(small: Model, recorder: Recorder) -> None:
    """Smaller steps follow larger ones, and pages change hands: what is left in the buffers of
    earlier steps does no harm. Pages are 16 positions; some sequences come to a new one."""
    engine = fused(small, recorder)
    requests = Requests(small, small.engine(kv_tokens=512), engine)
    rng = random.Random(3)
    for number, length in enumerate((14, 3, 30, 1, 16)):
        requests.start(f"s{number}", rng.choices(range(96), k=length))
        requests.step(f"s{number}")
    for keys in ("01234", "01234", "10", "3", "4210", "013"):
        requests.step(*(f"s{key}" for key in keys))
    requests.end("s0", "s2")
    requests.start("new", rng.choices(range(96), k=40))
    requests.step("new", "s1")  # a prefill among them: not graphed
    requests.step("new", "s3", "s1")
    requests.step("s1")
    assert recorded(recorder) == (4 * LAYERS, 5 * LAYERS)  # of 1, 2, 4 and 8 sequences


def recorded(recorder: Recorder) -> tuple[int, int]:
    return recorder.recorded, recorder.repeated


def test_mixtures_of_experts(recorder: Recorder) -> None:
    """Rows that only pad go to experts, too, and to nobody else's harm."""
    model = make_model(
        model_type="qwen3_moe",
        num_hidden_layers=LAYERS,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        mlp_only_layers=[1],
    )
    requests = Requests(model, model.engine(kv_tokens=512), fused(model, recorder))
    for number in range(3):
        requests.start(f"s{number}", [number + 1, 7, 5 * number])
        requests.step(f"s{number}")
    for keys in ("012", "012", "20", "1"):
        requests.step(*(f"s{key}" for key in keys))
    assert recorded(recorder) == (3 * LAYERS, LAYERS)  # of 4, 2 and 1 sequences


def test_a_sequence_that_leaves_between_two_blocks(small: Model, recorder: Recorder) -> None:
    """The others go on, in a step of another size, where they were."""
    engine, plain = fused(small, recorder), small.engine(kv_tokens=512)
    requests = Requests(small, plain, engine)
    for key in ("a", "b", "c"):
        requests.start(key, [ord(key) % 90, 5, 7])
        requests.step(key)
    sampled = []
    for each in (plain, engine):
        sweep = each.begin(MODEL)
        numbers = [
            sweep.join(part([row(key, 3, [11], draw=0)], 0, small.n_blocks)) for key in ("a", "b")
        ]
        sweep.advance()
        sweep.advance()
        each.free(("a",))
        left = sweep.advance()
        while numbers[1] not in left:
            left |= sweep.advance()
        sampled.append(left[numbers[1]].sampled)
    assert sampled[0] == sampled[1]
    requests.end("a", "b", "c")


def test_hidden_states_handed_on_are_the_stage_s_own(small: Model, recorder: Recorder) -> None:
    """The next step does not change what the last one gave."""
    engine = fused(small, recorder)
    stage = part([row("s", 0, [1])], 0, 2)
    first = run(engine, stage).hidden
    assert first is not None
    before = first.clone()
    run(engine, part([row("s", 1, [2])], 0, 2))
    assert torch.equal(first, before)


def test_a_warm_up_records_all_that_is_attached(small: Model, recorder: Recorder) -> None:
    """And what comes later as it comes; the first step has nothing to record."""
    engine = TorchEngine("cpu", 512, threads=1, capture=recorder)
    engine.open_model(MODEL, small.manifest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "BATCHES", ((1, 1),))
        list(engine.warm_up(MODEL))
    assert recorder.recorded == 0
    for block, buffer in enumerate(small.buffers):
        engine.attach(MODEL, block, memoryview(buffer))
    assert recorder.recorded == LAYERS * len(BATCHES)
    requests = Requests(small, small.engine(kv_tokens=512), engine)
    requests.start("s", [4])
    requests.step("s")
    requests.step("s")
    assert recorded(recorder) == (LAYERS * len(BATCHES), LAYERS * 2)


def test_weights_that_moved_are_recorded_anew(small: Model, recorder: Recorder) -> None:
    engine = fused(small, recorder)
    plain = small.engine(kv_tokens=512)
    requests = Requests(small, plain, engine)
    requests.start("s", [4])
    requests.step("s")
    old = bytearray(small.buffers[1])
    requests.step("s")
    for each in (plain, engine):
        moved = bytearray(old)
        each.attach(MODEL, 1, memoryview(moved))
    requests.step("s")
    assert recorded(recorder) == (LAYERS + 1, LAYERS + 1)
