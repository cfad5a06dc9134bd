"""Decoders that ranks on several devices run together: transformers' tokens.

The devices are CPUs here, and gloo sums for them: the same code as on GPUs but for NCCL, streams
and the kernels (tests/gpu/test_device_ranks.py).
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path as Folder
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.node.core.kv import PAGE
from services.node.engine import collective
from services.node.engine.budget import KvBudget
from services.node.engine.collective import Group
from services.node.engine.device_ranks import DeviceLeadDecoder, DeviceRanks, DeviceTeam
from services.node.engine.engine import TorchEngine
from services.node.engine.kv_memory import KvMemory
from services.node.engine.orders import TakeCache
from services.node.engine.sliced import Summed
from services.node.engine.weights import LayerUnit
from services.node.memory.arena import Arena
from shared.errors import (
    BadInput,
    CapacityExceeded,
    EngineFailed,
    LambdaScaleError,
    NotFound,
    UnsupportedModel,
)
from shared.ids import ModelId
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import MODEL, Model, Path, make_model, part, row, run, run_all
from tests.unit.node.engine.test_adapters import SPECS, Adapted
from tests.unit.node.engine.test_against_transformers import FORMS
from tests.unit.node.engine.test_ranks import FOUR_KV_HEADS, PROMPT, Divided

COUNT = 10
if TYPE_CHECKING:
    from services.node.engine.graphs import Capture  # which imports Triton

CPU = torch.device("cpu")
FAMILIES = (
    "gqa",
    "biases",
    "qwen2_tied",
    "qwen3_window_in_listed_layers",
    "qwen3_moe_mixed",
    "mixtral",
)
LIMIT_S = 60.0


class OnDevices(Divided):
    """An engine whose ranks have a device each."""

    def __init__(self, devices: Sequence[torch.device], capture: "Capture | None" = None) -> None:
        self.degree = len(devices)
        self._arena = Arena(64 << 20)
        self.device_ranks = DeviceRanks(devices, self._arena.memory)
        self.engine = TorchEngine(
            str(devices[0]),
            KvBudget(8 << 20),
            threads=1,
            cpu_weights="stored",
            capture=capture,
            ranks=self.device_ranks,
        )

    @contextmanager
    def hosting(
        self, name: ModelId, model: Model, order: Iterable[int] | None = None
    ) -> Iterator[None]:
        """In the context, the blocks lie in the arena and are attached, in this order."""
        spans = [self._arena.allocate(len(buffer)) for buffer in model.buffers]
        self.engine.open_model(name, model.manifest)
        for block in range(model.n_blocks) if order is None else order:
            spans[block].memory[:] = model.buffers[block]
            self.engine.attach(name, block, spans[block].memory)
        yield
        for span in spans:
            self._arena.free(span)


TWO = pytest.mark.parametrize("divided", [2], indirect=True)
"""Where four ranks would show nothing more."""


@pytest.fixture(scope="module", params=(2, 4))
def divided(request: pytest.FixtureRequest) -> Iterator[OnDevices]:
    made = OnDevices([CPU] * request.param)
    yield made
    made.device_ranks.close()


def check(path: Path, model: Model, prompt: list[int] = PROMPT, key: str = "s") -> None:
    """The tokens are those of transformers."""
    tokens = path.generate(prompt, COUNT, key)
    assert tokens == model.expected_tokens(prompt, COUNT, tokens)


def model_for(divided: OnDevices, form: str = "gqa", **changes: Any) -> Model:
    heads = {} if divided.degree == 2 else FOUR_KV_HEADS
    return make_model(seed=3, **{**FORMS[form], **heads, **changes})


@pytest.mark.parametrize("form", FAMILIES)
def test_the_tokens_of_transformers(divided: OnDevices, form: str) -> None:
    model = model_for(divided, form)
    with divided.holding(model) as path:
        check(path, model)


def test_each_rank_has_its_slice_alone(divided: OnDevices) -> None:
    """Also where sizes cannot be divided evenly: transformers' tokens show the others' slices."""
    sizes: dict[str, Any] = {"intermediate_size": 200, "vocab_size": 101, "head_dim": 12}
    model = model_for(divided, **sizes)
    with divided.holding(model) as path:
        network = divided.engine._models[MODEL].network
        assert isinstance(network, DeviceLeadDecoder)
        (layer,) = divided.engine._models[MODEL].layer_units(1)
        assert isinstance(layer, LayerUnit)
        assert isinstance(layer.o, Summed)
        heads, hidden = model.oracle.config.num_attention_heads // divided.degree, 32
        assert layer.o._own.weight.shape == (hidden, heads * 12)
        check(path, model)


@TWO
def test_logits_of_bf16(divided: OnDevices, logits: Logits) -> None:
    """As near to those of transformers in fp32 as one process's are."""
    model = model_for(divided, dtype="bfloat16")
    model.cpu_weights = "stored"
    with divided.holding(model) as path:
        path.run([row("s", 0, PROMPT, draw=0)])
    together = logits.take()
    Path(model).run([row("s", 0, PROMPT, draw=0)])
    torch.testing.assert_close(together, logits.take(), atol=0.2, rtol=0.02)


