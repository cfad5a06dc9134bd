"""Log probabilities of answers and of echoed prompts, over HTTP."""

from typing import Any

import aiohttp
import pytest

from services.gateway.core import admission
from tests.unit.gateway.http.builders import ASK, CHAT, events, post
from tests.unit.gateway.support import CONTEXT, Cluster, ids_of


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


async def test_no_more_is_generated_with_scores_than_an_answer_holds(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_SCORES", 12)
    body = {**ASK, "logprobs": 1, "n": 2}
    assert [(await post(http, {**body, "max_tokens": n}))[0] for n in (3, 4)] == [200, 400]
    assert (await post(http, {**body, "max_tokens": 50, "logprobs": None}))[0] == 200
    # Who asks for no number of tokens gets what there is room for.
    chat = {**CHAT, "logprobs": True, "top_logprobs": 1, "n": 2}
    _, answer = await post(http, chat, "chat/completions")
    assert answer["usage"]["completion_tokens"] == 6
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


RANKED = {**ASK, "prompt": "say", "prompt_logprobs": 1, "max_tokens": 2}


def of_prompt(*scores: float, most: int = 1) -> list[Any]:
    """What is told of the prompt `say`."""
    best = {"4": {"logprob": -1, "rank": 1, "decoded_token": "!"}} if most else {}
    texts = zip(ids_of("say"), "say", scores, strict=True)
    return [
        None,
        *(
            {str(token): {"logprob": score, "rank": None, "decoded_token": text}, **best}
            for token, text, score in texts
        ),
    ]


async def test_a_prompt_has_log_probabilities_beside_the_answer(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    """As vLLM tells them, for each choice."""
    cluster.nodes[1].scored_at_once = 2
    _, answer = await post(http, {**RANKED, "n": 2})
    for choice in answer["choices"]:
        assert choice["text"] == "he"
        assert choice["logprobs"] is None
        assert choice["prompt_logprobs"] == of_prompt(-0.25, -0.5, -0.75)


@pytest.mark.parametrize(("logprobs", "most"), [(0, 1), (1, 0), (2, 1)])
async def test_a_prompt_and_its_answer_may_differ_in_how_much_is_told(
    http: aiohttp.ClientSession, logprobs: int, most: int
) -> None:
    body = {**RANKED, "logprobs": logprobs, "prompt_logprobs": most, "echo": True}
    _, answer = await post(http, body)
    (choice,) = answer["choices"]
    assert choice["text"] == "sayhe"
    assert [len(one or ()) for one in choice["logprobs"]["top_logprobs"]] == [0] + [
        logprobs + 1
    ] * 5
    assert choice["prompt_logprobs"] == of_prompt(-0.25, -0.5, -0.75, most=most)
    _, plain = await post(http, {**body, "prompt_logprobs": None})
    assert plain["choices"][0]["logprobs"] == choice["logprobs"]


async def test_the_prompt_of_a_chat_has_log_probabilities_too(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    """Once, whatever the number of choices."""
    body = {**CHAT, "prompt_logprobs": 0, "n": 2}
    _, answer = await post(http, body, "chat/completions")
    prompts = [submit.tokens for submit in cluster.nodes[1].submits]
    assert sorted(submit.score_from for submit in cluster.nodes[1].submits) == [0, 1]
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [list(one) for one in others] == [[str(token)] for token in prompts[0][1:]]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_a_token_that_is_the_most_probable_is_told_once(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    _, answer = await post(http, {**RANKED, "prompt": "!!"})
    (_, *others) = answer["choices"][0]["prompt_logprobs"]
    assert [list(one) for one in others] == [["4"]] * 2
    assert [one["4"]["rank"] for one in others] == [1, 1]


@pytest.mark.parametrize(
    "changes", [{"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"stream": True}]
)
async def test_log_probabilities_of_prompts_that_cannot_be_told(
    http: aiohttp.ClientSession, changes: dict[str, Any]
) -> None:
    status, answer = await post(http, {**RANKED, **changes})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


async def test_no_more_is_told_of_prompts_than_an_answer_holds(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_SCORES", 16)
    assert [(await post(http, {**RANKED, "n": n}))[0] for n in (2, 3)] == [200, 400]
    _, answer = await post(http, {**RANKED, "prompt_logprobs": 4})
    assert answer["error"]["param"] == "prompt_logprobs"
    _, answer = await post(http, {**RANKED, "max_tokens": 9})
    assert answer["error"]["param"] == "prompt_logprobs"


async def test_of_tokens_that_read_the_same_the_most_probable_is_named(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].script = lambda submit: [4] * 10
    _, answer = await post(http, {**ASK, "logprobs": 1, "max_tokens": 10})
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"][-2:] == [-1, -1.125]
    assert found["top_logprobs"][1] == {"!": -0.125}
    assert found["top_logprobs"][-1] == {"!": -1}


async def test_a_long_answer_says_how_long_it_is(http: aiohttp.ClientSession) -> None:
    """It is sent in pieces; proxies and clients of HTTP/1.0 need its length."""
    ask = {**ASK, "logprobs": 2, "echo": True, "max_tokens": 3}
    async with http.post("/v1/completions", json=ask) as response:
        body = await response.read()
        assert response.headers["Content-Length"] == str(len(body))
        assert "Transfer-Encoding" not in response.headers
