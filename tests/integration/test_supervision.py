"""What dies under `up` is started again, whatever it is, and the cluster goes on as before."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.local import processes
from services.local.demo_model import make_checkpoint
from services.local.processes import NATS, ProcessRecord
from tests.support import commands
from tests.support.models import TINY

CONFIG = """
[gateway]
port = 0

[node]
arena_bytes = 67108864
kv_bytes = 67108864
threads = 1
step_floor_s = 0.05
"""
"""Paced, so that a stream lasts."""
LIMIT_S = 60.0
TOKENS = 60
SOON = "(at once|in 1 s)"
"""At once, if it had run for a minute."""


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[Path]:
    make_checkpoint(tmp_path / "tiny", TINY)
    (tmp_path / "cluster.toml").write_text(CONFIG)
    yield tmp_path
    await asyncio.to_thread(processes.end_all, tmp_path / "lambdascale-data")


class Streamed:
    """A completion's text, and when its first part is there."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.begun = asyncio.Event()

    async def text(self) -> str:
        body = {
            "model": "tiny",
            "prompt": "Hello",
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        text, tokens = "", 0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self._url}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["text"]
                        tokens += len(choice.get("token_ids") or ())
                    self.begun.set()
        assert tokens == TOKENS
        return text


def record(data: Path, name: str) -> ProcessRecord:
    return next(p for p in processes.read_state(data).processes if p.name == name)


async def started_again(data: Path, name: str) -> ProcessRecord:
    async with asyncio.timeout(LIMIT_S):
        while (found := record(data, name)).restarts == 0 or found.state != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found


async def well(directory: Path) -> Any:
    """The status, once everything is there and answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            shown = await commands.run("status", "--json", cwd=directory)
            if shown.code == 0 and [i["state"] for i in shown.document["instances"]] == ["serving"]:
                return shown.document


async def test_what_is_killed_is_started_again(directory: Path) -> None:
    data = directory / "lambdascale-data"
    words = ("up", "--nodes", "1", "--model", "tiny", "--config", "cluster.toml", "--detach")
    up = await commands.run(*words, "--json", cwd=directory)
    assert up.code == 0, up.err
    url = up.document["gateway_url"]
    expected = await Streamed(url).text()
    kept = await commands.run("model", "set", "tiny", "--min-instances", "1", cwd=directory)
    assert kept.code == 0, kept.err

    # A stream goes on while its bus is gone.
    stream = Streamed(url)
    text = asyncio.create_task(stream.text())
    await asyncio.wait_for(stream.begun.wait(), LIMIT_S)
    nats = record(data, NATS)
    os.kill(nats.pid, signal.SIGKILL)
    assert (await started_again(data, NATS)).pid != nats.pid
    assert await asyncio.wait_for(text, LIMIT_S) == expected

    for name in ("registry", "planner", "gateway", "node-0"):
        os.kill(record(data, name).pid, signal.SIGKILL)
    for name in ("registry", "planner", "gateway", "node-0"):
        await started_again(data, name)
    status = await well(directory)
    assert {p["restarts"] for p in status["processes"]} == {1}
    assert {p["last_exit"] for p in status["processes"]} == {"was killed by SIGKILL"}
    assert [model["name"] for model in status["models"]] == ["tiny"]
    assert await asyncio.wait_for(Streamed(url).text(), LIMIT_S) == expected

    log = (data / "logs" / "up.log").read_text()
    assert re.search(f"nats was killed by SIGKILL; it is started again {SOON}", log)

    # What starts the others again takes them along when it is killed itself.
    holder = processes.holder_of(data)
    assert holder is not None
    os.kill(holder.pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        while processes.strays(data):  # noqa: ASYNC110 - they are no children of ours
            await asyncio.sleep(0.01)
    down = await commands.run("down", cwd=directory)
    assert (down.code, down.err) == (0, "nothing was running in lambdascale-data\n")
    assert not (data / "cluster.json").exists()


async def test_in_the_foreground_a_line_says_so(directory: Path) -> None:
    words = ("up", "--nodes", "1", "--no-model", "--config", "cluster.toml")
    up = await commands.start(*words, cwd=directory)
    assert up.stderr
    async with asyncio.timeout(LIMIT_S):
        said = b""
        while b"Ctrl-C" not in (line := await up.stderr.readline()):
            assert line
            said += line
        assert b"publish a model: lambdascale model add PATH" in said
        os.kill(record(directory / "lambdascale-data", "planner").pid, signal.SIGKILL)
        ended = await up.stderr.readline()
        again = f"planner was killed by SIGKILL; it is started again {SOON} "
        assert re.search(again + r"\(log: ", ended.decode())
        assert await up.stderr.readline() == b"planner is started\n"
        up.send_signal(signal.SIGINT)
        await up.communicate()
    assert up.returncode == 0
    assert processes.strays(directory / "lambdascale-data") == []
