"""LoRA adapters: the logits and tokens of the base with the adapter's weights merged in."""

import copy
import random
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from services.node.checkpoints.store import Store
from services.node.engine.base import Row, RowsRefused
from services.node.engine.engine import TorchEngine
from shared.errors import Conflict
from shared.ids import ModelId
from tests.support import adapters
from tests.support.adapters import AdapterSpec
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import MODEL, Model, make_model, part, row, run

SPECS = {
    "all": AdapterSpec(1),
    "attention": AdapterSpec(2, rank=5, targets=adapters.ATTENTION),
    "q_and_v": AdapterSpec(3, rank=8, alpha=4, targets=("q_proj", "v_proj")),
    "rslora": AdapterSpec(4, rank=3, rslora=True),
    "some_layers": AdapterSpec(5, targets=("k_proj", "up_proj"), layers=(1, 3)),
    "bf16": AdapterSpec(6, dtype=torch.bfloat16),
    "high_rank": AdapterSpec(7, rank=40),
}
PROMPT = [random.Random(5).randrange(96) for _ in range(37)]


class Adapted:
    """A base and its adapters, with an oracle for each."""

    def __init__(self, folder: Folder, model: Model) -> None:
        self._folder, self.model = folder, model
        self._store = Store(folder / "store")

    def add(self, engine: TorchEngine, spec: AdapterSpec) -> ModelId:
        path = adapters.save(self._folder / f"{spec.seed}", spec, self.model.oracle.state_dict())
        imported = self._store.import_adapter(path, MODEL, self.model.manifest)
        weights = bytearray(imported.manifest.nbytes)
        self._store.fill(imported.model_id, 0, memoryview(weights))
        adapter = engine.make_adapter(imported.manifest)()(memoryview(weights))
        engine.use_adapter(imported.model_id, adapter)
        weights[:] = bytes(len(weights))  # the engine keeps no view of them
        return imported.model_id

    def oracle(self, spec: AdapterSpec) -> Model:
        merged = copy.deepcopy(self.model.oracle)
        merged.load_state_dict(adapters.merged(spec, self.model.oracle.state_dict()))
        return Model(self.model.manifest, self.model.buffers, merged)


@pytest.fixture
def adapted(tmp_path: Folder, model: Model) -> Adapted:
    return Adapted(tmp_path, model)


def with_adapter(given: Row, adapter: ModelId) -> Row:
    return replace(given, adapter=adapter)


def generate(engine: TorchEngine, adapter: ModelId, count: int, key: str = "s") -> list[int]:
    tokens: list[int] = []
    new, position, blocks = list(PROMPT), 0, len(engine.held(MODEL))
    for index in range(count):
        given = with_adapter(row(key, position, new, draw=index), adapter)
        ((token,),) = run(engine, part([given], 0, blocks)).sampled
        tokens.append(token)
        position += len(new)
        new = [token]
    return tokens


