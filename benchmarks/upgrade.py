"""An upgrade of a whole cluster while it works: every process is restarted, one after the other.

Run: .venv/bin/python -m benchmarks.upgrade [--from DIR]. A real cluster (three nats-servers, two of
each other service, four nodes) is under a steady load. Each process in turn is told to end
(SIGTERM) and started again, and the next one's turn comes when all is well: nodes, then registries,
planners and gateways, then nats-servers. With `--from DIR`, a
checkout of the release before, the cluster begins as that release, and each process comes back as
this one, so that both work side by side. Settings that the release before does not know are not set
at all. Every answer is compared with what transformers says.
"""

import argparse
import asyncio
import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.chaos import harness
from benchmarks.chaos.bench import MODEL, answers, prompts
from benchmarks.chaos.client import Answered, Client, End, Request
from benchmarks.watched import watched
from services import health
from services.local.cluster import Cluster, ClusterSpec
from services.local.demo_model import make_checkpoint
from services.local.nats_servers import Place, free_ports
from services.local.processes import NATS
from services.local.publishing import import_model
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BusError
from shared.ids import new_id
from shared.messages.scaling import ImportModel, PlannerQuery, PlannerState
from shared.pool_pages import read_pool

PER_S = 4.0
"""Requests a second."""
TOKENS = 40
SILENCE_S = 15.0
WELL_S = 120.0
"""Seconds within which all must be well again after a restart."""
AFTER_S = 2.0
"""Seconds of load after the last restart."""


_PRINT_SETTINGS = """
from msgspec.structs import fields
from shared.config import PREFIX, Config

for table in fields(Config):
    for key in fields(table.type):
        print(f"{PREFIX}{table.name}_{key.name}".upper())
"""
"""Prints the settings of the release in whose checkout it runs, as variables of the environment."""


def settings_of(checkout: Path) -> set[str]:
    """The variables that a release has settings for. CalledProcessError if it does not say so."""
    command = (sys.executable, "-c", _PRINT_SETTINGS)
    said = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return set(said.stdout.split())


def common_settings(before: Path) -> tuple[str, ...]:
    """The command that runs another command with those settings only that both releases know: what
    is new is set when all are upgraded. Empty: they know the same."""
    new = settings_of(Path(__file__).parents[1]) - settings_of(before)
    return ("env", *(f"--unset={name}" for name in sorted(new))) if new else ()


class Load:
    """Requests at a steady rate, until it is stopped."""

    def __init__(
        self, client: Client, asked: list[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        self._client = client
        self._asked = asked
        self.answered: list[Answered] = []
        self.stop = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                group.create_task(self._send(number))
                try:
                    async with asyncio.timeout(1 / PER_S):
                        await self.stop.wait()
                    return
                except TimeoutError:
                    continue

    async def _send(self, number: int) -> None:
        prompt, right = self._asked[number % len(self._asked)]
        request = Request(new_id("key"), prompt, right)
        self.answered.append(await self._client.ask(request, number))


async def until_well(cluster: Cluster, bus: Bus, watch: Watch) -> None:
    """Waits until every process runs, planner and registry answer, every node is there and a
    replica serves. TimeoutError after WELL_S."""

    async def is_well() -> bool:
        try:
            await bus.request(
                subjects.PLANNER_STATE, PlannerQuery(events=0), PlannerState, timeout=1.0
            )
            pool = await read_pool(partial(bus.request, timeout=1.0))
        except BusError:
            return False
        running = all(process.state == "running" for process in cluster.state.processes)
        return running and len(pool.nodes) == harness.NODES and bool(watch.replicas)

    async with asyncio.timeout(WELL_S):
        while not await is_well():  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.1)


def metrics_settings(role: str, port: int) -> dict[str, str]:
    """That a process says at this port whether it is ready. Gateways say it at their own."""
    own = role in ("planner", "registry", "node")
    return {f"LAMBDASCALE_{role.upper()}_METRICS_PORT": str(port)} if own else {}


async def until_ready(url: str) -> None:
    """Waits until a process serves, or stands by. TimeoutError after WELL_S."""
    async with asyncio.timeout(WELL_S):
        while not (await asyncio.to_thread(health.ask, f"{url}/ready"))[0]:  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.1)


async def measure(directory: Path, before: Path | None) -> list[Answered]:
    checkpoint = directory / "model"
    make_checkpoint(checkpoint, MODEL)
    asked = prompts(0)
    right = await asyncio.to_thread(answers, checkpoint, asked, TOKENS)
    common = common_settings(before) if before else ()
    release = (*(common or ("env",)), "-C", str(before)) if before else ()
    roles = harness.roles()
    ports = dict(zip(roles, free_ports(len(roles)), strict=True))
    settings = {name: metrics_settings(role, ports[name]) for name, role in roles.items()}
    places = {name: Place(within=release, settings=settings[name]) for name in roles}
    spec = ClusterSpec(
        directory=directory / "cluster",
        nodes=harness.NODES,
        gateways=harness.GATEWAYS,
        standbys=harness.STANDBYS,
        nats_servers=harness.NATS_SERVERS,
        gateway_port=0,
        settings=harness.SETTINGS,
        apart=True,
        places=places,
    )
    async with watched(spec) as (cluster, bus, watch):
        model = ImportModel(path=str(checkpoint), name=harness.MODEL, min_instances=2)
        await import_model(bus, model, say=lambda _: None)
        await until_well(cluster, bus, watch)
        gateways = [name for name, role in roles.items() if role == "gateway"]
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        urls |= dict(zip(gateways, cluster.state.gateway_urls, strict=True))
        client = Client(harness.MODEL, cluster.state.gateway_urls, SILENCE_S)
        load = Load(client, list(zip(asked, right, strict=True)))
        sending = asyncio.create_task(load.run())
        try:
            for name in reversed(places):
                began = time.monotonic()
                cluster.signal(name, signal.SIGTERM)
                await cluster.ended(name)
                places[name] = Place(within=common, settings=settings[name])
                await cluster.start_again(name)
                await until_well(cluster, bus, watch)
                if not name.startswith(NATS):  # that is back when `start_again` returns
                    await until_ready(urls[name])
                print(f"{name}: well after {time.monotonic() - began:.1f} s", flush=True)
            await asyncio.sleep(AFTER_S)
        finally:
            load.stop.set()
            await sending
        return load.answered


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--from", dest="before", type=Path, metavar="DIR", help="a checkout of the release before"
    )
    before = parser.parse_args().before
    directory = Path(tempfile.mkdtemp(prefix="lambdascale-upgrade-"))
    answered = uvloop.run(measure(directory, before.absolute() if before else None))
    counts = {end: sum(each.end is end for each in answered) for end in End}
    gaps = [b - a for each in answered for a, b in itertools.pairwise(each.came_at)]
    hung = sum(len(each.silent) for each in answered)
    again = sum(each.tries > 1 for each in answered)
    print(f"{len(answered)} answers: " + ", ".join(f"{n} {end.value}" for end, n in counts.items()))
    print(
        f"{hung} silences over {SILENCE_S:.0f} s, {again} came again, longest gap {max(gaps):.2f} s"
    )
    if counts[End.RIGHT] == len(answered) and not hung:
        shutil.rmtree(directory)
        return 0
    print(f"logs are in {directory}")
    for each in answered:
        if each.end is not End.RIGHT:
            print(f"{each.end.value}: {each.said}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
