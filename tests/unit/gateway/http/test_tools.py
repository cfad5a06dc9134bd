"""Tools over HTTP: what templates and nodes are given, and calls as clients read them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.unit.gateway.http.builders import CHAT, events, post
from tests.unit.gateway.http.calling import PARAMETERS, TEMPLATE, TEXT
from tests.unit.gateway.http.described import Described
from tests.unit.gateway.support import Cluster, ids_of, replica, running, text_files

MISTRAL = TEMPLATE.replace("<tool_call>\n", "[TOOL_CALLS] [").replace("\n</tool_call>", "]")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True},
}
OTHER = {"type": "function", "function": {"name": "g"}}
ASK = {**CHAT, "tools": [TOOL, OTHER]}
CALLS = [("f", '{"a": "é"}'), ("g", "{}")]


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


async def ask(http: aiohttp.ClientSession, **change: Any) -> dict[str, Any]:
    status, answer = await post(http, {**ASK, **change}, "chat/completions")
    assert status == 200, answer
    return answer


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    found = message.get("tool_calls", [])
    assert all(call["type"] == "function" for call in found)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in found]


async def test_calls_are_read(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    answer = await ask(http, n=2)
    ids = set()
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["content"], calls_of(message)) == ("I call.", CALLS)
        assert choice["finish_reason"] == "tool_calls"
        ids |= {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 4
    assert all(len(one) == 29 and one.startswith("call_") for one in ids)
    told = {key: value for key, value in TOOL["function"].items() if key != "strict"}
    told = {"type": "function", "function": told}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    other = {"type": "function", "function": {"name": "g", "parameters": nothing}}
    prompt = json.dumps(told) + json.dumps(other) + "hi"
    assert cluster.nodes[1].submits[0].tokens == tuple(ids_of(prompt))


async def test_a_message_with_calls_alone_has_no_content(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].script = lambda submit: ids_of(TEXT[8:])
    (choice,) = (await ask(http))["choices"]
    assert choice["message"]["content"] is None
    assert calls_of(choice["message"]) == CALLS


async def test_an_answer_without_calls(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    cluster.nodes[1].script = lambda submit: ids_of("well <tool_call>x")
    (choice,) = (await ask(http))["choices"]
    assert choice["message"]["content"] == "well <tool_call>x"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off(http: aiohttp.ClientSession) -> None:
    (choice,) = (await ask(http, max_tokens=len(ids_of(TEXT[: TEXT.index("é")]))))["choices"]
    assert calls_of(choice["message"]) == [("f", '{"a": "')]
    assert choice["finish_reason"] == "length"
    assert (await ask(http, stop=['"a"']))["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("at_once", [1, 7, 500])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_calls_are_streamed(
    cluster: Cluster, http: aiohttp.ClientSession, at_once: int, logprobs: bool
) -> None:
    cluster.nodes[1].at_once = at_once
    parts = await events(http, {**ASK, "logprobs": logprobs}, "chat/completions")
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "I call."
    told = [call for delta in deltas for call in delta.get("tool_calls", [])]
    for index, (name, arguments) in enumerate(CALLS):
        first, *others = [call for call in told if call["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", name)
        assert first["id"].startswith("call_")
        assert not [other for other in others if other.keys() != {"index", "function"}]
        pieces = [call["function"]["arguments"] for call in (first, *others)]
        assert "".join(pieces) == arguments
        assert len(pieces) > 3 or index
    assert [p["choices"][0]["finish_reason"] for p in parts if p["choices"]][-1] == "tool_calls"
    if logprobs:
        said = [p["choices"][0]["logprobs"] for p in parts]
        assert sum(len(one["content"]) for one in said if one) == len(ids_of(TEXT)) + 1


async def test_the_same_calls_when_asked_again(http: aiohttp.ClientSession) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = [await post(http, ASK, "chat/completions", **headers) for _ in range(2)]
    assert answers[0] == answers[1]
    assert calls_of(answers[0][1]["choices"][0]["message"]) == CALLS
    other = await post(http, ASK, "chat/completions", **{"Idempotency-Key": "j"})
    ids = [a[1]["choices"][0]["message"]["tool_calls"][0]["id"] for a in (answers[0], other)]
    assert ids[0] != ids[1]


async def test_what_nodes_are_to_keep_to(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("auto", "required", named, "none"):
        await ask(http, tool_choice=choice)
    await ask(http, tool_choice="required", parallel_tool_calls=False)
    rules = [submit.rules.grammar if submit.rules else "" for submit in cluster.nodes[1].submits]
    auto, required, one, none, single = rules
    assert ")*" in required
    assert ")*" not in single
    assert "lazy" in auto
    assert "lazy" not in required
    assert "call1" in required
    assert "call1" not in one
    assert none == ""
    assert cluster.nodes[1].submits[-2].tokens == tuple(ids_of("hi"))


async def test_no_grammar_where_text_has_no_end(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    for change in ({"ignore_eos": True}, {"min_tokens": 3}):
        answer = await ask(http, **change, max_tokens=200)
        assert calls_of(answer["choices"][0]["message"]) == CALLS
    assert not [s.rules.grammar for s in cluster.nodes[1].submits if s.rules and s.rules.grammar]


async def test_schemas_that_grammars_cannot_follow(http: aiohttp.ClientSession) -> None:
    odd = {**TOOL["function"], "parameters": {"type": "object", "not": {}}, "strict": None}
    tools = [{"type": "function", "function": odd}, OTHER]
    answer = await ask(http, tools=tools)
    assert calls_of(answer["choices"][0]["message"]) == CALLS
    strict = [{"type": "function", "function": {**odd, "strict": True}}]
    for change in ({"tools": strict}, {"tools": tools, "tool_choice": "required"}):
        status, answer = await post(http, {**ASK, **change}, "chat/completions")
        assert (status, answer["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [OTHER] * 129}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "h"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "min_tokens": 1}, "min_tokens"),
        ({"functions": [{"name": "f"}]}, "functions"),
        (
            {"tools": [{**OTHER, "function": {"name": "g", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{**OTHER, "function": {"name": "g", "parameters": {"a": 1 << 70}}}]},
            "tools[0].function.parameters",
        ),
    ],
    ids=str,
)
async def test_what_is_no_use_of_tools(
    http: aiohttp.ClientSession, change: dict[str, Any], param: str
) -> None:
    status, answer = await post(http, {**ASK, **change}, "chat/completions")
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "takes no tools"),
        (TEMPLATE.replace("<tool_call>", "CALL"), "is not known here"),
    ],
)
async def test_templates_that_have_no_place_for_tools(template: str, said: str) -> None:
    async with (
        running(replica(1), files=text_files(template)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        status, answer = await post(http, ASK, "chat/completions")
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert said in answer["error"]["message"]
        assert (await post(http, {**ASK, "tool_choice": "none"}, "chat/completions"))[0] == 200


async def test_ids_as_mistral_takes_them() -> None:
    template = MISTRAL.replace("arguments': call", "id': call.id, 'arguments': call").replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "tool_calls": [{**call, "id": "call_1"}, {**call, "id": "abcdef012"}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
    ]
    async with running(replica(1), files=text_files(template)) as cluster:
        text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
        cluster.nodes[1].script = lambda submit: ids_of(text)
        async with aiohttp.ClientSession(cluster.service.url) as http:
            answer = await ask(http, messages=history)
        prompt = cluster.nodes[1].submits[0].tokens
    (found,) = answer["choices"][0]["message"]["tool_calls"]
    assert len(found["id"]) == 9
    assert found["id"].isalnum()
    assert _contains(prompt, ids_of('"id": "abcdef012"'))
    assert not _contains(prompt, ids_of("call_1"))


def _contains(tokens: tuple[int, ...], part: list[int]) -> bool:
    return any(list(tokens[i : i + len(part)]) == part for i in range(len(tokens)))


async def test_the_tokens_of_a_chat_with_tools(http: aiohttp.ClientSession) -> None:
    async with http.post("/tokenize", json=ASK) as response:
        answer = await response.json()
    assert response.status == 200, answer
    assert answer["count"] > 100
