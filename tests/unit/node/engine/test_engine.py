"""The engine's contract: what it holds, what it refuses, and that a refusal changes nothing."""

from pathlib import Path as FilePath
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaForCausalLM

from services.local.demo_model import make_checkpoint
from services.node.checkpoints.store import Store
from services.node.engine.base import Draw, Row, RowsRefused
from services.node.engine.engine import TorchEngine
from shared.errors import (
    BadInput,
    CapacityExceeded,
    ConfigError,
    Conflict,
    CorruptCheckpoint,
    MissingTensor,
    NotFound,
    UnsupportedModel,
)
from shared.ids import ModelId
from shared.layout import BlockSpec, Manifest
from shared.messages.serving import Sampling
from tests.support.models import TINY
from tests.unit.node.engine.models import MODEL, Model, Path, make_model, part, row, run

LAST = 6


def test_blocks_are_held_once_attached(model: Model) -> None:
    engine = model.engine(2, 4)
    assert engine.held(MODEL) == {2, 3}
    assert engine.held(ModelId("other")) == frozenset()
    with pytest.raises(NotFound, match=r"\[0, 1, 4, 5\]"):
        run(engine, part([row("s", 0, [1])], 0, LAST))
    engine.attach(MODEL, 4, memoryview(model.buffers[4]))
    assert engine.held(MODEL) == {2, 3, 4}


def test_stored_weights_are_views_of_the_buffer(model: Model) -> None:
    """Nothing was copied: values and up-projections erased in the buffer leave the layers idle."""
    buffers = [bytearray(buffer) for buffer in model.buffers]
    engine = TorchEngine("cpu", 1024, threads=1, cpu_weights="stored")
    engine.open_model(MODEL, model.manifest)
    for spec, buffer in zip(model.manifest.blocks, buffers, strict=True):
        engine.attach(MODEL, spec.index, memoryview(buffer))
        for tensor in spec.tensors:
            if "v_proj" in tensor.name or "up_proj" in tensor.name:
                buffer[tensor.offset : tensor.offset + tensor.nbytes] = bytes(tensor.nbytes)
    decoder = model.oracle.model
    logits = model.oracle.lm_head(decoder.norm(decoder.embed_tokens.weight[7]))
    sampled = run(engine, part([row("s", 0, [5, 6, 7], draw=0)], 0, LAST)).sampled
    assert sampled == ((int(logits.argmax()),),)
    assert list(*sampled) != model.expected_tokens([5, 6, 7], 1)


def test_hidden_states_come_out_unless_the_head_ran(model: Model) -> None:
    rows = [row("a", 0, [1, 2, 3], draw=0), row("b", 0, [4])]
    first = run(model.engine(0, 1), part(rows, 0, 1))
    assert first.hidden is not None
    embedded = model.oracle.model.embed_tokens.weight[torch.tensor([1, 2, 3, 4])]
    assert torch.equal(first.hidden, embedded)
    assert first.sampled == ((), ())
    untokened = [replace(one, tokens=()) for one in rows]
    last = run(model.engine(1), part(untokened, 1, LAST, first.hidden))
    assert last.hidden is None
    assert last.sampled == (tuple(model.expected_tokens([1, 2, 3], 1)), ())


def test_only_stages_with_layers_use_kv(model: Model) -> None:
    path = Path(model, (1, 3, 5))
    path.run([row("s", 0, [1, 2], limit=50)])
    assert [engine.kv_used for engine, _, _ in path.stages] == [0, 16, 16, 0]


def test_no_room_runs_nothing(model: Model) -> None:
    engine = model.engine(kv_tokens=40)
    run(engine, part([row("a", 0, [1, 2])], 0, LAST))
    rows = [row("a", 2, [3]), row("b", 0, [1] * 16), row("c", 0, [1] * 17)]
    with pytest.raises(CapacityExceeded):
        run(engine, part(rows, 0, LAST))
    assert (engine.kv_used, engine.kv_capacity) == (16, 48)
    tokens = run(engine, part([row("a", 2, [3], draw=0), rows[1]], 0, LAST)).sampled
    assert list(tokens[0]) == model.expected_tokens([1, 2, 3], 1)
    engine.free(("a", "b", "nobody"))
    assert engine.kv_used == 0


BAD_ROWS: list[tuple[Row, type[Exception]]] = [
    (row("new", 3, [1]), NotFound),
    (row("s", 1, [1]), Conflict),
    (row("s", 3, [1]), Conflict),
    (row("s", 0, [1]), Conflict),
    (row("s", 2, []), BadInput),
    (row("s", 2, [1] * 9, limit=10), BadInput),
    (row("s", 2, [96]), RowsRefused),
    (row("s", 2, [-1]), RowsRefused),
    (replace(row("s", 2, [1]), count=2), BadInput),
]


