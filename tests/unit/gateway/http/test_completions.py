"""Completions over HTTP: prompts, choices, and whole answers."""

import json
from typing import Any

import aiohttp
import pytest

from shared import grammar
from shared.messages.serving import LogitRules
from tests.unit.gateway.http.builders import ASK, CHAT, events, post
from tests.unit.gateway.support import EOS_ID, NAME, Cluster, ids_of, replica, running, text_files

JSON = {"response_format": {"type": "json_object"}}


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
        "completion_tokens_details": {"reasoning_tokens": 0},
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


async def test_token_ids_come_if_asked_for(http: aiohttp.ClientSession) -> None:
    body = {**ASK, "return_token_ids": True}
    expected = [*ids_of("hello world"), EOS_ID]
    _, answer = await post(http, body)
    assert answer["choices"][0]["token_ids"] == expected
    parts = await events(http, body, "completions")
    found = [token for part in parts for token in part["choices"][0].get("token_ids", [])]
    assert found == expected


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


async def test_ignore_eos(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    _, answer = await post(http, {**ASK, "ignore_eos": True, "max_tokens": 20, "min_tokens": 20})
    assert cluster.nodes[1].submits[0].stop_ids == ()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20


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


async def test_a_model_has_defaults_of_its_own() -> None:
    """Of its generation_config.json; what a client gives goes before them."""
    own = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "repetition_penalty": 1.5}
    files = {**text_files(), "generation_config.json": json.dumps(own).encode()}
    async with (
        running(replica(1), files=files) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        await post(http, {**ASK, "temperature": 0, "top_k": -1})
        await post(http, ASK)
        given, left = (submit for submit in cluster.nodes[1].submits)
    assert (given.sampling.temperature, given.sampling.top_k) == (0, 0)
    assert (left.sampling.temperature, left.sampling.top_k) == (0.5, 7)
    assert given.sampling.top_p == left.sampling.top_p == 0.25
    assert given.rules is not None
    assert given.rules.repetition_penalty == 1.5
