"""The API over HTTP, in front of nodes that generate known text."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from services.gateway.core import admission
from shared import grammar
from shared.config import GatewayConfig
from shared.messages.serving import LogitRules
from tests.unit.gateway.support import (
    CONTEXT,
    EOS_ID,
    NAME,
    VOCAB,
    Cluster,
    ids_of,
    replica,
    running,
    text_files,
)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running(replica(1)) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.service.url) as session:
        yield session


async def post(
    http: aiohttp.ClientSession, body: dict[str, Any], route: str = "completions", **headers: str
) -> tuple[int, dict[str, Any]]:
    async with http.post(f"/v1/{route}", json=body, headers=headers) as response:
        return response.status, await response.json()


async def events(http: aiohttp.ClientSession, body: dict[str, Any], route: str) -> list[Any]:
    """The stream's events, [DONE] included."""
    async with http.post(f"/v1/{route}", json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data")]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


OVERFLOWS = "\n".join(["start: x0", *(f"x{i}: x{i + 1}" for i in range(8000)), 'x8000: "a"'])
NO_SCHEMA = {"schema": {"type": "objec"}}
JSON = {"response_format": {"type": "json_object"}}
ASK = {"model": NAME, "prompt": "say hello", "max_tokens": 50}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}


async def test_completion(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, ASK)
    assert status == 200
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"]) == (0, "hello world")
    assert choice["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 12,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    (submit,) = cluster.nodes[1].submits
    assert submit.tokens == (0, *ids_of("say hello"))
    assert (submit.prompt_tokens, submit.max_tokens, submit.stop_ids) == (10, 50, (EOS_ID,))


async def test_completion_ends_at_max_tokens(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, {**ASK, "max_tokens": 4})
    assert answer["choices"][0]["text"] == "hell"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_completion_is_short_if_nothing_is_asked(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    await post(http, {"model": NAME, "prompt": "x"})
    assert cluster.nodes[1].submits[0].max_tokens == 16


async def test_streamed_completion(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "stream_options": {"include_usage": True}}
    *parts, last = await events(http, body, "completions")
    assert "".join(part["choices"][0]["text"] for part in parts) == "hello world"
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 11 + ["stop"]
    assert all(part["usage"] is None for part in parts)
    assert len({part["id"] for part in (*parts, last)}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


async def test_usage_in_every_chunk(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "stream_options": {"continuous_usage_stats": True}}
    parts = await events(http, body, "completions")
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 12


async def test_token_ids_come_if_asked_for(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "return_token_ids": True}
    expected = [*ids_of("hello world"), EOS_ID]
    _, answer = await post(http, body)
    assert answer["choices"][0]["token_ids"] == expected
    parts = await events(http, body, "completions")
    found = [token for part in parts for token in part["choices"][0].get("token_ids", [])]
    assert found == expected


async def test_chat(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    status, answer = await post(http, CHAT, "chat/completions")
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello world"}
    (submit,) = cluster.nodes[1].submits
    assert submit.tokens == (0, 2, *ids_of("hi"), 3)
    assert submit.max_tokens == CONTEXT - 5


async def test_streamed_chat(http: aiohttp.ClientSession) -> None:
    parts = await events(http, CHAT, "chat/completions")
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
    assert deltas[-1] == {}
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in part for part in parts)


async def test_chat_content_in_parts(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts}], "max_completion_tokens": 7}
    status, _ = await post(http, body, "chat/completions")
    assert status == 200
    assert cluster.nodes[1].submits[0].tokens == (0, 2, *ids_of("a\nb"), 3)
    assert cluster.nodes[1].submits[0].max_tokens == 7


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[0, *ids_of("ab")]]),
        (["ab", "c"], [[0, *ids_of("ab")], [0, *ids_of("c")]]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
        ("<s>ab", [[0, *ids_of("ab")]]),
    ],
)
async def test_forms_of_prompts(
    cluster: Cluster, http: aiohttp.ClientSession, prompt: object, expected: list[list[int]]
) -> None:
    status, answer = await post(http, {**ASK, "prompt": prompt})
    assert status == 200
    assert sorted(list(s.tokens) for s in cluster.nodes[1].submits) == sorted(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_have_their_own_seeds(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    body = {**ASK, "n": 3, "seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4}
    _, answer = await post(http, body)
    assert [choice["text"] for choice in answer["choices"]] == ["hello world"] * 3
    sampled = [submit.sampling for submit in cluster.nodes[1].submits]
    assert sampled[0].seed == 5
    assert len({sampling.seed for sampling in sampled}) == 3
    assert {(s.temperature, s.top_p, s.top_k) for s in sampled} == {(0.5, 0.9, 4)}
    again = {**body, "n": 3}
    await post(http, again)
    assert [s.sampling for s in cluster.nodes[1].submits[3:]] == sampled


async def test_rules_go_with_every_choice(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    body = {
        **ASK,
        "n": 2,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -2,
        "logit_bias": {"9": -100, "7": 3.5},
        "min_tokens": 2,
        "logprobs": 0,
    }
    status, _ = await post(http, body)
    assert status == 200
    rules = LogitRules(
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=-2,
        logit_bias=((7, 3.5), (9, -100)),
        min_tokens=2,
    )
    submits = cluster.nodes[1].submits
    assert [submit.rules for submit in submits] == [rules, rules]
    assert [(s.sampling.top_k, s.sampling.min_p, s.sampling.logprobs) for s in submits] == [
        (0, 0.1, 0)
    ] * 2
    await post(http, {**ASK, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0})
    assert submits[2].rules is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (JSON, grammar.from_schema({"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}},
                }
            },
            grammar.from_schema({"type": "integer"}),
        ),
        (
            {"structured_outputs": {"json": '{"type": "integer"}'}},
            grammar.from_schema({"type": "integer"}),
        ),
        ({"structured_outputs": {"json_object": True}}, grammar.from_schema({"type": "object"})),
        ({"structured_outputs": {"regex": "a+"}}, grammar.from_regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, grammar.from_choice(["a", "b"])),
        ({"structured_outputs": {"grammar": "start: /a/"}}, grammar.from_lark("start: /a/")),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_what_text_is_held_to(
    cluster: Cluster, http: aiohttp.ClientSession, asked: dict[str, Any], expected: str | None
) -> None:
    status, _ = await post(http, {**CHAT, **asked}, "chat/completions")
    assert status == 200
    (submit,) = cluster.nodes[1].submits
    assert (submit.rules.grammar if submit.rules else None) == expected


async def test_log_probabilities_of_a_completion(http: aiohttp.ClientSession) -> None:
    text = "hello world"
    _, answer = await post(http, {**ASK, "logprobs": 2, "n": 2, "max_tokens": 3})
    for choice in answer["choices"]:
        found = choice["logprobs"]
        assert found["tokens"] == list(text[:3])
        assert found["token_logprobs"] == [0, -0.125, -0.25]
        assert found["text_offset"] == [0, 1, 2]
        alternatives = {"!": -1, '"': -2}
        assert found["top_logprobs"][1] == {**alternatives, "e": -0.125}
    parts = await events(http, {**ASK, "logprobs": 0, "max_tokens": 3}, "completions")
    streamed = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    assert [one["tokens"] for one in streamed] == [["h"], ["e"], ["l"]]
    assert [one["text_offset"] for one in streamed] == [[0], [1], [2]]
    assert streamed[1]["top_logprobs"] == [{"e": -0.125}]


async def test_log_probabilities_of_a_chat(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    cluster.nodes[1].script = lambda submit: ids_of("aü")
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    _, answer = await post(http, body, "chat/completions")
    content = answer["choices"][0]["logprobs"]["content"]
    alternative = [{"token": "!", "logprob": -1, "bytes": [0x21]}]
    assert content[0] == {
        "token": "a", "logprob": 0, "bytes": [0x61], "top_logprobs": alternative
    }  # fmt: skip
    assert [one["bytes"] for one in content[1:3]] == [[0xC3], [0xBC]]
    assert len(content) == answer["usage"]["completion_tokens"] == 4
    parts = await events(http, body, "chat/completions")
    streamed = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    assert [one["content"] for one in streamed] == [[one] for one in content]
    texts = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(texts) == "aü"


async def test_echo_says_the_prompt_first(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "echo": True, "n": 2, "stop": "say"}
    _, answer = await post(http, body)
    assert [c["text"] for c in answer["choices"]] == ["say hellohello world"] * 2
    _, answer = await post(http, {**ASK, "echo": True, "prompt": [ids_of("a b"), ids_of("c")]})
    assert [c["text"] for c in answer["choices"]] == ["a bhello world", "chello world"]
    parts = await events(http, {**ASK, "echo": True}, "completions")
    assert "".join(part["choices"][0]["text"] for part in parts) == "say hellohello world"


def joined(parts: list[Any], index: int) -> tuple[str, dict[str, list[Any]], str | None]:
    """A streamed choice: its text, log probabilities, and how it ended."""
    own = [c for part in parts for c in part["choices"] if c["index"] == index]
    told = [c["logprobs"] for c in own if c["logprobs"]]
    lists = {key: [one for found in told for one in found[key]] for key in told[0]}
    return "".join(c["text"] for c in own), lists, own[-1]["finish_reason"]


SCORED = {**ASK, "echo": True, "logprobs": 1, "max_tokens": 2}


@pytest.mark.parametrize("prompt", ["say", [0, *ids_of("say")]], ids=["text", "ids"])
async def test_an_echoed_prompt_is_scored(
    cluster: Cluster, http: aiohttp.ClientSession, prompt: str | list[int]
) -> None:
    cluster.nodes[1].scored_at_once = 2
    body = {**SCORED, "prompt": prompt}
    _, answer = await post(http, body)
    (choice,) = answer["choices"]
    assert choice["text"] == "sayhe"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "s", "a", "y", "h", "e"],
        "token_logprobs": [None, -0.25, -0.5, -0.75, 0, -0.125],
        "top_logprobs": [None, *({"!": -1, token: found} for token, found in (
            ("s", -0.25), ("a", -0.5), ("y", -0.75), ("h", 0), ("e", -0.125)
        ))],
        "text_offset": [0, 0, 1, 2, 3, 4],
    }  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 2
    parts = await events(http, body, "completions")
    assert parts[0]["choices"][0]["text"] == "say"
    assert joined(parts, 0) == ("sayhe", choice["logprobs"], "length")


async def test_every_choice_of_every_prompt_is_scored(http: aiohttp.ClientSession) -> None:
    body = {**SCORED, "prompt": [ids_of("ab"), ids_of("c")], "n": 2}
    _, answer = await post(http, body)
    parts = await events(http, body, "completions")
    assert [choice["text"] for choice in answer["choices"]] == ["abhe", "abhe", "che", "che"]
    for choice in answer["choices"]:
        scores = [-0.25] if choice["index"] < 2 else []
        assert choice["logprobs"]["token_logprobs"] == [None, *scores, 0, -0.125]
        assert joined(parts, choice["index"])[1] == choice["logprobs"]


async def test_a_prompt_can_be_scored_without_an_answer(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    body = {**SCORED, "max_tokens": 0, "return_token_ids": True, "prompt": ["say", "so"]}
    _, answer = await post(http, body)
    assert answer["usage"]["completion_tokens"] == 0
    assert [choice["text"] for choice in answer["choices"]] == ["say", "so"]
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == []
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"]) + 1
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.25, -0.5]
    parts = await events(http, body, "completions")
    for choice in answer["choices"]:
        streamed = joined(parts, choice["index"])
        assert streamed == (choice["text"], choice["logprobs"], "length")
    cluster.nodes[1].script = lambda submit: []  # ends at once
    _, answer = await post(http, {**ASK, "echo": True, "max_tokens": 0})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("say hello", "length")
    assert choice["logprobs"] is None
    whole = {**SCORED, "prompt": [5] * CONTEXT}
    assert [(await post(http, {**whole, "max_tokens": n}))[0] for n in (0, 1)] == [200, 400]


async def test_no_more_is_scored_than_an_answer_holds(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_SCORES", 16)
    body = {**SCORED, "prompt": "say"}
    assert [(await post(http, {**body, "n": n}))[0] for n in (2, 3)] == [200, 400]
    _, answer = await post(http, {**body, "logprobs": 4})
    assert answer["error"]["param"] == "logprobs"
    assert (await post(http, {**body, "logprobs": 20, "echo": False}))[0] == 200


async def test_of_tokens_that_read_the_same_the_most_probable_is_named(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].script = lambda submit: [4] * 10
    _, answer = await post(http, {**ASK, "logprobs": 1, "max_tokens": 10})
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"][-2:] == [-1, -1.125]
    assert found["top_logprobs"][1] == {"!": -0.125}
    assert found["top_logprobs"][-1] == {"!": -1}


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


async def test_ignore_eos(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, {**ASK, "ignore_eos": True, "max_tokens": 20, "min_tokens": 20})
    assert cluster.nodes[1].submits[0].stop_ids == ()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20


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


async def test_usage_says_how_much_of_the_prompt_was_cached(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    """The usage counts, for each prompt, the positions that no choice had to compute where it first
    gave a token."""
    cached = {ids_of("a")[0]: iter((16, 48)), ids_of("b")[0]: iter((32, 32))}
    cluster.nodes[1].cached = lambda submit: next(cached[submit.tokens[1]])
    body = {**ASK, "prompt": ["a" * 50, "b" * 50], "n": 2}
    _, answer = await post(http, body)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
    cluster.nodes[1].cached = lambda submit: 16
    asked = {**ASK, "stream_options": {"include_usage": True}}
    parts = await events(http, asked, "completions")
    assert parts[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


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


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ["a", 1]}, 400, "prompt"),
        ({"prompt": [VOCAB]}, 400, "prompt"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": CONTEXT}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"stop": [1]}, 400, "stop[0]"),
        ({"stop": ""}, 400, "stop"),
        ({"stop_token_ids": [1 << 70]}, 400, "stop_token_ids"),
        ({"n": 0}, 400, "n"),
        ({"n": 1000}, 400, "n"),
        ({"logit_bias": {str(VOCAB): 1}}, 400, "logit_bias"),
        ({"min_tokens": 51}, 400, "min_tokens"),
        ({"structured_outputs": {"regex": "a(b"}}, 400, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 140_000}}, 400, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, 400, "structured_outputs"),
        ({"structured_outputs": {"grammar": OVERFLOWS}}, 400, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "objec"}}}, 400, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": NO_SCHEMA}},
            400,
            "response_format",
        ),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_done_is_said(
    http: aiohttp.ClientSession, change: dict[str, Any], status: int, param: str
) -> None:
    found, answer = await post(http, {**ASK, **change})
    assert (found, answer["error"]["param"]) == (status, param)
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


