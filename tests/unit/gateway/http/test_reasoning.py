"""Thoughts of models, apart from the content of their answers."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.unit.gateway.http.builders import CHAT, events, post
from tests.unit.gateway.http.described import Described
from tests.unit.gateway.http.thinking import TEMPLATE, TEXT
from tests.unit.gateway.support import Cluster, ids_of, replica, running, text_files


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running(replica(1), files=text_files(TEMPLATE)) as cluster:
        cluster.nodes[1].script = lambda submit: ids_of(TEXT)
        yield cluster


@pytest.fixture
async def http(cluster: Cluster, described: Described) -> AsyncIterator[aiohttp.ClientSession]:
    tracing = [described.tracing()]
    async with aiohttp.ClientSession(cluster.service.url, trace_configs=tracing) as session:
        yield session


async def message(http: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await post(http, body, "chat/completions")
    assert status == 200
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


async def test_thoughts_are_apart(http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, {**CHAT, "n": 2}, "chat/completions")
    assert status == 200
    for choice in answer["choices"]:
        assert choice["message"] == {
            "role": "assistant",
            "content": "so <think>",
            "refusal": None,
            "annotations": [],
            "reasoning_content": "why",
            "reasoning": "why",
        }
        assert choice["finish_reason"] == "stop"
    thought = len(ids_of("\nwhy\n</think")) * 2
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


@pytest.mark.parametrize("per_token", [False, True])
async def test_thoughts_are_streamed(http: aiohttp.ClientSession, per_token: bool) -> None:
    options = {"include_usage": True}
    body = {**CHAT, "return_token_ids": per_token, "stream_options": options}
    *parts, last = await events(http, body, "chat/completions")
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert [d.get("reasoning") for d in deltas] == [d.get("reasoning_content") for d in deltas]
    assert "".join(delta.get("content") or "" for delta in deltas) == "so <think>"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    if per_token:
        ids = [token for part in parts for token in part["choices"][0].get("token_ids", [])]
        assert ids[:-1] == ids_of(TEXT)


async def test_thoughts_that_the_prompt_has_begun_or_ended(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].script = lambda submit: ids_of("why</think>so")
    found = await message(http, {**CHAT, "chat_template_kwargs": {"opened": True}})
    assert (found["reasoning"], found["content"]) == ("why", "so")
    found = await message(http, {**CHAT, "chat_template_kwargs": {"enable_thinking": False}})
    assert found == {
        "role": "assistant",
        "content": "why</think>so",
        "refusal": None,
        "annotations": [],
    }


async def test_thoughts_without_an_end(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    found = await message(http, {**CHAT, "max_tokens": 10})
    assert (found["reasoning"], found["content"]) == ("wh", None)


async def test_an_answer_that_is_asked_for_again(http: aiohttp.ClientSession) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = [await post(http, CHAT, "chat/completions", **headers) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
