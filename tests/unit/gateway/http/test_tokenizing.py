"""A model's tokens, over HTTP."""

from typing import Any

import aiohttp
import pytest

from tests.unit.gateway.http.builders import CHAT
from tests.unit.gateway.support import BOS, CONTEXT, NAME, VOCAB, ids_of


async def ask(http: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with http.post(path, json={"model": NAME, **body}) as response:
        return response.status, await response.json()


async def test_a_prompt_there_and_back(http: aiohttp.ClientSession) -> None:
    status, found = await ask(http, "/tokenize", prompt="abc", return_token_strs=True)
    assert (status, found["tokens"]) == (200, [0, *ids_of("abc")])
    assert (found["count"], found["max_model_len"]) == (4, CONTEXT)
    assert found["token_strs"] == [BOS, "a", "b", "c"]
    _, bare = await ask(http, "/tokenize", prompt="abc", add_special_tokens=False)
    assert (bare["tokens"], bare["token_strs"]) == (ids_of("abc"), None)
    assert await ask(http, "/detokenize", tokens=found["tokens"]) == (200, {"prompt": "abc"})


async def test_messages_are_those_that_a_chat_would_run(http: aiohttp.ClientSession) -> None:
    _, found = await ask(http, "/tokenize", messages=CHAT["messages"])
    async with http.post("/v1/chat/completions", json=CHAT) as response:
        usage = (await response.json())["usage"]
    assert found["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/tokenize", {"prompt": "a" * 10 * CONTEXT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_is_refused(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await ask(http, path, **body)
    assert (status, answer["error"]["param"]) == (400, param)
