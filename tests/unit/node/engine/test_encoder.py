"""Images give transformers' logits, on one node and over stages, whoever else is in the step."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from services.node.engine.base import Draw, PartResult, Row, RowsRefused
from services.node.engine.engine import TorchEngine
from shared.errors import BadInput, NotFound
from shared.ids import ModelId
from shared.messages.serving import Sampling
from tests.unit.node.engine.conftest import Logits
from tests.unit.node.engine.models import MODEL, Model, make_model, pack, part, run, run_all
from tests.unit.node.engine.models import row as text_row

SIZE, PATCH, LABELS = 32, 8, 7
POSITIONS = (SIZE // PATCH) ** 2 + 1
NORMALIZED = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.22, 0.23, 0.24]}


def make_vit(
    seed: int = 0, blocks: int = 0, preprocessor: dict[str, Any] | None = None, **changes: Any
) -> Model:
    """A model whose answers vary, and depend on where in an image things are."""
    base = {
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": PATCH,
        "num_labels": LABELS,
        "dtype": "float32",
    }
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = ViTConfig(**(base | changes))
    dtype = config.dtype
    oracle = ViTForImageClassification(config).eval()
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(False)
        if "layernorm" in name:
            parameter.normal_(mean=float(name.endswith("weight")), std=0.1)
        elif parameter.dim() == 1:
            parameter.normal_(std=0.1)
        else:
            parameter.normal_(std=parameter.flatten(1).shape[1] ** -0.5)
    oracle.vit.embeddings.cls_token.normal_()
    oracle.vit.embeddings.position_embeddings.normal_()
    oracle.classifier.weight.mul_(4)
    oracle.config.dtype = dtype
    oracle = oracle.to(dtype)
    raw = oracle.config.to_dict() | {
        "architectures": ["ViTForImageClassification"],
        "preprocessor_config": {"size": {"height": SIZE, "width": SIZE}} | (preprocessor or {}),
    }
    return Model(*pack(raw, oracle.state_dict(), blocks), oracle)


@pytest.fixture(scope="module")
def vit() -> Model:
    return make_vit()


def image(seed: int, size: int = SIZE) -> bytes:
    torch.manual_seed(seed)
    return bytes(torch.randint(0, 256, (size * size * 3,), dtype=torch.uint8).numpy())


def row(key: str, pixels: bytes, draw: bool = True, **sampling: Any) -> Row:
    what = Draw(0, Sampling(**sampling)) if draw else None
    return Row(key, 0, POSITIONS, POSITIONS, (0,) * POSITIONS, what, pixels)


def on(rows: list[Row]) -> list[Row]:
    """As a later stage gets them."""
    return [replace(one, tokens=(), image=b"") for one in rows]


def expected_logits(
    model: Model, images: list[bytes], preprocessor: dict[str, Any] | None = None
) -> torch.Tensor:
    """[images, labels] float32, by transformers' own image processor."""
    processor = ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}, **(preprocessor or {}))
    pixels = [
        torch.frombuffer(bytearray(one), dtype=torch.uint8).view(SIZE, SIZE, 3).numpy()
        for one in images
    ]
    values = processor(pixels, return_tensors="pt").pixel_values
    with torch.no_grad():
        logits: torch.Tensor = model.oracle(values).logits.float()
    return logits


