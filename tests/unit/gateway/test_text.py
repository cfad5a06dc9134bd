import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.core.admission import TooLong
from services.gateway.text import DecodeStream, Offsets, Stops, StopStrings, TextCodec
from shared.errors import BadInput, ModelError
from tests.support.amounts import examples
from tests.unit.gateway.support import BOS, EOS_ID, SPECIAL, TOKENIZER, VOCAB, ids_of

CODEC = TextCodec(TOKENIZER.to_str().encode(), bos=BOS)


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: word pieces that carry their space, bytes as tokens."""
    words = ["<s>", "</s>", "<unk>", "▁", "▁hello", "▁world", "a", "b", "."]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


FALLBACK = byte_fallback()
FALLBACK_IDS = FALLBACK.get_vocab()
FALLBACK_CODEC = TextCodec(FALLBACK.to_str().encode())


def streamed(codec: TextCodec, ids: list[int]) -> list[str]:
    stream = DecodeStream(codec)
    return [*(stream.step(token) for token in ids), stream.flush()]


def offsets(codec: TextCodec, ids: list[int], echo: str = "") -> list[int]:
    found = Offsets(codec, (), echo)
    return [found.next(token) for token in ids]


def test_offsets_are_places_in_the_text() -> None:
    """A character of several tokens begins with the first of them, and with the others too."""
    assert offsets(CODEC, ids_of("a€b\U0001f600c")) == [0, 1, 1, 1, 2, 3, 3, 3, 3, 4]
    words = [FALLBACK_IDS[word] for word in ("<s>", "▁hello", "▁world", "<0xE2>", "<0x82>", ".")]
    assert offsets(FALLBACK_CODEC, words) == [0, 0, 5, 11, 11, 11]
    stream = Offsets(FALLBACK_CODEC, [FALLBACK_IDS["▁hello"]], "")
    assert [stream.next(FALLBACK_IDS["▁world"]), stream.next(FALLBACK_IDS["."])] == [0, 6]


def test_special_tokens_have_a_place_where_a_prompt_spelled_them_out() -> None:
    text = "<|user|>hi<|assistant|>"
    ids = [0, *ids_of(text), *ids_of("yes"), EOS_ID]
    assert offsets(CODEC, ids, text) == [0, 0, 8, 9, 10, 23, 24, 25, 26]
    assert offsets(CODEC, ids, "hi") == [0, 0, 0, 1, 2, 2, 3, 4, 5]


@given(st.text())
def test_a_stream_of_bytes_reads_as_the_whole(text: str) -> None:
    pieces = streamed(CODEC, ids_of(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, VOCAB - 1), max_size=200))
@settings(max_examples=examples(150))
def test_any_tokens_read_as_the_whole(ids: list[int]) -> None:
    """Broken characters too: what can't be completed is given out, and only then."""
    assert "".join(streamed(CODEC, ids)) == CODEC.decode(ids)


def test_broken_bytes_do_not_wait_for_ever() -> None:
    stream = DecodeStream(CODEC)
    (byte,) = set(ids_of("€")[:1])
    pieces = [stream.step(byte) for _ in range(200)]
    assert len("".join(pieces)) >= 195


@given(st.text(alphabet="€🎉世é", max_size=8))
@example("€€")
def test_byte_tokens_become_characters(text: str) -> None:
    ids = [FALLBACK_IDS[f"<0x{byte:02X}>"] for byte in text.encode()]
    assert "".join(streamed(FALLBACK_CODEC, ids)) == text


def test_word_spaces_are_kept_between_tokens() -> None:
    hello, world = FALLBACK_IDS["▁hello"], FALLBACK_IDS["▁world"]
    assert streamed(FALLBACK_CODEC, [hello, world, hello]) == ["hello", " world", " hello", ""]
    after_prompt = DecodeStream(FALLBACK_CODEC, [hello])
    assert after_prompt.step(world) == " world"


def test_special_tokens_have_no_text() -> None:
    assert "".join(streamed(CODEC, [*ids_of("a"), EOS_ID, *ids_of("b")])) == "ab"


MOST = 100_000


# --- prompts -------------------------------------------------------------------


