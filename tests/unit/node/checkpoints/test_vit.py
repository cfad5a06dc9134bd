"""Image classifiers are packed like any model, without a tokenizer, with their image processor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

from services.node.checkpoints.checkpoint import open_checkpoint
from services.node.checkpoints.store import Store
from services.node.checkpoints.vit_config import VitConfig
from shared.errors import CorruptCheckpoint, MissingTensor, UnsupportedModel
from tests.support.classifier import TINY_VIT, make_classifier


@pytest.fixture
def own(tmp_path: Path) -> Path:
    make_classifier(tmp_path / "vit", TINY_VIT)
    return tmp_path / "vit"


def change(file: Path, **values: Any) -> None:
    changed = json.loads(file.read_text()) | values
    kept = {key: value for key, value in changed.items() if value != "missing"}
    file.write_text(json.dumps(kept))


def test_the_manifest_has_all_that_a_node_and_a_gateway_need(own: Path, tmp_path: Path) -> None:
    imported = Store(tmp_path / "store").import_checkpoint(own)
    assert imported.files == {}
    assert imported.context_length == 17
    config = imported.manifest.config
    assert config["preprocessor_config"]["size"] == {"height": 32, "width": 32}
    assert config["id2label"]["9"] == "class 9"
    assert imported.manifest.n_blocks == TINY_VIT.layers + 2


def test_another_image_processor_is_another_model(own: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first = store.import_checkpoint(own)
    change(own / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    assert store.import_checkpoint(own).model_id != first.model_id


@pytest.mark.parametrize("original", [True, False])
def test_every_tensor_that_transformers_saves_has_its_place(tmp_path: Path, original: bool) -> None:
    """`original`: tensors have their names in checkpoints on the Hub; else those in memory."""
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    model = ViTForImageClassification(config)
    model.save_pretrained(tmp_path, save_original_format=original)
    size = {"height": 16, "width": 16}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    checkpoint = open_checkpoint(tmp_path)
    state = model.state_dict()
    assert {t.name: t.shape for unit in checkpoint.units for t in unit} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported; only gelu"),
        ({"num_channels": 1}, "num_channels 1 is not supported"),
        ({"problem_type": "multi_label_classification"}, "'multi_label_classification'"),
        ({"image_size": 48}, "interpolated position embeddings are not supported"),
        ({"image_size": [32, 32]}, r"image_size \[32, 32\] is not supported"),
        ({"patch_size": 5}, "not a multiple of patch_size 5"),
        ({"quantization_config": {"bits": 8}}, "quantized checkpoints"),
        ({"dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"architectures": ["DeiTForImageClassification"]}, "supported: .*ViTForImageClass"),
    ],
)
def test_unsupported_by_name(own: Path, changes: dict[str, Any], says: str) -> None:
    change(own / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=says):
        open_checkpoint(own)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": "missing"}, "hidden_size is missing"),
        ({"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
        ({"layer_norm_eps": -1}, "layer_norm_eps must be a positive number"),
        ({"id2label": {"1": "one"}}, "id2label must name the classes from 0 on"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000, at most 1024 works"),
        ({"hidden_size": 8192, "num_attention_heads": 2}, "heads of 4096, at most 1024 works"),
    ],
)
def test_damaged_by_name(own: Path, changes: dict[str, Any], says: str) -> None:
    change(own / "config.json", **changes)
    with pytest.raises(CorruptCheckpoint, match=says):
        open_checkpoint(own)


def test_without_an_image_processor(own: Path) -> None:
    (own / "preprocessor_config.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"there is no preprocessor_config.json"):
        open_checkpoint(own)


def test_more_layers_than_there_are(own: Path) -> None:
    change(own / "config.json", num_hidden_layers=TINY_VIT.layers + 1)
    with pytest.raises(MissingTensor, match=r"16 tensors .* are missing"):
        open_checkpoint(own)


def test_keys_that_are_left_out_mean_what_they_mean_to_transformers() -> None:
    raw = ViTConfig().to_dict()
    raw |= {"architectures": ["ViTForImageClassification"], "preprocessor_config": {}}
    left_out = ("hidden_act", "layer_norm_eps", "image_size", "patch_size", "num_channels",
                "qkv_bias", "id2label")  # fmt: skip
    shorter = {key: value for key, value in raw.items() if key not in left_out}
    assert VitConfig.from_hf(shorter) == VitConfig.from_hf(raw)
    assert VitConfig.from_hf(raw).context_length == 197


def test_the_demo_classifier_is_a_checkpoint_for_transformers(own: Path) -> None:
    model, report = ViTForImageClassification.from_pretrained(own, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model(torch.rand(2, 3, 32, 32)).logits
    assert logits.shape == (2, 10)
    assert logits.std() > 1
