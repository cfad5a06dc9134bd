"""Another gateway, as a peer: litellm's proxy, unmodified, in front of the bare server."""

import asyncio
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.clients.environment import bin_of
from benchmarks.gateway.model import BENCH

SETTINGS = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would download one
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # as ours, which has no key
}
PACKAGES = ("litellm[proxy]==1.106.2",)
CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: text-completion-openai/{model}
      api_base: {url}/v1
      api_key: none
litellm_settings:
  drop_params: true
"""
START_S = 120.0
LIVE = "/health/liveliness"


@dataclass(frozen=True, slots=True)
class Peer:
    url: str
    pid: int


@asynccontextmanager
async def litellm(server: str) -> AsyncIterator[Peer]:
    """The proxy, of one process, before the server at that URL. Its packages are installed first,
    if they are not there. CalledProcessError if they cannot be; TimeoutError if it does not
    start."""
    program = bin_of(PACKAGES) / "litellm"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        config.write_text(CONFIG.format(model=BENCH, url=server))
        with (Path(directory) / "log").open("w") as log:
            process = await asyncio.create_subprocess_exec(
                str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port),
                cwd=directory, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **SETTINGS},
            )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            await _up(url, process)
            yield Peer(url, process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _up(url: str, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while True:
            with suppress(aiohttp.ClientError):
                async with session.get(url + LIVE) as response:
                    if response.status == 200:
                        return
            if process.returncode is not None or time.monotonic() > deadline:
                raise TimeoutError(f"litellm's proxy did not start within {START_S:g} s")
            await asyncio.sleep(0.2)
