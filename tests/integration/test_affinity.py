"""Chats on two real nodes: later turns find the KV of earlier ones, and usage says so truly."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.cluster import LIMIT_S, MODEL, running

CHATS, TURNS, WORDS, ANSWER = 12, 4, 60, 20
PAGE = 16


@dataclass
class Chat:
    name: str
    rng: random.Random
    prompt: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose KV the turns so far have computed."""

    async def turn(self, http: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        """Returns how many tokens of the prompt were cached."""
        self.prompt += [self.rng.randrange(3, 250) for _ in range(WORDS)]
        body: dict[str, Any] = {
            "model": MODEL, "prompt": self.prompt, "max_tokens": ANSWER, "ignore_eos": True,
            "temperature": 0, "return_token_ids": True,
        }  # fmt: skip
        async with http.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        self.prompt += answer["choices"][0]["token_ids"]
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


@pytest.mark.parametrize("named", [False, True], ids=["by-prefix", "by-session"])
async def test_later_turns_of_a_chat_find_their_kv(
    tmp_path: Path, checkpoint: Path, named: bool
) -> None:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with running(tmp_path / "cluster", checkpoint, nodes=2, min_instances=2) as cluster:
        await cluster.replicas(2)
        chats = [Chat(f"chat-{i}", random.Random(i)) for i in range(CHATS)]
        async with aiohttp.ClientSession(cluster.url, timeout=timeout) as http:
            for _ in range(TURNS):
                for chat in chats:
                    headers = {"X-Session-ID": chat.name} if named else {}
                    # All full pages of the turns before; the last token has no KV.
                    expected = chat.computed // PAGE * PAGE
                    assert await chat.turn(http, headers) == expected
                    chat.computed = len(chat.prompt) - 1
        await cluster.follow()
        await cluster.until(
            lambda: sum(status.cached_tokens > 0 for status in cluster.statuses.values()) == 2,
            "both nodes take part",
        )
