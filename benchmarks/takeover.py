"""How long nobody plans, or nobody knows the pool, when the active planner or registry ends.

Run: .venv/bin/python -m benchmarks.takeover. It starts a real cluster with one standby of each, and
kills (SIGKILL), stops (SIGSTOP) and ends (SIGTERM) the active process several times. A figure is
the time from the signal to the next answer. The limit is the bar that docs/design.md states.
"""

import asyncio
import signal
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.no_options import describe
from services.local.cluster import ELECTED, Cluster, ClusterSpec, bus_config
from shared import subjects
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.election.lease import LeaseRecord
from shared.errors import BusError
from shared.messages import Message
from shared.messages.pool import PoolPage, PoolQuery
from shared.messages.scaling import PlannerQuery, PlannerState

ROUNDS = 5
LIMIT_S = 2.0
TRY_S = 0.05
"""Seconds that a request may take, and so about the resolution of the figures."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
QUESTIONS: dict[str, tuple[str, Message, type[Message]]] = {
    "planner": (subjects.PLANNER_STATE, PlannerQuery(events=0), PlannerState),
    "registry": (subjects.REGISTRY_POOL, PoolQuery(), PoolPage),
}


async def lease_of(bus: Bus, role: str) -> LeaseRecord:
    entry = await (await bus.kv(subjects.KV_ACTIVE)).get(role)
    if entry is None:
        raise BusError(f"nobody has ever been active as {role}")
    return msgspec.msgpack.decode(entry.value, type=LeaseRecord)


def process_of(cluster: Cluster, role: str, lease: LeaseRecord) -> str:
    """The name of the process that has a role, by what the logs say."""
    logs = cluster.spec.directory / "logs"
    for name, its_role in cluster.services.items():
        if its_role == role and f"holder={lease.holder} " in (logs / f"{name}.log").read_text():
            return name
    raise BusError(f"no process says that it is {lease.holder}")


async def until_answered(bus: Bus, role: str) -> None:
    subject, question, answer = QUESTIONS[role]
    while True:
        try:
            await bus.request(subject, question, answer, timeout=TRY_S)
            return
        except BusError:
            await asyncio.sleep(TRY_S / 10)


async def until_one_stands_by(cluster: Cluster, name: str) -> None:
    """Waits until a process that was just started again says that it stands by."""
    log = cluster.spec.directory / "logs" / f"{name}.log"
    before = log.read_text().count("stands by")
    cluster.start_service(name)
    while log.read_text().count("stands by") == before:  # noqa: ASYNC110 - it says so there only
        await asyncio.sleep(TRY_S)


async def measure(cluster: Cluster, bus: Bus, role: str, number: signal.Signals) -> float:
    name = process_of(cluster, role, await lease_of(bus, role))
    began = time.monotonic()
    cluster.signal(name, number)
    if number is signal.SIGTERM:
        await cluster.ended(name)  # it answers until it has given its role back
    await until_answered(bus, role)
    took_s = time.monotonic() - began
    if number is signal.SIGSTOP:
        cluster.signal(name, signal.SIGCONT)
    await cluster.ended(name)
    await until_one_stands_by(cluster, name)
    return took_s


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        spec = ClusterSpec(directory=Path(directory), nodes=1, gateway_port=0, standbys=1)
        cluster = Cluster(spec)
        await cluster.start()
        try:
            async with NatsBus(bus_config(cluster.state), "bench") as bus:
                print(f"seconds from the signal to the next answer, {ROUNDS} rounds")
                for role in ELECTED:
                    for number in SIGNALS:
                        took = [await measure(cluster, bus, role, number) for _ in range(ROUNDS)]
                        print(
                            f"  {role:8} {number.name}  median {statistics.median(took):.2f}, "
                            f"worst {max(took):.2f}  (limit {LIMIT_S}: {max(took) / LIMIT_S:.2f} x)"
                        )
        finally:
            await cluster.stop()


if __name__ == "__main__":
    describe("takeover", __doc__)
    asyncio.run(main())
