"""Decoders that several processes run together: the bits of one, and transformers' tokens."""

import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as Folder
from typing import Any

import pytest
import torch

from services.node.core.kv import PAGE
from services.node.engine.budget import KvBudget
from services.node.engine.engine import TorchEngine
from services.node.engine.kv_host import KvHost
from services.node.engine.linear import Form
from services.node.engine.orders import Meet
from services.node.engine.ranks import Ranks
from services.node.engine.rehearsal import measure
from services.node.memory.arena import Arena
from shared.errors import BadInput, ConfigError, EngineFailed, UnsupportedModel
from shared.ids import NO_ADAPTER, ModelId
from shared.step_costs import StepCosts
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import MODEL, Model, Path, make_model, part, row, run, run_all
from tests.unit.node.engine.test_adapters import SPECS, Adapted, with_adapter
from tests.unit.node.engine.test_against_transformers import FORMS

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

ONE_KV_HEAD = ("mqa", "unaligned")
DIVISIBLE = [name for name in FORMS if name not in ONE_KV_HEAD]
FOUR_KV_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
PROMPT = random.Random(3).choices(range(96), k=70)
COUNT = 12
"""Tokens. On a busy machine ranks that share a core wait long for each other."""
DEGREES = (2, 4)


class Divided:
    """An engine of a degree, which serves one test after the other."""

    def __init__(self, degree: int, form: Form = "packed", threads: int = 1) -> None:
        self.degree = degree
        self._arena = Arena(8 << 20)
        self.ranks = Ranks((degree,), self._arena.memory)
        self.engine = TorchEngine(
            "cpu", 4096, threads=degree * threads, cpu_weights=form, ranks=self.ranks
        )

    @contextmanager
    def holding(self, model: Model, start: int = 0, stop: int | None = None) -> Iterator[Path]:
        """The engine as a path that holds these blocks of the model."""
        stop = model.n_blocks if stop is None else stop
        spans = [self._arena.allocate(len(buffer)) for buffer in model.buffers]
        try:
            self.engine.open_model(MODEL, model.manifest)
            for block in range(start, stop):
                spans[block].memory[:] = model.buffers[block]
                self.engine.attach(MODEL, block, spans[block].memory)
            path = Path.__new__(Path)
            path.stages = [(self.engine, start, stop)]
            yield path
        finally:
            self.engine.close_model(MODEL)
            for span in spans:
                self._arena.free(span)


@pytest.fixture(scope="module", params=DEGREES)
def divided(request: pytest.FixtureRequest) -> Iterator[Divided]:
    made = Divided(request.param)
    yield made
    made.ranks.close()


def model_for(divided: Divided, form: str = "gqa", **changes: Any) -> Model:
    heads = {} if divided.degree == 2 else FOUR_KV_HEADS
    return make_model(seed=3, **{**FORMS[form], **heads, **changes})


@pytest.mark.parametrize("form", DIVISIBLE)
def test_every_form_has_the_bits_of_one_process(
    divided: Divided, form: str, logits: Logits
) -> None:
    model = model_for(divided, form)
    with divided.holding(model) as path:
        tokens = path.generate(PROMPT, COUNT)
    together = logits.take()
    assert Path(model).generate(PROMPT, COUNT) == tokens
    assert torch.equal(together, logits.take())
    expected = model.expected_logits(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("form", ["mixtral", "qwen3_moe_mixed"])
def test_experts_in_bf16_and_in_batches(divided: Divided, form: str, logits: Logits) -> None:
    model = model_for(divided, form, dtype="bfloat16")
    rows = [row(str(i), 0, PROMPT[i : i + 9], draw=0) for i in range(5)]
    with divided.holding(model) as path:
        tokens = path.run(rows)
    together = logits.take()
    assert Path(model).run(rows) == tokens
    assert torch.equal(together, logits.take())


def test_bf16_and_shares_of_different_sizes(divided: Divided, logits: Logits) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 104,
        "intermediate_size": 200,
        "vocab_size": 101,
        "head_dim": 12,
    }
    model = model_for(divided, dtype="bfloat16", **sizes)
    with divided.holding(model) as path:
        tokens = path.generate(PROMPT, COUNT)
    together = logits.take()
    assert Path(model).generate(PROMPT, COUNT) == tokens
    assert torch.equal(together, logits.take())


