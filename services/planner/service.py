"""The planner's shell on the bus: what it hears goes to the core, and what the core commands is
done."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from services.planner.core.choose import AUTO
from services.planner.core.desk import Settings
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.core.planner import Planner
from services.planner.core.scaling import Decide, decide
from services.planner.core.serving.strategies import SERVING
from services.planner.core.stimuli import Heard, Wake
from services.planner.shell import Shell
from services.planner.store import Store
from shared import subjects, telemetry
from shared.bus.base import Bus, On
from shared.capabilities import load_signer
from shared.clock import now, wall_ns
from shared.config import PlannerConfig
from shared.errors import ConfigError
from shared.ids import new_id
from shared.messages import Message
from shared.messages.chronicle import ChronicleQuery, EventQuery
from shared.messages.decisions import Decisions, DecisionsQuery
from shared.messages.instances import InstanceSets, InstancesQuery
from shared.messages.load import GatewayLoad
from shared.messages.pool import ModelAdded, ModelRemoved, NodeGone, NodeJoined, NodeStatus
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventRecord,
    FirstPartialToken,
    PeerSuspect,
    PlannerQuery,
    PlannerState,
    PullFailed,
    SetInstances,
)
from shared.messages.story import StoryQuery, Told
from shared.service import Service

if TYPE_CHECKING:
    from shared.metrics import Metrics


class PlannerService(Service):
    role: ClassVar[str] = "planner"
    core_type: ClassVar[type[Planner]] = Planner
    """Simulations and tests use a core that is validated after every stimulus."""

    def __init__(self, bus: Bus, config: PlannerConfig, decide: Decide = decide) -> None:
        """`decide`: how many replicas a model needs. Simulations compare other rules."""
        super().__init__("planner")
        if config.strategy not in (known := (AUTO, *STRATEGIES)):
            raise ConfigError(f"planner.strategy {config.strategy!r}: known are {', '.join(known)}")
        if config.serving not in SERVING:
            raise ConfigError(f"planner.serving {config.serving!r}: known are {', '.join(SERVING)}")
        self._bus = bus
        self._config = config
        self._decide = decide
        self._observe: Callable[[EventRecord], None] = lambda _: None
        """Told of every change of an event."""

    def metrics(self) -> "Metrics":
        from services.planner.metrics import PlannerMetrics

        metrics = super().metrics()
        shown = PlannerMetrics(metrics, lambda: self.core if self.ready else None)
        self._observe = shown.event_changed
        return metrics

    async def open(self) -> None:
        bus = await self.become_active(self._bus)
        self._store = Store(bus, self.log)
        archive = await self._store.load()
        self.core = self.core_type(settings(self._config, self.term, self._decide), archive)
        signer = load_signer(self.role, self._config.signing_key_file)
        self._shell = Shell(
            bus,
            self.core,
            self._store,
            self.log,
            self._spawn,
            self._event_changed,
            signer,
        )
        self.resources.callback(self._shell.close)
        self.spawn(self._store.run(), name="store")
        self.spawn(self._shell.send_outbox(), name="outbox")
        nodes = On(NodeJoined, self._hear), On(NodeGone, self._hear)
        self.own(await bus.subscribe(subjects.POOL_NODES, *nodes))
        models = On(ModelAdded, self._hear), On(ModelRemoved, self._hear)
        self.own(await bus.subscribe(subjects.POOL_MODELS, *models))
        self.own(await bus.subscribe(subjects.POOL_STATUS, On(NodeStatus, self._hear)))
        self.own(await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, self._hear)))
        arrivals = (
            On(BlocksArrived, self._gather),
            On(BlockArrived, self._gather),
            On(PullFailed, self._hear),
            On(FirstPartialToken, self._hear),
        )
        self.own(await bus.subscribe(subjects.ARRIVALS, *arrivals))
        self.own(await bus.subscribe(subjects.PLANNER_SUSPECT, On(PeerSuspect, self._hear)))
        self._shell.feed(Wake())
        await self._shell.ready.wait()  # waits for the registry, as long as it takes
        self.own(await bus.serve(subjects.PLANNER_STATE, PlannerQuery, self._state))
        self.own(await bus.serve(subjects.PLANNER_INSTANCES, InstancesQuery, self._instances))
        self.own(await bus.serve(subjects.PLANNER_SCALE, SetInstances, self._shell.ask))
        self.own(await bus.serve(subjects.PLANNER_DECISIONS, DecisionsQuery, self._decisions))
        self.own(await bus.serve(subjects.PLANNER_CHRONICLE, ChronicleQuery, self._chronicle))
        self.own(await bus.serve(subjects.PLANNER_EVENT, EventQuery, self._event))
        self.own(await bus.serve(subjects.PLANNER_STORY, StoryQuery, self._story))
        if self._config.scaler_port:
            self._serve_scaler()

    def _serve_scaler(self) -> None:
        from services.planner.scaler import Scaler  # gRPC: 0.1 s and 20 MB, for those who use it

        host, port = self._config.scaler_host, self._config.scaler_port
        scaler = Scaler(self.core.wanted_nodes)
        self.spawn(scaler.serve(host, port, self.log), name="scaler", contained=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> Any:
        return self.spawn(work, name=name)

    def _event_changed(self, record: EventRecord) -> None:
        self._observe(record)

    async def drain(self) -> None:
        await self._store.settled()

    async def _hear(self, message: Heard) -> None:
        self._shell.feed(message)

    async def _gather(self, report: BlockArrived | BlocksArrived) -> None:
        self._shell.gather(report)

    async def _state(self, message: PlannerQuery) -> Message:
        return PlannerState(sets=self.core.sets(), events=self.core.events(message.events))

    async def _instances(self, message: InstancesQuery) -> Message:
        return InstanceSets(sets=self.core.sets(message.names))

    async def _decisions(self, message: DecisionsQuery) -> Message:
        return Decisions(decisions=self.core.decisions(message.name, message.limit))

    async def _chronicle(self, message: ChronicleQuery) -> Message:
        return self.core.chronicle(message.last_s, wall_ns())

    async def _event(self, message: EventQuery) -> Message:
        return self.core.event(message.event, message.after)

    async def _story(self, message: StoryQuery) -> Message:
        return Told.of(self.core.story(message.subject), now(), wall_ns())


def settings(config: PlannerConfig, epoch: int, decide: Decide = decide) -> Settings:
    return Settings(
        epoch=epoch,
        new_id=new_id,
        new_trace=telemetry.new_trace,
        serving=SERVING[config.serving],
        strategy=config.strategy,
        tick_s=config.tick_s,
        queue_per_instance=config.queue_per_instance,
        prefill_wait_s=config.prefill_wait_s,
        fill=config.fill,
        idle_s=config.idle_s,
        scale_up_hold_s=config.scale_up_hold_s,
        horizon_s=config.horizon_s,
        stray_s=config.stray_s,
        anticipate=config.anticipate,
        max_stages=config.max_stages,
        link_bytes_per_s=config.link_bytes_per_s,
        disk_bytes_per_s=config.disk_bytes_per_s,
        step_overhead_s=config.step_overhead_s,
        decide=decide,
    )
