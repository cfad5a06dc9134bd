"""Vectors of texts over HTTP."""

import base64
import json
import struct
from typing import Any

import aiohttp
import pytest

from services.gateway import embedding
from services.gateway.http import embeddings
from shared.config import GatewayConfig
from shared.ids import ModelName
from shared.messages.serving import Pooling, Submit
from tests.unit.gateway.http.builders import post
from tests.unit.gateway.support import NAME, Cluster, ids_of, replica, running, text_files

VECTORS, OTHER = ModelName("vectors"), ModelName("other")
ASK = {"model": VECTORS, "input": "hello"}


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def vector_of(submit: Submit) -> bytes:
    """One whose numbers tell the prompt's last token and its length."""
    return floats(float(submit.tokens[-1]), float(submit.prompt_tokens), 0.0, 2.0)


@pytest.fixture
async def cluster(cluster: Cluster) -> Cluster:
    """One that has a model with vectors of four numbers."""
    await serve(cluster)
    return cluster


async def serve(
    cluster: Cluster,
    files: dict[str, bytes] | None = None,
    name: ModelName = VECTORS,
    **config: Any,
) -> None:
    given = {**text_files(), **(files or {})}
    record = await cluster.store_model(given, name, hidden_size=4, **config)
    await cluster.add(record)
    await cluster.publish(replica(2), record=record)
    cluster.nodes[2].vector = vector_of
    await cluster.until(
        lambda: bool(cluster.loads) and any(m.model == name for m in cluster.loads[-1].models)
    )


def numbers(answer: dict[str, Any]) -> list[list[float]]:
    return [each["embedding"] for each in answer["data"]]


async def test_a_text_has_a_vector_of_length_one(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, answer = await post(http, ASK, "embeddings")
    assert status == 200
    (submit,) = cluster.nodes[2].submits
    assert submit.tokens == (0, *ids_of("hello"))
    assert (submit.pooling, submit.max_tokens, submit.stop_ids) == (Pooling.LAST, 1, ())
    last, count = submit.tokens[-1], submit.prompt_tokens
    length = (last**2 + count**2 + 4) ** 0.5
    assert answer == {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": 0,
                "embedding": pytest.approx([last / length, count / length, 0, 2 / length]),
            }
        ],
        "model": VECTORS,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["one", "two"], [(0, *ids_of("one")), (0, *ids_of("two"))]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
async def test_inputs_of_every_kind(
    cluster: Cluster, http: aiohttp.ClientSession, given: Any, prompts: list[tuple[int, ...]]
) -> None:
    body = {**ASK, "input": given, "normalize": False}
    _, answer = await post(http, body, "embeddings")
    assert [submit.tokens for submit in cluster.nodes[2].submits] == prompts
    assert numbers(answer) == [[prompt[-1], len(prompt), 0, 2] for prompt in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_a_vector_in_base64(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "input": [7], "normalize": False, "encoding_format": "base64"}
    _, answer = await post(http, body, "embeddings")
    (found,) = answer["data"]
    assert base64.b64decode(found["embedding"]) == floats(7, 1, 0, 2)


async def test_many_inputs_come_in_order_and_do_not_fill_the_queue(
    cluster: Cluster, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "AT_ONCE", 3)
    waiting: list[int] = []

    def told(submit: Submit) -> bytes:
        dispatch = cluster.service._dispatch
        waiting.append(len(dispatch._ledger.requests))
        return vector_of(submit)

    cluster.nodes[2].vector = told
    body = {**ASK, "input": [[i] for i in range(1, 21)], "normalize": False}
    status, answer = await post(http, body, "embeddings")
    assert status == 200
    assert [each["index"] for each in answer["data"]] == list(range(20))
    assert [each[0] for each in numbers(answer)] == list(range(1, 21))
    assert max(waiting) == 3


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("pooling_mode_mean_tokens", Pooling.MEAN), ("pooling_mode_lasttoken", Pooling.LAST)],
)
async def test_the_model_says_how_it_pools(
    cluster: Cluster, http: aiohttp.ClientSession, mode: str, expected: Pooling
) -> None:
    other = b'{"word_embedding_dimension": 4, "pooling_mode_cls_token": false, "%b": true}'
    await serve(cluster, {"pooling.json": other % mode.encode()}, OTHER)
    status, _ = await post(http, {**ASK, "model": OTHER}, "embeddings")
    assert status == 200
    await post(http, {**ASK, "model": OTHER, "pooling": "mean"}, "embeddings")
    own, asked = cluster.nodes[2].submits
    assert (own.pooling, asked.pooling) == (expected, Pooling.MEAN)


