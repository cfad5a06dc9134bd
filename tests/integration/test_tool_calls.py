"""Calls of tools with the openai client's own helpers, against a real cluster.

The model's weights are random: it calls what it must, and says nonsense otherwise.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel, Field

from services.local.demo_model import make_checkpoint
from tests.support.cluster import MODEL, Running, running
from tests.support.models import TINY

CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather?"}]
SPEC = replace(TINY, context_length=2048)
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Weather(BaseModel):
    """The weather of a city."""

    city: Annotated[str, Field(max_length=8)]
    days: Annotated[int, Field(ge=1, le=9)]
    unit: Literal["c", "f"]


class Stop(BaseModel):
    code: Annotated[int, Field(ge=0, le=99)]


TOOLS: list[ChatCompletionToolParam] = [
    openai.pydantic_function_tool(Weather),
    openai.pydantic_function_tool(Stop),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    checkpoint = tmp_path_factory.mktemp("tools") / "tiny"
    make_checkpoint(checkpoint, SPEC)
    async with running(checkpoint.with_name("data"), checkpoint, nodes=1) as up:
        yield up


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(up: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def check(call: Any) -> None:
    schema = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    jsonschema.validate(json.loads(call.function.arguments), schema[call.function.name])


async def test_required_calls(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="required", seed=seed,
            parallel_tool_calls=seed % 2 == 0, max_completion_tokens=800,
        )  # fmt: skip
        (choice,) = answer.choices
        calls = choice.message.tool_calls or []
        if choice.finish_reason == "tool_calls":
            for call in calls:
                check(call)
        assert len(calls) == 1 or (calls and seed % 2 == 0)
        assert choice.message.content is None
        return "".join(call.model_dump_json(exclude={"id"}) for call in calls)

    said = await asyncio.gather(*(ask(seed) for seed in (1, 1, 2, 3)))
    assert said[0] == said[1] != said[3]


async def test_a_named_call_parsed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL,
        messages=CHAT,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "Weather"}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_streamed_call(client: openai.AsyncOpenAI) -> None:
    kinds = []
    async with client.chat.completions.stream(
        model=MODEL,
        messages=CHAT,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "Stop"}},
        seed=3,
        logprobs=True,
    ) as stream:
        async for event in stream:
            kinds.append(event.type)
        answer = await stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Stop)
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert kinds.count("tool_calls.function.arguments.done") == 1


async def test_a_model_that_may_call_answers_as_without_tools(client: openai.AsyncOpenAI) -> None:
    """Until it opens a call, a lazy grammar changes no token."""
    described = await client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, temperature=0, max_completion_tokens=60
    )
    free = await client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, temperature=0, max_completion_tokens=60,
        extra_body={"min_tokens": 1},
    )  # fmt: skip
    assert described.choices[0].message.content == free.choices[0].message.content


async def test_a_whole_conversation(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=MODEL, messages=CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls or []
    history: list[Any] = [
        *CHAT,
        message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    later = await client.chat.completions.create(
        model=MODEL, messages=history, tools=TOOLS, tool_choice="none", max_completion_tokens=5
    )
    assert later.choices[0].message.content
    assert later.usage
    assert answer.usage
    history[-1]["tool_call_id"] = "other"
    with pytest.raises(openai.BadRequestError, match="has a call 'other'"):
        await client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
