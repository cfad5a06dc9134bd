"""Streamed answers: events, usage, stop strings, and clients that leave."""

import asyncio
import itertools
import socket
from collections.abc import Sequence
from random import Random

import aiohttp
import pytest

from services.gateway.answers import Answers
from services.gateway.connections import Connection
from services.gateway.generation import Delta
from services.gateway.http.sending import FAILED
from tests.unit.gateway.http.builders import ASK, CHAT, events, post
from tests.unit.gateway.support import Cluster, ids_of


async def test_streamed_completion(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "stream_options": {"include_usage": True}}
    *parts, last = await events(http, body, "completions")
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello world"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 11 + ["stop"]
    assert all(part["usage"] is None for part in parts)
    assert len({part["id"] for part in (*parts, last)}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(("tokens", "writes"), [(1, 1), (2, 3)])
async def test_a_stream_takes_few_writes(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, tokens: int, writes: int
) -> None:
    """Each is a system call, and wakes the client: the headers go with the first event, and the end
    of the body with the last one."""
    sent: list[bytes] = []
    send = socket.socket.send

    def record(to: socket.socket, data: bytes) -> int:
        sent.append(bytes(data))
        return send(to, data)

    monkeypatch.setattr(socket.socket, "send", record)
    await events(http, {**ASK, "max_tokens": tokens}, "completions")
    ours = [data for data in sent if not data.startswith(b"POST")]
    assert len(ours) == writes
    assert ours[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\ndata: {" in ours[0]
    assert ours[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_usage_in_every_chunk(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "stream_options": {"continuous_usage_stats": True}}
    parts = await events(http, body, "completions")
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_min_tokens_also_holds_for_stop_strings(http: aiohttp.ClientSession) -> None:
    for least, text in ((2, "he"), (3, "hel"), (4, "hello wor")):
        _, answer = await post(http, {**ASK, "stop": "l", "min_tokens": least})
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_streamed_choices_are_told_apart(http: aiohttp.ClientSession) -> None:
    parts = await events(http, {**CHAT, "n": 2}, "chat/completions")
    texts = {0: "", 1: ""}
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["delta"].get("content", "")
    assert texts == {0: "hello world", 1: "hello world"}


async def test_stop_string_over_tokens_cancels_the_attempt(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    node = cluster.nodes[1]
    node.pause_at = 9
    _, answer = await post(http, {**ASK, "stop": ["zzz", "o wo"]})
    assert answer["choices"][0]["text"] == "hell"
    assert answer["choices"][0]["finish_reason"] == "stop"
    await node.until(lambda: bool(node.cancels))
    assert node.cancels[0].request == node.submits[0].request
    await cluster.loaded(lambda load: load.running_requests == load.running_tokens == 0)


@pytest.mark.parametrize("at_once", [4, 7, 50])
async def test_several_tokens_at_once_are_taken_in_order_up_to_a_stop_string(
    cluster: Cluster, http: aiohttp.ClientSession, at_once: int
) -> None:
    cluster.nodes[1].at_once = at_once
    parts = await events(http, CHAT, "chat/completions")
    pieces = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(pieces) == "hello world"
    parts = await events(http, {**CHAT, "stop": "o w"}, "chat/completions")
    pieces = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(pieces) == "hell"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    _, answer = await post(http, {**ASK, "stop": "o w", "logprobs": 0})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hell", "stop")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_only_the_last_event_of_a_choice_says_that_it_ends(
    cluster: Cluster, http: aiohttp.ClientSession, route: str, logprobs: bool
) -> None:
    """Also where all tokens come at once."""
    cluster.nodes[1].at_once = 50
    body = {**(ASK if route == "completions" else CHAT), "n": 2, "return_token_ids": logprobs}
    parts = await events(http, body, route)
    for index in (0, 1):
        own = [c for part in parts for c in part["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in own]
        assert "".join(texts) == "hello world"
        assert texts[-1] == ""


async def test_usage_in_a_chunk_counts_up_to_that_chunk(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].at_once = 50
    body = {**ASK, "stream_options": {"continuous_usage_stats": True}}
    parts = await events(http, body, "completions")
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == [*range(1, 12), 12]


async def test_a_stop_string_ends_its_own_choice_only(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    node = cluster.nodes[1]
    node.script = lambda submit: ids_of("stop" if submit.tokens == (9,) else "never")
    node.pause_at = 4
    asking = asyncio.create_task(post(http, {**ASK, "prompt": [[8], [9]], "stop": "top"}))
    await node.until(lambda: bool(node.cancels))
    ended = {submit.request for submit in node.submits if submit.tokens == (9,)}
    assert {cancel.request for cancel in node.cancels} == ended
    node.resume.set()
    _, answer = await asking
    assert [choice["text"] for choice in answer["choices"]] == ["never", "s"]


async def test_half_a_stop_string_is_not_lost(http: aiohttp.ClientSession) -> None:
    parts = await events(http, {**ASK, "stop": "world!"}, "completions")
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello world"


async def test_characters_split_over_tokens_come_whole(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    text = "grüße 🎉 世界"
    cluster.nodes[1].script = lambda submit: ids_of(text)
    parts = await events(http, ASK, "completions")
    pieces = [part["choices"][0]["text"] for part in parts]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


async def test_a_client_that_leaves_cancels_its_request(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    node = cluster.nodes[1]
    node.pause_at = 3
    async with http.post("/v1/completions", json={**ASK, "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await node.until(lambda: bool(node.cancels))
    await cluster.loaded(lambda load: load.running_requests == 0)


async def test_a_client_that_leaves_before_the_first_token(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    node = cluster.nodes[1]
    node.pause_at = 0
    asking = asyncio.create_task(post(http, ASK))
    await node.until(lambda: len(node.submits) == 1)
    asking.cancel()
    await node.until(lambda: bool(node.cancels))


@pytest.mark.parametrize("seed", range(3))
async def test_tokens_keep_their_order_whichever_way_they_take(
    cluster: Cluster, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Where the client reads too slowly, a token waits; otherwise it is written at once."""
    draw = Random(seed)
    ways: list[bool] = []

    def takes(_: Connection) -> bool:
        ways.append(draw.random() < 0.5)
        return ways[-1]

    monkeypatch.setattr(Connection, "takes", property(takes))
    text = "".join(f"{number:04}" for number in range(100))
    cluster.nodes[1].script = lambda submit: ids_of(text)
    cluster.nodes[1].at_once = 3
    said = ["", ""]
    for event in await events(http, {**ASK, "max_tokens": 400, "n": 2}, "completions"):
        (choice,) = event["choices"]
        said[choice["index"]] += choice["text"]
    assert said == [text, text]
    assert set(ways) == {True, False}


async def test_a_bug_in_mid_stream_ends_that_stream_with_an_error(
    cluster: Cluster, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, calls = Answers.events, itertools.count(1)

    def fail_once(answers: Answers, deltas: Sequence[Delta]) -> bytes:
        if next(calls) == 6:
            raise RuntimeError("a bug")
        return written(answers, deltas)

    monkeypatch.setattr(Answers, "events", fail_once)
    *parts, last = await events(http, ASK, "completions")
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello"
    assert last["error"]["message"] == FAILED
    await cluster.loaded(lambda load: load.running_requests == 0)
