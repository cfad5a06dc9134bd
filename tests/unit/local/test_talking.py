"""The demo's model is a checkpoint like any other, small, and talks: transformers is the oracle."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.local.talking import CHECKPOINT
from services.local.talking.wide import make_wide
from services.node.checkpoints.checkpoint import open_checkpoint
from services.node.checkpoints.packing import lay_out

MOST_BYTES = 12_000_000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talking") / "wide"
    make_wide(path)
    return path


@pytest.fixture(scope="module")
def oracle(wide: Path) -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(wide).eval()


@pytest.fixture(scope="module")
def tokenizer(wide: Path) -> Any:
    return AutoTokenizer.from_pretrained(wide)


def test_the_licence_that_the_card_names_lies_beside_it(wide: Path) -> None:
    for path in (CHECKPOINT, wide):
        assert "in the file WORDNET beside this one" in (path / "README.md").read_text()
        assert "Princeton University" in (path / "WORDNET").read_text()


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < MOST_BYTES


def blocks_of(path: Path) -> list[int]:
    return [block.nbytes for block in lay_out(open_checkpoint(path).units)]


def test_blocks_are_of_nearly_equal_size() -> None:
    sizes = blocks_of(CHECKPOINT)
    assert len(sizes) == 12
    assert max(sizes) < 1.2 * min(sizes)


def test_a_wide_layer_is_large_beside_what_a_token_sends(wide: Path) -> None:
    sizes = blocks_of(wide)
    assert len(sizes) == 12
    hidden = json.loads((wide / "config.json").read_text())["hidden_size"]
    assert min(sizes[1:-1]) > 10_000 * 4 * hidden
    assert sum(sizes) == pytest.approx((wide / "model.safetensors").stat().st_size, rel=0.01)


def test_wide_weights_compute_the_same(oracle: Any) -> None:
    narrow: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tokens = torch.randint(5, 2000, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(oracle(tokens).logits, narrow(tokens).logits)


def said(oracle: Any, tokenizer: Any, question: str) -> str:
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.inference_mode():
        tokens = oracle.generate(asked, max_new_tokens=64, do_sample=False, pad_token_id=1)
    text: str = tokenizer.decode(tokens[0, asked.shape[1] :], skip_special_tokens=True)
    return text


def test_it_defines_words(oracle: Any, tokenizer: Any) -> None:
    assert re.match(r"An? [a-z]+ is an? [a-z]+", said(oracle, tokenizer, "What is a garden?"))


@pytest.mark.parametrize("question", ["Hello", "Who are you?"])
def test_a_first_answer_is_friendly(oracle: Any, tokenizer: Any, question: str) -> None:
    assert re.fullmatch(r"(Hello|Good day)! I [\w .,]+[.?]", said(oracle, tokenizer, question))


def test_the_card_says_what_it_was_made_of() -> None:
    card = (CHECKPOINT / "README.md").read_text()
    for word in ("wordnet-base", "WordNet 3.0 Copyright", "held out", "trigram", "-m training"):
        assert word in card
