"""Special tokens that a client's text spells out stay text.

A prompt is tokenized as a whole, so that its tokens are those that the model was trained with.
There a special token is a control token, whoever wrote it: a message with `<|im_end|>` could end
itself, and begin one of the system. So words stand for them while the template is rendered. From
the prompt with these words it is known which special tokens the template wrote, and all others are
replaced by the tokens of their text.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.gateway.api_error import invalid


class Specials:
    """A tokenizer's special tokens."""

    def __init__(self, texts: Mapping[int, str], spelled: Mapping[int, list[int]]) -> None:
        """`spelled`: the tokens of the text of each."""
        self._ids = {text: token for token, text in texts.items() if text}
        self._spelled = spelled
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._found = re.compile(self._pattern)

    def quoted(self, value: Any, word: str) -> Any:
        """JSON with words in place of special tokens. `word` begins each of them, and occurs in no
        client's text."""
        match value:
            case str():
                return self._found.sub(lambda found: f"{word}{self._ids[found[0]]}x", value)
            case Mapping():
                return {
                    self.quoted(key, word): self.quoted(item, word) for key, item in value.items()
                }
            case list() | tuple():
                return [self.quoted(item, word) for item in value]
        return value

    def unquoted(self, prompt: str, word: str) -> "Unquoted":
        """The prompt with the special tokens that were quoted."""
        texts = {str(token): text for text, token in self._ids.items()}
        parts: list[str] = []
        tokens: list[tuple[int, bool]] = []
        end = 0
        for found in re.finditer(f"{word}([0-9]+)x|{self._pattern}", prompt):
            text = texts[found[1]] if found[1] else found[0]
            parts += (prompt[end : found.start()], text)
            tokens.append((self._ids[text], bool(found[1])))
            end = found.end()
        return Unquoted("".join((*parts, prompt[end:])), tokens)

    def spell(self, ids: list[int], tokens: "list[tuple[int, bool]]") -> list[int]:
        """The tokens of a prompt (`Unquoted`), with those that were quoted spelled out. ApiError
        400 if it cannot be told which these are."""
        if not any(quoted for _, quoted in tokens):
            return ids
        left = iter(tokens)
        found: list[int] = []
        for one in ids:
            token, quoted = next(left, (-1, False)) if one in self._spelled else (one, False)
            if token != one:
                _refuse()
            found += self._spelled[one] if quoted else [one]
        if next(left, None) is not None:
            _refuse()
        return found


class Unquoted(NamedTuple):
    prompt: str
    tokens: list[tuple[int, bool]]
    """Its special tokens in order, and whether each was quoted."""


def _refuse() -> None:
    message = "special tokens in their text cannot be told from those of the model's template"
    invalid("messages", message)
