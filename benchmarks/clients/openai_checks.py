"""What users of OpenAI's client rely on. Runs in an environment with any version of the client, and
nothing else.

Run: python openai_checks.py BASE_URL MODEL
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import openai

CHAT: list[Any] = [{"role": "user", "content": "Say hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}},
    "required": ["name"],
    "additionalProperties": False,
}
FUNCTION = {"name": "pick", "description": "Picks a letter", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


def checks(client: Any, model: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each with its name; it fails if it raises or returns something false."""
    chat, text = client.chat.completions.create, client.completions.create
    respond = client.responses.create

    def streamed(**more: Any) -> tuple[str, list[Any]]:
        chunks = list(chat(model=model, messages=CHAT, max_tokens=20, stream=True, **more))
        found = [choice for chunk in chunks for choice in chunk.choices]
        return "".join(choice.delta.content or "" for choice in found), chunks

    def a_call() -> object:
        (call,) = (
            chat(model=model, messages=CHAT, tools=TOOLS, tool_choice="required", temperature=0)
            .choices[0]
            .message.tool_calls
        )
        said = {"role": "assistant", "tool_calls": [call.model_dump()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
        again = chat(model=model, messages=[*CHAT, said, result], tools=TOOLS, max_tokens=5)
        return json.loads(call.function.arguments)["name"] in "ab" and again.choices

    def helper() -> object:
        with client.chat.completions.stream(
            model=model, messages=CHAT, max_completion_tokens=20, temperature=0
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        whole = chat(model=model, messages=CHAT, max_completion_tokens=20, temperature=0)
        return final.choices[0].message.content == whole.choices[0].message.content

    def responses_helper() -> object:
        with client.responses.stream(model=model, input="hi", max_output_tokens=400) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
            return "".join(deltas) == stream.get_final_response().output_text

    def format_of(name: str) -> Any:
        named = {"name": "picked", "schema": SCHEMA, "strict": True}
        form = {"type": "json_schema"}
        return {**form, "json_schema": named} if name == "chat" else {"format": {**form, **named}}

    def refused(kind: type[Exception], call: Callable[[], object]) -> bool:
        try:
            call()
        except kind:
            return True
        return False

    ask = {"model": model, "prompt": "Say hello", "max_tokens": 8, "temperature": 0}
    talk = {"model": model, "messages": CHAT, "max_tokens": 8}
    yield "models", lambda: [m.id for m in client.models.list()] == [model]
    yield "a model", lambda: client.models.retrieve(model).id == model
    yield "completion", lambda: text(**ask).choices[0].finish_reason in ("stop", "length")
    yield "prompts and n", lambda: len(text(**{**ask, "prompt": ["a", "b"]}, n=2).choices) == 4
    yield "token ids", lambda: text(**{**ask, "prompt": [5, 6, 7]}).usage.prompt_tokens == 3
    yield "logprobs", lambda: len(text(**ask, logprobs=2).choices[0].logprobs.top_logprobs[0]) == 2
    yield "echo", lambda: text(**ask, echo=True).choices[0].text.startswith("Say hello")
    yield "stream", lambda: [*text(**ask, stream=True)]
    yield "chat", lambda: chat(**talk).choices[0].message.role == "assistant"
    yield "chat stream", lambda: streamed()[0]
    yield (
        "usage at the end",
        lambda: streamed(stream_options={"include_usage": True})[1][-1].usage.total_tokens,
    )
    yield (
        "chat logprobs",
        lambda: chat(**talk, logprobs=True, top_logprobs=2).choices[0].logprobs.content,
    )
    yield (
        "seed",
        lambda: (
            chat(**talk, seed=1).choices[0].message.content
            == chat(**talk, seed=1).choices[0].message.content
        ),
    )
    yield (
        "json_schema",
        lambda: (
            json.loads(
                chat(model=model, messages=CHAT, response_format=format_of("chat"))
                .choices[0]
                .message.content
            )["name"]
            in "ab"
        ),
    )
    yield "chat helper", helper
    yield "a call of a tool and its result", a_call
    yield (
        "tool_choice none",
        lambda: not chat(**talk, tools=TOOLS, tool_choice="none").choices[0].message.tool_calls,
    )
    yield "response", lambda: respond(model=model, input="hi", max_output_tokens=8).output_text
    yield "responses helper", responses_helper
    yield (
        "response with a schema",
        lambda: (
            json.loads(respond(model=model, input="hi", text=format_of("response")).output_text)[
                "name"
            ]
            in "ab"
        ),
    )
    yield (
        "response with a tool",
        lambda: (
            respond(
                model=model,
                input="hi",
                tools=[{"type": "function", "strict": True, **FUNCTION}],
                tool_choice="required",
            )
            .output[-1]
            .type
            == "function_call"
        ),
    )
    yield (
        "unknown model",
        lambda: refused(openai.NotFoundError, lambda: chat(model="no", messages=CHAT)),
    )
    yield (
        "too long",
        lambda: refused(openai.BadRequestError, lambda: text(**{**ask, "max_tokens": 10**6})),
    )


def main() -> int:
    url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    results = []
    for name, check in checks(client, model):
        try:
            why = "" if check() else "is not as it should be"
        except Exception as error:
            why = repr(error)
        results.append(not why)
        print(f"{'pass' if not why else 'FAIL'}  {name}{f': {why[:200]}' if why else ''}")
    print(f"openai {openai.__version__}: {sum(results)} of {len(results)} pass")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