async def test_the_model_s_token_ids_are_named(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, {**ASK, "logit_bias": {str(VOCAB): 1}})
    assert f"0 to {VOCAB - 1}" in answer["error"]["message"]


async def test_context_length_is_named(http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, {**ASK, "max_tokens": CONTEXT})
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "10 in the prompt" in answer["error"]["message"]
    said = f"This model's maximum context length is {CONTEXT} tokens. However, "
    for prompt in ("x", [5] * CONTEXT):
        _, answer = await post(http, {**ASK, "prompt": prompt, "max_tokens": CONTEXT})
        assert answer["error"]["code"] == "context_length_exceeded"
        assert answer["error"]["message"].startswith(said)


@pytest.mark.parametrize("knows", [False, True])
async def test_a_developer_is_a_system_where_the_template_knows_no_other(knows: bool) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    if knows:
        template += "{% if messages[0].role == 'developer' %}!{% endif %}"
    files = text_files(template)
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    async with running(replica(1), files=files) as cluster:
        async with aiohttp.ClientSession(cluster.service.url) as http:
            await post(http, {**CHAT, "messages": messages}, "chat/completions")
        (submit,) = cluster.nodes[1].submits
    expected = "developer:a;user:b;!" if knows else "system:a;user:b;"
    assert submit.tokens == tuple(ids_of(expected))


