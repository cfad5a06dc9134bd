"""The HTTP endpoint on which a process other than a gateway says how it is.

`/live`: 200 as long as the process answers. `/ready`: 200 if it can do its work (or stands by for
the process that does), else 503 and why. `/metrics`: see `shared.metrics`. Gateways have the same
paths at their own port. A process whose event loop hangs says nothing, which is an answer too.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from structlog.stdlib import BoundLogger

from shared.errors import ConfigError
from shared.metrics import Metrics

WELL = "ok"
AGAIN_S = 1.0
"""Seconds between attempts at a port that another process has."""


@asynccontextmanager
async def monitoring(
    host: str, port: int, metrics: Metrics, wrong: Callable[[], str], log: BoundLogger
) -> AsyncIterator[None]:
    """Serves meanwhile. `wrong`: what keeps the process from its work; empty: nothing.

    While another process has the port, as the one does that a standby of this machine stands by
    for, it waits for its end. ConfigError if the port cannot be had for another reason.
    """

    async def live(_: web.Request) -> web.Response:
        return web.Response(text=WELL)

    async def ready(_: web.Request) -> web.Response:
        reason = wrong()
        return web.Response(text=reason or WELL, status=503 if reason else 200)

    async def show(request: web.Request) -> web.Response:
        body, content_type = metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application()
    app.add_routes([web.get("/live", live), web.get("/ready", ready), web.get("/metrics", show)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        if await _begun(site, host, port):
            yield
            return
        log.warning("another process has the metrics port: waits for it", host=host, port=port)
        waiting = asyncio.ensure_future(_begin_later(runner, host, port, log))
        try:
            yield
        finally:
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
    finally:
        await runner.cleanup()


async def _begun(site: web.TCPSite, host: str, port: int) -> bool:
    """False if another process has the port."""
    try:
        await site.start()
        return True
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigError(
            f"the metrics endpoint cannot be at {host}:{port} ({error}): set "
            "telemetry.metrics_host to an address of this machine, metrics_port to a port of it"
        ) from error


async def _begin_later(runner: web.AppRunner, host: str, port: int, log: BoundLogger) -> None:
    while True:
        await asyncio.sleep(AGAIN_S)
        if await _begun(web.TCPSite(runner, host, port), host, port):
            log.info("has the metrics port", host=host, port=port)
            return
