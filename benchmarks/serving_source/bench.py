"""What a source that serves requests loses of its tokens/s while its model is loaded from it.

Host 0 has a node whose link is paced to half, host 1 has a node that may use the whole link, and
host 2 is the target of both. A source decodes a steady batch. Beside that, in turn and round after
round, run: nothing, loads of its model to the target, nothing, and a plain socket copy of as many
bytes at the same rate. Each loss is relative to just before and just after, so that a drift of the
machine affects all alike. The engines have one thread, so that the other threads have a core.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.multicast.model import checkpoint_spec
from benchmarks.multicast.nodes import Nodes
from benchmarks.serving_source.plain import plain_copy
from benchmarks.serving_source.requests import Requests
from benchmarks.serving_source.results import (
    HALF,
    OURS,
    PLAIN,
    WHOLE,
    Results,
    Row,
    Sample,
    Settings,
    Window,
)
from benchmarks.testbed import Testbed, Wiring, data_address, goodput
from services.local.demo_model import make_checkpoint
from services.planner.core.multicast.schedule import Move
from shared.messages.pool import ModelRecord

PACED, UNPACED, TARGET = range(3)
"""Nodes, each on the host with its number."""
SETTLE_S = 0.25
PATIENCE = 30
"""A load that takes this many times the limit has failed."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def measure(settings: Settings, say: Callable[[str], None]) -> Results:
    """Runs the benchmark. ConfigError: this machine cannot have a testbed. BenchFailed,
    PlainCopyFailed: something went wrong."""
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        make_checkpoint(checkpoint, checkpoint_spec(settings.nbytes, settings.blocks))
        wiring = Wiring(hosts=3, link_mbit=settings.link_mbit)
        with Testbed(wiring) as testbed, testbed.hub.entered():
            return uvloop.run(_run(testbed, settings, Path(folder), checkpoint, say))


async def _run(
    testbed: Testbed, settings: Settings, folder: Path, checkpoint: Path, say: Callable[[str], None]
) -> Results:
    whole = goodput(settings.link_mbit)
    half = round(whole / 2)
    memory = {
        "LAMBDASCALE_NODE_SLOTS": str(settings.batch),
    }
    async with Nodes(testbed, folder, settings.nbytes) as nodes:
        say("starting 3 nodes")
        await nodes.start(1, {**memory, "LAMBDASCALE_NODE_LINK_BYTES_PER_S": str(half)})
        await nodes.start(3, memory)
        sources: list[_Source] = []
        for number, link, rate, paced in (PACED, HALF, half, half), (UNPACED, WHOLE, whole, 0):
            record = await nodes.load(checkpoint, settings.blocks, number)
            rows = Row(link, OURS, rate), Row(link, PLAIN, rate)
            source = _Source(testbed, nodes, settings, record, number, paced, rows)
            await source.load(0)  # not counted: it makes the connections
            sources.append(source)
        for source in sources:
            say(f"{source.link} link")
            await source.measure(say)
    return Results(settings, record.nbytes, tuple(row for s in sources for row in s.rows))


class _Source:
    """A node that serves, and that others load from."""

    def __init__(
        self,
        testbed: Testbed,
        nodes: Nodes,
        settings: Settings,
        record: ModelRecord,
        number: int,
        paced: int,
        rows: tuple[Row, Row],
    ) -> None:
        """`paced`: bytes/s; 0: not paced. `rows`: the rows of our loading and of the plain copy."""
        self._testbed = testbed
        self._nodes = nodes
        self._settings = settings
        self._record = record
        self._number = number
        self._paced = paced
        self.rows = rows
        self.link = rows[0].link
        self._patience_s = PATIENCE * record.nbytes / (paced or goodput(settings.link_mbit))

    async def measure(self, say: Callable[[str], None]) -> None:
        """Adds a sample to the rows for each round."""
        ours, plain = self.rows
        node, bus = self._nodes.info(self._number), self._nodes.bus
        async with Requests(bus, node, self._record, self._settings.batch) as requests:
            await requests.during(requests.steady())
            before = await self._window(requests, self._nothing())
            for number in range(self._settings.rounds):
                loading = await self._window(requests, self.load(self._settings.window_s))
                after = await self._window(requests, self._nothing())
                copying = await self._copy(requests, round(loading.bytes_per_s * loading.took_s))
                again = await self._window(requests, self._nothing())
                ours.samples.append(Sample(before, loading, after))
                plain.samples.append(Sample(after, copying, again))
                before = again
                losses = ", ".join(f"{row.way} {row.samples[-1].loss:.1%}" for row in self.rows)
                say(f"  round {number + 1} of {self._settings.rounds}: lost with {losses}")

    async def _copy(self, requests: Requests, nbytes: int) -> Window:
        async with plain_copy(
            self._testbed.hosts[self._number],
            self._testbed.hosts[TARGET],
            data_address(TARGET),
            nbytes,
            self._paced,
        ) as copied:
            return await self._window(requests, _after(copied, nbytes))

    async def _window(self, requests: Requests, work: Coroutine[Any, Any, int]) -> Window:
        """The window while `work` lasts, which returns how many bytes it sent. On a machine so busy
        that no token comes meanwhile, it lasts until one does."""
        tokens, node, machine = requests.tokens, self._nodes.cpu_s(self._number), _machine_cpu_s()
        began = time.monotonic()
        sent = await requests.during(work)
        if requests.tokens == tokens:
            await requests.during(requests.more(1))
        took = time.monotonic() - began
        tokens = requests.tokens - tokens
        window = Window(
            took_s=took,
            tokens_per_s=tokens / took,
            bytes_per_s=sent / took,
            node_cores=(self._nodes.cpu_s(self._number) - node) / took,
            machine_cores=(_machine_cpu_s() - machine) / took,
        )
        await requests.during(asyncio.sleep(SETTLE_S))
        return window

    async def _nothing(self) -> int:
        await asyncio.sleep(self._settings.window_s)
        return 0

    async def load(self, least_s: float) -> int:
        """Loads the model onto the target again and again, for at least `least_s` seconds. Returns
        the bytes."""
        moves = [
            Move(block + 1, self._number, TARGET, block) for block in range(self._record.n_blocks)
        ]
        until, sent = time.monotonic() + least_s, 0
        while not sent or time.monotonic() < until:
            await self._nodes.multicast(self._record, moves, self._patience_s)
            sent += self._record.nbytes
        return sent


async def _after(copied: Coroutine[Any, Any, None], nbytes: int) -> int:
    await copied
    return nbytes


def _machine_cpu_s() -> float:
    """CPU seconds of everything on this machine so far."""
    user, nice, system, _, _, irq, softirq = map(
        int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
    )
    return (user + nice + system + irq + softirq) * _TICK_S
