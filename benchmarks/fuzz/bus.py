"""Real services over a real nats-server: every request and broadcast that somebody may send them,
with fields that make no sense."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.fuzz.report import Report
from benchmarks.fuzz.values import Source
from services.local.cluster import bus_config
from services.local.credentials import User
from services.local.processes import ClusterState
from shared import subjects
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.errors import (
    BadMessage,
    BusTimeout,
    LambdaScaleError,
    MessageTooLarge,
    NoResponders,
    ServiceFailed,
)
from shared.ids import GatewayId, NodeId
from shared.messages import Message, copies, decode, instances, load, pool, scaling, serving, story
from shared.messages.decisions import DecisionsQuery
from shared.permissions import Role, topic_of

AT_A_TIME = 8
WITHIN_S = 60.0
NODE = NodeId("node-0")
Said = tuple[tuple[str, Sequence[type[Message]]], ...]
"""Subjects, with what is said there."""
REQUESTS: Said = (
    (subjects.REGISTRY_MODEL_ADD, [pool.ModelAdd]),
    (subjects.REGISTRY_MODEL_SET, [pool.ModelSet]),
    (subjects.REGISTRY_MODELS, [pool.ModelsQuery]),
    (subjects.REGISTRY_SOURCES, [pool.SourcesQuery]),
    (subjects.REGISTRY_RESERVE, [pool.Reserve]),
    (subjects.REGISTRY_UNRESERVE, [pool.Unreserve]),
    (subjects.REGISTRY_POOL, [pool.PoolQuery]),
    (subjects.REGISTRY_NODES, [pool.NodesQuery]),
    (subjects.REGISTRY_STORY, [story.StoryQuery]),
    (subjects.REGISTRY_COPIES, [copies.CopiesQuery]),
    (subjects.REGISTRY_DUTY, [pool.SetDuty]),
    (subjects.REGISTRY_LEAVE, [copies.Leave]),
    (subjects.PLANNER_STATE, [scaling.PlannerQuery]),
    (subjects.PLANNER_INSTANCES, [instances.InstancesQuery]),
    (subjects.PLANNER_SCALE, [scaling.SetInstances]),
    (subjects.PLANNER_DECISIONS, [DecisionsQuery]),
    (subjects.PLANNER_STORY, [story.StoryQuery]),
    (subjects.node_plan(NODE), [scaling.ApplyPlan]),
    (subjects.node_release(NODE), [scaling.ReleaseModel]),
    (subjects.node_keep(NODE), [copies.KeepCopy]),
    (subjects.node_drop(NODE), [copies.DropCopy]),
    (subjects.node_story(NODE), [story.StoryQuery]),
    (subjects.node_submit(NODE), [serving.Submit]),
)
BROADCASTS: Said = (
    (subjects.POOL_STATUS, [pool.NodeStatus]),
    (subjects.POOL_REPORT, [pool.ReportStatus]),
    (subjects.POOL_NODES, [pool.NodeJoined, pool.NodeGone]),
    (subjects.POOL_MODELS, [pool.ModelAdded, pool.ModelRemoved]),
    (subjects.PLANNER_SUSPECT, [scaling.PeerSuspect]),
    (subjects.INSTANCES, [instances.InstanceSet, instances.InstanceChange]),
    (subjects.EVENTS, [scaling.EventChanged]),
    (subjects.ARRIVALS, [scaling.BlockArrived, scaling.PullFailed, scaling.FirstPartialToken]),
    (subjects.LOAD_GATEWAY, [load.GatewayLoad]),
    (subjects.node_cancel(NODE), [serving.Cancel]),
    (subjects.node_report(NODE), [pool.ReportStatus]),
)


class Services:
    def __init__(
        self,
        state: ClusterState,
        record: pool.ModelRecord,
        nodes: Sequence[pool.NodeInfo],
        gateway: GatewayId,
        seed: int,
        report: Report,
    ) -> None:
        self._state = state
        self._report = report
        self._requests: Said = (*REQUESTS, (subjects.gateway_story(gateway), [story.StoryQuery]))
        self._broadcasts: Said = (*BROADCASTS, (subjects.gateway_tokens(gateway), [serving.Tokens]))
        likely: dict[str, list[Any]] = {
            "term": [None], "v": [1], "trace": [""], "node": [info.node for info in nodes],
            "gateway": [gateway], "generation": [info.generation for info in nodes],
            "model_id": [record.model_id], "name": [record.name], "epoch": [0],
            "address": ["tcp://127.0.0.1:1"],
        }  # fmt: skip
        self._source = Source(f"bus {seed}", likely)

    async def run(self, inputs: int) -> None:
        async with AsyncExitStack() as opened:
            buses: dict[Role, Bus] = {}
            for role in Role:
                user = User(role, NODE if role is Role.NODE else None)
                bus = NatsBus(bus_config(self._state, user=user), f"fuzz-{role}")
                buses[role] = await opened.enter_async_context(bus)
            turn = iter(range(inputs))

            async def work() -> None:
                # Broadcasts come later: by them nodes leave, and models are removed.
                for number in turn:
                    await self._say(buses, asks=number < inputs / 2 or self._source.chance(0.3))

            async with asyncio.TaskGroup() as group:
                for _ in range(AT_A_TIME):
                    group.create_task(work())

    async def _say(self, buses: dict[Role, Bus], *, asks: bool) -> None:
        source = self._source
        subject, kinds = source.random.choice(self._requests if asks else self._broadcasts)
        kind = source.random.choice(kinds)
        message = self._drawn(kind)
        topic = topic_of(subject)
        assert topic is not None
        bus = buses[source.random.choice(sorted(topic.says))]
        part = f"{'request' if asks else 'broadcast'} {kind.__name__}"
        try:
            if asks:
                await bus.request(subject, message, Message, timeout=WITHIN_S)
            else:
                await bus.publish(subject, message)
        except (ServiceFailed, BusTimeout, NoResponders) as error:
            self._report.find(f"{part}: {error.code}", f"{error!s:.300} {message!r:.500}")
            self._report.ended(part, error.code)
        except MessageTooLarge as error:
            self._report.ended(part, error.code)
        except LambdaScaleError as error:
            self._report.ended(part, error.code)
        else:
            self._report.ended(part, "taken")

    def _drawn(self, kind: type[Message]) -> Message:
        """One that the decoder lets through."""
        while True:
            data = self._source.packed(self._source.value(kind, odd=0.03))
            try:
                message = decode(data)
            except BadMessage:
                continue
            if isinstance(message, kind):
                return message