def over_stages(model: Model, cuts: tuple[int, ...], rows: list[Row]) -> PartResult:
    hidden = None
    for start, stop in pairwise((0, *cuts, model.n_blocks)):
        given = part(rows if start == 0 else on(rows), start, stop, hidden)
        result = run(model.engine(start, stop), given)
        hidden = result.hidden
    return result


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "no_qkv_bias": {"qkv_bias": False},
    "one_layer": {"num_hidden_layers": 1},
    "one_head": {"num_attention_heads": 1},
    "unaligned": {"hidden_size": 36, "intermediate_size": 33, "num_attention_heads": 3},
    "eps": {"layer_norm_eps": 0.1},
    "small_patches": {"patch_size": 4},
    "one_label": {"num_labels": 1},
    "normalized": {"preprocessor": NORMALIZED},
    "not_normalized": {"preprocessor": {"do_normalize": False}},
    "not_rescaled": {"preprocessor": {"do_rescale": False, "image_std": [200.0, 210.0, 220.0]}},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, logits: Logits) -> None:
    model = make_vit(seed=3, **FORMS[form])
    images = [image(i) for i in range(3)]
    positions = (SIZE // model.oracle.config.patch_size) ** 2 + 1
    rows = [
        replace(row(f"s{i}", one), count=positions, limit=positions) for i, one in enumerate(images)
    ]
    result = run(model.engine(), part(rows, 0, model.n_blocks))
    expected = expected_logits(model, images, FORMS[form].get("preprocessor"))
    assert_close(logits.take(), expected)
    assert list(result.sampled) == [(label,) for label in expected.argmax(-1).tolist()]


@pytest.mark.parametrize("cuts", [(), (1,), (3,), (5,), (1, 5), (2, 4), (1, 2, 4, 5)])
def test_over_stages(vit: Model, cuts: tuple[int, ...], logits: Logits) -> None:
    images = [image(i) for i in range(4)]
    rows = [row(f"s{i}", one) for i, one in enumerate(images)]
    over_stages(vit, cuts, rows)
    assert_close(logits.take(), expected_logits(vit, images))


def test_blocks_of_several_units(logits: Logits) -> None:
    model = make_vit(blocks=2)
    over_stages(model, (1,), [row("s", image(1))])
    assert_close(logits.take(), expected_logits(model, [image(1)]))


WIDE: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 1024, "num_attention_heads": 12}
"""Some processors have other products for such sizes and many rows."""


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_bits_whoever_else_is_in_the_step(
    dtype: str, sizes: dict[str, Any], logits: Logits
) -> None:
    model = make_vit(seed=1, dtype=dtype, **sizes)
    engine, last = model.engine(), model.n_blocks
    rows = [row(f"s{i}", image(i)) for i in range(7)]
    run_all(engine, [part([rows[0]], 0, last), part(rows[1:3], 0, last), part(rows[3:], 0, last)])
    together = logits.take()
    engine.free(tuple(one.sequence for one in rows))
    for one in rows:
        run(engine, part([one], 0, last))
    assert torch.equal(logits.take(), together)
    over_stages(model, (2, 4), rows[2:3])
    assert torch.equal(logits.take(), together[2:3])


