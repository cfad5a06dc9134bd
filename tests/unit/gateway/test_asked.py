"""Requests with values that are none are refused, and the field is named."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.gateway.api_error import ApiError
from services.gateway.asked import Asked, chat, completion
from services.gateway.bodies import ChatBody, CompletionBody
from services.gateway.history import Dialogue
from services.gateway.unsupported import INSTEAD, SILENT, refused_by

ASK = {"model": "m", "prompt": "say hello"}
USER = {"role": "user", "content": "hi"}
CHAT = {"model": "m", "messages": [USER]}
FORMAT = {"response_format": {"type": "json_object"}}


def refused(body: dict[str, Any], read: Callable[[bytes], Asked]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(msgspec.json.encode(body))
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
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"type": "objec"}, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "echo": True}, "truncate_prompt_tokens"),
    ],
)
def test_bad_values(change: dict[str, Any], param: str) -> None:
    error = refused({**ASK, **change}, completion)
    assert error.status == 400
    said = msgspec.json.decode(error.body)["error"]
    assert said["param"] == param
    assert said["type"] == "invalid_request_error"
    assert len(said["message"]) < 1000


ALWAYS_SENT: dict[str, Any] = {
    "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": [],
    "tool_choice": "none", "parallel_tool_calls": True, "function_call": None, "best_of": 1,
    "skip_special_tokens": True, "include_stop_str_in_output": False, "length_penalty": 1.0,
    "use_beam_search": False, "priority": 0, "safety_identifier": "x", "prompt_cache_key": "y",
}  # fmt: skip


def test_what_changes_nothing_is_taken() -> None:
    completion(msgspec.json.encode({**ASK, **ALWAYS_SENT}))
    chat(msgspec.json.encode({**CHAT, **ALWAYS_SENT}))


@pytest.mark.parametrize(
    "change",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"store": True},
        {"best_of": 2},
        {"use_beam_search": True},
        {"length_penalty": 0.5},
        {"chat_template": "x"},
        {"priority": 1},
        {"cache_salt": "x"},
        {"regex": "a"},
        {"ebnf": "root ::= x"},
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused_by_name(change: dict[str, Any]) -> None:
    (name,) = change
    errors = refused({**ASK, **change}, completion), refused({**CHAT, **change}, chat)
    for error in errors:
        assert error.status == 400
        assert str(error).startswith(f"{name}: is not supported; leave it out")
        assert msgspec.json.decode(error.body)["error"]["param"] == name


def test_the_table_of_what_is_refused_names_fields() -> None:
    known = {*refused_by(CompletionBody), *refused_by(ChatBody)}
    assert set(SILENT) | set(INSTEAD) <= known


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"reasoning_effort": "low"},
        {"continue_final_message": True},
    ],
)
def test_what_only_chats_have(change: dict[str, Any]) -> None:
    (name,) = change
    said = f"{name}: is not supported; leave it out (use /v1/chat/completions)"
    assert str(refused({**ASK, **change}, completion)) == said


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "field", "said"),
    [
        ({"role": "tool", "content": "5", "tool_call_id": "1"}, "tool_call_id", "has a call '1'"),
        ({"role": "tool", "content": "5"}, "tool_call_id", "is needed"),
        ({"role": "function", "content": "5", "name": "f"}, "role", "use 'tool'"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "tool_calls", "only messages"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "tool_call_id", "only messages"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "use tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0]", "function"),
        ({"role": "boss", "content": "a"}, "role", "system, developer, user, assistant, tool"),
        ({"role": "assistant", "refusal": "no"}, "refusal", "not supported"),
    ],
    ids=str,
)
def test_messages_that_a_template_would_not_be_given(
    message: dict[str, Any], field: str, said: str
) -> None:
    history = [USER, message]
    error = refused({**CHAT, "messages": history}, chat)
    assert error.status == 400
    assert msgspec.json.decode(error.body)["error"]["param"] == f"messages[1].{field}"
    assert said in str(error)


@pytest.mark.parametrize("arguments", ["[1]", "{", "5", '{"a": 1' + "0" * 30 + "}", "[" * 5000])
def test_arguments_are_a_json_object(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    history = [USER, {"role": "assistant", "tool_calls": [CALL, call]}]
    error = refused({**CHAT, "messages": history}, chat)
    said = msgspec.json.decode(error.body)["error"]
    assert said["param"] == "messages[1].tool_calls[1].function.arguments"


def test_calls_reach_the_template_as_it_reads_them() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": [1]}'}, "index": 0}
    empty = {"id": "d", "type": "function", "function": {"name": "g", "arguments": ""}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call, empty], "reasoning": "r"}
    answer = {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "d"}
    (prompt,) = chat(msgspec.json.encode({**CHAT, "messages": [USER, calling, answer]})).prompts
    assert isinstance(prompt, Dialogue)
    _, called, answered = prompt.messages
    functions = [one["function"] for one in called["tool_calls"]]
    assert functions == [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]
    assert called["reasoning_content"] == "r"
    assert answered == {"role": "tool", "content": "5", "tool_call_id": "d", "name": "g"}


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer: dict[str, Any] = {
        "role": "assistant", "content": "hi", "refusal": None, "audio": None, "annotations": [],
        "tool_calls": None, "function_call": None, "parsed": {"a": 1},
        "provider_specific_fields": {"refusal": None},
    }  # fmt: skip
    history = [USER, answer]
    chat(msgspec.json.encode({**CHAT, "messages": history}))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [USER, {"role": "assistant"}]},
         "continue_final_message"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_bad_values_of_chats(change: dict[str, Any], param: str) -> None:
    error = refused({**CHAT, **change}, chat)
    assert msgspec.json.decode(error.body)["error"]["param"] == param


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_older_names_of_structures(name: str) -> None:
    value: object = {"json": {"type": "object"}, "choice": ["a", "b"]}.get(name, 'start: "a"')
    older = completion(msgspec.json.encode({**ASK, f"guided_{name}": value}))
    newer = completion(msgspec.json.encode({**ASK, "structured_outputs": {name: value}}))
    assert older.rules.grammar == newer.rules.grammar != ""


@pytest.mark.parametrize(
    "change", [{"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}, {"top_logprobs": -1}]
)
def test_bad_top_logprobs(change: dict[str, Any]) -> None:
    error = refused({**CHAT, **change}, chat)
    assert msgspec.json.decode(error.body)["error"]["param"] == "top_logprobs"


def test_the_allowed_range_is_said() -> None:
    assert "-2 to 2" in str(refused({**ASK, "presence_penalty": 3}, completion))
    old = refused({**ASK, "ebnf": "a"}, completion)
    assert 'use structured_outputs: {"grammar": ...}' in str(old)
