"""Cuts the answers about the whole pool into pages (`shared/pool_pages.py` puts them together)."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from shared.messages.pool import NodeInfo, Nodes, NodeView, PoolPage

PAGE_BYTES = 1 << 20
"""A page is full when its nodes take this much."""
Item = TypeVar("Item", NodeView, NodeInfo)


def page_of(views: Iterable[NodeView], page_bytes: int = PAGE_BYTES) -> PoolPage:
    """The first page of these nodes, which come in order of their names."""
    nodes, more = _cut(views, page_bytes)
    return PoolPage(nodes=nodes, more=more)


def nodes_of(infos: Iterable[NodeInfo], page_bytes: int = PAGE_BYTES) -> Nodes:
    """The same, without what the nodes hold."""
    nodes, more = _cut(infos, page_bytes)
    return Nodes(nodes=nodes, more=more)


def _cut(items: Iterable[Item], page_bytes: int) -> tuple[tuple[Item, ...], bool]:
    """What is on the page, and whether there is more."""
    page, nbytes = list[Item](), 0
    for item in items:
        if nbytes >= page_bytes:
            return tuple(page), True
        page.append(item)
        nbytes += len(msgspec.msgpack.encode(item))
    return tuple(page), False
