"""Checkpoints of every family as transformers writes them: imported and run, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.node.checkpoints.config import ModelConfig
from services.node.checkpoints.store import Imported, Store
from shared.errors import LambdaScaleError, MissingTensor, UnsupportedModel
from tests.unit.node.engine.models import Model, make_oracle
from tests.unit.node.engine.models import Path as EnginePath
from tests.unit.node.engine.test_against_transformers import FAMILIES, FORMS, tokens_of

MIXED = ["qwen2_yarn", "qwen2_tied", "qwen2_window_in_upper_layers", "qwen3_moe_mixed"]


def save(path: Path, form: str, **how: Any) -> Any:
    """What transformers makes of it, and has in memory."""
    oracle = make_oracle(seed=4, **FORMS[form])
    oracle.save_pretrained(path, **how)
    (path / "tokenizer.json").write_text("{}")
    return oracle


def imported(path: Path, store: Path, blocks: int = 3) -> tuple[Imported, tuple[bytearray, ...]]:
    kept = Store(store)
    made = kept.import_checkpoint(path, blocks=blocks)
    buffers = []
    for block in made.manifest.blocks:
        buffers.append(bytearray(block.nbytes))
        kept.fill(made.model_id, block.index, memoryview(buffers[-1]))
    return made, tuple(buffers)


@pytest.mark.parametrize("how", [{}, {"max_shard_size": "30KB"}, {"save_original_format": False}])
@pytest.mark.parametrize("form", [*FAMILIES, *MIXED])
def test_a_checkpoint_runs(form: str, how: dict[str, Any], tmp_path: Path) -> None:
    oracle = save(tmp_path / "saved", form, **how)
    assert (tmp_path / "saved" / "model.safetensors").exists() == ("max_shard_size" not in how)
    made, buffers = imported(tmp_path / "saved", tmp_path / "store")
    model = Model(made.manifest, buffers, oracle)
    prompt = tokens_of(1, 60)
    tokens = EnginePath(model, (1,)).generate(prompt, 12)
    assert tokens == model.expected_logits(prompt + tokens)[59:-1].argmax(-1).tolist()


@pytest.mark.parametrize("form", ["qwen3_moe", "mixtral"])
def test_experts_of_both_generations_are_packed_alike(form: str, tmp_path: Path) -> None:
    oracle = save(tmp_path / "each", form)
    oracle.save_pretrained(tmp_path / "stacked", save_original_format=False)
    (tmp_path / "stacked" / "tokenizer.json").write_text("{}")
    names = [set(load_file(tmp_path / d / "model.safetensors")) for d in ("each", "stacked")]
    assert not any("experts" in name for name in names[0] & names[1])
    each, stacked = (imported(tmp_path / d, tmp_path / "store")[1] for d in ("each", "stacked"))
    assert each == stacked


@pytest.mark.parametrize("form", [*FAMILIES, *MIXED])
def test_config_generations_say_the_same(form: str, tmp_path: Path) -> None:
    save(tmp_path, form)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "dtype")}
    scaling = dict(new["rope_parameters"])
    old |= {"torch_dtype": new["dtype"], "rope_theta": scaling.pop("rope_theta")}
    kind = scaling.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else scaling | {"type": kind}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


def edited(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """None takes it away."""
    tensors = load_file(path / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("form", "name", "tensor", "error"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.5.up_proj.weight", None, MissingTensor),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight", None, MissingTensor),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight", None, MissingTensor),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias", None, MissingTensor),
        ("qwen3", "model.layers.3.self_attn.q_norm.weight", None, MissingTensor),
        ("qwen2", "model.layers.1.self_attn.o_proj.bias", torch.ones(32), UnsupportedModel),
        ("mistral", "model.layers.1.self_attn.q_norm.weight", torch.ones(12), UnsupportedModel),
        (
            "qwen3_moe",
            "model.layers.0.mlp.experts.down_proj",
            torch.ones(8, 32, 40),
            UnsupportedModel,
        ),
    ],
)
def test_tensors_that_do_not_fit(
    form: str, name: str, tensor: torch.Tensor | None, error: type, tmp_path: Path
) -> None:
    save(tmp_path / "saved", form)
    edited(tmp_path / "saved", name, tensor)
    with pytest.raises(LambdaScaleError) as caught:
        imported(tmp_path / "saved", tmp_path / "store")
    assert type(caught.value) is error
    assert name in str(caught.value)
