"""Encoders of texts are packed like any model, with what is said of their vectors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.node.checkpoints.checkpoint import open_checkpoint
from services.node.checkpoints.store import Store
from shared.errors import CorruptCheckpoint, LambdaScaleError, MissingTensor, UnsupportedModel
from tests.support.bert import TINY_BERT, make_bert


@pytest.fixture
def own(tmp_path: Path) -> Path:
    make_bert(tmp_path / "bert")
    return tmp_path / "bert"


def change(file: Path, **values: Any) -> None:
    changed = json.loads(file.read_text()) | values
    kept = {key: value for key, value in changed.items() if value != "missing"}
    file.write_text(json.dumps(kept))


def refusal(path: Path, error: type[LambdaScaleError], says: str) -> None:
    with pytest.raises(error, match=says):
        open_checkpoint(path)


def test_the_manifest_has_all_that_a_node_and_a_gateway_need(own: Path, tmp_path: Path) -> None:
    imported = Store(tmp_path / "store").import_checkpoint(own)
    assert set(imported.files) == {
        "tokenizer.json", "tokenizer_config.json", "pooling.json", "modules.json"
    }  # fmt: skip
    assert imported.context_length == TINY_BERT.positions
    assert imported.manifest.n_blocks == TINY_BERT.layers + 2


def test_every_tensor_but_those_of_the_pooler_has_its_place(own: Path) -> None:
    checkpoint = open_checkpoint(own)
    stored = load_file(own / "model.safetensors")
    assert {t.name: t.shape for unit in checkpoint.units for t in unit} == {
        name: tuple(tensor.shape)
        for name, tensor in stored.items()
        if not name.startswith("pooler.")
    }


def test_what_older_exports_and_others_have_beside_it(own: Path) -> None:
    tensors = load_file(own / "model.safetensors")
    for name in ("pooler.dense.weight", "pooler.dense.bias"):
        del tensors[name]
    tensors["embeddings.position_ids"] = torch.arange(TINY_BERT.positions)[None]
    save_file(tensors, own / "model.safetensors")
    open_checkpoint(own)
    del tensors["encoder.layer.0.output.LayerNorm.bias"]
    save_file(tensors, own / "model.safetensors")
    refusal(own, MissingTensor, r"encoder\.layer\.0\.output\.LayerNorm\.bias")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"hidden_act": "gelu_new"}, UnsupportedModel, "hidden_act 'gelu_new'.*only gelu"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModel, "relative_key"),
        ({"is_decoder": True}, UnsupportedModel, "is_decoder"),
        ({"add_cross_attention": True}, UnsupportedModel, "add_cross_attention"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantized"),
        ({"num_attention_heads": 5}, CorruptCheckpoint, "not a multiple of num_attention_heads 5"),
        ({"max_position_embeddings": "missing"}, CorruptCheckpoint, "max_position_embeddings"),
        ({"max_position_embeddings": 64}, CorruptCheckpoint, "position_embeddings.*has shape"),
        ({"architectures": ["BertForMaskedLM"]}, UnsupportedModel, "supported: .*BertModel"),
    ],
)
def test_configs_that_are_refused(
    own: Path, changes: dict[str, Any], error: type[LambdaScaleError], says: str
) -> None:
    change(own / "config.json", **changes)
    refusal(own, error, says)


@pytest.mark.parametrize(
    ("file", "content", "error", "says"),
    [
        ("1_Pooling/config.json", "[]", CorruptCheckpoint, "1_Pooling/config.json"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            UnsupportedModel,
            "pooling max_tokens is not supported",
        ),
        ("modules.json", "{}", CorruptCheckpoint, "modules.json"),
        (
            "modules.json",
            '[{"type": "sentence_transformers.models.Dense"}]',
            UnsupportedModel,
            "module Dense is not supported",
        ),
    ],
)
def test_vectors_that_cannot_be_made_are_refused(
    own: Path, file: str, content: str, error: type[LambdaScaleError], says: str
) -> None:
    (own / file).write_text(content)
    refusal(own, error, says)


def test_a_tokenizer_is_needed(own: Path) -> None:
    (own / "tokenizer.json").unlink()
    refusal(own, UnsupportedModel, "tokenizer.json")