@TWO
def test_blocks_of_several_units_in_any_order(divided: OnDevices) -> None:
    model = model_for(divided, blocks=3)
    order = random.Random(1).sample(range(model.n_blocks), k=model.n_blocks)
    with divided.hosting(MODEL, model, order):
        path = Path.__new__(Path)
        path.stages = [(divided.engine, 0, model.n_blocks)]
        check(path, model)
        divided.engine.close_model(MODEL)


def test_a_path_over_nodes_of_one_and_of_several_devices(divided: OnDevices) -> None:
    model = model_for(divided)
    for cuts in ((2,), (1, 4)):
        bounds = (0, *cuts, model.n_blocks)
        for stage in range(len(bounds) - 1):
            path = Path(model, cuts)
            with divided.holding(model, *bounds[stage : stage + 2]) as one:
                path.stages[stage] = one.stages[0]
                check(path, model)


def test_batches_chunks_and_cached_prefixes(divided: OnDevices) -> None:
    model = model_for(divided)
    prompts = [PROMPT[:9], PROMPT[3:60], PROMPT[5:6]]
    with divided.holding(model) as path:
        engine, stop = divided.engine, model.n_blocks
        tokens = [list[int](), list[int](), list[int]()]
        for step in range(4):
            rows = [
                row(str(i), len(p) + step - 1 if step else 0, made[-1:] or p, draw=step)
                for i, (p, made) in enumerate(zip(prompts, tokens, strict=True))
            ]
            for made, drawn in zip(tokens, path.run(rows), strict=True):
                made += drawn
        for prompt, made in zip(prompts, tokens, strict=True):
            assert made == model.expected_tokens(prompt, 4)
        run_all(engine, [part([row("cut", 0, PROMPT[:20])], 0, stop)])
        last = run(engine, part([row("cut", 20, PROMPT[20:], draw=0)], 0, stop)).sampled[0]
        assert list(last) == model.expected_tokens(PROMPT, 1)
        whole = tuple(PROMPT[3:60])
        found = engine.adopt(MODEL, "again", whole, 512)
        assert found == len(whole) // PAGE * PAGE
        (again,) = path.run([row("again", found, list(whole[found:]), draw=0)])
        assert list(again) == model.expected_tokens(list(whole), 1)
        engine.free(("0", "1", "2", "cut", "again"))


@TWO
def test_pages_that_other_sequences_had(divided: OnDevices) -> None:
    """A sequence is preempted and begins again, in pages that are not empty."""
    model = model_for(divided)
    with divided.holding(model) as path:
        for key in ("a", "b", "c"):
            check(path, model, PROMPT[ord(key) % 3 :], key)
            if key != "a":
                divided.engine.free((key,))
        divided.engine.free(("a",))


def test_a_stage_that_runs_on_keeps_its_kv(divided: OnDevices) -> None:
    """A row of the first two layers' blocks goes on to the end: its pages move, at all ranks."""
    model = model_for(divided)
    with divided.holding(model) as path:
        first = run(divided.engine, part([row("s", 0, PROMPT)], 0, 3))
        assert divided.engine.kv_parts(MODEL, 0, 3) == 2
        rest = part([row("s", 0, PROMPT, draw=0)], 3, model.n_blocks, first.hidden)
        tokens = list(run(divided.engine, rest).sampled[0])
        position = len(PROMPT)
        for step in range(1, 5):
            ((token,),) = path.run([row("s", position, tokens[-1:], draw=step)])
            tokens.append(token)
            position += 1
        assert tokens == model.expected_tokens(PROMPT, 5, tokens)


@TWO
def test_models_come_sleep_and_go_in_the_middle_of_a_step(divided: OnDevices) -> None:
    model, other = model_for(divided), model_for(divided, "qwen2_tied")
    engine, name = divided.engine, ModelId("other")
    with divided.holding(model):
        sweep, tokens = engine.begin(MODEL), list[int]()
        with divided.hosting(name, other):
            sweep.join(part([row("s", 0, PROMPT, draw=0)], 0, model.n_blocks))
            for _ in range(2):  # the embedding, and a layer
                sweep.advance()
            engine.close_model(name, asleep=True)
        sweep.advance()
        with divided.hosting(name, other):
            while not tokens:
                for result in sweep.advance().values():
                    tokens += result.sampled[0]
            assert tokens == model.expected_tokens(PROMPT, 1)
            one = part([row("t", 0, PROMPT, draw=0)], 0, other.n_blocks)
            assert [*run(engine, one, name).sampled[0]] == other.expected_tokens(PROMPT, 1)
            engine.close_model(name)


