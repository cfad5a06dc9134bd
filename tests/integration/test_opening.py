"""A node that loads a model alone runs requests before it has the last blocks."""

import asyncio
from pathlib import Path

import pytest

from services.planner.core.fleet import PACE_S
from shared import subjects
from shared.bus.base import On
from shared.ids import NodeId
from shared.messages import Message
from shared.messages.instances import InstanceChange, InstanceSet
from shared.messages.pool import Tier
from tests.support.cluster import MODEL, Answer, Oracle, Running, prompts, running
from tests.support.models import TINY

TOKENS = 12
SETTINGS = {
    # The model of 0.6 MB comes from the disk in two seconds.
    "LAMBDASCALE_NODE_DISK_BYTES_PER_S": "300000",
    "LAMBDASCALE_PLANNER_IDLE_S": "60",
}


class Openings:
    """The nodes that opened before they were complete, in order."""

    def __init__(self) -> None:
        self.nodes: list[NodeId] = []
        self._opened = asyncio.Condition()

    async def follow(self, up: Running) -> None:
        await up.bus.subscribe(subjects.INSTANCES, On(Message, self._hear))

    async def last(self, number: int = 1) -> NodeId:
        """The node that opened last, once this number of openings were heard of."""
        async with self._opened:
            await self._opened.wait_for(lambda: len(self.nodes) >= number)
        return self.nodes[-1]

    async def _hear(self, message: Message) -> None:
        found = message.now if isinstance(message, InstanceChange) else message
        if isinstance(found, InstanceSet):
            self.nodes += [i.leader for i in found.instances if i.opening]
        async with self._opened:
            self._opened.notify_all()


def on_disk(up: Running) -> int:
    """How many nodes have the whole model on disk."""
    holdings = (holding for status in up.statuses.values() for holding in status.holdings)
    blocks = [len(h.blocks) for h in holdings if h.tier is Tier.DISK]
    return blocks.count(up.record.n_blocks)


async def test_requests_run_while_the_model_is_copied(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    asked = prompts(4, TINY.vocab_size)
    openings = Openings()
    async with running(tmp_path, checkpoint, nodes=1, settings=SETTINGS, min_instances=0) as up:
        await openings.follow(up)
        first = asyncio.create_task(up.ask(asked[0], TOKENS))
        await openings.last()
        others = await up.ask_all(asked[1:], TOKENS)
        answers = [await first, *others]
        assert [answer.error for answer in answers] == [""] * len(asked)
        assert [answer.tokens for answer in answers] == oracle.tokens(asked, TOKENS)
        await up.replicas(1)


@pytest.mark.parametrize("cache", ["0", str(64 << 20)], ids=["asleep", "in the host cache"])
async def test_a_copy_in_memory_takes_requests_while_it_wakes(
    tmp_path: Path, checkpoint: Path, oracle: Oracle, cache: str
) -> None:
    asked = prompts(4, TINY.vocab_size)
    openings = Openings()
    settings = {"LAMBDASCALE_NODE_HOST_BYTES": cache, "LAMBDASCALE_PLANNER_IDLE_S": "0.2"}
    tier = Tier.CACHE if cache != "0" else Tier.HOST

    def asleep(up: Running) -> bool:
        held = {h.tier for status in up.statuses.values() for h in status.holdings}
        return tier in held and Tier.GPU not in held

    async with running(tmp_path, checkpoint, nodes=1, settings=settings, min_instances=0) as up:
        await up.ask_all(asked[:1], TOKENS)
        await openings.follow(up)
        for prompt in asked[1:]:
            await up.until(lambda: asleep(up), f"a copy in {tier}")
            await asyncio.sleep(2 * PACE_S)  # gateways have been told that it sleeps
            before = len(openings.nodes)
            answer = await up.ask(prompt, TOKENS)
            assert answer.error == ""
            assert [answer.tokens] == oracle.tokens([prompt], TOKENS)
            await openings.last(before + 1)


async def test_requests_of_a_node_that_dies_before_its_last_block_go_on_elsewhere(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    settings = SETTINGS | {"LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2"}
    asked = prompts(3, TINY.vocab_size)
    answers = [Answer() for _ in asked]
    openings = Openings()
    async with running(
        tmp_path, checkpoint, nodes=2, settings=settings, min_instances=0, apart=True
    ) as up:
        await up.until(lambda: on_disk(up) == 2, "two durable copies")
        await openings.follow(up)
        tasks = [
            asyncio.create_task(up.ask(prompt, TOKENS, MODEL, into=answer))
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        up.kill(await openings.last())
        await asyncio.gather(*tasks)
        assert [answer.error for answer in answers] == [""] * len(asked)
        assert [answer.tokens for answer in answers] == oracle.tokens(asked, TOKENS)
