"""When a node tells registry and planner how it is, and what it says then."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from services.node.core.profile import Profiler, rounded
from services.node.core.told import Telling
from services.node.core.view import NodeView
from shared.ids import ModelId
from shared.messages.pool import NodeStatus, Profile

STATUS_EVERY_S = 1.0
STATUS_GAP_S = 0.05
"""The least time between two statuses, however much changes. A block that lands is reported by
itself: in a status it is said with the next change, or when the model is whole."""


class Statuses:
    def __init__(
        self,
        look: Callable[[], NodeView],
        profiler: Profiler,
        kv_s: Callable[[Profile, int], float],
    ) -> None:
        """`look`: the node as it is now. `kv_s`: how long so many bytes of KV take from another
        node to this one, which measured the profile; 0: KV does not move."""
        self._look = look
        self._profiler = profiler
        self._kv_s = kv_s
        self._due = asyncio.Event()
        self._cause = ""
        """The last message that asked for the status that is due; empty if none did."""
        self._whole = False
        """Whether the next status has to say everything."""
        self._telling = Telling()
        self.profile = Profile()
        """What the node had measured when it last reported it."""

    def changed(self, cause: str = "") -> None:
        """A status is due soon."""
        self._cause = cause or self._cause
        self._due.set()

    def everything(self, cause: str = "") -> None:
        """A status that says everything is due soon."""
        self._whole = True
        self.changed(cause)

    def next(self, cause: str = "") -> NodeStatus:
        """The status to publish now. `cause`: the message that makes the node say it."""
        view = self._look()
        told = self._telling.next(view.holdings, whole=self._whole)
        cause, self._cause, self._whole = cause or self._cause, "", False
        load = dataclasses.asdict(view.load)
        measured = self._measured(load.pop("kv_position_bytes"))
        self.profile = msgspec.structs.replace(measured, steps=load.pop("costs"))
        del load["host_tier"]  # only the node's metrics have it
        return NodeStatus(
            cause=cause,
            node=view.info.node,
            generation=view.info.generation,
            seq=told.seq,
            since=told.since,
            arena_free=view.arena_free,
            holdings=told.holdings,
            dropped=told.dropped,
            profile=self.profile,
            peers=view.peers,
            disk_bytes=view.disk_bytes,
            disk_free=view.disk_free,
            host_free=view.host_free,
            copying=view.copying,
            unfit=view.unfit,
            **load,
        )

    def _measured(self, kv_position_bytes: Mapping[ModelId, int]) -> Profile:
        profile = self._profiler.profile()
        models = (
            msgspec.structs.replace(
                each,
                kv_s_per_token=rounded(
                    self._kv_s(profile, kv_position_bytes.get(each.model_id, 0))
                ),
            )
            for each in profile.models
        )
        return msgspec.structs.replace(profile, models=tuple(models))

    async def run(self, publish: Callable[[], Awaitable[None]]) -> None:
        """Calls `publish` on every change, and once a second, without end."""
        while True:
            self._due.clear()
            await publish()
            await asyncio.sleep(STATUS_GAP_S)
            try:
                async with asyncio.timeout(STATUS_EVERY_S - STATUS_GAP_S):
                    await self._due.wait()
            except TimeoutError:
                continue
