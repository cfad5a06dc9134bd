"""The demo's course: cluster, model, reference answers, burst, scale-in, report."""

import asyncio
import math
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from services.cli.cluster import Cluster, ClusterSpec, bus_config, node_id
from services.cli.demo import scenario
from services.cli.demo.burst import Ask, Outcome, asks, reference, run_burst
from services.cli.demo.figure import draw
from services.cli.demo.report import make_report
from services.cli.demo.view import render
from services.cli.demo.watch import Watch
from services.cli.demo_model import make_demo_model
from services.cli.models import import_model
from shared.bus.nats import NatsBus
from shared.errors import LambdaScaleError

PARALLEL_REFERENCE = scenario.SLOTS
READY_S = 30.0
SCALE_IN_S = 30.0
REFRESH_S = 0.1


def play(out: Path, count: int) -> dict[str, Any]:
    """Runs the demo with `count` requests; figure, report and logs go to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    return asyncio.run(Demo(out, count).run())


class Demo:
    def __init__(self, out: Path, count: int) -> None:
        self.out = out
        self.count = count
        self.phase = ""
        self.console = Console(stderr=True)
        self.figure = self.out / "event.png"
        self.nodes = [node_id(number) for number in range(scenario.NODES)]
        self.watch = Watch()
        self.outcomes: list[Outcome] = []
        self.requests = asks(self.count, scenario.TOKENS)

    async def run(self) -> dict[str, Any]:
        model = self.out / "model"
        if not (model / "config.json").exists():
            self._say("making a small model")
            await asyncio.to_thread(make_demo_model, model)
        with tempfile.TemporaryDirectory(prefix="lambdascale-demo-") as directory:
            cluster = Cluster(self._spec(Path(directory), model))
            self._say(f"starting a cluster of {scenario.NODES} nodes")
            await cluster.start()
            try:
                report = await self._on(cluster, model)
            finally:
                self._say("ending the cluster")
                await cluster.stop()
                keep_records(Path(directory), self.out)
        self._write(report)
        return report

    def _spec(self, directory: Path, model: Path) -> ClusterSpec:
        nbytes = (model / "model.safetensors").stat().st_size
        settings = {
            "LAMBDASCALE_NODE_LINK_BYTES_PER_S": str(int(nbytes / scenario.COPY_S)),
            "LAMBDASCALE_NODE_ARENA_BYTES": str(int(nbytes * scenario.ARENA_SPARE)),
            "LAMBDASCALE_NODE_STEP_FLOOR_S": str(scenario.STEP_FLOOR_S),
            "LAMBDASCALE_NODE_SLOTS": str(scenario.SLOTS),
            "LAMBDASCALE_NODE_THREADS": "1",
        }
        return ClusterSpec(
            directory=directory, nodes=scenario.NODES, gateway_port=0, settings=settings
        )

    async def _on(self, cluster: Cluster, model: Path) -> dict[str, Any]:
        url = cluster.state.gateway_url
        async with NatsBus(bus_config(cluster.state), "demo") as bus, self._live():
            await self.watch.follow(bus)
            self._say("publishing the model on node-0")
            record = await import_model(bus, model, scenario.MODEL, say=lambda _: None)
            self.watch.n_blocks = record.n_blocks
            await self._until(lambda: len(self.watch.replicas) == 1, READY_S, "the first replica")
            self._say("one complete node answers the reference requests")
            expected = await reference(url, scenario.MODEL, self.requests, PARALLEL_REFERENCE)
            self._say(f"a burst of {self.count} requests")
            start = time.monotonic()
            await run_burst(url, scenario.MODEL, self.requests, gaps(self.count), self.outcomes)
            self._say("the burst is over: the cluster shrinks")
            await self._until(self._small_again, SCALE_IN_S, "the scale-in")
        return self._report(expected, start)

    def _small_again(self) -> bool:
        return len(self.watch.instances) == 1 and len(self.watch.replicas) == 1

    def _report(self, expected: dict[Ask, tuple[int, ...]], start: float) -> dict[str, Any]:
        report = make_report(
            self.watch, self.outcomes, expected, start, replicas_at_end=len(self.watch.replicas)
        )
        draw(self.figure, self.watch, self.nodes, self.outcomes, start)
        return report

    def _write(self, report: dict[str, Any]) -> None:
        document = msgspec.json.format(msgspec.json.encode(report), indent=2)
        (self.out / "report.json").write_bytes(document + b"\n")

    async def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self.watch.change()
        except TimeoutError as error:
            raise LambdaScaleError(f"{what} did not happen within {limit_s:.0f} s") from error

    def _say(self, phase: str) -> None:
        self.phase = phase
        if not self.console.is_terminal:
            self.console.print(phase)

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        """The live picture, where there is a terminal to draw it on."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False) as live:

            async def refresh() -> None:
                while True:
                    live.update(
                        render(self.watch, self.nodes, self.outcomes, self.phase), refresh=True
                    )
                    await asyncio.sleep(REFRESH_S)

            task = asyncio.get_running_loop().create_task(refresh())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])


def gaps(count: int) -> list[float]:
    """A wave at once, then exponential gaps (their quantiles, shuffled)."""
    first = min(scenario.FIRST_WAVE, count)
    rest = count - first
    quantiles = [-math.log(1 - (i + 0.5) / max(rest, 1)) / scenario.RATE for i in range(rest)]
    random.Random(0).shuffle(quantiles)
    return [0.0] * first + quantiles


def keep_records(directory: Path, out: Path) -> None:
    """Logs and traces outlive the cluster's directory."""
    for name in ("logs", "traces"):
        shutil.rmtree(out / name, ignore_errors=True)
        if (directory / name).exists():
            shutil.copytree(directory / name, out / name)
