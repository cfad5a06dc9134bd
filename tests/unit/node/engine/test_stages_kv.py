"""Sequences of stages take KV for the layers of these only, and get the tokens of transformers."""

from itertools import pairwise

import pytest

from services.node.core.kv import PAGE
from services.node.engine.engine import TorchEngine
from services.node.engine.linear import Form
from shared.errors import CapacityExceeded
from shared.parts import Part
from tests.unit.node.engine.models import MODEL, Model, Path, make_model, part, row, run

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


@pytest.mark.parametrize("form", ["packed", "stored"])
def test_a_stage_has_as_many_sequences_as_its_layers_have_room_for(
    model: Model, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """Each of two stages has two of four layers: one page is enough for two sequences."""
    monkeypatch.setattr(model, "cpu_weights", form)
    path = Path(model, (3,), kv_tokens=2 * PAGE)
    prompts = {f"s{i}": [*PROMPT, i] for i in range(4)}
    tokens = {key: path.generate(prompt, 5, key) for key, prompt in prompts.items()}
    for key, prompt in prompts.items():
        assert tokens[key] == model.expected_tokens(prompt, 5, tokens[key])
    for engine, start, stop in path.stages:
        assert engine.kv_used == engine.kv_capacity
        assert engine.kv_parts(MODEL, start, stop) == 2
    with pytest.raises(CapacityExceeded):
        path.generate(PROMPT, 1, "late")
    path.stages[0][0].free(("s2",))
    path.stages[1][0].free(("s2",))
    assert path.generate(PROMPT, 1, "late") == model.expected_tokens(PROMPT, 1)


def test_different_stages_of_one_engine_share_its_pages(model: Model) -> None:
    """As where one node is a stage of several paths."""
    engine = model.engine(kv_tokens=3 * PAGE)
    cuts = {"a": (3,), "b": (2, 4), "c": ()}
    paths = {}
    for key, cut in cuts.items():
        paths[key] = Path(model, cut)
        bounds = pairwise((0, *cut, model.n_blocks))
        # Each path's last stage runs on the same engine.
        paths[key].stages[-1] = (engine, *list(bounds)[-1])
    for key, path in paths.items():
        assert path.generate(PROMPT, 8, key) == model.expected_tokens(PROMPT, 8)
    assert engine.kv_used == 2 * PAGE  # a half, a quarter and a whole
    engine.free(("a", "b"))
    assert engine.kv_used == PAGE


def test_the_pages_of_a_part_have_its_layers_only(model: Model) -> None:
    """A node of a group holds one part of the model for good."""
    whole, budget = model.engine(), 1 << 20
    engines: list[tuple[TorchEngine, int, int]] = []
    for start, stop in ((0, 2), (2, model.n_blocks)):
        engine = model.engine(start, stop, kv_bytes=budget, room=Part(start, stop))
        engines.append((engine, start, stop))
        assert engine.kv_parts(MODEL, start, stop) == 1
    assert whole.kv_parts(MODEL, 0, 2) == 4
    one_layer, three_layers = (engine.kv_share(MODEL) for engine, _, _ in engines)
    assert one_layer == pytest.approx(3 * three_layers, rel=0.1)
    group = Path(model, (2,))
    group.stages = engines
    assert group.generate(PROMPT, 20) == model.expected_tokens(PROMPT, 20)


def test_a_part_without_layers_can_be_opened(model: Model) -> None:
    engine = model.engine(0, 1, room=Part(0, 1))
    assert engine.kv_share(MODEL) > 0
    assert not engine.keeps(MODEL, 0, 1)
    assert run(engine, part([row("s", 0, PROMPT)], 0, 1)).hidden is not None
