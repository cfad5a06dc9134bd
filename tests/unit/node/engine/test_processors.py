"""Rules on logits: against transformers where it has them, and the same however they came."""

import json
import re
import string

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from services.local.demo_tokenizer import EOS as END
from services.local.demo_tokenizer import SPECIAL_TOKENS, train_tokenizer
from services.node.engine.base import Context, Draw, Row, RowsRefused
from services.node.engine.processors import Logits, Processor, Processors
from services.node.engine.sampling import sample
from shared import grammar
from shared.errors import BadInput, LambdaScaleError, NotReady
from shared.grammar import Vocabulary
from shared.messages.serving import LogitRules, Sampling

VOCAB = 320
TOKENIZER = train_tokenizer(VOCAB)
EOS = SPECIAL_TOKENS.index(END)
VOCABULARY = Vocabulary(TOKENIZER.to_str().encode(), VOCAB, EOS)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
TOKENS = st.lists(st.integers(0, 30), min_size=1, max_size=40)


def context(
    rules: LogitRules, prompt: list[int], drawn: list[int], stop_ids: tuple[int, ...] = (EOS,)
) -> Context:
    return Context((*prompt, *drawn), len(prompt), stop_ids, rules)


def applied(rules: LogitRules, prompt: list[int], drawn: list[int], logits: torch.Tensor) -> Logits:
    values: Logits = logits.double().numpy().copy()
    Processor(context(rules, prompt, drawn), VOCABULARY).apply(values)
    return values


def noise(seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).double() * 4


@given(TOKENS, TOKENS, st.floats(0.5, 2), st.integers(0, 2**32))
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], drawn: list[int], penalty: float, seed: int
) -> None:
    logits = noise(seed)
    ours = applied(LogitRules(repetition_penalty=penalty), prompt, drawn, logits)
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    theirs = oracle(torch.tensor([prompt + drawn]), logits[None].clone())[0]
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-12)


