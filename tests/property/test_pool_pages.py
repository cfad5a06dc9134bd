"""The pool is read in pages, whatever its size, and every node is read once."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.registry.core.pages import nodes_of, page_of
from services.registry.core.pool import Pool
from shared import subjects
from shared.bus.base import M
from shared.bus.delivery import MAX_PAYLOAD
from shared.ids import ModelId, NodeId
from shared.messages import Message, encode
from shared.messages.pool import (
    Models,
    Nodes,
    NodesQuery,
    NodeView,
    PoolPage,
    PoolQuery,
    PoolState,
    Tier,
)
from shared.pool_pages import read_nodes, read_pool
from tests.unit.registry.builders import holding, info, record, status


class Registry:
    """Answers from a pool, in pages of a given size."""

    def __init__(self, pool: Pool, page_bytes: int) -> None:
        self.pool = pool
        self.page_bytes = page_bytes
        self.pages: list[PoolPage | Nodes] = []

    async def __call__(self, subject: str, message: Message, reply: type[M], /) -> M:
        answer: Message = Models(records=self.pool.catalog.records)
        if subject == subjects.REGISTRY_POOL:
            assert isinstance(message, PoolQuery)
            whole = self.pool.page(PoolQuery(after=message.after)).nodes
            answer = page_of(whole, self.page_bytes)
            self.pages.append(answer)
        elif subject == subjects.REGISTRY_NODES:
            assert isinstance(message, NodesQuery)
            answer = nodes_of(self.pool.nodes(message).nodes, self.page_bytes)
            self.pages.append(answer)
        assert isinstance(answer, reply)
        return answer


def read(registry: Registry) -> PoolState:
    return asyncio.run(read_pool(registry))


def names(nodes: Sequence[NodeView]) -> list[NodeId]:
    return [view.info.node for view in nodes]


@given(st.lists(st.from_regex(r"[a-z0-9-]{1,6}", fullmatch=True), unique=True), st.integers(1, 900))
def test_all_pages_together_are_the_pool(nodes: list[str], page_bytes: int) -> None:
    pool = Pool()
    pool.catalog.put(record())
    for node in nodes:
        pool.lease_put(info(node), 0.0)
    registry = Registry(pool, page_bytes)
    state = read(registry)
    assert names(state.nodes) == sorted(nodes)
    assert state.models == (record(),)
    assert [page.more for page in registry.pages] == [True] * (len(registry.pages) - 1) + [False]


@given(st.lists(st.from_regex(r"[a-z0-9-]{1,6}", fullmatch=True), unique=True), st.integers(1, 900))
def test_all_pages_of_names_together_are_the_pool(nodes: list[str], page_bytes: int) -> None:
    pool = Pool()
    for node in nodes:
        pool.lease_put(info(node), 0.0)
    registry = Registry(pool, page_bytes)
    assert [each.node for each in asyncio.run(read_nodes(registry))] == sorted(nodes)
    assert [page.more for page in registry.pages] == [True] * (len(registry.pages) - 1) + [False]


def test_the_names_of_many_thousands_of_nodes_come_in_several_messages() -> None:
    pool = Pool()
    for number in range(60_000):
        pool.lease_put(info(f"node-{number:05}"), 0.0)
    page = pool.nodes(NodesQuery())
    assert page.more
    assert len(encode(page)) < MAX_PAYLOAD / 4
    after = pool.nodes(NodesQuery(after=page.nodes[-1].node))
    assert after.nodes[0].node > page.nodes[-1].node


def test_a_pool_that_is_many_times_larger_than_a_message_is_read() -> None:
    models = [ModelId(f"{number:032}") for number in range(100)]
    on_disk = [holding(Tier.DISK, *range(16), model_id=model) for model in models]
    pool = Pool()
    for number in range(1500):
        name = f"node-{number:04}"
        pool.lease_put(info(name), 0.0)
        pool.status(status(name, *on_disk), 0.0)
    page = pool.page(PoolQuery())
    assert page.more
    assert len(encode(page)) < MAX_PAYLOAD / 4
    after = pool.page(PoolQuery(after=page.nodes[-1].info.node))
    assert names(after.nodes)[0] > names(page.nodes)[-1]
