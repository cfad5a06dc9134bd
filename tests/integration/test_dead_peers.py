"""Relays and sources in processes that are killed or stopped, or whose host vanishes, in the midst
of a chunk: whoever pulls from them, or is pulled from, learns of it and goes on."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from shared.errors import PeerLost, TransportTimeout
from tests.integration.relay import CHUNK, CONTENT, EVERY, end, pull_from
from tests.unit.node.moving.movers import MODEL, Node

RATE = 4_000_000
"""A chunk of 512 KiB takes 130 ms, in frames of 64 KiB."""
LIMIT_S = 100.0


class Relay:
    """The process, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._said = process.stdout
        self.address = ""

    async def hear(self) -> str:
        async with asyncio.timeout(LIMIT_S):
            return (await self._said.readline()).decode().strip()


@asynccontextmanager
async def relay(
    source: str = "", *, host: str = "127.0.0.1", within: tuple[str, ...] = ()
) -> AsyncIterator[Relay]:
    """`within`: a command that the process is run by."""
    words = [sys.executable, "-m", "tests.integration.relay", host, str(RATE)]
    process = await asyncio.create_subprocess_exec(
        *within, *words, *[source] * bool(source), stdout=asyncio.subprocess.PIPE
    )
    started = Relay(process)
    try:
        started.address = await started.hear()
        yield started
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node.transport)
            stack.push_async_callback(node.mover.close)
        yield


