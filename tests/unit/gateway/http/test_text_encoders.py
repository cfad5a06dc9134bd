"""Encoders of texts over HTTP: they give vectors, and nothing else."""

import struct
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from shared.ids import ModelName
from shared.messages.serving import Pooling, Submit
from tests.unit.gateway.http.builders import post
from tests.unit.gateway.support import CONTEXT, Cluster, replica

Submits = list[Submit]
OTHER = ModelName("encoder")
ASK = {"model": OTHER, "input": "hellos hello"}


def wordpiece() -> dict[str, bytes]:
    """The tokenizer's special tokens are 2 in front of a text and 3 behind it."""
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "hello": 4, "##s": 5}
    tokenizer = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    special = b'{"cls_token": "[CLS]", "sep_token": "[SEP]"}'
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": special}


@pytest.fixture
async def encoder(cluster: Cluster) -> Submits:
    """What an encoder of texts was asked; it is named OTHER."""
    record = await cluster.store_model(
        wordpiece(), OTHER, embeds=True, hidden_size=2, architectures=["BertModel"]
    )
    await cluster.add(record)
    await cluster.publish(replica(2), record=record)
    cluster.nodes[2].vector = lambda submit: struct.pack("<2f", 3, 4)
    await cluster.until(
        lambda: bool(cluster.loads) and any(m.model == OTHER for m in cluster.loads[-1].models)
    )
    return cluster.nodes[2].submits


async def test_an_encoder_is_given_the_tokens_with_both_special_ones(
    encoder: Submits, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, ASK, "embeddings")
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 5)
    await post(http, {**ASK, "pooling": "cls"}, "embeddings")
    assert [submit.tokens for submit in encoder] == [(2, 4, 5, 4, 3)] * 2
    assert [submit.pooling for submit in encoder] == [Pooling.MEAN, Pooling.CLS]


async def test_of_an_encoders_input_the_first_tokens_are_kept(
    encoder: Submits, http: aiohttp.ClientSession
) -> None:
    """And the special token behind them."""
    given: list[tuple[Any, int]] = [
        ("hellos hello", 5), ("hellos hello", 4), ("hellos hello", 1), ([2, 4, 5, 4], 3)
    ]  # fmt: skip
    for text, most in given:
        body = {**ASK, "input": text, "truncate_prompt_tokens": most}
        assert (await post(http, body, "embeddings"))[0] == 200
    kept = [(2, 4, 5, 4, 3), (2, 4, 5, 3), (3,), (2, 4, 5)]
    assert [submit.tokens for submit in encoder] == kept


async def test_an_input_longer_than_an_encoders_positions_is_refused_with_the_limit(
    encoder: Submits, http: aiohttp.ClientSession
) -> None:
    for given in ("hello " * (CONTEXT - 1), [4] * (CONTEXT + 1)):
        status, answer = await post(http, {**ASK, "input": given}, "embeddings")
        error = answer["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert str(CONTEXT) in error["message"]
    assert encoder == []
    status, _ = await post(http, {**ASK, "input": "hello " * (CONTEXT - 2)}, "embeddings")
    assert status == 200


async def test_an_encoder_does_nothing_else(encoder: Submits, http: aiohttp.ClientSession) -> None:
    said = [{"role": "user", "content": "x"}]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": said}),
        ("responses", {"input": "x"}),
        ("messages", {"messages": said, "max_tokens": 5}),
        ("messages/count_tokens", {"messages": said}),
        ("classify", {"image": ""}),
    ]
    for call, body in calls:
        status, answer = await post(http, {**body, "model": OTHER}, call)
        assert (status, "use /v1/embeddings" in answer["error"]["message"]) == (400, True), call
    assert encoder == []


async def test_an_encoder_is_named_as_one(encoder: Submits, http: aiohttp.ClientSession) -> None:
    async with http.get(f"/v1/models/{OTHER}") as response:
        assert (await response.json())["task"] == "feature-extraction"
