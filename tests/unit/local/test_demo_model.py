"""The demo model is a checkpoint like any other: transformers is the oracle."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.local.demo_model import make_checkpoint, make_random_model
from services.node.checkpoints.checkpoint import open_checkpoint
from services.node.checkpoints.packing import lay_out
from shared.errors import BadInput
from tests.support.models import LLAMA3_ROPE, TINY

STEPS = 64
EOS_ID = 1
PROMPTS = [[0, *random.Random(seed).choices(range(5, 2900), k=12)] for seed in range(4)]
"""Token ids: the tokenizer, which is trained on the texts of the Python that runs, is not the same
everywhere."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("demo")
    make_random_model(path)
    return path


@pytest.fixture(scope="module")
def oracle(demo: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo).eval()


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo)


def greedy(oracle: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """For each prompt (all are equally long): tokens, and at each step how far the best one lies
    before the second."""
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    step, past = torch.tensor(prompts), None
    with torch.inference_mode():
        for _ in range(STEPS):
            result = oracle(step, past_key_values=past, use_cache=True)
            past = result.past_key_values
            best = result.logits[:, -1].topk(2)
            for (tokens, gaps), index, value in zip(found, best.indices, best.values, strict=True):
                tokens.append(int(index[0]))
                gaps.append(float(value[0] - value[1]))
            step = best.indices[:, :1]
    return found


def test_weights_are_what_transformers_loads(demo: Path, oracle: Any) -> None:
    state = oracle.state_dict()
    saved = load_file(demo / "model.safetensors")
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert oracle.dtype == torch.float32


def test_blocks_are_of_nearly_equal_size(demo: Path) -> None:
    sizes = [block.nbytes for block in lay_out(open_checkpoint(demo).units)]
    assert len(sizes) == 16
    assert max(sizes) < 1.002 * min(sizes)
    assert 40e6 < sum(sizes) < 55e6


def test_greedy_decoding_is_stable_and_lively(oracle: Any) -> None:
    for tokens, gaps in greedy(oracle, PROMPTS):
        assert min(gaps) > 1e-4
        assert EOS_ID not in tokens
        assert len(set(tokens[-32:])) > 8


def test_early_tokens_change_what_comes_much_later(oracle: Any) -> None:
    others = [[ids[0], ids[1] + 1, *ids[2:]] for ids in PROMPTS]
    found = greedy(oracle, PROMPTS + others)
    for (tokens, _), (other, _) in zip(found[: len(PROMPTS)], found[len(PROMPTS) :], strict=True):
        assert sum(a == b for a, b in zip(tokens[-32:], other[-32:], strict=True)) < 8


def test_tokenizer_and_chat_template(tokenizer: Any) -> None:
    text = "Grüße, naïve 東京! <tag>\n\tindent  two"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|begin|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"][-1] == 4
    assert tokenizer.eos_token_id == EOS_ID


@pytest.mark.parametrize(
    "spec",
    [
        replace(TINY, tied=True),
        replace(TINY, dtype=torch.bfloat16, shards=2),
        replace(TINY, old_config=True, dtype=torch.float16),
        replace(TINY, old_config=True, rope_scaling=LLAMA3_ROPE),
        replace(TINY, rope_scaling=LLAMA3_ROPE),
    ],
    ids=["tied", "bf16 sharded", "old fp16", "old llama3", "llama3"],
)
def test_variants_load_in_transformers(tmp_path: Path, spec: Any) -> None:
    make_checkpoint(tmp_path, spec)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == spec.dtype
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    wanted = (spec.rope_scaling or {"rope_type": "default"})["rope_type"]
    assert model.config.rope_parameters["rope_type"] == wanted
    assert model.model.embed_tokens.weight.shape == (spec.vocab_size, spec.hidden)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == spec.tied


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_checkpoint(tmp_path / name, replace(TINY, seed=seed))
    content = {
        name: [(tmp_path / name / f).read_bytes() for f in ("model.safetensors", "tokenizer.json")]
        for name in "abc"
    }
    assert content["a"] == content["b"]
    assert content["a"][0] != content["c"][0]
    assert content["a"][1] == content["c"][1]


def test_larger_demo_models_stay_balanced(tmp_path: Path) -> None:
    make_random_model(tmp_path, layers=2, hidden=384)
    sizes = [block.nbytes for block in lay_out(open_checkpoint(tmp_path).units)]
    assert max(sizes) < 1.02 * min(sizes)
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == 12


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="100"):
        make_random_model(tmp_path, hidden=100)
    with pytest.raises(BadInput, match="vocabulary"):
        make_checkpoint(tmp_path, replace(TINY, vocab_size=100))