@TWO
def test_slices_are_freed_when_a_model_sleeps(divided: OnDevices) -> None:
    """Each model has 28 MB at each rank."""
    model = make_model(hidden_size=256, intermediate_size=8192, num_hidden_layers=2)
    (rank,), held = divided.device_ranks.processes, list[int]()
    for name in map(ModelId, "abcd"):
        with divided.hosting(name, model):
            status = Folder(f"/proc/{rank}/status").read_text()
            held.append(int(status.partition("RssAnon:")[2].split()[0]) >> 10)
            divided.engine.close_model(name, asleep=True)
    assert held[-1] < held[0] + 30


@TWO
def test_a_warm_up_is_done_by_all_ranks(divided: OnDevices) -> None:
    """It may end early, and go on between the blocks of a step."""
    model = model_for(divided, "mixtral")
    with divided.holding(model) as path:
        network = divided.engine._models[MODEL].network
        assert isinstance(network, DeviceLeadDecoder)
        pieces = network.warm_up()
        for _ in range(3):
            next(pieces)
        sweep, tokens = divided.engine.begin(MODEL), list[int]()
        sweep.join(part([row("s", 0, PROMPT, draw=0)], 0, model.n_blocks))
        while not tokens:
            next(pieces, None)
            for result in sweep.advance().values():
                tokens += result.sampled[0]
        assert tokens == model.expected_tokens(PROMPT, 1)
        divided.engine.free(("s",))
        assert len([*pieces]) > 3
        assert path.generate(PROMPT, 2) == model.expected_tokens(PROMPT, 2)


