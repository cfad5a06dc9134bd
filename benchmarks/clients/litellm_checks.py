"""litellm against a gateway whose model was taught the lessons of langchain/lessons.json.

python litellm_checks.py URL MODEL
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no prices from the network

import litellm
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
ASK: dict[str, Any] = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "any",
    "temperature": 0,
    "max_retries": 0,
}
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = [{"role": "user", "content": "What is the weather in San Francisco, CA?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather at a location.",
        "parameters": {
            "properties": {"location": {"type": "string"}},
            "required": ["location"],
            "type": "object",
        },
    },
}
HERE = {"location": "San Francisco, CA"}


class Joke(BaseModel):
    setup: str
    punchline: str


def plain() -> None:
    answer = litellm.completion(**ASK, messages=HELLO, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello. What can I do?"] * 2
    assert answer.usage.total_tokens > answer.usage.prompt_tokens > 0


def streamed() -> None:
    chunks = list(
        litellm.completion(
            **ASK, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello. What can I do?"
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.usage.completion_tokens > 0


def asynchronous() -> None:
    answer = asyncio.run(litellm.acompletion(**ASK, messages=HELLO))
    assert answer.choices[0].message.content


def log_probabilities() -> None:
    answer = litellm.completion(**ASK, messages=HELLO, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs["content"]
    assert len(found) == answer.usage.completion_tokens
    assert all(len(one["top_logprobs"]) == 2 for one in found)


def schema() -> None:
    joke = [{"role": "user", "content": "Tell me a joke about cats."}]
    answer = litellm.completion(**ASK, messages=joke, response_format=Joke)
    assert Joke.model_validate_json(answer.choices[0].message.content)


def tools() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("auto", "required", named):
        answer = litellm.completion(**ASK, messages=WEATHER, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", HERE)


def streamed_tools() -> None:
    chunks = list(litellm.completion(**ASK, messages=WEATHER, tools=[TOOL], stream=True))
    (choice,) = litellm.stream_chunk_builder(chunks).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", HERE)
    assert choice.finish_reason == "tool_calls"


def a_conversation_with_tools() -> None:
    first = litellm.completion(**ASK, messages=WEATHER, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It's sunny."}
    history = [*WEATHER, first.model_dump(), result]
    answer = litellm.completion(**ASK, messages=history, tools=[TOOL])
    assert answer.choices[0].message.content == "It is sunny in San Francisco."


def fallbacks_of_prompts_that_are_too_long() -> None:
    try:
        litellm.completion(**ASK, messages=[{"role": "user", "content": "hello " * 20_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the prompt was not refused as too long")


def errors() -> None:
    for change, kind in (
        ({"temperature": -1}, litellm.BadRequestError),
        ({"model": "openai/other"}, litellm.NotFoundError),
    ):
        try:
            litellm.completion(**{**ASK, **change}, messages=HELLO)
        except kind:
            continue
        raise AssertionError(f"{change} was not refused with {kind.__name__}")


CHECKS: tuple[Callable[[], None], ...] = (
    plain,
    streamed,
    asynchronous,
    log_probabilities,
    schema,
    tools,
    streamed_tools,
    a_conversation_with_tools,
    fallbacks_of_prompts_that_are_too_long,
    errors,
)


def main() -> int:
    failed = 0
    for check in CHECKS:
        try:
            check()
        except Exception as error:  # the boundary of a check
            failed += 1
            print(f"FAIL {check.__name__}: {error!r}"[:1000])
        else:
            print(f"ok   {check.__name__}")
    print(f"{len(CHECKS) - failed} of {len(CHECKS)} pass")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
