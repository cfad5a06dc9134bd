"""Anthropic's Messages API, with Anthropic's own client and without."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest

from shared.config import GatewayConfig
from tests.unit.gateway.http.builders import post
from tests.unit.gateway.http.calling import PARAMETERS
from tests.unit.gateway.http.calling import TEMPLATE as CALLING
from tests.unit.gateway.http.calling import TEXT as CALLING_TEXT
from tests.unit.gateway.http.described import Described
from tests.unit.gateway.http.thinking import TEMPLATE
from tests.unit.gateway.http.thinking import TEXT as THINKING_TEXT
from tests.unit.gateway.support import (
    CONTEXT,
    NAME,
    TOKENIZER,
    Cluster,
    ids_of,
    replica,
    running,
    text_files,
)

ASK: dict[str, Any] = {
    "model": NAME,
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hi"}],
}
TEXT = "hello world"


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = cluster.service.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


async def events(
    http: aiohttp.ClientSession, body: dict[str, Any], **headers: str
) -> list[dict[str, Any]]:
    """Each has the name that it came under."""
    async with http.post(
        "/v1/messages", json={**body, "stream": True}, headers=headers
    ) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        event = json.loads(lines["data"])
        assert event["type"] == lines["event"]
        found.append(event)
    return found


async def test_a_message(client: anthropic.AsyncAnthropic) -> None:
    answer = await client.messages.create(**ASK, extra_headers={"X-Request-ID": "abc"})
    (block,) = answer.content
    assert (block.type, block.text) == ("text", TEXT)
    assert (answer.id, answer.type, answer.role) == ("msg_abc", "message", "assistant")
    assert answer.model == NAME
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len(ids_of(TEXT)) + 1
    assert answer.usage.input_tokens == len("hi") + 3
    assert answer._request_id == "abc"


async def test_the_end_of_a_message(client: anthropic.AsyncAnthropic) -> None:
    short = await client.messages.create(**{**ASK, "max_tokens": 3})
    assert (short.stop_reason, short.stop_sequence) == ("max_tokens", None)
    stopped = await client.messages.create(**ASK, stop_sequences=["zzz", "wor"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wor")
    assert [block.text for block in stopped.content if block.type == "text"] == ["hello "]
    nothing = await client.messages.create(**ASK, stop_sequences=["h"])
    assert nothing.content == []


async def test_a_stream(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(**ASK, stop_sequences=["d"]) as stream:
        text = "".join([part async for part in stream.text_stream])
        answer = await stream.get_final_message()
    assert text == TEXT.removesuffix("d")
    assert answer.content[0].text == text  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "d")
    assert answer.usage.output_tokens == len(ids_of(TEXT))


async def test_the_order_of_events(http: aiohttp.ClientSession) -> None:
    found = await events(http, {**ASK, "max_tokens": 3})
    names = [event["type"] for event in found]
    assert names == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, begun, *deltas, stop, end, _ = found
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert begun["content_block"] == {"type": "text", "text": "", "citations": None}
    assert {event["index"] for event in (begun, *deltas, stop)} == {0}
    assert "".join(event["delta"]["text"] for event in deltas) == TEXT[:3]
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == ("max_tokens", None)
    assert end["usage"]["output_tokens"] == 3


async def test_a_stream_without_text(http: aiohttp.ClientSession) -> None:
    found = await events(http, {**ASK, "stop_sequences": ["h"]})
    assert [event["type"] for event in found] == ["message_start", "message_delta", "message_stop"]


async def test_a_stream_that_lives_says_so(
    cluster: Cluster, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.sending.KEEPALIVE_S", 0.02)
    node = await cluster.node(1)
    node.pause_at = 3
    async with http.post("/v1/messages", json={**ASK, "stream": True}) as response:
        async for line in response.content:
            if line == b"event: ping\n":
                break
        node.resume.set()
        rest = await response.content.read()
    assert b"event: message_stop" in rest


async def test_what_a_model_is_told(cluster: Cluster, client: anthropic.AsyncAnthropic) -> None:
    """Turns of the same role are one message, and a system prompt goes first."""
    await client.messages.create(
        model=NAME,
        max_tokens=5,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    (submit,) = cluster.nodes[1].submits
    said = "<s><|system|>be brief<|user|>a\nb<|assistant|>c<|user|>d<|assistant|>"
    assert list(submit.tokens) == ids_of(said)


async def test_thoughts_are_blocks_of_their_own(described: Described) -> None:
    async with running(replica(1), files=text_files(TEMPLATE)) as cluster:
        cluster.nodes[1].script = lambda submit: ids_of(THINKING_TEXT)
        url = cluster.service.url
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
            answer = await client.messages.create(**ASK)
            async with client.messages.stream(**ASK) as stream:
                streamed = await stream.get_final_message()
            history = [*ASK["messages"], answer.to_param(), {"role": "user", "content": "go on"}]
            await client.messages.create(**{**ASK, "messages": history})
            plain = await client.messages.create(**ASK, thinking={"type": "disabled"})
        tracing = [described.tracing()]
        async with aiohttp.ClientSession(url, trace_configs=tracing) as http:
            await events(http, ASK)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "why"
    assert answer.content[1].text == "so <think>"
    assert [block.to_dict() for block in streamed.content] == [
        block.to_dict() for block in answer.content
    ]
    assert [block.type for block in plain.content] == ["text"]


TOOLS = [
    {"name": "f", "description": "d", "input_schema": PARAMETERS},
    {"name": "g", "input_schema": {"type": "object"}},
]


async def test_calls_of_tools_and_their_results(described: Described) -> None:
    ask = {**ASK, "max_tokens": 140, "tools": TOOLS}
    async with running(replica(1), files=text_files(CALLING)) as cluster:
        cluster.nodes[1].script = lambda submit: ids_of(CALLING_TEXT)
        url = cluster.service.url
        async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
            answer = await client.messages.create(**ask)
            async with client.messages.stream(**ask) as stream:
                streamed = await stream.get_final_message()
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "fine"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            turns = [answer.to_param(), {"role": "user", "content": results}]
            await client.messages.create(**{**ask, "messages": [*ASK["messages"], *turns]})
            with pytest.raises(anthropic.BadRequestError, match="tools: "):
                await client.messages.create(**{**ask, "tools": [TOOLS[0], TOOLS[0]]})
            with pytest.raises(anthropic.BadRequestError, match="tool_choice: "):
                await client.messages.create(**ask, tool_choice={"type": "tool", "name": "h"})
        tracing = [described.tracing()]
        async with aiohttp.ClientSession(url, trace_configs=tracing) as http:
            found = await events(http, ask)
    text, first, second = answer.content
    assert answer.stop_reason == streamed.stop_reason == "tool_use"
    assert (text.type, text.text) == ("text", "I call.")
    assert (first.type, first.name, first.input) == ("tool_use", "f", {"a": "é"})
    assert (second.type, second.name, second.input) == ("tool_use", "g", {})
    assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [{"a": "é"}, {}]
    begun = [event["content_block"] for event in found if "content_block" in event]
    assert [block.get("input") for block in begun] == [None, {}, {}]
    deltas = {event["delta"]["type"] for event in found if "index" in event and "delta" in event}
    assert deltas == {"text_delta", "input_json_delta"}
    said = TOKENIZER.decode(list(cluster.nodes[1].submits[2].tokens), skip_special_tokens=False)
    assert said.endswith("</tool_call>finefine")


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model=NAME, messages=ASK["messages"])
    answer = await client.messages.create(**ASK)
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "status", "kind", "says"),
    [
        ({"model": "other"}, 404, "not_found_error", "there is no model 'other'"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: "),
        ({"max_tokens": CONTEXT}, 400, "invalid_request_error", "context length"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences: "),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"stop": "x"}, 400, "invalid_request_error", "stop: there is no such field"),
        ({"container": {}}, 400, "invalid_request_error", "container: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type: ",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            400,
            "invalid_request_error",
            "must end with a turn of the user",
        ),
    ],
)
async def test_errors(
    http: aiohttp.ClientSession, change: dict[str, Any], status: int, kind: str, says: str
) -> None:
    found, answer = await post(http, {**ASK, **change}, "messages", **{"X-Request-ID": "abc"})
    assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
    assert says in answer["error"]["message"]
    assert answer["request_id"] == "abc"


async def test_the_client_knows_the_errors(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.messages.create(**{**ASK, "model": "other"})
    assert refused.value.type == "not_found_error"
    assert refused.value.request_id


async def test_a_key_comes_in_the_client_s_header() -> None:
    digest = hashlib.sha256(b"sk-right").hexdigest()
    async with running(replica(1), config=GatewayConfig(api_keys=(digest,))) as cluster:
        url = cluster.service.url
        async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-right") as right:
            assert (await right.messages.create(**ASK)).content
        async with anthropic.AsyncAnthropic(base_url=url, api_key="sk-wrong") as wrong:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await wrong.messages.create(**ASK)
        assert refused.value.type == "authentication_error"


async def test_a_stream_is_taken_up_again(http: aiohttp.ClientSession) -> None:
    key = {"Idempotency-Key": "a-message"}

    async def ids(**more: str) -> list[str]:
        body = {**ASK, "stream": True}
        async with http.post("/v1/messages", json=body, headers={**key, **more}) as response:
            lines = (await response.text()).splitlines()
        return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]

    whole = await ids()
    assert whole[-1] == "end"
    assert await ids(**{"Last-Event-ID": whole[3]}) == whole[4:]
    (stop,) = [e["type"] for e in await events(http, ASK, **key, **{"Last-Event-ID": "end"})]
    assert stop == "message_stop"
