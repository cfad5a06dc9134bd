"""A Unix socket on which a process says whether it is well; services/health.py asks it.

Whoever connects gets one line: `well`, or what is wrong. A process whose event loop hangs says
nothing, which is an answer too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.errors import ConfigError

WELL = "well"


@asynccontextmanager
async def telling(path: str, wrong: Callable[[], str]) -> AsyncIterator[None]:
    """Answers meanwhile with what `wrong` says, or WELL where that is nothing.

    An empty `path` means no socket. ConfigError if there can be none at the path.
    """
    if not path:
        yield
        return

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{wrong() or WELL}\n".encode())
        writer.close()

    try:
        server = await asyncio.start_unix_server(tell, path)
    except OSError as error:
        raise ConfigError(f"telemetry.health_socket {path!r} cannot be used: {error}") from error
    async with server:
        yield
