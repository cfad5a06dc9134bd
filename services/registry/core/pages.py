"""Cuts the answer about the whole pool into pages (`shared/pool_pages.py` puts them together)."""

from collections.abc import Iterable

import msgspec

from shared.messages.pool import NodeView, PoolPage

PAGE_BYTES = 1 << 20
"""A page is full when its nodes take this much."""


def page_of(views: Iterable[NodeView], page_bytes: int = PAGE_BYTES) -> PoolPage:
    """The first page of these nodes, which come in order of their names."""
    page, nbytes = list[NodeView](), 0
    for view in views:
        if nbytes >= page_bytes:
            return PoolPage(nodes=tuple(page), more=True)
        page.append(view)
        nbytes += len(msgspec.msgpack.encode(view))
    return PoolPage(nodes=tuple(page), more=False)
