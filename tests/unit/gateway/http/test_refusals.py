"""Requests that are refused, and what the error says."""

import hashlib
from typing import Any

import aiohttp
import pytest

from services.gateway.text import TextCodec
from shared.config import GatewayConfig
from shared.confined.pool import ConfinedPool
from tests.unit.gateway.http.builders import ASK, CHAT, post
from tests.unit.gateway.support import CONTEXT, VOCAB, replica, running

OVERFLOWS = "\n".join(["start: x0", *(f"x{i}: x{i + 1}" for i in range(8000)), 'x8000: "a"'])


NO_SCHEMA = {"schema": {"type": "objec"}}


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
        ({"prompt": ["a"] * 1000}, 400, "prompt"),
        ({"prompt": "a" * 40_000}, 400, "prompt"),
        ({"prompt": [1] * 1000}, 400, "prompt"),
        ({"stop": ["x" * 1000] * 9}, 400, "stop"),
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


async def test_what_is_too_much_is_refused_before_it_is_read(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(TextCodec, "_encode", never)
    monkeypatch.setattr(ConfinedPool, "run", never)
    for change in ({"prompt": ["a"] * 1000}, {"prompt": ["a" * 40_000]}):
        assert (await post(http, {**ASK, **change}))[0] == 400
    for content, count in (("a" * 40_000, 1), ("a", 5000)):
        body = {**CHAT, "messages": [{"role": "user", "content": content}] * count}
        found, answer = await post(http, body, "chat/completions")
        assert (found, answer["error"]["param"]) == (400, "messages")


async def test_fields_that_mean_nothing_here_are_taken(http: aiohttp.ClientSession) -> None:
    status, _ = await post(http, {**ASK, "user": "me", "metadata": {"a": 1}})
    assert status == 200
    said: dict[str, Any] = {
        "role": "user",
        "content": "a",
        "annotations": [],
        "refusal": None,
        "tool_calls": None,
    }
    assert (await post(http, {**CHAT, "messages": [said]}, "chat/completions"))[0] == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"new": True}, "new"),
        ({"temprature": 1}, "temprature"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages[0].weight"),
        ({"stream_options": {"include": True}}, "stream_options.include"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
    ],
)
async def test_unknown_fields_are_refused_by_name(
    http: aiohttp.ClientSession, change: dict[str, Any], param: str
) -> None:
    status, answer = await post(http, {**CHAT, **change}, "chat/completions")
    assert (status, answer["error"]["param"]) == (400, param)
    assert "no such field" in answer["error"]["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": "\xff"}', b"[" * 60_000])
async def test_bodies_that_are_no_requests(http: aiohttp.ClientSession, raw: bytes) -> None:
    async with http.post("/v1/completions", data=raw) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_calls(http: aiohttp.ClientSession) -> None:
    for method, target, status in (("GET", "/v1/files", 404), ("GET", "/v1/completions", 405)):
        async with http.request(method, target) as response:
            assert response.status == status
            assert "no such call" in (await response.json())["error"]["message"]
            assert response.headers.get("Allow", "") == ("POST" if status == 405 else "")


@pytest.mark.parametrize("expected", ["100-continue", "something else"])
async def test_what_a_client_expects_is_no_obstacle(
    http: aiohttp.ClientSession, expected: str
) -> None:
    async with http.post(
        "/v1/completions", json={**ASK, "no": 1}, headers={"Expect": expected}
    ) as response:
        assert response.status == 400
        assert "no such field" in (await response.json())["error"]["message"]


async def test_a_body_that_is_not_what_its_encoding_says(http: aiohttp.ClientSession) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with http.post("/v1/completions", data=b"no gzip", headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


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
