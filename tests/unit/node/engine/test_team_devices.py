"""Models that fit on no device, of which all devices of a machine run each part together."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from services.node.engine import kernels
from services.node.engine.engine import TorchEngine
from services.node.engine.ranks import Ranks
from services.node.engine.rehearsal import measure, tried
from services.node.memory.arena import Arena
from shared.errors import CapacityExceeded
from shared.parts import Part
from shared.step_costs import StepCosts
from tests.support.amounts import cases
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import MODEL, Model, Path, make_model, part, row, run
from tests.unit.node.engine.test_against_transformers import FORMS
from tests.unit.node.engine.test_lost_ranks import kill, regroup
from tests.unit.node.engine.test_ranks import COUNT, FOUR_KV_HEADS, PROMPT

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

PAGE_BYTES = 4096


class Device:
    """A device with room for one part, and the costs of steps such that the largest team is the
    fastest."""

    def __init__(self, model: Model, own: Part, devices: int, threads: int = 1) -> None:
        self.own = own
        self._model = model
        sizes = [-(-len(model.buffers[b]) // PAGE_BYTES) * PAGE_BYTES for b in own.blocks]
        self.arena = Arena(sum(sizes))
        degrees = tuple(n for n in (2, 4) if n <= threads * devices)
        self.ranks = Ranks(degrees, self.arena.memory)
        measured = tuple(
            StepCosts(degree, 1e9 * degree * count, 0.0, 0.0, count)
            for count in (1, devices)
            for degree in (1, *degrees)
            if degree <= threads * count
        )
        self.engine = TorchEngine(
            "cpu", 4096, threads=threads, ranks=self.ranks, measure=lambda *_: measured
        )
        self.engine.open_model(MODEL, model.manifest, own, devices)

    def attach(self, block: int) -> None:
        memory = self.arena.allocate(len(self._model.buffers[block])).memory
        memory[:] = self._model.buffers[block]
        self.engine.attach(MODEL, block, memory)

    def fill(self) -> "Device":
        for block in self.own.blocks:
            self.attach(block)
        return self

    @property
    def stage(self) -> tuple[TorchEngine, int, int]:
        return self.engine, self.own.start, self.own.stop


Make = Callable[..., Device]


@pytest.fixture
def devices() -> Iterator[Make]:
    made: list[Device] = []

    def make(*args: Any, **named: Any) -> Device:
        made.append(Device(*args, **named))
        return made[-1]

    yield make
    for each in made:
        each.ranks.close()


def path_over(*devices: Device) -> Path:
    path = Path.__new__(Path)
    path.stages = [device.stage for device in devices]
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_devices_have_the_bits_of_one_process(
    devices: Make, logits: Logits, dtype: str
) -> None:
    model = make_model(dtype=dtype)
    pair = [devices(model, own, 2).fill() for own in (Part(0, 3), Part(3, model.n_blocks))]
    for device in pair:
        assert device.engine.division(MODEL).startswith("2 processes run it: 2 devices run it")
        with pytest.raises(CapacityExceeded):
            device.arena.allocate(min(map(len, model.buffers)))
    tokens = path_over(*pair).generate(PROMPT, COUNT)
    together = logits.take()
    assert Path(model).generate(PROMPT, COUNT) == tokens
    assert torch.equal(together, logits.take())
    if dtype == "float32":
        assert tokens == model.expected_tokens(PROMPT, COUNT)


@pytest.mark.parametrize(("count", "threads"), cases([(2, 2)], thorough=[(4, 1)]))
def test_a_team_of_four_over_devices(devices: Make, count: int, threads: int) -> None:
    model = make_model(seed=3, num_hidden_layers=6, **FOUR_KV_HEADS)
    expected = model.expected_tokens(PROMPT, COUNT)
    ends = [model.n_blocks * i // count for i in range(count + 1)]
    owns = [Part(ends[i], ends[i + 1]) for i in range(count)]
    found = [devices(model, own, count, threads).fill() for own in owns]
    said = {device.engine.division(MODEL).partition(";")[0] for device in found}
    assert said == {f"4 processes run it: {count} devices run it together"}
    assert path_over(*found).generate(PROMPT, COUNT) == expected


def test_what_processes_cannot_divide_has_the_threads_of_all(devices: Make) -> None:
    model = make_model(seed=3, **FORMS["mixtral"])
    pair = [devices(model, own, 2).fill() for own in (Part(0, 3), Part(3, model.n_blocks))]
    for device in pair:
        assert device.engine.division(MODEL).startswith("1 process runs it: 2 devices run it")
        assert device.engine._models[MODEL].threads == 2
    tokens = path_over(*pair).generate(PROMPT, COUNT)
    assert tokens == model.expected_tokens(PROMPT, COUNT)


def test_blocks_come_while_a_path_over_another_node_serves(devices: Make) -> None:
    model = make_model()
    first, second = devices(model, Part(0, 3), 2).fill(), devices(model, Part(3, model.n_blocks), 2)
    expected = model.expected_tokens(PROMPT, 6)
    tokens: list[int] = []
    whole = model.engine(3)
    for step, block in enumerate(second.own.blocks):
        path = path_over(first)
        path.stages.append((whole, 3, model.n_blocks))
        given, at = (PROMPT, 0) if not step else (tokens[-1:], len(PROMPT) + step - 1)
        tokens += path.run([row("loads", at, given, draw=step)])[0]
        second.attach(block)
    assert tokens == expected[: len(tokens)]
    assert path_over(first, second).generate(PROMPT, 6) == expected


def test_rows_wait_for_the_blocks_of_a_team(devices: Make) -> None:
    model = make_model()
    device = devices(model, Part(0, 3), 2)
    device.attach(0)
    sweep = device.engine.begin(MODEL)
    given = part([row("s", 0, PROMPT)], 0, 3)
    sweep.join(type(given)(given.start, given.stop, given.rows, given.hidden, waits=True))
    results: dict[int, Any] = {}
    for block in (1, 2):
        assert not sweep.advance()
        device.attach(block)
    while not results:
        results |= sweep.advance()
    alone = run(model.engine(0, 3), given)
    (result,) = results.values()
    assert result.hidden is not None
    assert alone.hidden is not None
    assert torch.equal(result.hidden, alone.hidden)


def test_a_rank_of_one_device_is_killed(devices: Make) -> None:
    """Its device goes on with one process, which has the threads of both. The other's team
    stays."""
    model = make_model()
    pair = [devices(model, own, 2).fill() for own in (Part(0, 3), Part(3, model.n_blocks))]
    path, tokens = path_over(*pair), list[int]()
    for step in range(8):
        if step == 3:
            kill(pair[0].ranks, 1)
            regroup(pair[0].engine)
        given, at = (PROMPT, 0) if not step else (tokens[-1:], len(PROMPT) + step - 1)
        tokens += path.run([row("s", at, given, draw=step)])[0]
    assert tokens == model.expected_tokens(PROMPT, 8)
    said = [device.engine.division(MODEL) for device in pair]
    assert said[0].startswith("1 process runs it: 2 devices run it together; no others are left")
    assert said[1].startswith("2 processes run it")
    assert pair[0].engine._models[MODEL].threads == 2


def test_a_part_is_expected_to_take_the_time_of_its_own_weights(devices: Make) -> None:
    model = make_model()
    whole, found = Part(0, model.n_blocks), []
    engine = devices(model, whole, 2).engine
    for own in (Part(0, 3), Part(3, model.n_blocks), whole):
        engine.close_model(MODEL)
        engine.open_model(MODEL, model.manifest, own, 2)
        said = engine.division(MODEL)
        found.append(float(said.rpartition(" ms with 1,")[0].rpartition(" ")[2]))
    assert all(ms > 0 for ms in found)
    assert found[0] + found[1] == pytest.approx(found[2], rel=0.02)


def test_what_is_measured_of_more_devices() -> None:
    """A device of one thread has a team only with another device."""
    assert tried(1, "packed", 2) == (2,)
    compiled = kernels.load()
    assert compiled is not None
    ranks = Ranks((2,), Arena(1 << 20).memory)
    try:
        ranks.start(threads=1, form="packed", kept_bytes=0, spare=True)
        found = measure(ranks, 1, "packed", compiled, devices=2)
    finally:
        ranks.close()
    assert [(each.devices, each.degree) for each in found] == [(1, 1), (2, 1), (2, 2)]
    assert all(each.bytes_per_s > 0 and each.step_s > 0 for each in found)