@TWO
def test_what_another_sequence_left_does_no_harm(divided: OnDevices) -> None:
    """Not even if it is no number: pages are erased at all ranks."""
    model = model_for(divided)
    with divided.holding(model) as path:
        whole_pages = -(-len(PROMPT) // PAGE) * PAGE
        ill = torch.full((whole_pages, 32), torch.nan)
        run(divided.engine, part([row("ill", 0, [0] * whole_pages)], 1, model.n_blocks, ill))
        divided.engine.free(("ill",))
        check(path, model)


def test_rank_0_with_the_kernels_for_gpus() -> None:
    """In Triton's interpreter, while rank 1 has torch's operators: they do the same for their
    heads. It warms up with the others, and records no graphs."""
    pytest.importorskip("triton", reason="Triton is not installed here: its kernels are not tested")
    recorded: list[Any] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        recorded.append(work)
        return work

    made = OnDevices([CPU] * 2, record)
    model = make_model(seed=3, num_hidden_layers=2, **FORMS["mixtral"])
    with made.holding(model) as path:
        assert made.engine._models[MODEL].graphs is None
        next(made.engine.warm_up(MODEL))
        tokens = path.generate(PROMPT[:20], 3)
    assert tokens == model.expected_tokens(PROMPT[:20], 3, tokens)
    assert not recorded
    made.device_ranks.close()


# --- what it cannot do ---------------------------------------------------------


@TWO
def test_heads_that_cannot_be_divided_are_refused_by_name(divided: OnDevices) -> None:
    one = make_model(**FORMS["mqa"])
    why = f"node.tensor_parallel is {divided.degree}, which does not divide this model's 1 KV heads"
    with pytest.raises(UnsupportedModel, match=why):
        divided.engine.open_model(MODEL, one.manifest)
    with divided.holding(model_for(divided)) as path:  # the engine goes on
        path.generate(PROMPT, 2)


@TWO
def test_blocks_that_ranks_cannot_see_are_refused(divided: OnDevices) -> None:
    model = model_for(divided)
    with divided.holding(model, 0, 0), pytest.raises(BadInput, match="in the arena"):
        divided.engine.attach(MODEL, 0, memoryview(bytearray(model.buffers[0])))


@TWO
def test_no_room_for_kv_at_another_rank(divided: OnDevices) -> None:
    """It is told by name, and the next model opens."""
    model = model_for(divided)
    ranks = divided.device_ranks
    allocate, told = KvMemory.allocate, ranks.tell

    def telling(order: Any, *args: Any, **named: Any) -> None:
        told(TakeCache(1 << 60) if isinstance(order, TakeCache) else order, *args, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "tell", telling)
        with pytest.raises(CapacityExceeded, match=r"rank 1: .* on cpu: lower node.kv_bytes"):
            divided.engine.open_model(MODEL, model.manifest)

        def short(memory: KvMemory, nbytes: int) -> torch.Tensor:
            return allocate(memory, 1 << 60)

        patched.setattr(ranks, "tell", told)
        patched.setattr(KvMemory, "allocate", short)
        with pytest.raises(CapacityExceeded, match=r"be allocated: lower node.kv_bytes"):
            divided.engine.open_model(MODEL, model.manifest)
    with divided.holding(model) as path:
        assert path.generate(PROMPT, 2) == model.expected_tokens(PROMPT, 2)


@TWO
def test_kv_stays_where_it_is(divided: OnDevices) -> None:
    model = model_for(divided)
    with divided.holding(model) as path:
        path.run([row("s", 0, PROMPT, draw=0)])
        with pytest.raises(NotFound, match="lies on several devices"):
            divided.engine.lend("s", (0, model.n_blocks), 0, PAGE)


@TWO
def test_adapters_are_refused_by_name(divided: OnDevices, tmp_path: Folder) -> None:
    model = model_for(divided)
    with divided.holding(model):
        adapted = Adapted(tmp_path, model)
        with pytest.raises(UnsupportedModel, match="several GPUs run take no adapters"):
            adapted.add(divided.engine, SPECS["all"])


# --- what is lost ---------------------------------------------------------------


def until(true: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_rank_that_is_killed_in_a_step_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no step that follows gives anything out."""
    made = OnDevices([CPU] * 2)
    ranks, model = made.device_ranks, make_model()
    (rank,) = ranks.processes
    with made.hosting(MODEL, model):
        os.kill(rank, signal.SIGSTOP)

        def kill() -> None:
            time.sleep(0.2)  # or before, which does not matter: rank 0 waits for it in any case
            os.kill(rank, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineFailed, match="signal 9"):
            run(made.engine, part([row("s", 0, PROMPT, draw=0)], 0, model.n_blocks))
        killer.join()
        assert f"rank 1 (process {rank}) ended with signal 9" in ranks.broken
        with pytest.raises(EngineFailed, match="signal 9"):
            run(made.engine, part([row("t", 0, PROMPT, draw=0)], 0, model.n_blocks))

        # NCCL ends kernels that wait for a lost rank, and nothing is raised where they were begun.
        monkeypatch.setattr(ranks, "tell", lambda *_: None)
        monkeypatch.setattr(DeviceTeam, "check", lambda _: None)
        for name in ("sum", "hand_on"):
            monkeypatch.setattr(Group, name, lambda *_: None)
        monkeypatch.setattr(Group, "gather", lambda _, x: [x, x])
        for start, stop in ((0, 3), (0, model.n_blocks)):
            rows = [row(f"to {stop}", 0, PROMPT, draw=0)]
            with pytest.raises(EngineFailed, match="signal 9"):
                run(made.engine, part(rows, start, stop))
    ranks.close()


def test_ranks_that_are_out_of_step_are_given_up() -> None:
    """Rank 0 fails within a layer, so that the others wait for it."""
    made = OnDevices([CPU] * 2)
    ranks, model = made.device_ranks, make_model()
    with made.hosting(MODEL, model), pytest.MonkeyPatch.context() as patched:

        def fail(*_: Any) -> None:
            raise MemoryError("no room for the step")

        patched.setattr(Summed, "add", fail)
        with pytest.raises(EngineFailed, match="out of step: no room for the step"):
            run(made.engine, part([row("s", 0, PROMPT, draw=0)], 0, model.n_blocks))
    assert "out of step" in ranks.broken
    until(lambda: all(process.poll() is not None for process in ranks._processes))
    ranks.close()


def test_a_rank_that_ends_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    start = DeviceRanks._start

    def starting(self: DeviceRanks, *args: Any) -> None:
        start(self, *args)
        os.kill(self.processes[-1], signal.SIGKILL)

    monkeypatch.setattr(DeviceRanks, "_start", starting)
    with pytest.raises(EngineFailed, match="signal 9"):
        OnDevices([CPU] * 2)


def test_a_rank_that_ends_before_the_others_have_found_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hear = DeviceRanks.hear

    def hearing(self: DeviceRanks) -> list[LambdaScaleError]:
        found = hear(self)
        for process in self.processes:  # it has said that it is there
            os.kill(process, signal.SIGKILL)
        return found

    monkeypatch.setattr(collective, "MEETING", timedelta(seconds=1))
    monkeypatch.setattr(DeviceRanks, "hear", hearing)
    with pytest.raises(EngineFailed, match="signal 9"):
        OnDevices([CPU] * 2)
