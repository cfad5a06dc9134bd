"""What the demo's observer hears of one event, made up: a source, a target, two blocks."""

import time

from services.local.watch import Watch
from shared.ids import EventId, GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages import Message
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.scaling import (
    BlockArrived,
    EventChanged,
    EventRecord,
    EventState,
    Timings,
    Transfer,
)

MODEL = ModelName("m")
MODEL_ID = ModelId("id-of-m")
EVENT = EventId("ev-1")
SOURCE, TARGET = NodeId("node-0"), NodeId("node-1")
BLOCKS = 2
DECIDED_NS = time.time_ns()


def record(state: EventState = EventState.COMPLETE, error: str = "") -> EventRecord:
    complete = 2.0 if state is EventState.COMPLETE else None
    return EventRecord(
        id=EVENT,
        name=MODEL,
        model_id=MODEL_ID,
        state=state,
        cause="9 requests queued",
        revision=0,
        sources=(SOURCE,),
        targets=(TARGET,),
        strategy="binomial",
        transfers=tuple(Transfer(block + 1, SOURCE, TARGET, block) for block in range(BLOCKS)),
        n_blocks=BLOCKS,
        nbytes=200,
        detected_ns=DECIDED_NS,
        decided_ns=DECIDED_NS,
        history=((state, DECIDED_NS),),
        predicted=Timings(all_complete_s=1.9),
        actual=Timings(first_byte_s=0.1, first_partial_token_s=0.5, all_complete_s=complete),
        physical_limit_s=1.6,
        bytes_moved=200,
        trace=f"00-{'a' * 32}-{'b' * 16}-01",
        error=error,
    )


def arrived(block: int, *, begin_s: float, end_s: float) -> BlockArrived:
    """Times are seconds after the decision."""
    return BlockArrived(
        event=EVENT,
        revision=0,
        node=TARGET,
        generation=Generation(1),
        model_id=MODEL_ID,
        block=block,
        source=SOURCE,
        transport="tcp",
        nbytes=100,
        started_ns=DECIDED_NS,
        first_byte_ns=DECIDED_NS + int(begin_s * 1e9),
        finished_ns=DECIDED_NS + int(end_s * 1e9),
        ready_ns=DECIDED_NS + int(end_s * 1e9),
    )


def replica(node: NodeId, state: InstanceState = InstanceState.SERVING) -> Instance:
    return instance(f"replica-{node}", (Stage(node, "", 0, BLOCKS),), state)


def path(state: InstanceState = InstanceState.SERVING) -> Instance:
    return instance("path", (Stage(TARGET, "", 0, 1), Stage(SOURCE, "", 1, BLOCKS)), state)


def instance(name: str, stages: tuple[Stage, ...], state: InstanceState) -> Instance:
    return Instance(
        id=InstanceId(name), stages=stages, state=state, capacity=1.0, slots=4, event=EVENT
    )


def instances(*members: Instance) -> InstanceSet:
    return InstanceSet(name=MODEL, model_id=MODEL_ID, epoch=1, revision=1, instances=members)


def load(queued: int, running: int) -> GatewayLoad:
    found = ModelLoad(
        model=MODEL,
        queued_requests=queued,
        queued_tokens=0,
        running_requests=running,
        running_tokens=0,
        instance_requests={},
    )
    return GatewayLoad(gateway=GatewayId("gateway-0"), url="http://gateway", models=(found,))


STORY: tuple[Message, ...] = (
    instances(replica(SOURCE)),
    load(9, 4),
    EventChanged(record=record(EventState.TRANSFERRING)),
    arrived(0, begin_s=0.1, end_s=1.2),
    instances(replica(SOURCE), path()),
    load(3, 8),
    arrived(1, begin_s=0.9, end_s=2.0),
    instances(replica(SOURCE), replica(TARGET), path(InstanceState.MOVING)),
    EventChanged(record=record()),
    instances(replica(SOURCE), replica(TARGET)),
    load(0, 8),
    instances(replica(SOURCE)),
    load(0, 0),
)


async def watched() -> Watch:
    """A watch that heard the whole story."""
    watch = Watch(n_blocks=BLOCKS)
    for message in STORY:
        await watch.hear(message)
    return watch