def test_parts_of_different_stages_in_one_sweep(vit: Model, logits: Logits) -> None:
    engine, late = vit.engine(), [row("late", image(8))]
    hidden = run(vit.engine(0, 3), part(late, 0, 3)).hidden
    both = [part([row("whole", image(7))], 0, 6), part(on(late), 3, 6, hidden)]
    run_all(engine, both)
    assert_close(logits.take(), expected_logits(vit, [image(7), image(8)]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str, logits: Logits) -> None:
    """As near to float32 as transformers in the same precision."""
    model, exact = make_vit(dtype=dtype), make_vit()
    images = [image(i) for i in range(8)]
    run(model.engine(), part([row(f"s{i}", one) for i, one in enumerate(images)], 0, 6))
    expected = expected_logits(exact, images)
    theirs = (expected_logits(model, images) - expected).abs().mean()
    assert (logits.take() - expected).abs().mean() <= 1.2 * theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_8_bits(dtype: str, logits: Logits) -> None:
    """Near to what they are without, and the same in every batch and on every path."""
    model, exact = make_vit(dtype=dtype, **WIDE), make_vit(**WIDE)
    model.cpu_weights = "int8"
    images = [image(i) for i in range(16)]
    rows = [row(f"s{i}", one) for i, one in enumerate(images)]
    engine = model.engine()
    run(engine, part(rows, 0, 6))
    together, expected = logits.take(), expected_logits(exact, images)
    error = (together - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05
    engine.free(tuple(one.sequence for one in rows))
    run(engine, part(rows[3:4], 0, 6))
    over_stages(model, (2, 4), rows[3:4])
    assert torch.equal(logits.take(), together[3:4].repeat(2, 1))


def test_log_probabilities_of_the_first_classes(vit: Model) -> None:
    result = run(vit.engine(), part([row("s", image(5), logprobs=3)], 0, 6))
    expected = torch.log_softmax(expected_logits(vit, [image(5)])[0], -1)
    best = expected.topk(3)
    (found,) = result.logprobs["s"]
    assert [index for index, _ in found.top] == best.indices.tolist()
    assert_close(torch.tensor([p for _, p in found.top]), best.values)
    assert found.drawn == found.top[0][1]


def test_nothing_is_kept(vit: Model) -> None:
    engine = vit.engine(kv_tokens=16)
    tokens = (0,) * POSITIONS
    assert engine.adopt(MODEL, "s0", tokens, POSITIONS) == 0
    run(engine, part([row(f"s{i}", image(i)) for i in range(9)], 0, 6))
    assert engine.kv_used == 0
    engine.free(tuple(f"s{i}" for i in range(9)))
    assert engine.adopt(MODEL, "s0", tokens, POSITIONS) == 0


def test_an_image_that_ends_leaves_the_sweep(vit: Model, logits: Logits) -> None:
    engine = vit.engine()
    sweep = engine.begin(MODEL)
    number = sweep.join(part([row("a", image(1)), row("b", image(2))], 0, 6))
    sweep.advance()
    engine.free(("a",))
    left: dict[int, PartResult] = {}
    while not left:
        left = sweep.advance()
    assert [one.sequence for one in left[number].rows] == ["b"]
    assert_close(logits.take(), expected_logits(vit, [image(2)]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image": b""}, "an image of 3072 bytes is due, not of 0"),
        ({"image": image(1)[:-3]}, "an image of 3072 bytes is due, not of 3069"),
        ({"count": 5}, "5 positions from 0 on; expected all 17"),
        ({"count": 18, "limit": 18}, "18 positions from 0 on; expected all 17"),
    ],
)
def test_only_the_wrong_image_is_refused(vit: Model, changes: dict[str, Any], says: str) -> None:
    engine = vit.engine()
    sweep = engine.begin(MODEL)
    wrong = replace(row("wrong", image(1)), **changes)
    with pytest.raises(RowsRefused, match=says) as refused:
        sweep.join(part([row("right", image(0)), wrong], 0, 6))
    assert refused.value.sequences == ("wrong",)
    assert isinstance(refused.value.why, BadInput)
    assert run(engine, part([row("right", image(0))], 0, 6)).sampled != ((),)


def test_a_second_row_of_an_image_is_refused(vit: Model) -> None:
    engine = vit.engine(3)
    hidden = run(vit.engine(0, 3), part([row("s", image(0))], 0, 3)).hidden
    long = replace(row("s", b""), limit=POSITIONS + 1, tokens=())
    run(engine, part([long], 3, 6, hidden))
    assert hidden is not None
    more = part([replace(long, position=POSITIONS, count=1)], 3, 6, hidden[:1])
    with pytest.raises(RowsRefused, match="1 positions from 17 on"):
        engine.begin(MODEL).join(more)


def test_a_block_that_is_not_there(vit: Model) -> None:
    engine: TorchEngine = vit.engine(0, 5)
    with pytest.raises(NotFound, match=r"blocks \[5\]"):
        engine.begin(MODEL).join(part([row("s", image(0))], 0, 6))


def test_a_model_that_reads_text_finds_its_kv_after_one_that_sees(vit: Model) -> None:
    reader, engine = make_model(), TorchEngine("cpu", 256, threads=1)
    engine.open_model(ModelId("seeing"), vit.manifest)
    assert engine.kv_capacity == 0
    engine.open_model(MODEL, reader.manifest)
    assert engine.kv_capacity == 256
    for block, buffer in enumerate(reader.buffers):
        engine.attach(MODEL, block, memoryview(buffer))
    prompt = text_row("s", 0, [5, 6, 7], draw=0)
    token = reader.expected_tokens([5, 6, 7], 1)[0]
    assert run(engine, part([prompt], 0, reader.n_blocks)).sampled == ((token,),)
