"""A client as a careful program is: it comes again when its gateway dies or has no room."""

import asyncio
import enum
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

PATIENCE = 12
"""How many silences long a client waits for a whole answer before it gives up."""
WAIT_S = 0.25
"""Before a client comes again, unless the answer says how long to wait."""


class End(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    """With an error that says so, and no token before it."""
    BROKEN = "failed cleanly"
    """With an error that says so, after some tokens."""
    LOST = "lost"
    """No end at all."""


@dataclass(frozen=True, slots=True)
class Request:
    key: str
    """The idempotency key."""
    prompt: tuple[int, ...]
    right: tuple[int, ...]
    """Its answer, by transformers."""


@dataclass(slots=True)
class Answered:
    request: Request
    asked_at: float
    end: End = End.LOST
    said: str = ""
    """The error that it ended with."""
    tries: int = 0
    silent: list[tuple[str, float]] = field(default_factory=list)
    """The gateways' URLs from which nothing came for long, and when they were given up."""
    came_at: list[float] = field(default_factory=list)
    """When each token came for the first time (time.monotonic())."""

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens, at most."""
        return max((after - before for before, after in pairwise(self.came_at)), default=0.0)

    def gap_over(self, at: float) -> float:
        """Seconds between the tokens before and after a time; 0 if it was not amid them."""
        pairs = pairwise(self.came_at)
        return next((after - before for before, after in pairs if before <= at < after), 0.0)


class Again(Exception):
    """The client has to come again."""


class Client:
    def __init__(self, model: str, urls: Sequence[str], silence_s: float) -> None:
        """`silence_s`: a client that hears nothing for so long gives the connection up."""
        self._model = model
        self._urls = urls
        self._silence_s = silence_s

    async def ask(self, request: Request, first: int) -> Answered:
        """`first`: the number of the gateway that it tries first."""
        answered = Answered(request, time.monotonic())
        limits = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=self._silence_s)
        try:
            async with (
                asyncio.timeout(PATIENCE * self._silence_s),
                aiohttp.ClientSession(timeout=limits) as session,
            ):
                while True:
                    url = self._urls[(first + answered.tries) % len(self._urls)]
                    answered.tries += 1
                    try:
                        await self._try(session, url, answered)
                        return answered
                    except Again as again:
                        answered.said = str(again)
                    except TimeoutError:
                        answered.silent.append((url, time.monotonic()))
                    except (aiohttp.ClientError, OSError) as error:
                        answered.said = repr(error)
                    await asyncio.sleep(WAIT_S)
        except TimeoutError:
            return answered

    async def _try(self, session: aiohttp.ClientSession, url: str, answered: Answered) -> None:
        """Asks once. Raises what is worth coming again for."""
        request = answered.request
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": len(request.right),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        headers = {"Idempotency-Key": request.key}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            if response.status in (409, 429, 503):
                await asyncio.sleep(min(float(response.headers.get("Retry-After", 0)), 2.0))
                raise Again(await response.text())
            if response.status != 200:
                answered.end, answered.said = End.REFUSED, await response.text()
                return
            await self._read(response, answered)

    async def _read(self, response: aiohttp.ClientResponse, answered: Answered) -> None:
        tokens: list[int] = []
        worth_trying = False
        async for line in response.content:
            worth_trying = worth_trying or line.startswith(b"retry: ")
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                right = tuple(tokens) == answered.request.right
                answered.end = End.RIGHT if right else End.WRONG
                answered.said = "" if right else f"{tokens} and not {answered.request.right}"
                return
            chunk = json.loads(line[6:])
            if error := chunk.get("error"):
                if worth_trying:
                    raise Again(str(error))
                answered.end, answered.said = End.BROKEN, str(error)
                return
            for choice in chunk.get("choices", ()):
                tokens += choice.get("token_ids") or ()
            new = len(tokens) - len(answered.came_at)
            answered.came_at += [time.monotonic()] * new
        raise Again("the connection ended in the midst of the answer")