async def test_a_pooling_that_is_not_supported_is_refused(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    await serve(cluster, {"pooling.json": b'{"pooling_mode_max_tokens": true}'}, OTHER)
    ask = {**ASK, "model": OTHER}
    status, answer = await post(http, ask, "embeddings")
    assert (status, answer["error"]["param"]) == (400, "model")
    status, _ = await post(http, {**ask, "pooling": "last"}, "embeddings")
    assert status == 200


@pytest.mark.parametrize("normalized", [True, False])
async def test_the_model_says_whether_vectors_are_normalized(
    cluster: Cluster, http: aiohttp.ClientSession, normalized: bool
) -> None:
    kinds = ["Pooling", *["Normalize"] * normalized]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    await serve(cluster, {"modules.json": json.dumps(modules).encode()}, OTHER)
    ask = {**ASK, "model": OTHER, "input": [7]}
    plain, length_one = [7, 1, 0, 2], pytest.approx([n / 54**0.5 for n in (7, 1, 0, 2)])
    for given, expected in ((None, normalized), (True, True), (False, False)):
        _, answer = await post(http, {**ask, "normalize": given}, "embeddings")
        assert numbers(answer) == [length_one if expected else plain]


async def test_the_first_state_of_a_decoder_is_refused(http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, {**ASK, "pooling": "cls"}, "embeddings")
    assert (status, answer["error"]["param"]) == (400, "pooling")


async def test_a_vector_may_be_cut_if_the_model_says_so(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cut: dict[str, Any] = {**ASK, "dimensions": 2}
    status, answer = await post(http, cut, "embeddings")
    assert (status, answer["error"]["param"]) == (400, "dimensions")
    await serve(cluster, None, OTHER, matryoshka_dimensions=[2, 4])
    cut = {**cut, "model": OTHER, "input": [7]}
    status, answer = await post(http, cut, "embeddings")
    assert numbers(answer) == [pytest.approx([7 / 50**0.5, 1 / 50**0.5])]
    status, answer = await post(http, {**cut, "dimensions": 3}, "embeddings")
    assert (status, "2, 4" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[1 << 20]]}, "input"),
        ({"input": [[5]] * (embedding.MAX_INPUTS + 1)}, "input"),
        ({"input": [5] * 5000}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"stream": True}, "stream"),
        ({"pooling": "max"}, "pooling"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    http: aiohttp.ClientSession, changes: dict[str, Any], param: str
) -> None:
    status, answer = await post(http, {**ASK, **changes}, "embeddings")
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("limit", "most"), [("MAX_NUMBERS", 4), ("MAX_TOKENS", 1)])
async def test_an_answer_has_its_limits(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(embedding, limit, most)
    status, _ = await post(http, {**ASK, "input": [[5]]}, "embeddings")
    assert status == 200
    status, answer = await post(http, {**ASK, "input": [[5], [6]]}, "embeddings")
    assert (status, answer["error"]["param"]) == (400, "input")


async def test_a_node_that_gives_no_vectors_is_not_believed() -> None:
    """One of the release before takes the request for one that generates."""
    async with (
        running(replica(1), config=GatewayConfig(max_attempts=1)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        await serve(cluster)
        cluster.nodes[2].vector = lambda submit: b""
        status, answer = await post(http, ASK, "embeddings")
        assert status == 500
        assert "release before" in answer["error"]["message"]
        assert len(cluster.nodes[2].submits) == 2
        cluster.nodes[2].vector = vector_of
        status, _ = await post(http, ASK, "embeddings")
        assert status == 200  # the instance is not to blame


async def test_a_vector_of_another_size_is_refused(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[2].vector = lambda submit: floats(1, 2, 3)
    status, _ = await post(http, ASK, "embeddings")
    assert status == 500


async def test_text_can_still_be_generated(http: aiohttp.ClientSession) -> None:
    status, _ = await post(http, {"model": NAME, "prompt": "x"})
    assert status == 200
