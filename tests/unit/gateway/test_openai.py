"""Requests with values that are none are refused, and the field is named."""

from typing import Any

import msgspec
import pytest

from services.gateway.openai import ApiError, Body, ChatRequest, CompletionRequest, parse, rules_of

ASK = {"model": "m", "prompt": "say hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
FORMAT = {"response_format": {"type": "json_object"}}


def refused(body: dict[str, Any], kind: type[Body]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        rules_of(parse(msgspec.json.encode(body), kind), vocab_size=100)
    return caught.value


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({**FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({**FORMAT, "min_tokens": 3}, "min_tokens"),
        ({**FORMAT, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ],
)
def test_bad_values(change: dict[str, Any], param: str) -> None:
    error = refused({**ASK, **change}, CompletionRequest)
    assert error.status == 400
    said = msgspec.json.decode(error.body)["error"]
    assert said["param"] == param
    assert said["type"] == "invalid_request_error"
    assert len(said["message"]) < 1000


@pytest.mark.parametrize(
    "change", [{"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": -1}]
)
def test_bad_top_logprobs(change: dict[str, Any]) -> None:
    error = refused({**CHAT, **change}, ChatRequest)
    assert msgspec.json.decode(error.body)["error"]["param"] == "top_logprobs"


def test_the_allowed_range_is_said() -> None:
    assert "-2 to 2" in str(refused({**ASK, "presence_penalty": 3}, CompletionRequest))
    assert "0 to 99" in str(refused({**ASK, "logit_bias": {"100": 1}}, CompletionRequest))
    old = refused({**ASK, "guided_regex": "a"}, CompletionRequest)
    assert 'use structured_outputs: {"regex": ...}' in str(old)
