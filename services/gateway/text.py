"""Text to tokens, and tokens back to text while they are generated."""

import re
from collections.abc import Iterable
from typing import Protocol

from tokenizers import Tokenizer

from services.gateway.aside import aside
from services.gateway.core.admission import check_prompt
from services.gateway.quoting import Specials
from shared.errors import BadInput, ModelError

_INLINE_CHARS = 1 << 11
"""More characters are tokenized on a thread, while streams go on. They take a millisecond."""
SHRINKS = 4
"""A tokenizer that normalizes text may drop characters of it. It is taken to leave a quarter."""
_UTF8_LONGEST = 4
_REPLACEMENT = "\ufffd"
_WINDOW = 64
_SHIFT = 12
"""From this many tokens on that are decoded only as context, some are forgotten, by a second
call of the tokenizer."""
_WORD_SPACE = "\u2581"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level tokenizers write bytes (GPT-2; Radford et al. 2019).
    Printable characters stand for themselves, others for the remaining bytes, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in plain]
    named = {chr(byte): byte for byte in plain}
    return named | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


_BYTES = _byte_alphabet()


class TextCodec:
    """A model's tokenizer, from the bytes of its tokenizer.json."""

    def __init__(self, tokenizer_json: bytes, *, bos: str | None = None, add_bos: bool = False):
        """`add_bos`: prompts begin with `bos` even if the tokenizer does not add it."""
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # tokenizers raises bare Exceptions
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = {token: found.content for token, found in added.items() if found.special}
        self.specials = Specials(self._special, self._spelled())
        decoder = repr(self._tokenizer.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._joins = decoder.startswith("ByteLevel(")
        """Whether the bytes of a text are those of its tokens, one behind the other."""
        self._alone: dict[int, str | None] = {}
        self.longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        """The most characters that a token stands for."""
        if self._tokenizer.normalizer is not None:
            self.longest *= SHRINKS
        self.bos = self.token_id(bos) if bos else None
        """The token that prompts begin with, if there is one."""
        self._add_bos = add_bos

    def _spelled(self) -> dict[int, list[int]]:
        """The tokens of each special token's text."""
        tokenizer = self._tokenizer
        tokenizer.encode_special_tokens = True
        texts = list(self._special.values())
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        tokenizer.encode_special_tokens = False
        return {token: one.ids for token, one in zip(self._special, found, strict=True)}

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    async def encode_prompts(self, texts: list[str], most: int) -> list[list[int]]:
        """The tokens of bare prompts, with the special tokens that the model wants, and never two
        BOS. TooLong if a prompt has more than `most`."""
        found = await self._encode(texts, most, special=True)
        bos = self.bos
        if bos is not None:
            for ids in found:
                if ids[:2] == [bos, bos]:
                    del ids[0]
                elif self._add_bos and ids[:1] != [bos]:
                    ids.insert(0, bos)
        return found

    async def encode_chats(self, rendered: list[str], most: int) -> list[list[int]]:
        """The tokens of rendered chat templates, whose texts contain their special tokens. TooLong
        if a text has more than `most`."""
        return await self._encode(rendered, most, special=False)

    async def _encode(self, texts: list[str], most: int, *, special: bool) -> list[list[int]]:
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self._encode_now(texts, special, most)
        return await aside(self._encode_now, texts, special, most)

    def _encode_now(self, texts: list[str], special: bool, most: int) -> list[list[int]]:
        """In one call, which does not hold the GIL."""
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        except Exception as error:  # lone surrogates and whatever else the tokenizer refuses
            raise BadInput(f"the text cannot be tokenized: {error}") from error
        for one in found:
            check_prompt(len(one), most)
        return [one.ids for one in found]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a single token stands for, possibly a part of a character. Empty for
        special and unknown ids."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if self._byte_level:
            return bytes(_BYTES.get(char, 0x3F) for char in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace(_WORD_SPACE, " ").encode()

    def alone(self, token: int) -> str | None:
        """The text of a token, where it is the same whatever whole characters are before it. None:
        it may depend on them, is a part of a character, or is a special token."""
        if token not in self._alone:
            self._alone[token] = self._text_alone(token)
        return self._alone[token]

    def _text_alone(self, token: int) -> str | None:
        if not self._joins or token in self._added:
            return None
        try:
            return self.token_bytes(token).decode() or None
        except UnicodeDecodeError:
            return None

    def token_text(self, token: int) -> str:
        """How the tokenizer itself writes a token. Empty for unknown ids."""
        return self._tokenizer.id_to_token(token) or ""

    @property
    def special_tokens(self) -> frozenset[int]:
        return frozenset(self._special)

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a short piece of text. BadInput if it cannot be tokenized."""
        return self._encode_now([text], False, len(text) * _UTF8_LONGEST)[0]

    def special(self, token: int) -> str | None:
        """How a prompt writes a special token; None for other tokens."""
        return self._special.get(token)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens that are written like this."""
        found = {self.token_id(text) for text in texts}
        return frozenset(token for token in found if token in self._special)

    def decode(self, ids: list[int], shown: frozenset[int] = frozenset()) -> str:
        """The text, without special tokens other than those to be shown."""
        if not shown:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        left = [token for token in ids if token in shown or token not in self._special]
        return self._tokenizer.decode(left, skip_special_tokens=False)


class TextStream(Protocol):
    """Text that grows with the generated tokens."""

    def step(self, token: int) -> str:
        """The text that became certain with this token."""

    def flush(self) -> str:
        """The rest of the text, when no token follows."""


class DecodeStream:
    """The text of a growing sequence of tokens. A character comes out when all its bytes are there.

    A few tokens before the new ones are decoded with them, because the text of a token can depend
    on its neighbours (word spaces, byte tokens). A trailing replacement character may be the
    beginning of a character, so it waits. After as many tokens as a character has bytes, what
    cannot be completed any more comes out.
    """

    def __init__(
        self,
        codec: TextCodec,
        context: Iterable[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`: special tokens that are text."""
        self._codec = codec
        self._shown = shown
        self._window = list(context)
        self._clean = len(self._window)
        """How many tokens of the window have their whole text out."""
        self._sent = -1 if self._window else 0
        """How many characters of the window's text are out. -1: all. They are counted when that is
        needed, which it mostly is not, because the tokenizer takes long."""

    def step(self, token: int) -> str:
        if self._clean == len(self._window) and (alone := self._codec.alone(token)) is not None:
            return alone
        if self._sent < 0:
            self._sent = len(self._decoded())
        self._window.append(token)
        text = self._decoded()
        end = len(text)
        if text.endswith(_REPLACEMENT):
            if len(self._window) - self._clean < _UTF8_LONGEST:
                return ""
            end -= 1
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        if end == len(text):
            if self._clean >= _SHIFT:
                self._shift(self._clean, held=0)
            self._clean = len(self._window)
        elif len(self._window) > _WINDOW:
            self._shift(len(self._window) - _UTF8_LONGEST, held=1)
        return new

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        return "" if self._clean == len(self._window) else self._decoded()[self._sent :]

    def _decoded(self) -> str:
        return self._codec.decode(self._window, self._shown)

    def _shift(self, start: int, held: int) -> None:
        del self._window[:start]
        self._sent = len(self._decoded()) - held
        self._clean = 0


class Offsets:
    """Where the text of each token begins in the whole text."""

    def __init__(self, codec: TextCodec, context: Iterable[int], echo: str) -> None:
        """`echo`: the prompt, if the text begins with it. Otherwise `context` are the prompt's last
        tokens."""
        self._codec = codec
        self._stream = DecodeStream(codec, context)
        self._echo = echo
        self._end = 0

    def next(self, token: int) -> int:
        """The offset of the next token. Special tokens take no room, except where a prompt spelled
        them out."""
        start, special = self._end, self._codec.special(token)
        if special is None:
            self._end += len(self._stream.step(token))
        elif self._echo.startswith(special, start):
            self._end += len(special)
        return start


class Stops:
    """Stop strings, made ready for `StopStrings` once for all choices."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.strings = tuple((stop, _borders(stop)) for stop in strings)


class StopStrings:
    """Finds the earliest stop string in text that comes in pieces.

    Text that may be the beginning of a stop string is held back until the next piece decides. Each
    character is looked at once, whatever came before (Knuth, Morris, Pratt 1977): stop strings come
    from strangers.
    """

    def __init__(self, stops: Stops, kept: bool = False) -> None:
        """`kept`: whether the text ends behind the stop string, not before it."""
        self._stops = stops.strings
        self._kept = kept
        self._met = [0] * len(self._stops)
        """How many characters of each stop string the text ends with."""
        self._held = ""
        self.found: str | None = None
        """The stop string that was met."""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns (text that is certain, whether a stop string was met; then nothing follows)."""
        if not self._stops:
            return text, False
        whole = self._held + text
        met = [
            (begin, number)
            for number in range(len(self._stops))
            if (begin := self._find(number, text, len(self._held))) is not None
        ]
        if met:
            begin, number = min(met)
            self.found, _ = self._stops[number]
            self._held = ""
            return whole[: begin + len(self.found) * self._kept], True
        certain = len(whole) - max(self._met)
        self._held = whole[certain:]
        return whole[:certain], False

    def _find(self, number: int, text: str, before: int) -> int | None:
        """Where the stop string begins in what is held back and this text after it."""
        stop, borders = self._stops[number]
        met = self._met[number]
        for position, char in enumerate(text, before):
            while met and char != stop[met]:
                met = borders[met - 1]
            met += char == stop[met]
            if met == len(stop):
                return position + 1 - met
        self._met[number] = met
        return None

    def flush(self) -> str:
        """The text held back, when no text follows."""
        held, self._held = self._held, ""
        return held


def _borders(text: str) -> list[int]:
    """For each beginning of the text: the length of the longest shorter beginning that it ends
    with."""
    found, length = [0] * len(text), 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = found[length - 1]
        length += text[position] == text[length]
        found[position] = length
    return found
