"""Publishes a checkpoint: a node imports it, and requests are served once there is an instance."""

import asyncio
from collections.abc import Callable
from functools import partial

from services.local.asking import ask
from services.local.copies import copies, shortfalls
from shared import subjects
from shared.bus.base import Bus, On
from shared.errors import NotFound
from shared.ids import ModelName, NodeId, check_model_name
from shared.messages import Message
from shared.messages.changes import heard_set
from shared.messages.instances import InstanceChange, InstanceSet, InstanceState
from shared.messages.load import GatewayLoad
from shared.messages.pool import ModelRecord
from shared.messages.scaling import EventChanged, EventState, ImportModel, ModelImported
from shared.pool_pages import read_pool

IMPORT_TIMEOUT_S = 3600.0
"""Seconds. Packing reads and writes the whole checkpoint."""
SERVED_S = 60.0


async def import_model(
    bus: Bus, request: ImportModel, *, node: NodeId | None = None, say: Callable[[str], None]
) -> ModelRecord:
    """Has a node (the first, unless one is named) pack and publish a checkpoint. The path is the
    node's, and absolute."""
    pool = await read_pool(partial(ask, bus))
    nodes = sorted(view.info.node for view in pool.nodes)
    if not nodes:
        raise NotFound("no node is there to import the model; see `lambdascale status`")
    if node is not None and node not in nodes:
        raise NotFound(f"node {node!r} is not there; nodes are {', '.join(nodes)}")
    check_model_name(request.name)
    chosen = node or nodes[0]
    say(f"importing {request.path} on {chosen}")
    reply = await ask(
        bus, subjects.node_import(chosen), request, ModelImported, timeout=IMPORT_TIMEOUT_S
    )
    record = reply.record
    say(f"published {record.name}: {record.nbytes / 1e6:.1f} MB in {record.n_blocks} blocks")
    return record


class _Served:
    """Hears on the bus whether a gateway can hand requests for the model to an instance."""

    def __init__(self, name: ModelName, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._set: InstanceSet | None = None
        self._instance = False
        self._over = asyncio.Event()

    async def follow(self, bus: Bus) -> None:
        for subject in (subjects.INSTANCES, subjects.LOAD_GATEWAY, subjects.EVENTS):
            await bus.subscribe(subject, On(Message, self._on))

    async def wait(self) -> None:
        try:
            async with asyncio.timeout(SERVED_S):
                await self._over.wait()
        except TimeoutError:
            self._say(f"nothing serves {self._name} yet: `lambdascale events` tells more")

    async def _on(self, message: Message) -> None:
        match message:
            case InstanceSet(name=self._name) | InstanceChange(now=InstanceSet(name=self._name)):
                if found := heard_set(self._set, message):
                    self._set = found
                    states = [instance.state for instance in found.instances]
                    self._instance = InstanceState.SERVING in states
            case GatewayLoad() if self._instance:
                if self._name in message.listed:
                    self._over.set()
            case EventChanged():
                record = message.record
                if record.name == self._name and record.state is EventState.FAILED:
                    self._say(f"{record.id} failed: {record.error}")
            case _:
                pass


async def publish(
    bus: Bus, request: ImportModel, *, node: NodeId | None = None, say: Callable[[str], None]
) -> ModelRecord:
    """Imports a model and, unless it may sleep, waits until it is served. Says which durable copies
    it lacks then."""
    served = _Served(request.name, say)
    await served.follow(bus)
    record = await import_model(bus, request, node=node, say=say)
    if record.min_instances:
        await served.wait()
    if missing := shortfalls(await copies(bus)).get(record.name):
        say(f"{record.name} has {missing}")
    return record
