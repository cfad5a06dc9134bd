"""The course of the demo: cluster, model, reference answers, burst, scale-in, report."""

import asyncio
import contextlib
import math
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from services.cli.client import ended_by_signals
from services.cli.demo import scenario
from services.cli.demo.burst import Ask, Outcome, asks, reference, run_burst
from services.cli.demo.figure import draw
from services.cli.demo.report import headline, make_report
from services.cli.demo.view import render
from services.cli.report import of_event, write
from services.local import processes
from services.local.cluster import Cluster, ClusterSpec, bus_config, node_id
from services.local.publishing import import_model
from services.local.talking.wide import make_wide
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.errors import LambdaScaleError
from shared.messages.scaling import ImportModel, ScaleAccepted, SetInstances

PARALLEL_REFERENCE = scenario.SLOTS
READY_S = 30.0
PLAY_S = 80.0
"""Seconds for everything after the reference answers, besides the time over which requests are
sent."""
SCALE_IN_S = 20.0
"""The part of PLAY_S that is kept for the scale-in."""
REFRESH_S = 0.1


def play(out: Path, count: int) -> dict[str, Any]:
    """Runs the demo with `count` requests. Figure, report and logs go to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    return asyncio.run(Demo(out, count).run())


class Demo:
    def __init__(self, out: Path, count: int) -> None:
        self.out = out
        self.console = Console(stderr=True)
        self.figure = self.out / "event.png"
        self.page = self.out / "event.html"
        self.nodes = [node_id(number) for number in range(scenario.NODES)]
        self.watch = Watch()
        self.requests = asks(count, scenario.TOKENS)
        self.gaps = gaps(count)
        self.outcomes: list[Outcome] = []
        self.start: float | None = None
        """When the burst began (monotonic)."""
        self._phase = ""
        self._live: Live | None = None

    async def run(self) -> dict[str, Any]:
        with ended_by_signals():
            model = await self._model()
            directory = self.out / "cluster"
            processes.check_free(directory)
            shutil.rmtree(directory, ignore_errors=True)
            self.page.unlink(missing_ok=True)
            cluster = Cluster(self._spec(directory, model))
            self._say(f"starting a cluster of {scenario.NODES} nodes")
            try:
                await cluster.start()
                expected = await self._on(cluster, model)
            finally:
                self._say(f"ending the cluster (logs: {self.out / 'logs'})")
                await cluster.stop()
                keep_records(directory, self.out)
        return self._report(expected)

    async def _model(self) -> Path:
        model = self.out / "model"
        if not model.exists():
            unfinished = self.out / "model.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            await asyncio.to_thread(make_wide, unfinished)
            unfinished.rename(model)
        return model

    def _spec(self, directory: Path, model: Path) -> ClusterSpec:
        nbytes = (model / "model.safetensors").stat().st_size
        settings = {
            "LAMBDASCALE_NODE_LINK_BYTES_PER_S": str(int(nbytes / scenario.COPY_S)),
            "LAMBDASCALE_NODE_ARENA_BYTES": str(int(nbytes * scenario.ARENA_SPARE)),
            "LAMBDASCALE_NODE_STEP_FLOOR_S": str(scenario.STEP_FLOOR_S),
            "LAMBDASCALE_NODE_SLOTS": str(scenario.SLOTS),
            "LAMBDASCALE_NODE_THREADS": "1",
            "LAMBDASCALE_GATEWAY_API_KEYS": "",
            "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",  # weights come over the links only
        }
        return ClusterSpec(
            directory=directory,
            nodes=scenario.NODES,
            gateway_port=0,
            settings=settings,
            apart=True,
            ends_by_signal=True,
        )

    async def _on(self, cluster: Cluster, model: Path) -> Mapping[Ask, tuple[int, ...]]:
        """Returns the reference answers. Everything else is in `watch` and `outcomes`."""
        url = cluster.state.gateway_url
        self.console.print(f"watch it at {url}/")
        async with NatsBus(bus_config(cluster.state), "demo") as bus, self._view():
            await self.watch.follow(bus)
            self._say("publishing the model on node-0")
            request = ImportModel(path=str(model), name=scenario.MODEL, min_instances=1)
            record = await import_model(bus, request, say=lambda _: None)
            self.watch.n_blocks = record.n_blocks
            if not await self._until(lambda: len(self.watch.replicas) == 1, READY_S):
                raise LambdaScaleError(f"no node served the model within {READY_S:.0f} s")
            end = time.monotonic() + PLAY_S + sum(self.gaps)
            self._say("one complete node answers the reference requests")
            await _keep(bus, 1)  # to answer them alone fills it
            expected = await reference(url, scenario.MODEL, self.requests, PARALLEL_REFERENCE)
            await _keep(bus, None)
            self._say(f"a burst of {len(self.requests)} requests")
            self.start = time.monotonic()
            with contextlib.suppress(TimeoutError):  # what has not ended by then is lost
                async with asyncio.timeout(end - SCALE_IN_S - self.start):
                    await run_burst(url, scenario.MODEL, self.requests, self.gaps, self.outcomes)
            self._say("the burst is over: the cluster shrinks")
            await self._until(self._small_again, end - time.monotonic())
            await self._keep_page(bus)
        return expected

    async def _keep_page(self, bus: Bus) -> None:
        """Leaves the event as a page in a file."""
        if (event := self.watch.scale_out()) is not None:
            write(self.page, *await of_event(bus, event.id))

    def _small_again(self) -> bool:
        return len(self.watch.instances) == 1 and len(self.watch.replicas) == 1

    def _report(self, expected: Mapping[Ask, tuple[int, ...]]) -> dict[str, Any]:
        start = self.start or 0.0
        report = make_report(
            self.watch,
            self.outcomes,
            expected,
            start,
            figure=str(self.figure),
            page=str(self.page) if self.page.exists() else None,
        )
        draw(self.figure, self.watch, self.nodes, self.outcomes, start, headline(report))
        document = msgspec.json.format(msgspec.json.encode(report), indent=2)
        (self.out / "report.json").write_bytes(document + b"\n")
        return report

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Waits for a condition. Returns whether it came true in time."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self.watch.change()
        except TimeoutError:
            return False
        return True

    def _say(self, phase: str) -> None:
        self._phase = phase
        if self._live is None:
            self.console.print(phase)

    @asynccontextmanager
    async def _view(self) -> AsyncIterator[None]:
        """Shows the live picture if there is a terminal to draw it on."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False) as self._live:
            try:
                async with asyncio.TaskGroup() as group:
                    refreshing = group.create_task(self._refresh(self._live))
                    yield
                    refreshing.cancel()
                self._draw(self._live)  # its end stays on the screen
            finally:
                self._live = None

    async def _refresh(self, live: Live) -> None:
        while True:
            self._draw(live)
            await asyncio.sleep(REFRESH_S)

    def _draw(self, live: Live) -> None:
        picture = render(self.watch, self.nodes, self.outcomes, self._phase, self.start)
        live.update(picture, refresh=True)


def gaps(count: int) -> list[float]:
    """Seconds between requests: first a wave at once, then exponential gaps (their quantiles,
    shuffled)."""
    first = min(scenario.FIRST_WAVE, count)
    rest = count - first
    quantiles = [-math.log(1 - (i + 0.5) / max(rest, 1)) / scenario.RATE for i in range(rest)]
    random.Random(0).shuffle(quantiles)
    return [0.0] * first + quantiles


def keep_records(directory: Path, out: Path) -> None:
    """Copies logs and traces, so that they outlive the cluster's directory."""
    for name in ("logs", "traces"):
        shutil.rmtree(out / name, ignore_errors=True)
        if (directory / name).exists():
            (directory / name).rename(out / name)
    shutil.rmtree(directory, ignore_errors=True)


async def _keep(bus: Bus, instances: int | None) -> None:
    """Tells the planner to keep this number of instances. None: the number that the load needs."""
    wish = SetInstances(name=scenario.MODEL, instances=instances)
    await bus.request(subjects.PLANNER_SCALE, wish, ScaleAccepted, timeout=READY_S)
