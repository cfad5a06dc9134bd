"""Special tokens in a client's text: what the model is given for them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api_error import ApiError
from services.gateway.quoting import Specials
from services.gateway.text import TextCodec
from tests.unit.gateway.support import SPECIAL, TOKENIZER, byte_tokenizer, ids_of

CODEC = TextCodec(TOKENIZER.to_str().encode())
SPECIALS = CODEC.specials
PLAIN = byte_tokenizer()
PLAIN.encode_special_tokens = True
WORD = "quoted0123x"
TEXTS = st.lists(
    st.sampled_from([*SPECIAL, "<|user", "user|>", "<", "|", "s>", "/", "é", " "]), max_size=8
).map("".join)


def plain(text: str) -> list[int]:
    """The tokens of its letters: every byte is one."""
    found: list[int] = PLAIN.encode(text, add_special_tokens=False).ids
    return found


async def tokens(parts: list[tuple[str, bool]]) -> list[int]:
    """Of a prompt of parts, which are the client's or the template's."""
    prompt = "".join(SPECIALS.quoted(text, WORD) if own else text for text, own in parts)
    unquoted = SPECIALS.unquoted(prompt, WORD)
    assert unquoted.prompt == "".join(text for text, _ in parts)
    (ids,) = await CODEC.encode_chats([unquoted.prompt], 10_000)
    return SPECIALS.spell(ids, unquoted.tokens)


@given(st.lists(TEXTS, max_size=4))
async def test_only_the_template_s_special_tokens_are_control_tokens(texts: list[str]) -> None:
    parts = [
        part for text in texts for part in (("<|user|>", False), (text, True), ("</s>", False))
    ]
    found = await tokens(parts)
    expected: list[int] = []
    for text, own in parts:
        expected += plain(text) if own else ids_of(text)
    assert found == expected
    assert TOKENIZER.decode(found, skip_special_tokens=False) == "".join(t for t, _ in parts)


async def test_text_without_special_tokens_is_as_it_was() -> None:
    assert await tokens([("<s>hello <|nobody|>", False), (" wörld", True)]) == ids_of(
        "<s>hello <|nobody|> wörld"
    )


def test_everything_that_a_client_sends_is_quoted() -> None:
    given: Any = [{"content": "</s>", "</s>": [1, None, ("x</s>y",)]}]
    word = f"{WORD}1x"
    assert SPECIALS.quoted(given, WORD) == [{"content": word, word: [1, None, [f"x{word}y"]]}]


def test_what_cannot_be_told_is_refused() -> None:
    for ids in ([1, 1], [2], []):
        with pytest.raises(ApiError, match="cannot be told"):
            SPECIALS.spell(ids, [(1, True)])
    assert SPECIALS.spell([1, 1], [(1, False)]) == [1, 1]


def test_the_longest_special_token_counts() -> None:
    nested = Specials({1: "<a>", 2: "<a>b"}, {1: [7], 2: [8]})
    assert nested.unquoted(nested.quoted("<a>b<a>", WORD), WORD).tokens == [(2, True), (1, True)]


def test_a_tokenizer_without_special_tokens() -> None:
    none = Specials({}, {})
    assert none.quoted("a</s>", WORD) == "a</s>"
    assert none.unquoted("a</s>", WORD) == ("a</s>", [])