@pytest.mark.parametrize(("bad", "error"), BAD_ROWS)
def test_rows_that_do_not_fit(model: Model, bad: Row, error: type[Exception]) -> None:
    engine = model.engine()
    run(engine, part([row("s", 0, [1, 2])], 0, LAST))
    used = engine.kv_used
    with pytest.raises(error):
        run(engine, part([row("other", 0, [1]), bad], 0, LAST))
    assert engine.kv_used == used
    tokens = run(engine, part([row("s", 2, [3], draw=0)], 0, LAST)).sampled
    assert list(tokens[0]) == model.expected_tokens([1, 2, 3], 1)


def proposing(key: str, position: int, tokens: list[int], *proposed: int, index: int = 0) -> Row:
    draw = Draw(index, Sampling(), proposed=proposed)
    return replace(row(key, position, [*tokens, *proposed]), draw=draw)


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3, 5)])
@pytest.mark.parametrize("right", range(5))
def test_what_is_drawn_of_proposed_tokens(model: Model, cuts: tuple[int, ...], right: int) -> None:
    path, expected = Path(model, cuts), model.expected_tokens([1, 2, 3], 8)
    proposed = expected[:right] + [(token + 1) % 96 for token in expected[right:4]]
    (drawn,) = path.run([proposing("s", 0, [1, 2, 3], *proposed)])
    assert list(drawn) == expected[: right + 1]
    (drawn,) = path.run([row("s", 3 + right, [expected[right]], draw=right + 1)])
    assert list(drawn) == [expected[right + 1]]


def test_a_sequence_goes_on_where_the_accepted_tokens_end_and_nowhere_else(model: Model) -> None:
    engine, expected = model.engine(), model.expected_tokens([1, 2, 3], 2)
    wrong = (expected[1] + 1) % 96
    run(engine, part([proposing("s", 0, [1, 2, 3], expected[0], wrong)], 0, LAST))
    for position in (0, 2, 3, 5):
        with pytest.raises(Conflict):
            run(engine, part([row("s", position, [1])], 0, LAST))
    first = model.engine(0, 2)
    run(first, part([proposing("s", 0, [1, 2, 3], expected[0], wrong)], 0, 2))
    for position in (2, 6):
        with pytest.raises(Conflict):
            run(first, part([row("s", position, [1])], 0, 2))
    run(first, part([row("s", 3, [1])], 0, 2))
    with pytest.raises(BadInput, match="proposed"):
        run(first, part([replace(proposing("s", 4, [], 5), tokens=(5,))], 0, 2))


def test_a_page_that_was_proposed_into_need_not_be_found_again(model: Model) -> None:
    engine, expected = model.engine(kv_tokens=32), model.expected_tokens([1] * 14, 2)
    wrong = [(expected[0] + 1) % 96] * 4
    run(engine, part([proposing("s", 0, [1] * 14, *wrong)], 0, LAST))
    assert engine.kv_used == 32
    (drawn,) = run(engine, part([proposing("s", 14, expected[:1], *wrong)], 0, LAST)).sampled
    assert list(drawn) == expected[1:]


def test_only_accepted_tokens_are_found_by_others(model: Model) -> None:
    engine = model.engine()
    prompt = [i % 96 for i in range(28)]
    expected = model.expected_tokens(prompt, 3)
    wrong = [(token + 1) % 96 for token in expected]
    proposed = [expected[0], expected[1], *wrong[:2]]
    run(engine, part([proposing("s", 0, prompt, *proposed)], 0, LAST))
    assert engine.adopt(MODEL, "wrong", (*prompt, *proposed, 1), 60) == 16
    run(engine, part([row("s", 30, [expected[2], 7, 8])], 0, LAST))
    right = (*prompt, *expected, 7, 8)
    assert engine.adopt(MODEL, "right", right, 60) == 32
    (drawn,) = run(engine, part([row("right", 32, [8], draw=0)], 0, LAST)).sampled
    assert list(drawn) == model.expected_tokens(list(right), 1)


@pytest.mark.parametrize("hidden", [None, torch.zeros(2, 32), torch.zeros(1, 31)])
def test_hidden_states_that_do_not_fit(model: Model, hidden: torch.Tensor | None) -> None:
    with pytest.raises(BadInput, match="hidden"):
        run(model.engine(1), part([Row("s", 0, 1, 8)], 1, LAST, hidden))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 3), (4, 7)])
def test_blocks_that_do_not_exist(model: Model, start: int, stop: int) -> None:
    with pytest.raises(BadInput):
        run(model.engine(), part([row("s", 0, [1])], start, stop))


def test_a_sequence_stays_at_its_stage(model: Model) -> None:
    engine = model.engine()
    run(engine, part([row("s", 0, [1])], 0, 3))
    with pytest.raises(Conflict, match="another stage"):
        run(engine, part([row("s", 1, [1])], 0, 4))


