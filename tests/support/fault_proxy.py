"""A TCP proxy on loopback that misbehaves on demand, for what a real server will not do."""

import asyncio
from types import TracebackType
from typing import Self


class FaultProxy:
    def __init__(self, target: int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()
        self._connections = 0
        self._changed = asyncio.Condition()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.drop()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._clients)

    async def connected(self, times: int) -> None:
        """Waits until there have been this many connections."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._connections >= times)

    def drop(self) -> None:
        """Breaks the present connections; later ones work."""
        for client in self._clients:
            client.close()

    def silence(self) -> None:
        """Present connections stay open and carry nothing more; later ones work."""
        self._silent |= self._clients

    def inject(self, data: bytes) -> None:
        """Sends bytes to the clients as if the server had."""
        for client in self._clients:
            client.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._changed:
            self._connections += 1
            self._clients.add(writer)
            self._changed.notify_all()
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, there_writer, writer))
                group.create_task(self._copy(there_reader, writer, writer))
        except* (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            for end in (writer, there_writer):
                end.close()
            async with self._changed:
                self._clients.discard(writer)
                self._changed.notify_all()

    async def _copy(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        while data := await source.read(1 << 16):
            if client not in self._silent:
                sink.write(data)
                await sink.drain()
        raise ConnectionResetError("one end closed")