def test_weights_of_8_bits_and_ranks_of_several_threads(logits: Logits) -> None:
    model = make_model()
    model.cpu_weights = "int8"
    made = Divided(2, "int8", threads=2)
    with made.holding(model) as path:
        tokens = path.generate(PROMPT, 3)
    made.ranks.close()
    together = logits.take()
    assert Path(model).generate(PROMPT, 3) == tokens
    assert torch.equal(together, logits.take())


def test_batches_chunks_and_cached_prefixes(divided: Divided, logits: Logits) -> None:
    model = model_for(divided)
    prompts = [PROMPT[:9], PROMPT[3:60], PROMPT[5:6]]

    def drive(path: Path) -> list[int]:
        (engine, start, stop), *_ = path.stages
        rows = [row(str(i), 0, p, draw=0) for i, p in enumerate(prompts)]
        drawn = [token for (token,) in path.run(rows)]
        for step in range(1, 5):
            rows = [
                row(str(i), len(p) + step - 1, [token], draw=step)
                for i, (p, token) in enumerate(zip(prompts, drawn[-3:], strict=True))
            ]
            drawn += [token for (token,) in path.run(rows)]
        run_all(engine, [part([row("cut", 0, PROMPT[:20])], start, stop)])
        drawn += run(engine, part([row("cut", 20, PROMPT[20:], draw=0)], start, stop)).sampled[0]
        whole = tuple(PROMPT[3:60])
        found = engine.adopt(MODEL, "again", whole, 512)
        assert found == len(whole) // PAGE * PAGE
        drawn += path.run([row("again", found, list(whole[found:]), draw=0)])[0]
        engine.free(("0", "1", "2", "cut", "again"))
        return drawn

    with divided.holding(model) as path:
        tokens = drive(path)
    together = logits.take()
    assert drive(Path(model)) == tokens
    assert torch.equal(together, logits.take())
    assert tokens[:3] == [model.expected_tokens(prompt, 1)[0] for prompt in prompts]


