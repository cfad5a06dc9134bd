"""The peer: an HTTP server of aiohttp and uvloop that does nothing but answer.

Run: python -m benchmarks.gateway.bare. It prints its port. POST /v1/completions streams as many
events as `max_tokens` says, each as long as one of the gateway's, one at every tick. `tick_s` of
the query is the time between two ticks. Streams tick together, as all get a token of an engine's
step.
"""

import asyncio

import msgspec
import uvloop
from aiohttp import web

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,'
    b'"model":"bench","system_fingerprint":"ls-0123456789ab","choices":[{"index":0,"text":" word",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)


async def _completions(request: web.Request) -> web.StreamResponse:
    count = msgspec.json.decode(await request.read())["max_tokens"]
    tick_s = float(request.query.get("tick_s", 0))
    loop = asyncio.get_running_loop()
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    ticks = int(loop.time() / tick_s) + 1 if tick_s else 0
    for number in range(count):
        if tick_s:
            await asyncio.sleep((ticks + number) * tick_s - loop.time())
        await response.write(EVENT)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _serve() -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _completions)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    server = await asyncio.get_running_loop().create_server(
        runner.server, "127.0.0.1", 0, backlog=8192
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve())
