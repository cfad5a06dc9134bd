"""The cluster that a chaos run torments: every process on a host of its own."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

from benchmarks.chaos.faults import Fault, Kind
from benchmarks.testbed import Testbed, Wiring, control_address, data_address
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.nats_servers import Place
from services.local.nats_servers import names as nats_names
from services.local.processes import NATS
from services.local.publishing import import_model
from services.local.watch import Watch
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.errors import BusError, StartFailed
from shared.ids import ModelName
from shared.messages.scaling import ImportModel

MODEL = ModelName("chaos")
NODES, GATEWAYS, STANDBYS, NATS_SERVERS = 4, 2, 1, 3
LINK_MBIT, SLOW_MBIT = 20.0, 0.8
DOWN_S, UP_S = 0.3, 1.0
"""How long the links of an adapter that resets are down, and then up."""
RESTART_S = 1.0
"""Seconds from a death until the process is started again, as the systemd units have it."""
SETTINGS = {
    "LAMBDASCALE_NODE_THREADS": "1",
    "LAMBDASCALE_NODE_ARENA_BYTES": str(16 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": "4",
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "300000",
    "LAMBDASCALE_NODE_EVACUATE_S": "20",
    "LAMBDASCALE_PLANNER_IDLE_S": "1",
}
"""So that a copy takes 2 s, an answer too, and two cores carry it all."""


class Harness:
    """A running cluster, with what keeps it running."""

    def __init__(self, cluster: Cluster, bus: Bus, watch: Watch, bed: Testbed | None) -> None:
        self.cluster = cluster
        self.bus = bus
        self.watch = watch
        self._bed = bed
        self._hosts = {name: number for number, name in enumerate(roles())}

    @property
    def gateways(self) -> dict[str, str]:
        """The gateways' URLs, by the names of their processes."""
        names = [name for name, role in roles().items() if role == "gateway"]
        return dict(zip(names, self.cluster.state.gateway_urls, strict=True))

    async def suffer(self, fault: Fault) -> None:
        """Makes the fault happen. Returns when it is over."""
        if fault.kind is Kind.RESET:
            await self._reset_again_and_again(fault)
            return
        self._strike(fault)
        if fault.kind is Kind.NOTICE:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault.for_s):
                    await self.cluster.ended(fault.process)
                    return
        else:
            await asyncio.sleep(fault.for_s)
        self._relieve(fault)

    async def _reset_again_and_again(self, fault: Fault) -> None:
        host, bed, until = self._hosts[fault.process], self._network(), monotonic() + fault.for_s
        while monotonic() < until:
            bed.cut(host)
            bed.hosts[host].reset_connections()
            await asyncio.sleep(DOWN_S)
            bed.join(host)
            await asyncio.sleep(UP_S)

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.KILL:
                self.cluster.signal(fault.process, signal.SIGKILL)
            case Kind.END | Kind.NOTICE:
                self.cluster.signal(fault.process, signal.SIGTERM)
            case Kind.PAUSE:
                self.cluster.signal(fault.process, signal.SIGSTOP)
            case Kind.CUT:
                self._network().cut(self._hosts[fault.process])
            case Kind.SLOW:
                self._network().shape(self._hosts[fault.process], SLOW_MBIT)

    def _relieve(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.NOTICE:  # it has not left in time
                self.cluster.signal(fault.process, signal.SIGKILL)
            case Kind.PAUSE:
                self.cluster.signal(fault.process, signal.SIGCONT)
            case Kind.CUT:
                self._network().join(self._hosts[fault.process])
            case Kind.SLOW:
                self._network().shape(self._hosts[fault.process], LINK_MBIT)
            case _:
                pass

    def _network(self) -> Testbed:
        assert self._bed is not None, "a fault of the network was drawn without one"
        return self._bed

    async def keep(self) -> None:
        """Starts again what ends, until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self.cluster.names:
                group.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        while True:
            await self.cluster.ended(name)
            await asyncio.sleep(RESTART_S)
            with contextlib.suppress(BusError, StartFailed):  # then it is tried again
                await self.cluster.start_again(name)


def roles() -> dict[str, str]:
    """The role of each process of the cluster, by its name."""
    spec = ClusterSpec(directory=Path(), nodes=NODES, gateways=GATEWAYS, standbys=STANDBYS)
    return {
        **dict.fromkeys(nats_names(NATS_SERVERS), NATS),
        **Cluster(spec).services,
        **{f"node-{number}": "node" for number in range(NODES)},
    }


@contextmanager
def network() -> Iterator[Testbed]:
    """A host for each process. ConfigError if this machine cannot have it."""
    with Testbed(Wiring(hosts=len(roles()), link_mbit=LINK_MBIT)) as bed, bed.hub.entered():
        yield bed


@asynccontextmanager
async def running(
    directory: Path, checkpoint: Path, bed: Testbed | None, say: Callable[[str], None]
) -> AsyncIterator[Harness]:
    spec = ClusterSpec(
        directory=directory,
        nodes=NODES,
        gateways=GATEWAYS,
        standbys=STANDBYS,
        nats_servers=NATS_SERVERS,
        gateway_port=0,
        settings=SETTINGS,
        apart=True,
        places=_places(bed) if bed else {},
    )
    cluster = Cluster(spec)
    await cluster.start(say)
    try:
        async with NatsBus(bus_config(cluster.state), "chaos") as bus:
            watch = Watch()
            await watch.follow(bus)
            record = await import_model(
                bus, ImportModel(path=str(checkpoint), name=MODEL, min_instances=1), say=say
            )
            watch.n_blocks = record.n_blocks
            harness = Harness(cluster, bus, watch, bed)
            keeping = asyncio.create_task(harness.keep())
            try:
                yield harness
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
    finally:
        await cluster.stop()


def _places(bed: Testbed) -> Mapping[str, Place]:
    """Messages go over the control network, weights over the data network."""
    places = {}
    for number, (name, role) in enumerate(roles().items()):
        address = control_address(number)
        settings = {
            "gateway": {"LAMBDASCALE_GATEWAY_HOST": address},
            "node": {"LAMBDASCALE_NODE_HOST": data_address(number)},
        }.get(role, {})
        places[name] = Place(address, bed.hosts[number].path, settings=settings)
    return places