def test_a_closed_model_is_gone(model: Model) -> None:
    engine = model.engine()
    run(engine, part([row("s", 0, [1])], 0, LAST))
    engine.close_model(MODEL)
    engine.close_model(MODEL)
    assert engine.kv_used == 0
    with pytest.raises(NotFound):
        run(engine, part([row("s", 1, [1])], 0, LAST))
    with pytest.raises(NotFound):
        engine.attach(MODEL, 0, memoryview(model.buffers[0]))
    engine.open_model(MODEL, model.manifest)
    with pytest.raises(Conflict):
        engine.open_model(MODEL, model.manifest)


def test_two_models_share_the_budget(model: Model) -> None:
    engine, other = model.engine(kv_bytes=1 << 20), make_model(seed=9, num_hidden_layers=2)
    second = ModelId("second")
    engine.open_model(second, other.manifest)
    for block, buffer in enumerate(other.buffers):
        engine.attach(second, block, memoryview(buffer))
    prompt = [row("s", 0, [1, 2, 3], limit=60, draw=0)]
    run(engine, part(prompt, 0, LAST))
    mine = [replace(prompt[0], sequence="t", limit=40)]
    sampled = run(engine, part(mine, 0, 4), second).sampled
    assert list(*sampled) == other.expected_tokens([1, 2, 3], 1)
    assert engine.kv_used == 32  # a page of the first model, and a smaller one of the second


def test_draws_are_the_same_alone_and_in_a_batch(model: Model) -> None:
    def drawing(key: str, seed: int) -> Row:
        sampling = Sampling(temperature=1.0, seed=seed, top_p=0.95)
        return replace(row(key, 0, [3, 1, 4], 64), draw=Draw(5, sampling))

    together = run(model.engine(), part([drawing(f"s{i}", i) for i in range(9)], 0, LAST)).sampled
    alone = [run(model.engine(), part([drawing("s", i)], 0, LAST)).sampled[0] for i in range(9)]
    assert list(together) == alone
    assert len(set(alone)) > 1


def _with_block(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    blocks = list(manifest.blocks)
    blocks[index] = msgspec.structs.replace(blocks[index], **changes)
    return msgspec.structs.replace(manifest, blocks=tuple(blocks))


def _with_tensor(block: BlockSpec, **changes: Any) -> dict[str, Any]:
    first = msgspec.structs.replace(block.tensors[0], **changes)
    return {"tensors": (first, *block.tensors[1:])}


def test_manifests_that_do_not_fit_the_config(model: Model) -> None:
    manifest, block = model.manifest, model.manifest.blocks[2]
    cases: list[tuple[Manifest, type[Exception], str]] = [
        (_with_block(manifest, 2, tensors=block.tensors[1:]), MissingTensor, "input_layernorm"),
        (_with_block(manifest, 2, **_with_tensor(block, shape=(31,))), CorruptCheckpoint, "shape"),
        (_with_block(manifest, 2, **_with_tensor(block, dtype="int8")), UnsupportedModel, "int8"),
        (_with_block(manifest, 2, first_unit=3, last_unit=3), CorruptCheckpoint, "unit"),
        (msgspec.structs.replace(manifest, blocks=manifest.blocks[:-1]), CorruptCheckpoint, "unit"),
        (
            _with_block(
                manifest, 1, tensors=(*manifest.blocks[1].tensors, manifest.blocks[0].tensors[0])
            ),
            CorruptCheckpoint,
            "embed_tokens",
        ),
    ]
    for bad, error, what in cases:
        with pytest.raises(error, match=what):
            TorchEngine("cpu", 64, threads=1).open_model(MODEL, bad)


def test_a_short_buffer_is_refused(model: Model) -> None:
    engine = model.engine(0, 0)
    with pytest.raises(BadInput, match="block 1"):
        engine.attach(MODEL, 1, memoryview(model.buffers[1])[:-1])
    with pytest.raises(NotFound):
        engine.attach(MODEL, LAST, memoryview(model.buffers[0]))
    assert engine.held(MODEL) == frozenset()


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:99"])
def test_devices_that_cannot_be_used(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        TorchEngine(device, 64, threads=1)


@pytest.mark.parametrize("blocks", [0, 2])
def test_a_model_from_the_store(tmp_path: FilePath, blocks: int) -> None:
    """From a checkpoint on disk, packed as in production, to transformers' tokens."""
    make_checkpoint(tmp_path / "checkpoint", TINY)
    imported = Store(tmp_path / "store").import_checkpoint(tmp_path / "checkpoint", blocks=blocks)
    buffers = tuple(
        bytearray((tmp_path / "store" / imported.model_id / f"block-{b:03d}.bin").read_bytes())
        for b in range(imported.manifest.n_blocks)
    )
    oracle = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    model = Model(imported.manifest, buffers, oracle)
    prompt = [11, 200, 35, 42, 5]
    assert Path(model).generate(prompt, 10) == model.expected_tokens(prompt, 10)
