"""Paths whose stages lack room, with real engine threads and their messages."""

import asyncio
from collections import Counter

from services.node.core.rows import request_of
from services.node.engine.base import StagePart
from shared.errors import CapacityExceeded
from shared.messages.instances import Stage
from tests.support.hash_engine import continuation
from tests.support.submits import BLOCKS, TWO, stages, submit
from tests.support.worker_cluster import Attempt, Cluster, cluster

PROMPT = tuple(range(20))
BACK = stages(("b", 0, 4), ("a", 4, BLOCKS))


def count_prefills(nodes: Cluster) -> Counter[str]:
    """How often each request's first position is run by a first stage, from now on."""
    prefills: Counter[str] = Counter()

    def watch(block: int, part: StagePart) -> None:
        if block == 0:
            prefills.update(request_of(row.sequence) for row in part.rows if not row.position)

    for engine in nodes.engines.values():
        engine.before_run = watch
    return prefills


class Ended:
    """How many requests were served, and word of each further one."""

    def __init__(self) -> None:
        self.served = 0
        self._changed = asyncio.Condition()

    async def tell(self) -> None:
        async with self._changed:
            self.served += 1
            self._changed.notify_all()

    async def after(self, served: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.served > served)


async def serve(nodes: Cluster, name: str, path: tuple[Stage, ...], ended: Ended) -> int:
    """As a gateway does: what is refused comes again when another request has ended. Returns the
    number of attempts."""
    for number in range(1, 100):
        message = submit(name, path, prompt=PROMPT, max_tokens=12, attempt=number)
        before = ended.served
        attempt = await (await nodes.submit(message)).end()
        if attempt.code is None:
            assert attempt.ids == continuation(PROMPT, 12, BLOCKS)
            await ended.tell()
            return number
        assert attempt.code == "capacity"
        await ended.after(before)
    raise AssertionError("never served")


async def test_no_prompt_is_prefilled_twice_for_want_of_kv_on_a_later_stage() -> None:
    """Two of the six sequences fit the second stage at a time."""
    async with cluster("a", "b", kv_capacity={"b": 64}, step_tokens=64) as nodes:
        prefills = count_prefills(nodes)
        ended = Ended()
        async with asyncio.timeout(20):
            attempts = await asyncio.gather(*(serve(nodes, f"r{i}", TWO, ended) for i in range(6)))
        assert max(attempts) > 1
        assert prefills == {f"r{i}": 1 for i in range(6)}
        await nodes.all_free()


async def test_leaders_that_follow_each_other_never_wait_for_each_other() -> None:
    """Each node has KV for one sequence, led or followed; both leaders ask the other at once."""
    async with cluster("a", "b", kv_capacity={"a": 32, "b": 32}, step_tokens=64) as nodes:
        prefills = count_prefills(nodes)
        for turn in range(5):
            messages = [
                submit(f"{turn}{path[0].node}", path, prompt=PROMPT, max_tokens=12)
                for path in (TWO, BACK)
            ]
            answers = await asyncio.gather(*map(nodes.submit, messages), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, Attempt):
                    assert (await answer.end()).code in (None, "capacity")
                else:
                    assert isinstance(answer, CapacityExceeded)
        assert set(prefills.values()) <= {1}
        await nodes.all_free()
