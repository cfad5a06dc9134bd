"""Grammars that generated text must follow, through llguidance (github.com/guidance-ai/llguidance).

A grammar is text in llguidance's form. The gateway makes it from what a client asks for, it travels
with the request, and the node that draws the tokens follows it.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from shared.errors import BadInput
from shared.stack import CHECK_STACK

MAX_CHARS = 1 << 17
FOLLOW_STACK = 8 * CHECK_STACK
"""Stack of threads that follow checked grammars. It is enough for the same rules there, with any
vocabulary."""
SPACES = r"[ \n\r\t]{1,20}"
"""White space between the parts of JSON. It is limited, or a model might never come to the next
part."""


class Vocabulary:
    """The text of each token id of a model."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos: int | None = None) -> None:
        """`vocab_size`: the number of logits. `eos`: a token that is no text; None: the tokenizer's
        own. BadInput if grammars cannot be followed with this tokenizer."""
        if not tokenizer_json.lstrip().startswith(b"{"):
            # Llguidance would take it for a path.
            raise BadInput("tokenizer.json is no JSON object")
        try:
            self.tokens = LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos)
        except (ValueError, UnicodeDecodeError) as error:
            raise BadInput(
                f"this model's tokenizer can't be used for structured output: {error}"
            ) from error


def eos_of(config: Mapping[str, Any]) -> int | None:
    """The first end-of-text id that a model's config names."""
    named = config.get("eos_token_id")
    found = named[0] if isinstance(named, list) and named else named
    return found if isinstance(found, int) else None


def from_schema(schema: Mapping[str, Any]) -> str:
    """A grammar of JSON that is valid by a JSON Schema. BadInput if the schema cannot be used."""
    try:
        text = msgspec.json.encode(schema).decode()
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": SPACES})
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the JSON schema cannot be used: {error}") from error


def from_regex(regex: str) -> str:
    """A grammar of text that matches `regex` as a whole. \\d and \\w are ASCII, as in JSON
    Schema."""
    return LLMatcher.grammar_from_regex(regex_to_lark(regex, use_ascii="dw"))


def from_choice(choices: Sequence[str]) -> str:
    """A grammar of exactly one of these texts."""
    texts = " | ".join(msgspec.json.encode(text).decode() for text in choices)
    # As rules, 2,000 choices would be too many.
    return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")


def from_lark(lark: str) -> str:
    return LLMatcher.grammar_from_lark(lark)


def around(lark: str, grammars: Mapping[str, str]) -> str:
    """A Lark grammar that refers to others by name, as in `start: "a" @name`."""
    found = [{"name": "around", "lark_grammar": lark}]
    for name, grammar in grammars.items():
        first, *more = _parts(grammar)
        found += [{**first, "name": name}, *more]
    return msgspec.json.encode({"grammars": found}).decode()


def _parts(grammar: str) -> list[dict[str, Any]]:
    if not grammar.lstrip().startswith("{"):
        return [{"lark_grammar": grammar}]
    try:
        return msgspec.json.decode(grammar, type=_Grammars).grammars
    except msgspec.DecodeError as error:
        raise BadInput(f"the grammar cannot be used: {error}") from error


class _Grammars(msgspec.Struct):
    """Llguidance's form of several grammars, the first of which is followed."""

    grammars: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def matcher(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """A matcher at the start of the grammar. BadInput if it is no grammar."""
    found = LLMatcher(vocabulary.tokens, grammar, log_level=0)
    if found.is_error():
        raise BadInput(f"the grammar cannot be used: {brief(found.get_error())}")
    return found


def check(grammar: str) -> None:
    """BadInput if the grammar cannot be followed, whatever the vocabulary.

    The grammar is made and begun as on a node, over the vocabulary of single bytes. A hostile
    grammar can take any time and end the process, so call this in a process of its own
    (shared.confined).
    """
    if len(grammar) > MAX_CHARS:
        raise BadInput(f"has {len(grammar)} characters, at most {MAX_CHARS} are taken")
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise BadInput(brief(messages[0]))
    begun = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    begun.compute_bitmask()
    if begun.is_error():
        raise BadInput(brief(begun.get_error()))


def brief(error: str) -> str:
    """What llguidance says about an error, without the parser's state."""
    return error.split("<state>")[0].strip()
