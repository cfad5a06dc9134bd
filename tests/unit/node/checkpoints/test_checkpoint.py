"""What is refused, and by which name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.local.demo_model import make_checkpoint
from services.node.checkpoints.checkpoint import open_checkpoint, open_tensors
from services.node.checkpoints.config import ModelConfig
from shared.errors import (
    BadInput,
    CorruptCheckpoint,
    LambdaScaleError,
    MissingTensor,
    NotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from tests.support.models import LLAMA3_ROPE, TINY

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.2.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_weights(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def refusal(path: Path, error: type[LambdaScaleError], *words: str) -> None:
    with pytest.raises(LambdaScaleError) as caught:
        open_checkpoint(path)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def test_opens_what_is_there(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert checkpoint.config.n_layers == TINY.layers
    assert checkpoint.raw_config == json.loads((tiny / "config.json").read_text())
    assert len(checkpoint.units) == TINY.layers + 2
    assert [tensor.name for tensor in checkpoint.units[-1]] == [
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert set(checkpoint.files) == {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json"
    }  # fmt: skip
    assert checkpoint.files["tokenizer.json"] == (tiny / "tokenizer.json").read_bytes()


def test_a_separate_chat_template_comes_along(own: Path) -> None:
    (own / "chat_template.jinja").write_text("{{ messages }}")
    assert open_checkpoint(own).files["chat_template.jinja"] == b"{{ messages }}"


def test_what_sentence_transformers_say_of_pooling_comes_along(own: Path) -> None:
    (own / "1_Pooling").mkdir()
    for mode in ("mean", "max"):  # the second cannot be followed, and the model is for text as well
        said = f'{{"pooling_mode_{mode}_tokens": true}}'
        (own / "1_Pooling" / "config.json").write_text(said)
        assert open_checkpoint(own).files["pooling.json"] == said.encode()
    (own / "1_Pooling" / "config.json").write_text("[]")
    refusal(own, CorruptCheckpoint, "1_Pooling/config.json")


def test_names_without_their_first_part(own: Path) -> None:
    """As Qwen3-Embedding has them, without a head."""
    whole = open_checkpoint(own)

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_weights(own, strip)
    bare = open_checkpoint(own)
    assert bare.units == whole.units
    assert bare.stored.keys() == whole.stored.keys()
    edit_weights(own, lambda tensors: tensors.pop("lm_head.weight"))
    refusal(own, MissingTensor, "lm_head.weight")
    edit_json(own / "config.json", tie_word_embeddings=True)
    assert len(open_checkpoint(own).units) == len(whole.units)


def test_config_generations_agree(own: Path, tmp_path: Path) -> None:
    spec = replace(TINY, rope_scaling=LLAMA3_ROPE, dtype=torch.bfloat16)
    make_checkpoint(tmp_path / "new", spec)
    make_checkpoint(tmp_path / "old", replace(spec, old_config=True))
    new, old = open_checkpoint(tmp_path / "new"), open_checkpoint(tmp_path / "old")
    assert new.raw_config != old.raw_config
    assert new.config == old.config
    assert isinstance(new.config, ModelConfig)
    assert new.config.rope.kind == "llama3"


def test_reads_ranges_of_tensors(tiny: Path) -> None:
    (stored,) = open_checkpoint(tiny).stored[UP]
    whole = load_file(tiny / WEIGHTS)[UP].numpy().tobytes()
    part = bytearray(100)
    with open_tensors([stored]) as reader:
        reader.read(stored, 40, memoryview(part))
    assert bytes(part) == whole[40:140]


def test_file_that_shrinks_while_it_is_read(own: Path) -> None:
    (stored,) = open_checkpoint(own).stored[UP]
    with open_tensors([stored]) as reader:
        (own / WEIGHTS).write_bytes(b"")
        with pytest.raises(CorruptCheckpoint, match="became shorter"):
            reader.read(stored, 0, memoryview(bytearray(8)))


def test_no_such_directory(tmp_path: Path) -> None:
    refusal(tmp_path / "nowhere", NotFound, "nowhere")


def test_a_file_is_no_checkpoint(tiny: Path) -> None:
    refusal(tiny / "config.json", BadInput, "directory")


def test_a_path_that_no_file_system_takes(tmp_path: Path) -> None:
    refusal(tmp_path / ("x" * 256), BadInput, "too long")


@pytest.mark.parametrize("content", ["{", "[]", '{"a": NaN}', '{"a": 1e', '{"a": "\\ud800"}'])
def test_config_that_is_no_json_object(own: Path, content: str) -> None:
    (own / "config.json").write_text(content)
    refusal(own, CorruptCheckpoint, "config.json")


def test_config_with_a_number_no_manifest_can_carry(own: Path) -> None:
    edit_json(own / "config.json", huge=1 << 70)
    refusal(own, CorruptCheckpoint, "config.json")


def test_missing_config(own: Path) -> None:
    (own / "config.json").unlink()
    refusal(own, CorruptCheckpoint, "no config.json")


def test_unsupported_architecture(own: Path) -> None:
    edit_json(own / "config.json", architectures=["MambaForCausalLM"])
    refusal(own, UnsupportedModel, "MambaForCausalLM")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(own: Path, name: str) -> None:
    (own / WEIGHTS).rename(own / name)
    refusal(own, UnsafeCheckpoint, name, "safetensors")


def test_no_weights(own: Path) -> None:
    (own / WEIGHTS).unlink()
    refusal(own, CorruptCheckpoint, WEIGHTS, INDEX)


def test_truncated_weights(own: Path) -> None:
    content = (own / WEIGHTS).read_bytes()
    (own / WEIGHTS).write_bytes(content[:-1])
    refusal(own, CorruptCheckpoint, WEIGHTS, "cut short")


def test_weights_too_long(own: Path) -> None:
    with (own / WEIGHTS).open("ab") as file:
        file.write(b"x")
    refusal(own, CorruptCheckpoint, WEIGHTS, "wrong length")


def test_weights_that_are_no_safetensors(own: Path) -> None:
    (own / WEIGHTS).write_bytes(b"\x80\x04" * 100)
    refusal(own, CorruptCheckpoint, WEIGHTS, "not a safetensors file")


def test_missing_tensor(own: Path) -> None:
    edit_weights(own, lambda tensors: tensors.pop(UP))
    refusal(own, MissingTensor, UP)


def test_missing_head_of_an_untied_model(own: Path) -> None:
    edit_weights(own, lambda tensors: tensors.pop("lm_head.weight"))
    refusal(own, MissingTensor, "lm_head.weight")


def test_unexpected_shape(own: Path) -> None:
    edit_weights(own, lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()}))
    refusal(own, CorruptCheckpoint, UP, "[64, 96]", "[96, 64]")


def test_mixed_dtypes(own: Path) -> None:
    edit_weights(own, lambda tensors: tensors.update({UP: tensors[UP].bfloat16()}))
    refusal(own, UnsupportedModel, UP, "bfloat16", "float32")


def test_unsupported_dtype(own: Path) -> None:
    edit_weights(own, lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}))
    refusal(own, UnsupportedModel, UP, "I8")


def test_tensors_that_would_be_ignored(own: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    edit_weights(own, lambda tensors: tensors.update({name: torch.ones(16)}))
    refusal(own, UnsupportedModel, name)


def test_derived_buffers_of_old_exports_are_ignored(own: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(own, lambda tensors: tensors.update({name: torch.ones(8, dtype=torch.int64)}))
    assert name not in open_checkpoint(own).stored


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "sharded", replace(TINY, shards=3))
    return tmp_path / "sharded"


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refusal(sharded, CorruptCheckpoint, "model-00002-of-00003.safetensors")


def test_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refusal(sharded, CorruptCheckpoint, shard.name, "cut short")


def test_shard_without_a_tensor_that_the_index_names(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, shard)
    refusal(sharded, MissingTensor, shard.name, name)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 3])
def test_index_that_points_elsewhere(sharded: Path, shard: object) -> None:
    edit_json(sharded / INDEX, weight_map={"lm_head.weight": shard})
    refusal(sharded, CorruptCheckpoint, INDEX)


def test_index_without_a_map(sharded: Path) -> None:
    (sharded / INDEX).write_text("{}")
    refusal(sharded, CorruptCheckpoint, INDEX)


def test_no_fast_tokenizer(own: Path) -> None:
    (own / "tokenizer.json").unlink()
    refusal(own, UnsupportedModel, "tokenizer.json")


@pytest.mark.parametrize(
    "template",
    ["{{ %}", "{{" + "(" * 5000, "{% for a in b %}" * 25 + "{% endfor %}" * 25],
    ids=["malformed", "deep", "nested"],
)
def test_a_chat_template_that_cannot_be_read(own: Path, template: str) -> None:
    (own / "chat_template.jinja").write_text(template)
    refusal(own, CorruptCheckpoint, "chat template cannot be read")


def test_damaged_tokenizer(own: Path) -> None:
    (own / "tokenizer.json").write_text('{"model": ')
    refusal(own, CorruptCheckpoint, "tokenizer.json")
