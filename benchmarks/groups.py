"""A model that fits no device spreads from one machine to others, in the simulation.

Run: `.venv/bin/python -m benchmarks.groups`, a minute. A Llama-2-70B lies on the eight devices of
an H800 machine, a part on each, and each device has a link of 400 Gbit/s. Then three machines more
are asked for: device i of each needs part i. All processes are the real services, in virtual time.

limit      one copy over the links of one machine, all at once
transfer   from the first request for a block to the last block
makespan   from the decision to the last device that serves
"""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.planner.core.events import TERMINAL
from shared import subjects, telemetry
from shared.config import TelemetryConfig
from shared.ids import ModelName
from shared.messages.instances import Instance
from shared.messages.scaling import (
    EventRecord,
    PlannerQuery,
    PlannerState,
    ScaleAccepted,
    SetInstances,
)
from simulation import loop, systems
from simulation.cluster import Cluster, ClusterSpec, serves_alone
from simulation.hardware import hardware
from simulation.models import model

MODEL = ModelName("llama-2-70b")
DEVICES, LAYERS = 8, 82  # a block for each layer, the embedding and the head
BAR = 1.05
LOOK_S, LIMIT_S = 0.01, 600.0


@dataclass(frozen=True)
class Spread:
    record: EventRecord
    groups: tuple[Instance, ...]
    limit_s: float

    @property
    def transfer_s(self) -> float:
        actual = self.record.actual
        return (actual.last_block_s or 0.0) - (actual.asked_s or 0.0)

    @property
    def makespan_s(self) -> float:
        return self.record.actual.all_complete_s or 0.0


def spec(machines: int) -> ClusterSpec:
    return ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware("h800-400g"),
        models=(model(MODEL),),
        nodes=DEVICES * machines,
        devices=DEVICES,
        blocks=LAYERS,
        chunks=16,
        anticipate=False,
        checked=False,
    )


async def spread(machines: int) -> Spread:
    given = spec(machines)
    async with Cluster(given) as cluster:
        await cluster.serving()
        await _until(cluster, lambda state: all(e.state in TERMINAL for e in state.events))
        ask = SetInstances(name=MODEL, instances=machines)
        accepted = await cluster.bus.request(
            subjects.PLANNER_SCALE, ask, ScaleAccepted, timeout=5.0
        )
        state = await _until(
            cluster,
            lambda state: (
                state.events[0].id == accepted.event
                and state.events[0].state in TERMINAL
                and len(_groups(state)) == machines
            ),
        )
    rate = DEVICES * given.hardware.link_bytes_per_s
    return Spread(state.events[0], _groups(state), given.models[0].nbytes / rate)


async def _until(cluster: Cluster, there: Callable[[PlannerState], bool]) -> PlannerState:
    async with asyncio.timeout(LIMIT_S):
        while True:
            state = await cluster.bus.request(
                subjects.PLANNER_STATE, PlannerQuery(), PlannerState, timeout=5.0
            )
            if there(state):
                return state
            await asyncio.sleep(LOOK_S)


def _groups(state: PlannerState) -> tuple[Instance, ...]:
    return tuple(i for each in state.sets for i in each.instances if serves_alone(i))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", type=int, default=4, help="how many there are in the end")
    args = parser.parse_args()
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    found = loop.run(spread(args.machines))
    machines = [sorted({s.node for s in group.stages}) for group in found.groups]
    sizes = sorted({len(nodes) for nodes in machines})
    print(f"{len(found.groups)} groups of {sizes} devices; strategy {found.record.strategy}")
    print(f"limit     {found.limit_s:.3f} s")
    for name, seconds in (("transfer", found.transfer_s), ("makespan", found.makespan_s)):
        ratio = seconds / found.limit_s
        print(f"{name}  {seconds:.3f} s, {ratio:.3f} x ({'met' if ratio <= BAR else 'not met'})")
    moved = found.record.bytes_moved * spec(args.machines).unit / 1e9
    print(f"{moved:.1f} GB moved, predicted {found.record.predicted.all_complete_s} s")


if __name__ == "__main__":
    main()
