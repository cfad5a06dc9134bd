"""Blocks of a hosted model on their way from this node's host cache or disk into its arena."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from services.node.checkpoints.reading import Outcome, Unreadable, Wanted
from services.node.core.residency import PlanId
from services.node.memory.arena import ModelSpace
from services.node.moving.events import Arrival, PullFailure
from services.node.parts import AnyDataPlane
from shared.clock import wall_ns
from shared.errors import LambdaScaleError, as_typed
from shared.ids import ModelId, NodeId

READER = "promotion"
"""User of a span."""
Read = Callable[[ModelId, Sequence[Wanted]], AsyncGenerator[Outcome, None]]
"""Brings blocks to their places, like `Store.read`."""
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class Promotion:
    """Reads blocks. Peers may read each chunk as soon as it is verified, and a block lands once it
    is whole: its last chunks may follow a moment later, and peers' reads wait for them."""

    def __init__(
        self,
        node: NodeId,
        model: ModelId,
        plan: PlanId,
        blocks: Sequence[int],
        space: ModelSpace,
        read: Read,
        data: AnyDataPlane,
        *,
        pulled: bool,
        way: str,
        land: Callable[[Arrival | PullFailure], None],
        spawn: Spawn,
    ) -> None:
        """Begins to read. `pulled`: whether the blocks may have been pulled before, so that the
        data plane has to give them up first. `way`: where from, for reports. `land` is told of each
        block once."""
        self._node = node
        self._model = model
        self._plan = plan
        self._space = space
        self._read_from = read
        self._pulled = pulled
        self._way = way
        self._data = data
        self._land = land
        self._missing = dict.fromkeys(blocks, 0)
        """How many chunks are missing of each block that has not landed."""
        self._first_ns: dict[int, int] = {}
        """When a block's first chunk was asked for."""
        self._asked_ns = wall_ns()
        self._stopping = False
        self._task = spawn(self._run(), f"promote {model}")

    async def stop(self) -> None:
        """Ends the promotion. Once this returns, it does not touch the space any more. What was
        verified stays."""
        self._stopping = True
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        self._space.span.hold(READER)
        try:
            await self._read(await self._take_over())
        except Exception as error:  # the promotion's boundary: nobody awaits it
            # The data plane has ended (Conflict), or there is a bug: what is missing has failed,
            # and the planner is told why.
            for block in list(self._missing):
                self._fail(block, as_typed(error))
        finally:
            self._space.span.release(READER)

    async def _take_over(self) -> list[Wanted]:
        wanted: list[Wanted] = []
        taken: Mapping[int, frozenset[int]] = dict.fromkeys(self._missing, frozenset())
        if self._pulled:
            taken = await self._data.take_over(self._model, list(self._missing))
        for block, verified in taken.items():
            self._missing[block] = self._space.manifest.n_chunks(block)
            self._count(block, len(verified))
            if block in self._missing:
                wanted.append(Wanted(block, self._space.block(block), verified))
        return wanted

    async def _read(self, wanted: Sequence[Wanted]) -> None:
        async with aclosing(self._read_from(self._model, wanted)) as outcomes:
            async for outcome in outcomes:
                if self._stopping:
                    return
                await self._on_outcome(outcome)

    async def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Unreadable):
            self._fail(outcome.block, outcome.error)
            return
        began = self._first_ns.get(outcome.block, outcome.began_ns)
        self._first_ns[outcome.block] = min(began, outcome.began_ns)
        self._count(outcome.block, len(outcome.chunks))  # first: requests may wait for the block
        await self._data.mark_held(self._model, outcome.block, outcome.chunks)

    def _count(self, block: int, chunks: int) -> None:
        """Counts chunks of a block that have come. After a block has failed, more of its chunks may
        come: they do not count."""
        if block not in self._missing:
            return
        self._missing[block] -= chunks
        if self._missing[block] == 0:
            del self._missing[block]
            self._land(self._arrival(block))

    def _fail(self, block: int, error: LambdaScaleError) -> None:
        del self._missing[block]
        self._land(PullFailure(self._plan, self._model, block, self._node, error))

    def _arrival(self, block: int) -> Arrival:
        ended = wall_ns()
        return Arrival(
            plan=self._plan,
            model_id=self._model,
            block=block,
            source=self._node,
            transport=self._way,
            nbytes=len(self._space.block(block)),
            started_ns=self._asked_ns,
            first_byte_ns=self._first_ns.get(block, ended),
            finished_ns=ended,
        )
