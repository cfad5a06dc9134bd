import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.node.engine import warmup
from services.node.engine.base import Draw
from services.node.engine.decoder import Decoder
from services.node.engine.encoder import EncoderStep
from services.node.engine.engine import TorchEngine
from services.node.engine.layer_step import LayerStep
from services.node.engine.sampling import Drawn, sample
from services.node.engine.weights import ExpertMlp, LayerUnit, Mlp
from tests.unit.node.engine.models import MODEL, Model, make_model
from tests.unit.node.engine.test_encoder import LABELS, POSITIONS, make_vit


def decoder_of(model: Model) -> Decoder:
    model.cpu_weights = "stored"
    network = model.engine(0, 0)._model(MODEL).network
    assert isinstance(network, Decoder)
    return network


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_batch_goes_through_a_layer_and_the_head(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(attention_bias=True, dtype=dtype)
    decoder = decoder_of(model)
    layers: list[int] = []
    heads: list[int] = []
    run = LayerStep.run

    def spy(
        step: LayerStep,
        block: int,
        blocks: Sequence[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
    ) -> int:
        run(step, block, blocks, hidden, kv)
        layers.append(len(hidden))
        return 1

    def drawn(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        heads.append(len(logits))
        return sample(logits, draws)

    monkeypatch.setattr(LayerStep, "run", spy)
    monkeypatch.setattr(warmup, "sample", drawn)
    pieces = list(warmup.warm_up(decoder))
    assert layers == [n * count for n, count in warmup.BATCHES]
    assert heads == [n for n in (1, 2, 4, 8, 16, 32, 64) for _ in ("greedy", "at random")]
    assert len(pieces) == len(layers) + len(heads) // 2


def test_layers_of_every_kind_are_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        mlp_only_layers=[1, 2],
    )
    run, warmed = LayerStep.run, list[type]()

    def spy(
        step: LayerStep,
        block: int,
        blocks: Sequence[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
    ) -> int:
        run(step, block, blocks, hidden, kv)
        warmed.extend(type(unit.mlp) for unit in blocks[0])
        return 1

    monkeypatch.setattr(LayerStep, "run", spy)
    list(warmup.warm_up(decoder_of(model)))
    batches = len(warmup.BATCHES)
    assert sorted(warmed, key=str) == [ExpertMlp] * batches + [Mlp] * batches


def test_images_go_through_all_of_a_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernels the engine is told to run here."""
    model = make_vit()
    engine = TorchEngine("cpu", 0, threads=1, capture=lambda work: work)
    engine.open_model(MODEL, model.manifest)
    layers: list[int] = []
    classes: list[torch.Size] = []
    run = EncoderStep.run

    def spy(
        step: EncoderStep, block: int, units: Sequence[Any], hidden: torch.Tensor, kv: torch.Tensor
    ) -> None:
        run(step, block, units, hidden, kv)
        layers.append(len(hidden))

    def drawn(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        classes.append(logits.shape)
        return sample(logits, draws)

    monkeypatch.setattr(EncoderStep, "run", spy)
    monkeypatch.setattr(warmup, "sample", drawn)
    pieces = list(engine.warm_up(MODEL))
    assert layers == [images * POSITIONS for images in (1, 2, 4, 8)]
    assert classes == [(images, LABELS) for images in (1, 2, 4, 8)]
    assert len(pieces) == 4


def test_on_a_cpu_there_is_nothing_to_warm(model: Model) -> None:
    assert list(model.engine().warm_up(MODEL)) == []
    assert list(make_vit().engine().warm_up(MODEL)) == []


def test_an_engine_on_a_cpu_needs_no_triton() -> None:
    """It is not there on machines with torch's CPU build. In a process of its own: in this one
    other tests may have imported it."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from services.node.engine.engine import TorchEngine\n"
        "TorchEngine('cpu', 64, 1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
