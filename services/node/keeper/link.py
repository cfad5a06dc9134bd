"""A node's end of the connection to its keeper: it claims the memories that outlived the process
before, and tells the keeper what lies in them.

Everything goes over one socket, in order, and the keeper reads what a process said even after its
death. So a node tells the keeper to forget a place before it overwrites it, and the next process
never takes the new bytes for the old model.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec import MsgspecError

from services.node.keeper.messages import (
    Alive,
    Asked,
    Claim,
    Drop,
    Forget,
    Granted,
    Held,
    Hold,
    Refused,
    Space,
    Waits,
    decode_told,
    encode,
)
from services.node.keeper.sockets import Truncated, new_socket, peer_of, receive, send, short_path
from services.node.keeper.tenure import ALIVE_S
from shared import telemetry
from shared.ids import Generation, NodeId

NONE_YET = Generation(0)
START_S = 5.0
"""Within this time a keeper that is started listens."""
POLL_S = 0.02


class Memory(NamedTuple):
    """A memfd that outlived its process. Whoever takes it closes the descriptor."""

    descriptor: int
    nbytes: int
    about: str


@dataclass(slots=True)
class Estate:
    """What outlived the process before."""

    memories: dict[str, Memory] = field(default_factory=dict)
    spaces: list[Space] = field(default_factory=list)
    generations: frozenset[Generation] = frozenset()
    """Of processes that are dead for certain."""

    def close(self) -> None:
        """Closes what was not taken."""
        for memory in self.memories.values():
            os.close(memory.descriptor)
        self.memories.clear()


class _Unusable(Exception):
    """Why there is no keeper."""


class KeeperLink:
    """Without a keeper (`keep_s` is 0, it cannot be started, it is gone) the calls do nothing: the
    node works as well, but its weights end with it. `hold` and `drop` may be called on any
    thread."""

    def __init__(self, directory: Path, node: NodeId, keep_s: float) -> None:
        self._directory = directory
        self._node = node
        self._keep_s = keep_s
        self._socket: socket.socket | None = None
        self._generation = NONE_YET
        self._log = telemetry.logger("keeper", node=node)

    @property
    def there(self) -> bool:
        return self._socket is not None

    async def claim(self, waits: Callable[[], None] = lambda: None) -> Estate:
        """Returns once no other process of this node can touch its memories. `waits` is called if
        another process has to end first."""
        if not self._keep_s:
            return Estate()
        estate = Estate()
        try:
            self._socket = await self._connect()
            self._say(Claim(self._node))
            await self._inherit(self._socket, estate, waits)
        except (OSError, _Unusable, MsgspecError, UnicodeDecodeError, Truncated) as error:
            estate.close()
            self._lose(str(error))
            return Estate()
        except BaseException:
            estate.close()
            self.close()
            raise
        return estate

    def hold(self, memory: str, descriptor: int, nbytes: int, about: str = "") -> None:
        self._say(Hold(memory, nbytes, about), descriptor)

    def drop(self, memory: str) -> None:
        self._say(Drop(memory))

    def note(self, space: Space) -> None:
        self._say(space)

    def forget(self, memory: str, model: str) -> None:
        self._say(Forget(memory, model))

    def works_as(self, generation: Generation) -> None:
        """The next process may take what this generation of the node leaves, its lease too."""
        self._generation = generation
        self._say(Alive(generation))

    async def stay(self) -> None:
        """Says again and again that this process is at work."""
        while self._socket is not None:
            self._say(Alive(self._generation))
            await asyncio.sleep(ALIVE_S)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- the socket ---

    async def _connect(self) -> socket.socket:
        async with asyncio.timeout(START_S):
            while (found := self._try()) is None:
                await self._start()
        return found

    async def _start(self) -> None:
        """Starts a keeper, unless another process does so, or the last one is about to end."""
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.node.keeper"),
            *(str(self._directory), self._node, str(self._keep_s)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        if code := await started.wait():
            raise _Unusable(f"it ended with {code} while starting")
        await asyncio.sleep(POLL_S)

    def _try(self) -> socket.socket | None:
        """A connection to the keeper that is there."""
        connection = new_socket()
        try:
            with short_path(self._directory) as path:
                connection.connect(path)
            if (user := peer_of(connection)[1]) != os.getuid():
                raise _Unusable(f"a process of user {user} listens in its place")
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        return connection

    async def _inherit(
        self, connection: socket.socket, estate: Estate, waits: Callable[[], None]
    ) -> None:
        while True:
            data, descriptor = await _received(connection)
            message = decode_told(data) if data else None
            match message:
                case Held(memory, nbytes, about) if descriptor is not None:
                    estate.memories[memory] = Memory(descriptor, nbytes, about)
                case Space():
                    estate.spaces.append(message)
                case Granted(generations):
                    estate.generations = frozenset(map(Generation, generations))
                    return
                case Waits(pid):
                    self._log.info("stands by: another process of this node runs", pid=pid)
                    waits()
                case Refused(why):
                    raise _Unusable(why)
                case _:
                    raise _Unusable("it ended")

    def _say(self, message: Asked, descriptor: int | None = None) -> None:
        if (connection := self._socket) is None:
            return
        try:
            send(connection, encode(message), () if descriptor is None else (descriptor,))
        except OSError as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self.close()
        self._log.warning("no keeper: this node's weights will not outlive its process", why=why)


async def _received(connection: socket.socket) -> tuple[bytes, int | None]:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return receive(connection)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(connection, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(connection)