async def test_the_template_may_refuse(http: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    status, answer = await post(http, {**CHAT, "messages": messages}, "chat/completions")
    assert status == 400
    assert "system goes first" in answer["error"]["message"]


async def test_pictures_are_refused(http: aiohttp.ClientSession) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    messages = [{"role": "user", "content": parts}]
    status, answer = await post(http, {**CHAT, "messages": messages}, "chat/completions")
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0]")


async def test_unknown_fields_are_ignored(http: aiohttp.ClientSession) -> None:
    status, _ = await post(http, {**ASK, "user": "me", "metadata": {"a": 1}, "new": True})
    assert status == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": "\xff"}', b"[" * 100_000])
async def test_bodies_that_are_no_requests(http: aiohttp.ClientSession, raw: bytes) -> None:
    async with http.post("/v1/completions", data=raw) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_calls(http: aiohttp.ClientSession) -> None:
    for method, target, status in (("GET", "/v1/files", 404), ("GET", "/v1/completions", 405)):
        async with http.request(method, target) as response:
            assert response.status == status
            assert "no such call" in (await response.json())["error"]["message"]


async def test_models(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        listed = await response.json()
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["created"]) == (NAME, "model", 5)
    assert card["max_model_len"] == CONTEXT
    async with http.get(f"/v1/models/{NAME}") as response:
        assert await response.json() == card
    async with http.get("/v1/models/other") as response:
        assert response.status == 404


async def test_request_id_is_returned(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=ASK, headers={"X-Request-ID": "abc-1"}) as ours:
        assert ours.headers["X-Request-ID"] == "abc-1"
        assert (await ours.json())["id"] == "cmpl-abc-1"
    async with http.get("/health", headers={"X-Request-ID": "bad id\u00e9"}) as made:
        assert made.headers["X-Request-ID"].startswith("req-")


async def test_health_and_metrics(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    await post(http, ASK)
    await cluster.loaded(lambda load: load.running_requests == 0)
    async with http.get("/health") as response:
        assert await response.json() == {"status": "ok"}
    async with http.head("/metrics") as response:
        assert response.status == 200
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert f'lambdascale_gateway_requests_total{{end="stop",model="{NAME}"}} 1.0' in lines
    assert f'lambdascale_gateway_generated_tokens_total{{model="{NAME}"}} 12.0' in lines
    assert f'lambdascale_gateway_ttft_seconds_count{{model="{NAME}"}} 1.0' in lines
    assert f'lambdascale_gateway_queued_requests{{model="{NAME}"}} 0.0' in lines


async def test_bodies_have_a_limit() -> None:
    config = GatewayConfig(max_body_bytes=1000)
    async with (
        running(replica(1), config=config) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        status, answer = await post(http, {**ASK, "prompt": "x" * 1000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_api_keys() -> None:
    config = GatewayConfig(api_keys=(hashlib.sha256(b"secret").hexdigest(),))
    async with (
        running(replica(1), config=config) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            status, answer = await post(http, ASK, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        status, _ = await post(http, ASK, Authorization="Bearer secret")
        assert status == 200
        async with http.get("/health") as response:
            assert response.status == 200
