"""OpenAI's Responses API, with OpenAI's own client and without."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from services.gateway.encoder import WAITING
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

ASK: dict[str, Any] = {"model": NAME, "input": "hi"}
TEXT = "hello world"


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{cluster.service.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


async def events(http: aiohttp.ClientSession, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each has the name that it came under, and its number."""
    async with http.post("/v1/responses", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    found = []
    for number, block in enumerate(text.split("\n\n")[:-1]):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        event = json.loads(lines["data"])
        assert (event["type"], event["sequence_number"]) == (lines["event"], number)
        found.append(event)
    return found


async def test_a_response(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(
        **ASK, metadata={"a": "b"}, extra_headers={"X-Request-ID": "abc"}
    )
    assert answer.output_text == TEXT
    assert (answer.id, answer.object, answer.status) == ("resp_abc", "response", "completed")
    (item,) = answer.output
    assert item.type == "message"
    assert (item.role, item.status) == ("assistant", "completed")
    assert answer.incomplete_details is None
    assert answer.error is None
    assert answer.metadata == {"a": "b"}
    assert answer.usage
    assert answer.usage.output_tokens == len(ids_of(TEXT)) + 1
    assert answer.usage.input_tokens == len("hi") + 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_a_response_that_is_cut_off(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(**ASK, max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == TEXT[:3]
    assert answer.output[0].status == "incomplete"


async def test_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(**ASK) as stream:
        text = "".join(
            [event.delta async for event in stream if event.type == "response.output_text.delta"]
        )
        answer = await stream.get_final_response()
    assert text == answer.output_text == TEXT
    assert answer.status == "completed"


async def test_the_order_of_events(http: aiohttp.ClientSession) -> None:
    found = await events(http, {**ASK, "max_output_tokens": 3})
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    created, _, added, part, *deltas, done, part_done, item_done, last = found
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    assert (added["item"]["status"], added["item"]["content"]) == ("in_progress", [])
    assert part["part"]["text"] == ""
    assert "".join(event["delta"] for event in deltas) == done["text"] == TEXT[:3]
    assert part_done["part"]["text"] == TEXT[:3]
    assert last["response"]["output"] == [item_done["item"]]
    assert item_done["item"]["status"] == "incomplete"
    assert {e["item_id"] for e in (part, *deltas, done, part_done)} == {added["item"]["id"]}
    assert last["response"]["usage"]["output_tokens"] == 3


async def test_the_form_of_the_text(client: openai.AsyncOpenAI, cluster: Cluster) -> None:
    class City(BaseModel):
        name: str

    node = await cluster.node(1)
    node.script = lambda submit: ids_of('{"name": "Rome"}')
    answer = await client.responses.parse(**ASK, text_format=City)
    assert answer.output_parsed == City(name="Rome")
    assert '"Rome"' not in node.submits[0].rules.grammar  # type: ignore[union-attr]
    assert "name" in node.submits[0].rules.grammar  # type: ignore[union-attr]


async def test_what_a_model_is_told(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await client.responses.create(
        model=NAME,
        max_output_tokens=5,
        instructions="be brief",
        input=[
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
            {"role": "user", "content": "d"},
        ],
    )
    (submit,) = cluster.nodes[1].submits
    said = "<s><|system|>be brief\nbe kind<|user|>a<|assistant|>c<|user|>d<|assistant|>"
    assert list(submit.tokens) == ids_of(said)


async def test_thoughts_are_items_of_their_own() -> None:
    async with running(replica(1), files=text_files(TEMPLATE)) as cluster:
        cluster.nodes[1].script = lambda submit: ids_of(THINKING_TEXT)
        async with aiohttp.ClientSession(cluster.service.url) as http:
            _, answer = await post(http, ASK, "responses")
            thoughts, message = answer["output"]
            found = await events(http, ASK)
    assert thoughts["type"] == "reasoning"
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert message["content"][0]["text"] == "so <think>"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    names = [event["type"].removeprefix("response.") for event in found]
    assert names.index("reasoning_text.done") < names.index("output_text.delta")
    last = found[-1]["response"]["output"]
    assert [item["content"][0]["text"] for item in last] == ["why", "so <think>"]
    assert [event["output_index"] for event in found if "item" in event] == [0, 0, 1, 1]


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "g"},
]


async def test_calls_of_tools_and_their_results(described: Described) -> None:
    ask = {**ASK, "tools": TOOLS}
    async with running(replica(1), files=text_files(CALLING)) as cluster:
        cluster.nodes[1].script = lambda submit: ids_of(CALLING_TEXT)
        url = cluster.service.url
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            answer = await client.responses.create(**ask)
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "fine"}
                for item in answer.output
                if item.type == "function_call"
            ]
            asked = [{"role": "user", "content": "hi"}, *answer.output, *results]
            await client.responses.create(**{**ask, "input": asked})
        tracing = [described.tracing()]
        async with aiohttp.ClientSession(url, trace_configs=tracing) as http:
            found = await events(http, ask)
            status, refused = await post(
                http, {**ask, "tool_choice": {"type": "function", "name": "h"}}, "responses"
            )
    assert (status, refused["error"]["param"]) == (400, "tool_choice")
    message, first, second = answer.output
    assert message.content[0].text == "I call."
    assert (first.type, first.name, first.arguments) == ("function_call", "f", '{"a": "é"}')
    assert (second.type, second.name, second.arguments) == ("function_call", "g", "{}")
    assert first.call_id != second.call_id
    names = [event["type"].removeprefix("response.") for event in found]
    begin = names.index("function_call_arguments.delta")
    assert names[begin - 1] == "output_item.added"
    assert found[begin - 1]["item"]["arguments"] == ""
    end = names.index("function_call_arguments.done")
    assert names[end + 1] == "output_item.done"
    assert set(names[begin:end]) == {"function_call_arguments.delta"}
    assert found[end]["arguments"] == first.arguments
    assert [item["type"] for item in found[-1]["response"]["output"]] == [
        "message",
        "function_call",
        "function_call",
    ]
    said = TOKENIZER.decode(list(cluster.nodes[1].submits[1].tokens), skip_special_tokens=False)
    assert said.endswith("</tool_call>finefine")


async def test_a_stream_that_lives_says_so(
    cluster: Cluster, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.sending.KEEPALIVE_S", 0.02)
    node = await cluster.node(1)
    node.pause_at = 3
    async with http.post("/v1/responses", json={**ASK, "stream": True}) as response:
        async for line in response.content:
            if line == WAITING.splitlines(keepends=True)[0]:
                break
        node.resume.set()
        rest = await response.content.read()
    assert b"event: response.completed" in rest


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": [{"content": "a"}]}, 400, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, 400, "input[0].call_id"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": CONTEXT}, 400, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, 400, "text.format"),
        ({"store": True}, 400, "store"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"messages": []}, 400, "messages"),
    ],
)
async def test_what_cannot_be_done_is_said(
    http: aiohttp.ClientSession, change: dict[str, Any], status: int, param: str
) -> None:
    found, answer = await post(http, {**ASK, **change}, "responses")
    assert found == status
    assert answer["error"]["param"].startswith(param)
    assert answer["error"]["message"]


async def test_nothing_is_stored_and_that_is_said(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, ASK, "responses")
    assert answer["store"] is False
    _, refused = await post(http, {**ASK, "previous_response_id": answer["id"]}, "responses")
    assert "send the whole conversation in input" in refused["error"]["message"]
