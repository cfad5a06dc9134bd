"""What may go wrong in a cluster, each fault with its time and the code that causes it.

A fault hits a node by name, or by its role. With a role, the fault waits for a node that has it,
and hits a named node if none appears. At least two nodes are always left working; a fault that
would leave fewer is skipped.
"""

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shared import subjects
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.ids import NodeId
from shared.messages.pool import Duty, Nodes, SetDuty
from simulation.cluster import GATEWAY, PLANNER, REGISTRY, Cluster

POLL_S = 0.01
PATIENCE_S = 8.0
"""Seconds that a fault waits for a node with its role."""
DUTY_TIMEOUT_S = 1.0
"""Seconds that an operator waits for the registry, and then before asking again."""
WORKING = 2
"""Number of nodes that are always left alone."""


class Role(enum.Enum):
    SOURCE = "a source of a running event"
    TARGET = "a target that loads"
    RELAY = "a target that others pull from"
    LEADER = "the leader of a path"
    REPLICA = "a replica"


@dataclass(frozen=True, slots=True)
class Whom:
    role: Role | None
    otherwise: str
    """The name of the node to hit if there is no role, or if no node has it."""

    def __str__(self) -> str:
        return f"{self.role.value}, else {self.otherwise}" if self.role else self.otherwise


class Field:
    """The place where faults happen."""

    def __init__(
        self,
        cluster: Cluster,
        find: Callable[[Role], list[str]],
        say: Callable[[str], None],
        crashed: Callable[[str], None],
    ) -> None:
        """`find`: nodes that have a role now. `crashed` is called before a process is killed."""
        self.cluster = cluster
        self.say = say
        self.crashed = crashed
        self.hits = 0
        """How many nodes were hit so far."""
        self._find = find
        self._hit: set[str] = set()

    async def look_for(self, whom: Whom) -> str:
        """A node that has the role. Nodes that are well come first."""
        give_up = now() + PATIENCE_S
        while whom.role is not None and now() < give_up:
            for name in self._find(whom.role):
                if name not in self._hit:
                    return name
            await asyncio.sleep(POLL_S)
        return whom.otherwise

    def well(self) -> list[str]:
        """The nodes that no fault has hit."""
        return [name for name in self.cluster.nodes if name not in self._hit]

    async def set_duty(self, node: str, duty: Duty, within_s: float = 0.0) -> None:
        """Tells the registry what a node may be used for, as `lambdascale node` does, until the
        registry has it."""
        wish = SetDuty(node=NodeId(node), duty=duty, within_s=within_s)
        while True:
            try:
                await self.cluster.bus.request(
                    subjects.REGISTRY_DUTY, wish, Nodes, timeout=DUTY_TIMEOUT_S
                )
                return
            except LambdaScaleError as error:
                self.say(f"again, {node} is to be {duty.value}: {error}")
                await asyncio.sleep(DUTY_TIMEOUT_S)

    @contextmanager
    def hit(self, what: str, *names: str) -> Iterator[bool]:
        """Whether the nodes may be hit. If so, no other fault gets them until the block ends. The
        log has the begin and the end."""
        left = [name for name in self.well() if name not in names]
        if len(left) < WORKING or self._hit & set(names):
            self.say(f"skipped: {', '.join(names)} {what}")
            yield False
            return
        self._hit.update(names)
        self.hits += len(names)
        self.say(f"{', '.join(names)} {what}")
        try:
            yield True
        finally:
            self._hit.difference_update(names)
            self.say(f"over: {', '.join(names)} {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(ABC):
    at: float
    """Seconds after the start."""
    lasts: float

    @abstractmethod
    async def happen(self, field: Field) -> None:
        """Runs the fault from its time on, until it is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(Fault):
    """A node dies, and a new process comes back under its name."""

    whom: Whom

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        with field.hit("dead", name) as may:
            if may:
                field.crashed(name)
                field.cluster.crash(name)
                await asyncio.sleep(self.lasts)
                await field.cluster.begin(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(Fault):
    """A node ends in good order, and a new process comes back under its name."""

    whom: Whom

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        with field.hit("left", name) as may:
            if may:
                field.crashed(name)  # its memory goes all the same
                await field.cluster.stop(name)
                await asyncio.sleep(self.lasts)
                await field.cluster.begin(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Fault):
    """A node's process is stopped (SIGSTOP): its connections stay open and say nothing."""

    whom: Whom

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        with field.hit("paused", name) as may:
            if may:
                field.cluster.broker.stop(name)
                field.cluster.network.pause(name)
                await asyncio.sleep(self.lasts)
                field.cluster.network.resume(name)
                field.cluster.broker.resume(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusCut(Fault):
    """A node is cut off from the bus, but not from its peers."""

    whom: Whom

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        with field.hit("cut off from the bus", name) as may:
            if may:
                field.cluster.broker.cut(name)
                await asyncio.sleep(self.lasts)
                field.cluster.broker.heal(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCut(Fault):
    """Two nodes cannot reach each other; everybody else can."""

    whom: Whom
    other: str

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        if name == self.other:
            return
        with field.hit("cut off from each other", name, self.other) as may:
            if may:
                field.cluster.network.block(name, self.other)
                await asyncio.sleep(self.lasts)
                field.cluster.network.unblock(name, self.other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink(Fault):
    whom: Whom
    share: float
    """The share of its rate that remains, in both directions."""

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        network, rate = field.cluster.network, field.cluster.spec.hardware.link_bytes_per_s
        with field.hit(f"at {self.share:.0%} of its rate", name) as may:
            if may:
                network.set_rates(name, out=rate * self.share, into=rate * self.share)
                await asyncio.sleep(self.lasts)
                network.set_rates(name, out=rate, into=rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(Fault):
    """Reads from a node bring wrong bytes."""

    whom: Whom
    reads: int

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        if name in field.cluster.network:
            field.say(f"{self.reads} reads from {name} are wrong")
            field.cluster.network.corrupt(name, self.reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage(Fault):
    """The bus is away for everybody."""

    async def happen(self, field: Field) -> None:
        field.say("the bus is away")
        field.cluster.broker.fail()
        await asyncio.sleep(self.lasts)
        field.cluster.broker.recover()
        field.say("the bus is back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Fault):
    share: float
    """The share of messages that is lost."""

    async def happen(self, field: Field) -> None:
        field.say(f"the bus loses {self.share:.1%} of messages")
        field.cluster.broker.loss = self.share
        await asyncio.sleep(self.lasts)
        field.cluster.broker.loss = 0.0
        field.say("the bus loses nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter(Fault):
    """Messages are delayed, each subject by its own time, so that they arrive in another order."""

    up_to_s: float

    async def happen(self, field: Field) -> None:
        field.say(f"messages come up to {self.up_to_s:.3f} s late")
        field.cluster.broker.jitter_s = self.up_to_s
        await asyncio.sleep(self.lasts)
        field.cluster.broker.jitter_s = 0.0
        field.say("messages come at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanish(Fault):
    """Half of the nodes die at the same time. New processes come back under their names."""

    async def happen(self, field: Field) -> None:
        half = field.well()[: len(field.cluster.nodes) // 2]
        with field.hit("dead, all at once", *half) as may:
            if may:
                for name in half:
                    field.crashed(name)
                    field.cluster.crash(name)
                await asyncio.sleep(self.lasts)
                for name in half:
                    await field.cluster.begin(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim(Fault):
    """Half of the nodes are taken away after a notice, as clouds do. New processes come back under
    their names."""

    notice_s: float

    async def happen(self, field: Field) -> None:
        cluster = field.cluster
        half = field.well()[: len(cluster.nodes) // 2]
        with field.hit(f"taken away within {self.notice_s:.1f} s", *half) as may:
            if may:
                async with asyncio.TaskGroup() as group:
                    for name in half:
                        group.create_task(self._take(field, name), name=f"{name} is taken away")
                await asyncio.sleep(self.lasts)
                for name in half:
                    await cluster.begin(name)

    async def _take(self, field: Field, name: str) -> None:
        field.crashed(name)  # its memory goes, sooner or later
        try:
            async with asyncio.timeout(self.notice_s):
                await field.cluster.stop(name, self.notice_s)
        except TimeoutError:
            field.say(f"{name} dead, its time was over")
            field.cluster.crash(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Fault):
    """An operator drains a node, with a limit or none, and later takes that back."""

    whom: Whom
    limit_s: float

    async def happen(self, field: Field) -> None:
        name = await field.look_for(self.whom)
        with field.hit("drained", name) as may:
            if may:
                await field.set_duty(name, Duty.DRAINING, self.limit_s)
                await asyncio.sleep(self.lasts)
                await field.set_duty(name, Duty.ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaderless(Fault):
    """The durable store has no leader for a while, as after the death of a NATS server: nothing is
    read or written. Messages pass."""

    async def happen(self, field: Field) -> None:
        field.say("the store has no leader")
        field.cluster.broker.leaderless = True
        await asyncio.sleep(self.lasts)
        field.cluster.broker.leaderless = False
        field.say("the store has a leader")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCut(Fault):
    """The active planner or registry alone does not reach the durable store for a while. Messages
    pass, so that nodes and gateways hear it."""

    role: str

    async def happen(self, field: Field) -> None:
        name, broker = field.cluster.active(self.role), field.cluster.broker
        refused = broker.refused
        field.say(f"{name} does not reach the store")
        broker.storeless.add(name)
        await asyncio.sleep(self.lasts)
        broker.storeless.discard(name)
        field.say(f"{name} reaches the store; {broker.refused - refused} messages were refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockJump(Fault):
    """The wall clock of a role's active process, or of a node, jumps and stays where it is."""

    process: str
    by_s: float

    async def happen(self, field: Field) -> None:
        roles = (PLANNER, REGISTRY, GATEWAY)
        name = field.cluster.active(self.process) if self.process in roles else self.process
        field.say(f"the clock of {name} jumps by {self.by_s:.0f} s")
        field.cluster.clocks[name].skew_ns += round(self.by_s * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Fault):
    """The active planner or registry, or a gateway, ends, killed or in good order, and comes
    back."""

    role: str
    killed: bool

    async def happen(self, field: Field) -> None:
        name = field.cluster.active(self.role)
        if self.killed:
            field.say(f"{name} dead")
            field.crashed(name)
            field.cluster.crash(name)
        else:
            field.say(f"{name} stops")
            await field.cluster.stop(name)
            field.crashed(name)
        await asyncio.sleep(self.lasts)
        await field.cluster.begin(name)
        field.say(f"{name} back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence(Fault):
    """The active planner or registry, or a gateway, is stopped (SIGSTOP) or cut off from the bus
    for a while, and then goes on as if nothing had happened."""

    role: str
    stopped: bool

    async def happen(self, field: Field) -> None:
        name, broker = field.cluster.active(self.role), field.cluster.broker
        field.say(f"{name} {'paused' if self.stopped else 'cut off from the bus'}")
        (broker.stop if self.stopped else broker.cut)(name)
        await asyncio.sleep(self.lasts)
        (broker.resume if self.stopped else broker.heal)(name)
        field.say(f"{name} goes on")