@pytest.mark.parametrize("form", ["packed", "stored"])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_merged_weights(
    adapted: Adapted, logits: Logits, name: str, form: Any
) -> None:
    model = copy.copy(adapted.model)
    model.cpu_weights = form
    engine, spec = model.engine(), SPECS[name]
    adapter = adapted.add(engine, spec)
    tokens = generate(engine, adapter, 24)
    oracle = adapted.oracle(spec)
    assert tokens == oracle.expected_tokens(PROMPT, 24, tokens)
    assert tokens != model.expected_tokens(PROMPT, 24)
    expected = oracle.expected_logits(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert (logits.take() - expected).abs().max() < 1e-4


FORMS: dict[str, dict[str, Any]] = {
    "unaligned": {"hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
}


@pytest.mark.parametrize("name", FORMS)
def test_families(tmp_path: Folder, name: str) -> None:
    adapted = Adapted(tmp_path, make_model(**FORMS[name]))
    engine = adapted.model.engine()
    adapter = adapted.add(engine, SPECS["all"])
    expected = adapted.oracle(SPECS["all"]).expected_tokens(PROMPT, 16)
    assert generate(engine, adapter, 16) == expected


def test_rows_of_several_adapters_and_of_none_share_a_batch(
    adapted: Adapted, logits: Logits
) -> None:
    """A row has the bits that it has alone."""
    engine, blocks = adapted.model.engine(), adapted.model.n_blocks
    names = [ModelId(""), *(adapted.add(engine, spec) for spec in SPECS.values())]
    alone = []
    for i, name in enumerate(names):
        run(engine, part([with_adapter(row(f"a{i}", 0, PROMPT, draw=0), name)], 0, blocks))
        alone.append(logits.take())
    rows = [with_adapter(row(f"b{i}", 0, PROMPT, draw=0), name) for i, name in enumerate(names)]
    rows += [with_adapter(row(f"c{i}", 0, PROMPT, draw=0), n) for i, n in enumerate(names)]
    run(engine, part(rows, 0, blocks))
    assert torch.equal(logits.take(), torch.cat(alone * 2))


def test_cached_kv_belongs_to_the_adapter(adapted: Adapted) -> None:
    engine = adapted.model.engine()
    name = adapted.add(engine, SPECS["all"])
    other = adapted.add(engine, SPECS["q_and_v"])
    first = generate(engine, name, 8, "first")
    prompt = tuple(PROMPT)
    assert engine.adopt(MODEL, "base", prompt, 64) == 0
    assert engine.adopt(MODEL, "other", prompt, 64, other) == 0
    assert engine.adopt(MODEL, "again", prompt, 64, name) == 32
    rest = with_adapter(row("again", 32, PROMPT[32:], draw=0, limit=64), name)
    ((token,),) = run(engine, part([rest], 0, adapted.model.n_blocks)).sampled
    assert token == first[0]


def test_a_row_whose_adapter_is_not_there_is_refused_alone(adapted: Adapted) -> None:
    engine, blocks = adapted.model.engine(), adapted.model.n_blocks
    missing = with_adapter(row("x", 0, PROMPT, draw=0), ModelId("nowhere"))
    with pytest.raises(RowsRefused, match="nowhere of model model is not in memory") as refused:
        run(engine, part([row("y", 0, PROMPT, draw=0), missing], 0, blocks))
    assert refused.value.sequences == ("x",)
    name = adapted.add(engine, SPECS["all"])
    run(engine, part([with_adapter(row("x", 0, PROMPT, draw=0), name)], 0, blocks))
    with pytest.raises(RowsRefused, match="another adapter"):
        run(engine, part([row("x", len(PROMPT), [1], draw=1)], 0, blocks))
    with pytest.raises(Conflict, match="run with adapter"):
        engine.drop_adapter(name)
    engine.free(("x",))
    engine.drop_adapter(name)
    with pytest.raises(RowsRefused, match="not in memory"):
        run(engine, part([with_adapter(row("x", 0, PROMPT, draw=0), name)], 0, blocks))


def test_the_memory_of_one_that_was_dropped_serves_the_next(adapted: Adapted) -> None:
    engine = adapted.model.engine()
    given = {name: adapted.add(engine, SPECS[name]) for name in ("all", "q_and_v", "bf16")}
    wanted = {name: adapted.oracle(SPECS[name]).expected_tokens(PROMPT, 8) for name in SPECS}
    at = address_of(engine, given["all"])
    engine.settle_adapter(engine._adapters[given["bf16"]])
    engine.drop_adapter(given.pop("all"))
    given["high_rank"] = adapted.add(engine, SPECS["high_rank"])
    given["all"] = adapted.add(engine, SPECS["all"])
    assert address_of(engine, given["all"]) == at
    for name, adapter in given.items():
        assert generate(engine, adapter, 8, name) == wanted[name]
        engine.free((name,))


def address_of(engine: TorchEngine, adapter: ModelId) -> int:
    """Where what is added in the first layer begins."""
    return int(engine._adapters[adapter].given[0]._kept[0].data_ptr())
