"""Compiled libraries from other nodes, so that a new node compiles nothing.

A node that has loaded a library answers requests for it, on a subject that names everything the
library was made from and for: the sources, the flags, the processor. So whoever answers has one
that fits, and if nobody has, the request fails at once.

What is fetched is native code. It is taken from whoever may answer on the bus, and its digest only
shows that it came whole. So this is for a bus that asks for a password (docs/deploy.md).
"""

import asyncio
from collections.abc import Callable, Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from services.node import compiling
from shared import subjects, telemetry
from shared.bus.base import Bus, Subscription
from shared.errors import BadMessage, LambdaScaleError, NotFound
from shared.messages.compiled import Compiled, FetchCompiled

Spawn = Callable[[Coroutine[Any, Any, None], str], object]

FETCH_S = 5.0


class Artefacts(compiling.Peers):
    def __init__(self, bus: Bus, spawn: Spawn) -> None:
        self._bus = bus
        self._spawn = spawn
        self._log = telemetry.logger("artefacts")
        self._loop = asyncio.get_running_loop()
        self._offered: dict[str, Subscription] = {}

    # --- on the threads that need a library ---

    def fetch(self, name: str) -> bytes | None:
        fetching = asyncio.run_coroutine_threadsafe(self._fetch(name), self._loop)
        return fetching.result()

    def offer(self, path: Path) -> None:
        self._loop.call_soon_threadsafe(self._spawn, self._offer(path), f"offer of {path.name}")

    # --- on the control loop ---

    async def _fetch(self, name: str) -> bytes | None:
        try:
            found = await self._bus.request(
                subjects.compiled(name), FetchCompiled(name=name), Compiled, timeout=FETCH_S
            )
        except LambdaScaleError as error:
            self._log.debug("no other node has the library", library=name, error=str(error))
            return None
        if found.name != name or sha256(found.data).hexdigest() != found.digest:
            self._log.warning("a library came damaged", library=name)
            return None
        self._log.info("library fetched", library=name, nbytes=len(found.data))
        return found.data

    async def _offer(self, path: Path) -> None:
        async def give(asked: FetchCompiled) -> Compiled:
            if asked.name != path.name:
                raise BadMessage(f"this is the subject of {path.name}, not of {asked.name}")
            try:
                data = await asyncio.to_thread(path.read_bytes)
            except OSError as error:
                raise NotFound(f"{path.name}: {error}") from error
            return Compiled(name=path.name, data=data, digest=sha256(data).hexdigest())

        if path.name not in self._offered:
            subject = subjects.compiled(path.name)
            self._offered[path.name] = await self._bus.serve(subject, FetchCompiled, give)

    async def __aenter__(self) -> Self:
        compiling.use_peers(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        compiling.use_peers(None)
        for subscription in self._offered.values():
            await subscription.close()