def test_kv_comes_back_from_host_memory(divided: Divided) -> None:
    """The first rank copies whole pages, which all ranks read."""
    model = model_for(divided)
    kv, whole = divided.engine._kv, tuple(PROMPT)
    with divided.holding(model) as path:
        kv.host = KvHost(1 << 24, torch.device("cpu"))
        path.run([row("first", 0, PROMPT, draw=0)])
        divided.engine.free(("first",))
        filler = kv.start(MODEL, (0, model.n_blocks), range(4), "filler", 4096)
        kv.extend(filler, 4096)
        kv.of_layers(MODEL, range(4))[:] = 0
        divided.engine.free(("filler",))
        assert divided.engine.adopt(MODEL, "again", whole, 512) == 0
        assert divided.engine.restorable(MODEL, "again", whole, 512) is not None
        found, more = divided.engine.restore("again")
        assert (found, more) == (len(whole) // PAGE * PAGE, False)
        tokens = path.run([row("again", found, PROMPT[found:], draw=0)])[0]
        divided.engine.free(("again",))
        kv.host = None
    assert list(tokens) == model.expected_tokens(PROMPT, 1)


def test_a_stage_of_a_path(divided: Divided) -> None:
    model = model_for(divided)
    for cuts in ((2,), (1, 4)):
        bounds = (0, *cuts, model.n_blocks)
        for stage in range(len(bounds) - 1):
            path = Path(model, cuts)
            with divided.holding(model, *bounds[stage : stage + 2]) as one:
                path.stages[stage] = one.stages[0]
                assert path.generate(PROMPT, 8) == model.expected_tokens(PROMPT, 8)


def test_kv_goes_over_between_degrees(divided: Divided) -> None:
    """The image of a prompt's KV is the same whoever computed it."""
    model, pages = model_for(divided), len(PROMPT) // PAGE * PAGE

    def image(engine: TorchEngine) -> bytes:
        run(engine, part([row("s", 0, PROMPT)], 0, model.n_blocks))
        loan = engine.lend("s", (0, model.n_blocks), 0, pages)
        data = bytearray(loan.nbytes)
        loan.read(memoryview(data))
        engine.give_back(loan)
        return bytes(data)

    whole = image(model.engine())
    with divided.holding(model) as path:
        assert image(path.stages[0][0]) == whole
        key, engine = "taken", path.stages[0][0]
        assert engine.receive(MODEL, key, tuple(PROMPT[::-1]), 512) == 0
        loan = engine.lend(key, (0, model.n_blocks), 0, pages)
        loan.fill(memoryview(bytearray(whole)))
        engine.give_back(loan)
        rest = row(key, pages, PROMPT[pages:], draw=0)
        (tokens,) = path.run([rest])
        assert list(tokens) == model.expected_tokens(PROMPT, 1)


def test_adapters_of_one_batch(divided: Divided, tmp_path: Folder, logits: Logits) -> None:
    model, specs = model_for(divided), [SPECS[name] for name in ("all", "q_and_v", "high_rank")]
    adapted = Adapted(tmp_path, model)

    def drive(engine: TorchEngine) -> tuple[tuple[int, ...], ...]:
        names = [adapted.add(engine, spec) for spec in specs]
        rows = [
            with_adapter(row(str(i), 0, PROMPT, draw=0), name)
            for i, name in enumerate((*names, NO_ADAPTER))
        ]
        sampled = run(engine, part(rows, 0, model.n_blocks)).sampled
        engine.free(tuple(one.sequence for one in rows))
        for name in names:
            engine.drop_adapter(name)
        return sampled

    with divided.holding(model) as path:
        tokens = drive(path.stages[0][0])
    together = logits.take()
    assert drive(model.engine()) == tokens
    assert torch.equal(together, logits.take())
    for (token,), spec in zip(tokens, specs, strict=False):
        assert [token] == adapted.oracle(spec).expected_tokens(PROMPT, 1)


def refused_models() -> dict[str, tuple[dict[str, Any], str]]:
    return {
        "mqa": (FORMS["mqa"], "does not divide this model's 1 KV heads"),
        "float16": ({**FOUR_KV_HEADS, "dtype": "float16"}, "torch.float16 are not divided"),
    }


@pytest.mark.parametrize("name", refused_models())
def test_what_cannot_be_divided_is_refused_by_name(divided: Divided, name: str) -> None:
    changes, why = refused_models()[name]
    model = make_model(**changes)
    with pytest.raises(UnsupportedModel, match=f"node.tensor_parallel is {divided.degree}.*{why}"):
        divided.engine.open_model(MODEL, model.manifest)
    with divided.holding(model_for(divided)) as path:  # the engine goes on
        path.generate(PROMPT, 2)


def test_blocks_that_ranks_cannot_see_are_refused(divided: Divided) -> None:
    model = model_for(divided)
    with divided.holding(model, 0, 0) as path:
        engine = path.stages[0][0]
        with pytest.raises(BadInput, match="in the arena"):
            engine.attach(MODEL, 0, memoryview(bytearray(model.buffers[0])))


def test_without_kernels_there_are_no_ranks() -> None:
    ranks = Ranks((2,), Arena(1 << 20).memory)
    with pytest.raises(ConfigError, match="cpu_weights to packed or int8"):
        TorchEngine("cpu", 64, threads=1, cpu_weights="stored", ranks=ranks)
    ranks.close()


def test_a_rank_that_is_killed_is_told() -> None:
    before = set(threading.enumerate())
    made = Divided(2)
    (watching,) = (t for t in set(threading.enumerate()) - before if t.name == "rank-1")
    assert made.ranks.broken == ""
    (rank,) = made.ranks.processes
    os.kill(rank, signal.SIGKILL)
    watching.join()
    assert f"rank 1 (process {rank}) ended with signal 9" in made.ranks.broken
    with pytest.raises(EngineFailed, match="signal 9"):
        made.engine.open_model(MODEL, make_model().manifest)
    made.ranks.close()


# --- degrees that are chosen ---------------------------------------------------


def costs(rates: dict[int, float]) -> Any:
    chosen = tuple(StepCosts(degree, rate, 0.0, 0.0) for degree, rate in rates.items())
    return lambda *_: chosen


class Chosen(Divided):
    """An engine that chooses the degree of each model."""

    def __init__(
        self,
        degrees: tuple[int, ...],
        measure: Any,
        form: Form = "packed",
        arena_bytes: int = 8 << 20,
    ) -> None:
        self._arena = Arena(arena_bytes)
        self.ranks = Ranks(degrees, self._arena.memory)
        self.engine = TorchEngine(
            "cpu",
            KvBudget(32 << 20),
            threads=4,
            cpu_weights=form,
            ranks=self.ranks,
            measure=measure,
        )

    def hold(self, name: ModelId, model: Model) -> None:
        self.engine.open_model(name, model.manifest)
        for block, buffer in enumerate(model.buffers):
            memory = self._arena.allocate(len(buffer)).memory
            memory[:] = buffer
            self.engine.attach(name, block, memory)

    def generate(self, models: dict[ModelId, Model]) -> dict[ModelId, list[int]]:
        """Greedy tokens of all models, which take turns step by step."""
        tokens: dict[ModelId, list[int]] = {name: [] for name in models}
        for step in range(COUNT):
            for name, model in models.items():
                given = PROMPT if not step else tokens[name][-1:]
                at = len(PROMPT) + step - 1 if step else 0
                one = part([row(name, at, given, draw=step)], 0, model.n_blocks)
                tokens[name] += run(self.engine, one, name).sampled[0]
        self.engine.free(tuple(models))
        return tokens


@pytest.fixture
def choosing() -> Iterator[Callable[..., Chosen]]:
    made: list[Chosen] = []

    def make(*args: Any, **named: Any) -> Chosen:
        made.append(Chosen(*args, **named))
        return made[-1]

    yield make
    for each in made:
        each.ranks.close()


def test_models_of_several_degrees_run_side_by_side(choosing: Callable[..., Chosen]) -> None:
    """Each degree is the fastest for one of them: four processes cannot divide two heads."""
    made = choosing((2, 4), costs({1: 1e9, 2: 2e9, 4: 4e9}))
    models = {
        ModelId("four"): make_model(seed=1, **FOUR_KV_HEADS),
        ModelId("two"): make_model(seed=2),
        ModelId("one"): make_model(seed=3, **FORMS["mqa"]),
        ModelId("experts"): make_model(seed=4, **FORMS["mixtral"]),
        ModelId("float16"): make_model(seed=5, dtype="float16"),
    }
    for name, model in models.items():
        made.hold(name, model)
    first = {name: made.engine.division(name).partition(":")[0] for name in models}
    assert first == {
        "four": "4 processes run it",
        "two": "2 processes run it",
        "one": "1 process runs it",
        "experts": "1 process runs it",
        "float16": "1 process runs it",
    }
    del models[ModelId("float16")]  # whose tokens are not those of float32
    expected = {name: model.expected_tokens(PROMPT, COUNT) for name, model in models.items()}
    assert made.generate(models) == expected

    # The KV of models that are open stays with all ranks while others are opened and closed.
    made.engine.close_model(ModelId("four"))
    assert made.generate({name: models[name] for name in expected if name != "four"}) == {
        name: tokens for name, tokens in expected.items() if name != "four"
    }
    made.hold(ModelId("four"), models[ModelId("four")])
    assert made.generate(models) == expected
    for name in (*models, ModelId("float16")):
        made.engine.close_model(name)
    made.hold(ModelId("two"), models[ModelId("two")])
    two = {ModelId("two"): models[ModelId("two")]}
    assert made.generate(two) == {"two": expected[ModelId("two")]}


def test_adapters_where_degrees_are_chosen(
    tmp_path: Folder, choosing: Callable[..., Chosen]
) -> None:
    made = choosing((2,), costs({1: 1e9, 2: 2e9}))
    for changes in ({}, FORMS["mqa"]):
        model, spec = make_model(seed=3, **changes), SPECS["all"]
        made.hold(MODEL, model)
        adapted = Adapted(tmp_path, model)
        name = adapted.add(made.engine, spec)
        given = with_adapter(row("adapted", 0, PROMPT, draw=0), name)
        ((token,),) = run(made.engine, part([given], 0, model.n_blocks)).sampled
        assert [token] == adapted.oracle(spec).expected_tokens(PROMPT, 1)
        made.engine.free(("adapted",))
        made.engine.drop_adapter(name)
        made.engine.close_model(MODEL)


@pytest.mark.parametrize("form", ["packed", "int8"])
def test_what_a_step_costs_is_measured(form: Form, choosing: Callable[..., Chosen]) -> None:
    measured: list[StepCosts] = []

    def watched(*args: Any) -> tuple[StepCosts, ...]:
        measured.extend(measure(*args))
        return tuple(measured)

    made = choosing((2, 4), watched, form)
    assert [each.degree for each in measured] == [1, 2, 4]
    assert all(each.bytes_per_s > 0 < each.layer_s and each.step_s > 0 for each in measured)
    model = make_model()
    model.cpu_weights = form
    made.hold(MODEL, model)
    assert re.search(r"run.? it: .* ms with 1, .* ms with 2$", made.engine.division(MODEL))
    tokens = made.generate({MODEL: model})[MODEL]
    assert tokens == Path(model).generate(PROMPT, COUNT)


def test_models_come_and_go_in_the_middle_of_a_step(choosing: Callable[..., Chosen]) -> None:
    made = choosing((2, 4), costs({1: 1e9, 2: 2e9, 4: 4e9}))
    model, other = make_model(seed=2), make_model(seed=1, **FOUR_KV_HEADS)
    made.hold(MODEL, model)
    made.hold(ModelId("goes"), model)
    sweep, tokens = made.engine.begin(MODEL), list[int]()
    sweep.join(part([row("s", 0, PROMPT, draw=0)], 0, model.n_blocks))
    for _ in range(2):  # the embedding, and a layer
        sweep.advance()
    made.engine.close_model(ModelId("goes"))
    sweep.advance()
    made.hold(ModelId("comes"), other)
    while not tokens:
        for result in sweep.advance().values():
            tokens += result.sampled[0]
    assert tokens == model.expected_tokens(PROMPT, 1)


def test_ranks_forget_a_model_that_slept_and_left(choosing: Callable[..., Chosen]) -> None:
    """Its packed weights, as rank 0 does."""
    made = choosing((2,), costs({1: 1e9, 2: 2e9}), arena_bytes=64 << 20)
    model = make_model(hidden_size=256, intermediate_size=8192, num_hidden_layers=2)
    (rank,) = made.ranks.processes

    def own_mib() -> int:
        made.ranks.teams[2].tell(Meet(2))
        made.ranks.teams[2].meet()  # it has done what it was told before
        status = Folder(f"/proc/{rank}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) >> 10

    made.hold(MODEL, model)
    packed = own_mib()
    made.engine.close_model(MODEL, asleep=True)
    assert own_mib() > packed - 5
    made.engine.close_model(MODEL)
    assert own_mib() < packed - 20