async def until_within_a_chunk(node: Node) -> None:
    """It has shown a chunk, and of another some bytes are there, most are not."""
    shown = memoryview(bytearray(CHUNK))
    chunks = [
        node.space.block(block)[at : at + CHUNK]
        for block in EVERY
        for at in range(0, len(CONTENT[block]), CHUNK)
    ]

    def within() -> bool:
        return any(any(chunk[:64]) and not any(chunk[CHUNK // 2 :]) for chunk in chunks)

    async with asyncio.timeout(LIMIT_S):
        await node.transport.read(node.transport.address, f"{MODEL}/0", 0, shown, priority=0)
        while not within():  # noqa: ASYNC110 - bytes come without an event
            await asyncio.sleep(0.001)


async def fails(node: Node) -> None:
    """What it has not got yet, for the reason that its source is lost."""
    await node.until(lambda: len(node.arrivals) + len(node.failures) == len(EVERY))
    arrived = {arrival.block for arrival in node.arrivals}
    assert {failure.block for failure in node.failures} == set(EVERY) - arrived
    assert node.failures
    assert {type(failure.error) for failure in node.failures} <= {PeerLost, TransportTimeout}


async def goes_on(node: Node, source: Node) -> None:
    node.failures.clear()
    pull_from(node, source.transport.address, revision=2)
    await node.complete()
    assert node.content() == CONTENT
    assert not node.failures


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_a_relay_that_dies_within_a_chunk(number: signal.Signals) -> None:
    """Both nodes behind it fail what it owes them, and go on: one from the source, the other from
    the one."""
    source, one, other = end("source"), end("one"), end("other")
    async with running(source, one, other), relay(source.transport.address) as between:
        source.hold(EVERY)
        for target in (one, other):
            target.hold([])
            pull_from(target, between.address)
        await until_within_a_chunk(one)
        between.process.send_signal(number)
        await fails(one)
        await fails(other)
        # What was verified is kept: it is not read again, wrong as it is by now at the source.
        source.space.block(0)[:CHUNK] = bytes(CHUNK)
        await goes_on(one, source)
        await goes_on(other, one)


async def let_go(source: Node) -> None:
    """The source has ended all connections that were dialled to it. Nobody is told of that."""
    async with asyncio.timeout(LIMIT_S):
        while source.transport._standing:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.02)


async def test_a_reader_that_is_stopped_within_a_chunk() -> None:
    """Its source lets it go and has its memory back. When it runs again it fails in good order."""
    source = Node("source", RATE, content=CONTENT, chunk=CHUNK)
    async with running(source), relay(source.transport.address) as reader:
        source.hold(EVERY)
        watcher = end("watcher")
        async with running(watcher):
            into = memoryview(bytearray(CHUNK))
            async with asyncio.timeout(LIMIT_S):
                await watcher.transport.read(reader.address, f"{MODEL}/0", 0, into, priority=0)
        reader.process.send_signal(signal.SIGSTOP)
        await let_go(source)
        async with asyncio.timeout(LIMIT_S):
            await source.mover.drop(MODEL)
        reader.process.send_signal(signal.SIGCONT)
        assert {await reader.hear() for _ in EVERY} == {
            f"failed {block} {PeerLost.code}" for block in EVERY
        }


# --- a host that vanishes ------------------------------------------------------------------


class Host:
    """A network namespace with a link to this one, which can be cut: no FIN, no RST, no ICMP."""

    def __init__(self) -> None:
        own = os.getpid()  # two runs of these tests are in nobody's way
        self.name = f"faults-{own}"
        network = f"10.{200 + own % 50}.{own // 50 % 256}"
        self.here, self.there = f"{network}.1", f"{network}.2"
        self.within = ("ip", "netns", "exec", self.name)
        self._link = f"ft{own}"

    async def link(self) -> None:
        inside = ("ip", "-n", self.name)
        await run(
            "ip",
            "link",
            "add",
            self._link,
            "type",
            "veth",
            "peer",
            "name",
            "eth",
            "netns",
            self.name,
        )
        await run("ip", "address", "add", f"{self.here}/30", "dev", self._link)
        await run("ip", "link", "set", self._link, "up")
        await run(*inside, "address", "add", f"{self.there}/30", "dev", "eth")
        await run(*inside, "link", "set", "eth", "up")

    async def unlink(self) -> None:
        """Sockets in it may outlive the namespace's name, and the link with them."""
        await run("ip", "link", "delete", self._link)

    async def vanish(self) -> None:
        await run("ip", "-n", self.name, "link", "set", "eth", "down")


async def run(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode:
        raise OSError(f"{' '.join(words)}: {said.decode().strip()}")


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    try:
        await run("ip", "netns", "add", host.name)
    except OSError as error:
        pytest.skip(f"network namespaces can't be had here: {error}")
    try:
        await host.link()
        yield host
    finally:
        await host.unlink()
        await run("ip", "netns", "delete", host.name)


async def test_a_source_whose_host_vanishes(host: Host) -> None:
    source, target = end("source", host=host.here), end("target", host=host.here)
    async with (
        running(source, target),
        relay(host=host.there, within=host.within) as far,
    ):
        source.hold(EVERY)
        target.hold([])
        pull_from(target, far.address)
        await until_within_a_chunk(target)
        await host.vanish()
        await fails(target)
        await goes_on(target, source)


async def test_a_reader_whose_host_vanishes(host: Host) -> None:
    """What was being sent to it does not keep the model's memory."""
    source = Node("source", RATE, host=host.here, content=CONTENT, chunk=CHUNK)
    async with running(source):
        source.hold(EVERY)
        async with relay(source.transport.address, host=host.there, within=host.within) as far:
            watcher = end("watcher", host=host.here)
            into = memoryview(bytearray(CHUNK))
            async with running(watcher), asyncio.timeout(LIMIT_S):
                await watcher.transport.read(far.address, f"{MODEL}/0", 0, into, priority=0)
            await host.vanish()
            await let_go(source)
            async with asyncio.timeout(LIMIT_S):
                await source.mover.drop(MODEL)
            said = {tuple((await far.hear()).split()) for _ in EVERY}
            assert {words[:2] for words in said} == {("failed", str(block)) for block in EVERY}
            assert {code for _, _, code in said} <= {PeerLost.code, TransportTimeout.code}
