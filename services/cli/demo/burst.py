"""The load: streaming requests over HTTP, each timed token by token."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from shared.errors import LambdaScaleError

PROMPTS = (
    "The scheduler decided that",
    "A binomial tree reaches every node because",
    "When the first block arrives, the engine",
    "In the garden behind the library there was",
    "Memory is copied once and then",
    "Two choices are better than one when",
    "The queue grew until the gateway",
    "Every morning the operator checks",
    "A token is a piece of",
    "If a node dies in the middle of a stream,",
    "The weather in the data centre is",
    "Pipelines are full as long as",
    "She opened the log and read",
    "Bandwidth, unlike latency, can be",
    "The last replica keeps a copy because",
    "It took five seconds to move",
)
REFERENCE_S = 35.0
SILENT_S = 30.0
"""Seconds. A stream that says nothing for this long is lost."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the burst. Equal requests must get equal tokens."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Outcome:
    ask: Ask
    sent_at: float
    """From time.monotonic(), like all times here."""
    token_at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    refused: bool = False
    """Whether it was not accepted (HTTP status other than 200). Such a request does not count as
    lost."""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.token_at[0] - self.sent_at if self.token_at else None

    @property
    def tpot_s(self) -> float | None:
        if len(self.token_at) < 2:
            return None
        return (self.token_at[-1] - self.token_at[0]) / (len(self.token_at) - 1)


def asks(count: int, max_tokens: int) -> list[Ask]:
    """The requests: half of them greedy, half sampled with a seed, with PROMPTS in turn."""
    found = []
    for number in range(count):
        prompt = PROMPTS[number % len(PROMPTS)]
        sampled = number % len(PROMPTS) % 2 == 1
        found.append(Ask(prompt, max_tokens, 0.8 if sampled else 0.0, seed=number % len(PROMPTS)))
    return found


async def send(
    session: aiohttp.ClientSession, url: str, model: str, ask: Ask, outcomes: list[Outcome]
) -> None:
    """Sends one request and reads its stream to the end. Its outcome is appended to `outcomes` as
    soon as it is sent."""
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    outcome = Outcome(ask, time.monotonic())
    outcomes.append(outcome)
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                outcome.refused = True
                outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    _take(outcome, line[6:].strip())
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.error = repr(error)


def _take(outcome: Outcome, data: bytes) -> None:
    if data == b"[DONE]":
        outcome.done = len(outcome.tokens) == outcome.ask.max_tokens
        return
    chunk = json.loads(data)
    if "error" in chunk:
        outcome.error = str(chunk["error"].get("message", chunk["error"]))
        return
    at = time.monotonic()
    for choice in chunk["choices"]:
        ids = choice.get("token_ids") or ()
        outcome.tokens.extend(ids)
        outcome.token_at.extend([at] * len(ids))


async def run_burst(
    url: str,
    model: str,
    requests: Sequence[Ask],
    gaps_s: Sequence[float],
    outcomes: list[Outcome],
) -> None:
    """Sends `requests[i]` after `gaps_s[i]` seconds. Returns when all have ended."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        for ask, gap in zip(requests, gaps_s, strict=True):
            await asyncio.sleep(gap)
            group.create_task(send(session, url, model, ask, outcomes))


async def reference(
    url: str, model: str, requests: Sequence[Ask], parallel: int
) -> dict[Ask, tuple[int, ...]]:
    """The answers of one complete node to each distinct request, a few at a time."""
    distinct = list(dict.fromkeys(requests))
    outcomes: list[Outcome] = []
    limit = asyncio.Semaphore(parallel)
    timeout = aiohttp.ClientTimeout(total=REFERENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:

        async def one(ask: Ask) -> None:
            async with limit:
                await send(session, url, model, ask, outcomes)

        for ask in distinct:
            group.create_task(one(ask))
    failed = [outcome.error for outcome in outcomes if not outcome.done]
    if failed:
        raise LambdaScaleError(f"the reference requests failed on the complete node: {failed[0]}")
    return {outcome.ask: tuple(outcome.tokens) for outcome in outcomes}
