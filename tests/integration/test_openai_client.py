"""The openai client against a real cluster: what its users rely on, with real tokens."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import jsonschema
import openai
import pytest
import pytest_asyncio
import torch
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_chunk import Choice
from openai.types.completion_choice import Logprobs
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.local.demo_model import make_checkpoint
from shared import subjects
from shared.bus.base import On
from shared.messages import Message
from shared.messages.pool import NodeStatus
from tests.support.cluster import MODEL, Running, prompts, running
from tests.support.cluster import Oracle as ClusterOracle
from tests.support.models import TINY
from tests.support.sse import Event, choices_of, read_stream

KEY = "sk-of-the-test"
SETTINGS = {
    "LAMBDASCALE_GATEWAY_API_KEYS": hashlib.sha256(KEY.encode()).hexdigest(),
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.005",
}
PROMPT = "The scheduler decided that"
CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]
NO_END = {"ignore_eos": True}
LONG = 480

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Oracle:
    """transformers on the same checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text).ids
        return found

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """After each of them, [len(ids), vocab]."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)

    def check(self, ids: list[int], found: Logprobs) -> None:
        assert found.token_logprobs
        assert found.top_logprobs
        first, *given = found.token_logprobs
        none, *top = found.top_logprobs
        assert not first
        assert not none
        for row, token, value, named in zip(self.logprobs(ids), ids[1:], given, top, strict=False):
            assert value == pytest.approx(float(row[token]), abs=1e-4)
            best = {float(row[token]), *row.topk(2).values.tolist()}
            assert sorted(named.values()) == pytest.approx(sorted(best), abs=1e-4)
        assert len(given) == len(top) == len(ids) - 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("openai") / "tiny"
    make_checkpoint(directory, TINY)
    return directory


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(checkpoint: Path) -> AsyncIterator[Running]:
    data = checkpoint.with_name("data")
    async with running(data, checkpoint, nodes=1, settings=SETTINGS, gateways=2) as up:
        yield up


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(up: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{up.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


async def greedy(client: openai.AsyncOpenAI, tokens: int) -> str:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=tokens, temperature=0, extra_body=NO_END
    )
    return answer.choices[0].text


def _logprobs(choices: list[Choice]) -> list[ChatCompletionTokenLogprob]:
    return [one for c in choices if c.logprobs for one in c.logprobs.content or []]


async def test_streams_survive_their_gateway(up: Running, checkpoint: Path) -> None:
    """Each client goes on at another gateway behind the last event that it has, and gets what an
    uninterrupted answer has: greedily, and sampled."""
    prompt, count = prompts(1, TINY.vocab_size)[0], 200
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": count,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    kinds: list[dict[str, float]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]
    login = {"Authorization": f"Bearer {KEY}"}
    names = [{**login, "Idempotency-Key": f"survives-{i}"} for i in range(len(kinds))]
    had: list[list[Event]] = [[] for _ in kinds]

    async with asyncio.TaskGroup() as group:
        for kind, name, events in zip(kinds, names, had, strict=True):
            reading = read_stream(
                up.urls[1], {**body, **kind}, name, route="completions", into=events
            )
            group.create_task(reading)
        await up.until(lambda: min(map(len, had)) > 40, "streams that flow")
        up.kill("gateway-2")
    assert max(map(len, had)) < count
    (right,) = ClusterOracle(checkpoint).tokens([prompt], count)
    sampled = await read_stream(up.url, {**body, **kinds[1]}, login, route="completions")
    for expected, kind, name, events in zip(
        (right, tokens_of(sampled)), kinds, names, had, strict=True
    ):
        rest = await read_stream(
            up.url, {**body, **kind}, name, route="completions", last=events[-1].id
        )
        assert tokens_of(events + rest) == expected
        assert tokens_of(rest)
    up.cluster.start_service("gateway-2")


def tokens_of(events: list[Event]) -> list[int]:
    return [token for choice in choices_of(events) for token in choice.get("token_ids") or ()]


async def test_the_client_s_own_retries_get_the_one_answer(
    up: Running, client: openai.AsyncOpenAI
) -> None:
    """The answer takes longer than the client waits. It asks again and again, with the same key."""
    before = await generated(up)
    hasty = client.with_options(timeout=0.3, max_retries=20)
    answer = await hasty.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=LONG,
        temperature=0,
        extra_body=NO_END,
        extra_headers={"Idempotency-Key": "a-client-in-haste"},
    )
    assert await generated(up) - before == LONG, "it was generated once"
    assert answer.choices[0].text == await greedy(client, LONG)


async def generated(up: Running) -> int:
    """Tokens that the gateway has taken from instances."""
    async with aiohttp.ClientSession(up.url) as http, http.get("/metrics") as response:
        text = await response.text()
    name = f'lambdascale_gateway_generated_tokens_total{{model="{MODEL}"}}'
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if name in line)


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_completion_and_its_usage(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=NO_END
    )
    (choice,) = answer.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens > 1


async def test_usage_names_the_cached_part_of_a_prompt(client: openai.AsyncOpenAI) -> None:
    prompt = "Another prompt, long enough to fill some pages of the cache. " * 3
    usages = []
    for _ in range(2):
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        usages.append(answer.usage)
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    usages += [chunk.usage async for chunk in stream if chunk.usage]
    found = [u.prompt_tokens_details.cached_tokens for u in usages if u and u.prompt_tokens_details]
    assert usages[0]
    assert found == [0, *[usages[0].prompt_tokens // 16 * 16] * 2]


async def test_a_stream_says_the_same_and_ends_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=NO_END,
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == await greedy(client, 12)
    assert len(chunks) > 6  # as it is generated, not in one piece
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 12


async def test_chat_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=10, temperature=0, extra_body=NO_END
    )
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_completion_tokens=10,
        temperature=0,
        stream=True,
        extra_body=NO_END,
    )
    chunks = [chunk async for chunk in stream]
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == message.content
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_seed_makes_sampling_repeatable(client: openai.AsyncOpenAI) -> None:
    async def sample(seed: int) -> str:
        answer = await client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=24,
            temperature=1.0,
            top_p=0.95,
            seed=seed,
            extra_body=NO_END,
        )
        return answer.choices[0].text

    texts = await asyncio.gather(sample(1), sample(1), sample(2))
    assert texts[0] == texts[1] != texts[2]


async def test_n_answers_to_each_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=[PROMPT, "Another"], n=2, max_tokens=16, seed=5, extra_body=NO_END
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage
    assert answer.usage.completion_tokens == 4 * 16


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    text = await greedy(client, 40)
    stop = text[20:24]
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop], extra_body=NO_END
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


async def test_errors_are_those_of_the_api(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        await client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=-1)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.completions.create(model=MODEL, prompt=[5] * 600)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt=PROMPT, temperature=-3)


async def test_a_key_is_asked_for(up: Running) -> None:
    for key in ("sk-other", KEY[:-1], KEY.upper()):
        url = f"{up.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError):
                await other.completions.create(model=MODEL, prompt=PROMPT)
            with pytest.raises(openai.AuthenticationError):
                await other.models.list()


async def test_a_client_that_leaves_cancels_its_request(
    up: Running, client: openai.AsyncOpenAI
) -> None:
    sampled: asyncio.Queue[int] = asyncio.Queue()

    async def hear(message: Message) -> None:
        if isinstance(message, NodeStatus) and message.running == 0:
            sampled.put_nowait(message.tokens_out)

    subscription = await up.bus.subscribe(subjects.POOL_STATUS, On(Message, hear))
    async with asyncio.timeout(30):
        first = await sampled.get()
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=LONG, stream=True, extra_body=NO_END
    )
    await anext(aiter(stream))
    while not sampled.empty():
        sampled.get_nowait()
    await stream.close()
    async with asyncio.timeout(30):
        before = await sampled.get()
    assert await greedy(client, 4)
    async with asyncio.timeout(30):
        while (after := await sampled.get()) < before + 4:
            continue
    await subscription.close()
    assert after == before + 4
    assert before < first + LONG  # it did not go on to its end


async def test_log_probabilities_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3, n=2, extra_body=NO_END
    )
    for choice in answer.choices:
        found = choice.logprobs
        assert found
        assert found.tokens
        assert found.token_logprobs
        assert found.top_logprobs
        assert "".join(found.tokens) == choice.text
        for token, value, top in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert value == top[token] == max(top.values()) <= 0
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_completion_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        extra_body=NO_END,
    )
    said = [one async for chunk in stream for one in _logprobs(chunk.choices)]
    assert len(said) == 8
    assert all(len(one.top_logprobs) == 2 for one in said)
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in said)


async def test_penalties_and_bias_change_what_is_said(client: openai.AsyncOpenAI) -> None:
    async def say(**change: object) -> list[int]:
        body = {"return_token_ids": True, "ignore_eos": True, **change}
        answer = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=body
        )
        return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

    plain = await say()
    assert len(set(await say(frequency_penalty=2.0, presence_penalty=2.0))) > len(set(plain))
    assert await say(repetition_penalty=1.5) != plain
    assert plain[0] not in await say(logit_bias={str(plain[0]): -100})
    assert await say(logit_bias={"77": 100}) == [77] * 40


async def test_json_keeps_to_its_schema(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "size": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["town", "village"]},
        },
        "required": ["city", "size", "kind"],
        "additionalProperties": False,
    }

    async def ask(seed: int) -> str:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            seed=seed,
            temperature=1.0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "strict": True, "schema": schema},
            },
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""

    texts = await asyncio.gather(*(ask(seed) for seed in (1, 1, 2, 3)))
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert texts[0] == texts[1] != texts[2]


async def test_text_keeps_to_a_regex_and_a_choice(client: openai.AsyncOpenAI) -> None:
    async def ask(**structure: object) -> str:
        answer = await client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=40,
            seed=1,
            extra_body={"structured_outputs": structure},
        )
        return answer.choices[0].text

    assert re.fullmatch(r"[a-z]{3,6} \d\d", await ask(regex=r"[a-z]{3,6} \d\d"))
    assert await ask(choice=["left", "right"]) in ("left", "right")
    with pytest.raises(openai.BadRequestError, match="structured_outputs"):
        await ask(regex="(")


async def test_min_tokens_keeps_the_end_away(client: openai.AsyncOpenAI) -> None:
    async def ask(stops: list[int], least: int) -> tuple[list[int], str]:
        body = {"min_tokens": least, "stop_token_ids": stops, "return_token_ids": True, **NO_END}
        answer = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0, extra_body=body
        )
        (choice,) = answer.choices
        return choice.token_ids, choice.finish_reason  # type: ignore[attr-defined]

    ids, _ = await ask([], 0)
    assert await ask(ids[:1], 0) == (ids[:1], "stop")
    later, _ = await ask(ids[:1], 6)
    assert len(later) > 6
    assert ids[0] not in later[:6]


async def test_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, echo=True, extra_body=NO_END
    )
    assert answer.choices[0].text == PROMPT + await greedy(client, 12)


async def test_an_echoed_prompt_is_scored_as_transformers_scores_it(
    client: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    """Whole, streamed, without an answer; as text and as token ids."""
    for prompt in (PROMPT, " ".join([PROMPT] * 12), oracle.ids(PROMPT)):
        for limit in (0, 3):
            answer = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=limit, temperature=0, echo=True, logprobs=2,
                extra_body={**NO_END, "return_token_ids": True},
            )  # fmt: skip
            (choice,) = answer.choices
            ids = prompt if isinstance(prompt, list) else oracle.ids(prompt)
            assert answer.usage
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.completion_tokens == limit
            found = choice.logprobs
            assert found
            generated = choice.token_ids  # type: ignore[attr-defined]
            oracle.check([*ids, *generated], found)
            assert found.text_offset
            assert found.tokens
            places = zip(found.tokens[1 : len(ids)], found.text_offset[1:], strict=False)
            assert all(choice.text.startswith(token, offset) for token, offset in places)
            said = "".join(found.tokens[1 : len(ids)])
            assert choice.text.startswith(said)
            assert (choice.text == said) == (limit == 0)
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=limit, temperature=0, echo=True, logprobs=2,
                stream=True, extra_body=NO_END,
            )  # fmt: skip
            text, told = "", Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
            async for chunk in stream:
                text += chunk.choices[0].text
                for name, values in (chunk.choices[0].logprobs or Logprobs()).model_dump().items():
                    getattr(told, name).extend(values or [])
            assert text == choice.text
            assert told == found


async def test_prompts_have_the_log_probabilities_of_transformers(
    client: openai.AsyncOpenAI, oracle: Oracle, up: Running
) -> None:
    said: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
    extra = {"prompt_logprobs": 3}
    text = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, extra_body=extra
    )
    chat = await client.chat.completions.create(
        model=MODEL, messages=said, max_tokens=1, extra_body=extra
    )
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
        session.post(f"{up.url}/tokenize", json={"model": MODEL, "messages": said}) as response,
    ):
        of_chat = (await response.json())["tokens"]
    assert chat.choices[0].logprobs is None
    for ids, told in (
        (oracle.ids(PROMPT), text.choices[0].prompt_logprobs),  # type: ignore[attr-defined]
        (of_chat, chat.prompt_logprobs),  # type: ignore[attr-defined]
    ):
        first, *others = told
        assert first is None
        for row, token, found in zip(oracle.logprobs(ids)[:-1], ids[1:], others, strict=True):
            best = row.topk(3).indices.tolist()
            assert set(found) == {str(token), *map(str, best)}
            assert [found[str(one)]["rank"] for one in best] == [1, 2, 3]
            for one, value in found.items():
                assert value["logprob"] == pytest.approx(float(row[int(one)]), abs=1e-4)


@pytest.mark.parametrize("tokenized", [True, False])
async def test_what_lm_evaluation_harness_asks(
    up: Running, oracle: Oracle, tokenized: bool
) -> None:
    """Its `local-completions`: how likely continuations are, and whether greedy decoding would
    say them; computed from the answer as its `parse_logprobs` does."""
    pairs = [("The scheduler", " decided that"), ("Nodes load", " while"), ("a", " b c d")]
    contexts = [len(oracle.ids(context)) for context, _ in pairs]
    whole = [oracle.ids(context + more) for context, more in pairs]
    body = {
        "model": MODEL,
        "prompt": whole if tokenized else [context + more for context, more in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{up.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        answer = await response.json()
    for choice, context, ids in zip(answer["choices"], contexts, whole, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][context:-1]
        top = choice["logprobs"]["top_logprobs"][context:-1]
        expected = oracle.logprobs(ids)[context - 1 : -1]
        known = [float(row[token]) for row, token in zip(expected, ids[context:], strict=True)]
        assert sum(logprobs) == pytest.approx(sum(known), abs=1e-3)
        greedy = all(one == max(named.values()) for one, named in zip(logprobs, top, strict=True))
        assert greedy == (expected.argmax(-1).tolist() == ids[context:])
