"""Encoders of texts (BERT) in the engine: the vectors of transformers' BertModel, with the same
bits in every batch and on every path."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from services.node.engine.base import Draw, PartResult, Row, RowsRefused, Score
from services.node.engine.engine import TorchEngine
from shared.errors import BadInput
from shared.messages.serving import Pooling, Sampling
from tests.support.bert import random_bert
from tests.unit.node.engine.models import MODEL, Model, pack, part, run, run_all

POSITIONS = 64
CLOSE = 1e-5
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
TEXTS = [[2, *((7 * i + i // 5 + n) % 90 + 5 for i in range(n)), 3] for n in (1, 0, 30, 7, 62, 16)]


def make_encoder(seed: int = 0, blocks: int = 0, dtype: str = "float32", **changes: Any) -> Model:
    oracle = random_bert(seed, **(SIZES | changes))
    oracle = oracle.to(getattr(torch, dtype))
    raw = oracle.config.to_dict() | {"architectures": ["BertModel"], "dtype": dtype}
    return Model(*pack(raw, oracle.state_dict(), blocks), oracle)


@pytest.fixture(scope="module")
def bert() -> Model:
    return make_encoder()


def text(key: str, tokens: list[int], pooling: Pooling = Pooling.MEAN) -> Row:
    return Row(key, 0, len(tokens), len(tokens), tuple(tokens), pooling=pooling)


def on(rows: list[Row]) -> list[Row]:
    """As a later stage gets them."""
    return [replace(one, tokens=()) for one in rows]


def expected(model: Model, tokens: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = model.oracle(torch.tensor([tokens])).last_hidden_state[0].float()
    by = {Pooling.CLS: states[0], Pooling.LAST: states[-1], Pooling.MEAN: states.mean(0)}
    return by[pooling]


def vectors(result: PartResult) -> dict[str, torch.Tensor]:
    return {
        key: torch.from_numpy(np.frombuffer(found, "<f4").copy())
        for key, found in result.vectors.items()
    }


def over_stages(model: Model, cuts: tuple[int, ...], rows: list[Row]) -> PartResult:
    hidden = None
    for start, stop in pairwise((0, *cuts, model.n_blocks)):
        given = part(rows if start == 0 else on(rows), start, stop, hidden)
        result = run(model.engine(start, stop), given)
        hidden = result.hidden
    return result


FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "one_layer": {"num_hidden_layers": 1},
    "one_head": {"num_attention_heads": 1},
    "unaligned": {"hidden_size": 36, "intermediate_size": 33, "num_attention_heads": 3},
    "eps": {"layer_norm_eps": 0.1},
    "one_type": {"type_vocab_size": 1},
    "wide": {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12},
}


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, pooling: Pooling) -> None:
    model = make_encoder(seed=3, **FORMS[form])
    rows = [text(f"s{i}", tokens, pooling) for i, tokens in enumerate(TEXTS)]
    found = vectors(run(model.engine(), part(rows, 0, model.n_blocks)))
    for one, tokens in zip(rows, TEXTS, strict=True):
        torch.testing.assert_close(
            found[one.sequence], expected(model, tokens, pooling), atol=CLOSE, rtol=CLOSE
        )


@pytest.mark.parametrize("cuts", [(), (1,), (3,), (5,), (1, 5), (2, 4), (1, 2, 4, 5)])
def test_over_stages(bert: Model, cuts: tuple[int, ...]) -> None:
    rows = [text(f"s{i}", tokens) for i, tokens in enumerate(TEXTS)]
    found = vectors(over_stages(bert, cuts, rows))
    for one, tokens in zip(rows, TEXTS, strict=True):
        torch.testing.assert_close(
            found[one.sequence], expected(bert, tokens, Pooling.MEAN), atol=CLOSE, rtol=CLOSE
        )


def test_blocks_of_several_units() -> None:
    model = make_encoder(blocks=2)
    found = vectors(over_stages(model, (1,), [text("s", TEXTS[2])]))
    torch.testing.assert_close(
        found["s"], expected(model, TEXTS[2], Pooling.MEAN), atol=CLOSE, rtol=CLOSE
    )


@pytest.mark.parametrize("form", ["usual", "unaligned", "wide"])
@pytest.mark.parametrize("cpu_weights", ["packed", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_bits_whoever_else_is_in_the_step(dtype: str, cpu_weights: Any, form: str) -> None:
    model = make_encoder(seed=1, dtype=dtype, **FORMS[form])
    model.cpu_weights = cpu_weights
    engine, last = model.engine(), model.n_blocks
    rows = [text(f"s{i}", tokens) for i, tokens in enumerate(TEXTS)]
    parts = [part([rows[0]], 0, last), part(rows[1:3], 0, last), part(rows[3:], 0, last)]
    together = {
        key: vector for result in run_all(engine, parts) for key, vector in result.vectors.items()
    }
    engine.free(tuple(together))
    for one in reversed(rows):
        assert run(engine, part([one], 0, last)).vectors[one.sequence] == together[one.sequence]
    assert over_stages(model, (2, 4), rows[2:5]).vectors.items() <= together.items()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_with_any_number_of_threads(threads: int) -> None:
    model = make_encoder(seed=1, **FORMS["wide"])
    rows = [text(f"s{i}", tokens) for i, tokens in enumerate(TEXTS)]
    alone = run(model.engine(), part(rows, 0, model.n_blocks)).vectors
    torch.set_num_threads(threads)
    try:
        engine = TorchEngine("cpu", 64, threads=threads)
        engine.open_model(MODEL, model.manifest)
        for block, buffer in enumerate(model.buffers):
            engine.attach(MODEL, block, memoryview(buffer))
        assert run(engine, part(rows, 0, model.n_blocks)).vectors == alone
    finally:
        torch.set_num_threads(1)


def test_nothing_is_kept(bert: Model) -> None:
    engine = bert.engine(kv_tokens=16)
    assert not engine.keeps(MODEL, 0, bert.n_blocks)
    run(engine, part([text(f"s{i}", tokens) for i, tokens in enumerate(TEXTS)], 0, 6))
    assert engine.kv_used == 0
    assert engine.adopt(MODEL, "s9", tuple(TEXTS[2]), len(TEXTS[2])) == 0


def test_a_text_that_ends_leaves_the_sweep(bert: Model) -> None:
    engine = bert.engine()
    sweep = engine.begin(MODEL)
    number = sweep.join(part([text("a", TEXTS[2]), text("b", TEXTS[3])], 0, 6))
    sweep.advance()
    engine.free(("a",))
    left: dict[int, PartResult] = {}
    while not left:
        left = sweep.advance()
    assert [one.sequence for one in left[number].rows] == ["b"]
    torch.testing.assert_close(
        vectors(left[number])["b"],
        expected(bert, TEXTS[3], Pooling.MEAN),
        atol=CLOSE,
        rtol=CLOSE,
    )


LONG = (5,) * (POSITIONS + 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"limit": 20}, "9 positions from 0 on; expected all 20"),
        ({"count": 65, "limit": 65, "tokens": LONG}, "65 positions; the model has 64"),
        ({"tokens": (96,) * 9}, "ids go from 0 to 95"),
        ({"pooling": None}, "gives vectors, and draws"),
        ({"draw": Draw(0, Sampling())}, "gives vectors, and draws"),
        ({"score": Score(0, (5,), 0)}, "gives vectors, and draws"),
    ],
)
def test_only_the_wrong_text_is_refused(bert: Model, changes: dict[str, Any], says: str) -> None:
    engine = bert.engine()
    sweep = engine.begin(MODEL)
    wrong = replace(text("wrong", TEXTS[3]), **changes)
    with pytest.raises(RowsRefused, match=says) as refused:
        sweep.join(part([text("right", TEXTS[2]), wrong], 0, 6))
    assert refused.value.sequences == ("wrong",)
    assert isinstance(refused.value.why, BadInput)
    assert run(engine, part([text("right", TEXTS[2])], 0, 6)).vectors.keys() == {"right"}