@given(
    TOKENS,
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
def test_bad_words_are_those_of_transformers(
    prompt: list[int], words: list[list[int]], drawn: list[int]
) -> None:
    """Who looks at the whole text; here the prompt does not count."""
    rules = LogitRules(bad_words=tuple(map(tuple, words)))
    oracle = NoBadWordsLogitsProcessor(words)
    logits = noise(1)
    theirs = oracle(torch.tensor([drawn]), logits[None].clone())[0]
    np.testing.assert_array_equal(applied(rules, prompt, drawn, logits), np.asarray(theirs))
    singles = {word[0] for word in words if len(word) == 1}
    found = np.isneginf(applied(rules, prompt, [], logits))
    assert set(np.flatnonzero(found)) == singles


def test_only_allowed_tokens_are_left() -> None:
    logits = noise(1)
    values = applied(LogitRules(allowed=(2, 5, 300)), [1], [], logits)
    left = np.flatnonzero(np.isfinite(values))
    assert left.tolist() == [2, 5, 300]
    assert values[left].tolist() == logits.numpy()[left].tolist()


@given(TOKENS, TOKENS, st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 2**32))
def test_frequency_and_presence_count_what_was_generated(
    prompt: list[int], drawn: list[int], frequency: float, presence: float, seed: int
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence: OpenAI's API reference."""
    logits = noise(seed)
    rules = LogitRules(frequency_penalty=frequency, presence_penalty=presence)
    count = torch.bincount(torch.tensor(drawn), minlength=VOCAB).double()
    expected = logits - count * frequency - (count > 0).double() * presence
    np.testing.assert_allclose(applied(rules, prompt, drawn, logits), expected.numpy(), atol=1e-12)


def test_the_order_is_penalties_then_bias_then_what_may_not_be_drawn() -> None:
    logits = torch.full((VOCAB,), 2.0)
    rules = LogitRules(
        repetition_penalty=4.0, presence_penalty=1.0, logit_bias=((5, 10.0),), min_tokens=2
    )
    values = logits.double().numpy().copy()
    processor = Processor(context(rules, [5], [6], stop_ids=(7, 400)), None)
    processor.apply(values)
    assert values[[5, 6, 7, 8]].tolist() == [10.5, -0.5, -np.inf, 2.0]
    processor.accept(8)
    values = logits.double().numpy().copy()
    processor.apply(values)
    assert values[7] == 2.0


def generate(schema_grammar: str, seed: int, cut: int, limit: int = 400) -> str:
    """Random text under a grammar; the sequence moves to another node before token `cut`."""
    rules = LogitRules(grammar=schema_grammar, repetition_penalty=1.1)
    drawn: list[int] = []
    processor = Processor(context(rules, [1, 2], drawn), VOCABULARY)
    while len(drawn) < limit:
        if len(drawn) == cut:
            processor = Processor(context(rules, [1, 2], drawn), VOCABULARY)
        draw = Draw(len(drawn), Sampling(temperature=1.0, seed=seed))
        logits = noise(seed + len(drawn)).float()[None]
        token = sample(logits, [draw], [processor])[0].token
        assert token is not None
        if token == EOS:
            return TOKENIZER.decode(drawn)
        drawn.append(token)
    raise AssertionError(f"no end after {limit} tokens: {TOKENIZER.decode(drawn)!r}")


@given(st.integers(0, 2**32), st.integers(0, 30))
def test_text_under_a_schema_is_valid_and_the_same_after_a_move(seed: int, cut: int) -> None:
    made = grammar.from_schema(SCHEMA)
    text = generate(made, seed, cut)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert generate(made, seed, -1) == text


@given(st.integers(0, 2**32))
def test_text_under_a_regex_fits_it(seed: int) -> None:
    regex = r"[a-f]{2,5}/-\d{3}(x|\w)?"
    assert re.fullmatch(regex, generate(grammar.from_regex(regex), seed, 3), re.ASCII)


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_is_one_of_its_texts(seed: int) -> None:
    choices = ['say "no"', "yes", "may\nbe"]
    assert generate(grammar.from_choice(choices), seed, 1) in choices


def test_a_choice_of_very_many() -> None:
    choices = [f"text {i}" for i in range(4000)]
    assert generate(grammar.from_choice(choices), 5, 1) in choices


def test_greedy_text_is_held_to_the_grammar_too() -> None:
    processor = Processor(
        context(LogitRules(grammar=grammar.from_regex("ab")), [1], []), VOCABULARY
    )
    logits = noise(1).float()[None]
    plain = Draw(0, Sampling())
    tokens = [sample(logits, [plain], [processor])[0].token for _ in range(3)]
    assert [TOKENIZER.id_to_token(token or 0) for token in tokens] == ["a", "b", END]


@pytest.mark.parametrize(
    "wrong",
    [
        grammar.from_regex("a(b"),
        grammar.from_schema({"type": "objec"}),
        grammar.from_lark("start: nothing"),
        "no grammar",
        grammar.from_regex("a" * grammar.MAX_CHARS),
    ],
)
def test_grammars_that_are_none(wrong: str) -> None:
    with pytest.raises(BadInput):
        grammar.check(wrong)


@pytest.mark.parametrize("data", [b"/etc/passwd", b"{}", b"\xff"])
def test_tokenizers_that_have_no_grammars(data: bytes) -> None:
    with pytest.raises(BadInput):
        Vocabulary(data, VOCAB)


REGEX = LogitRules(grammar=grammar.from_regex("ab"))


def drawing(key: str, rules: LogitRules, drawn: list[int] | None = None) -> Row:
    known = context(rules, [1], drawn or [])
    return Row(key, 0, 1, 9, draw=Draw(len(drawn or []), Sampling(), known))


def test_rows_whose_rules_cannot_be_followed_are_named() -> None:
    found = Processors({"vocab_size": VOCAB, "eos_token_id": [EOS]})
    plain = drawing("plain", LogitRules(presence_penalty=1.0))
    with pytest.raises(RowsRefused, match="not made before") as early:
        found.made([plain, drawing("early", REGEX)])
    assert (early.value.sequences, type(early.value.why)) == (("early",), NotReady)
    found.keep(found.made([plain]))
    assert found.of("plain")
    assert found.of("early") is None


def test_grammars_are_made_once_the_tokenizer_is_here() -> None:
    found = Processors({"vocab_size": VOCAB, "eos_token_id": [EOS]})
    with pytest.raises(NotReady, match="tokenizer"):
        found.maker(context(REGEX, [1], []))
    found.use_tokenizer(TOKENIZER.to_str().encode())
    wrong = found.maker(context(REGEX, [1], TOKENIZER.encode("b").ids[-1:]))
    with pytest.raises(BadInput):
        wrong()
    made = found.maker(context(REGEX, [1], []))()
    found.keep({"r": made})
    assert found.made([drawing("r", REGEX)]) == {}
    assert found.of("r") is made
    found.free(("r", "unknown"))
    assert found.of("r") is None


def test_a_tokenizer_that_cannot_be_used_is_read_once_and_refused_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[bytes] = []

    def watched(data: bytes, vocab_size: int, eos: int | None) -> Vocabulary:
        read.append(data)
        return Vocabulary(data, vocab_size, eos)

    monkeypatch.setattr("services.node.engine.processors.Vocabulary", watched)
    found = Processors({"vocab_size": VOCAB, "eos_token_id": EOS})
    known = context(REGEX, [1], [])
    found.use_tokenizer(b"{}")
    for _ in range(2):
        with pytest.raises(BadInput, match="can't be used for structured output"):
            found.maker(known)()
    assert read == [b"{}"]
    found.use_tokenizer(TOKENIZER.to_str().encode())
    assert found.maker(known)() is not found.maker(known)()
    assert len(read) == 2


def ambiguous(rules: int, letters: str) -> str:
    """A grammar that is sound, and comes to more parses than llguidance follows: with one letter
    after that, with many at once."""
    letter = " | ".join(f'"{letter}"' for letter in letters)
    names = " | ".join(f"x{i}" for i in range(rules))
    ways = (
        f"x{i}: ({letter}) y{i}\ny{i}: x{i * 7 % rules} | x{(i + 1) % rules} | x{(i + 5) % rules}"
        for i in range(rules)
    )
    return grammar.from_lark("\n".join([f"start: {names}", *ways]))


def test_a_grammar_that_breaks_later_ends_its_row() -> None:
    processor = Processor(context(LogitRules(grammar=ambiguous(400, "a")), [1], []), VOCABULARY)
    plain = Processor(context(LogitRules(), [1], []), None)
    draws = [Draw(0, Sampling())] * 2
    first, _ = sample(noise(1).float().repeat(2, 1), draws, [processor, plain])
    assert (TOKENIZER.id_to_token(first.token or 0), first.error) == ("a", None)
    broken, other = sample(noise(2).float().repeat(2, 1), draws, [processor, plain])
    assert (broken.token, type(broken.error)) == (None, BadInput)
    assert "Too many items" in str(broken.error)
    assert other.token is not None


def test_a_grammar_that_breaks_is_told_when_it_is_taken_up() -> None:
    rules = LogitRules(grammar=ambiguous(100, string.ascii_lowercase))
    with pytest.raises(BadInput, match="Too many items"):
        Processor(context(rules, [1], []), VOCABULARY)


def test_rules_that_cannot_be_made_are_refused_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise IndexError("out of bounds")

    monkeypatch.setattr("services.node.engine.processors._Seen", breaks)
    with pytest.raises(RowsRefused, match="out of bounds") as refused:
        Processors({"vocab_size": VOCAB}).made([drawing("odd", LogitRules(min_tokens=1))])
    assert (refused.value.sequences, type(refused.value.why)) == (("odd",), LambdaScaleError)