async def test_bos_is_there_once() -> None:
    assert await CODEC.encode_prompts(["ab"], MOST) == [[0, *ids_of("ab")]]
    assert await CODEC.encode_prompts(["<s>ab"], MOST) == [[0, *ids_of("ab")]]
    assert await CODEC.encode_chats(["<s>ab"], MOST) == [[0, *ids_of("ab")]]
    bare = Tokenizer.from_str(TOKENIZER.to_str())
    bare.post_processor = None
    codec = TextCodec(bare.to_str().encode(), bos=BOS, add_bos=True)
    assert await codec.encode_prompts(["ab"], MOST) == [[0, *ids_of("ab")]]
    assert await codec.encode_prompts(["<s>ab"], MOST) == [[0, *ids_of("ab")]]


async def test_long_texts_are_tokenized_alike() -> None:
    text = "abc " * 10_000
    assert await CODEC.encode_chats([text], MOST) == [ids_of(text)]


@pytest.mark.parametrize("text", ["abc", "abc " * 10_000])
async def test_more_tokens_than_may_be_are_refused(text: str) -> None:
    count = len(ids_of(text))
    assert len((await CODEC.encode_chats([text], count))[0]) == count
    with pytest.raises(TooLong, match=f"the prompt has {count} tokens"):
        await CODEC.encode_chats([text], count - 1)


async def test_a_tokenizer_that_truncates_does_not_here() -> None:
    short = Tokenizer.from_str(TOKENIZER.to_str())
    short.enable_truncation(4)
    short.enable_padding(length=10)
    codec = TextCodec(short.to_str().encode())
    assert await codec.encode_chats(["a" * 8], MOST) == [ids_of("a" * 8)]


async def test_text_that_is_none() -> None:
    with pytest.raises(BadInput, match="tokenized"):
        await CODEC.encode_chats(["\ud800"], MOST)


def test_a_broken_tokenizer_is_named() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextCodec(b"{}")


# --- stop strings --------------------------------------------------------------


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=10),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stops_cut_at_the_first_hit_however_the_text_comes(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopStrings(Stops(tuple(stops)))
    out, met, given_text = "", False, ""
    for piece in pieces:
        given_text += piece
        text, met = matcher.push(piece)
        out += text
        if met:
            break
    else:
        out += matcher.flush()
    hits = [at for stop in stops if (at := given_text.find(stop)) >= 0]
    assert met == bool(hits)
    assert out == (given_text[: min(hits)] if hits else given_text)


def test_a_stop_string_can_be_kept() -> None:
    matcher = StopStrings(Stops(("END", "ND")), kept=True)
    assert matcher.push("text E") == ("text ", False)
    assert matcher.push("ND more") == ("END", True)
    assert matcher.found == "END"


@given(st.lists(st.integers(0, VOCAB - 1), max_size=60), st.sets(st.integers(0, 3)))
def test_special_tokens_can_be_shown(ids: list[int], shown: set[int]) -> None:
    stream = DecodeStream(CODEC, (), frozenset(shown))
    text = "".join([*(stream.step(token) for token in ids), stream.flush()])
    left = [token for token in ids if token in shown or token >= len(SPECIAL)]
    assert text == TOKENIZER.decode(left, skip_special_tokens=False)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopStrings(Stops(("END", "\n\n")))
    assert matcher.push("text E") == ("text ", False)
    assert matcher.push("N") == ("", False)
    assert matcher.push("T\n") == ("ENT", False)
    assert matcher.push("\nmore") == ("", True)


def test_bytes_of_single_tokens() -> None:
    codec = TextCodec(TOKENIZER.to_str().encode())
    for text in ("a", " ", "\n", "ü", "🎉", "\xad"):
        assert b"".join(map(codec.token_bytes, ids_of(text))) == text.encode()
    assert codec.token_bytes(EOS_ID) == b"</s>"
    assert codec.token_bytes(VOCAB + 3) == b""


def test_bytes_of_tokens_of_a_sentencepiece_tokenizer() -> None:
    tokenizer = byte_fallback()
    codec = TextCodec(tokenizer.to_str().encode())
    pieces = ("▁hello", "<0xE2>", "a", "</s>")
    found = [codec.token_bytes(tokenizer.get_vocab()[piece]) for piece in pieces]
    assert found == [b" hello", b"\xe2", b"a", b"</s>"]
