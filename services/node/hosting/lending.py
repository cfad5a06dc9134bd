"""Pieces of models that other nodes copy: from this node's memory, or else its disk.

A piece in the arena or the host cache lies in its block's own region. A piece on the disk is read
into a buffer of its own, which is a region for some seconds; so the arena gives up no room for it.
"""

import asyncio
from dataclasses import dataclass

from services.node.hosting.hosting import Hosting
from services.node.hosting.library import Library
from services.node.hosting.pieces import PIECE_BYTES
from services.node.hosting.promotion import Spawn
from services.node.moving.mover import region_of
from services.node.parts import AnyDataPlane
from shared.errors import CapacityExceeded, NotFound
from shared.ids import ModelId, NodeId
from shared.messages.copies import LendPiece, Lent

LENT_S = 10.0
"""How long a piece from the disk stays readable."""
LENT_MAX = 8
"""The most pieces from the disk that are lent at a time."""

_Loan = tuple[NodeId, ModelId]


@dataclass(slots=True, eq=False)
class _Lent:
    region: str
    expiry: asyncio.Task[None]


class Lending:
    def __init__(
        self, hosting: Hosting, library: Library, data: AnyDataPlane, *, spawn: Spawn
    ) -> None:
        self._hosting = hosting
        self._library = library
        self._data = data
        self._spawn = spawn
        self._lent: dict[_Loan, _Lent] = {}
        self._reading: set[_Loan] = set()
        self._count = 0

    async def lend(self, ask: LendPiece) -> Lent:
        """NotFound: the piece is not here. CapacityExceeded: too much is lent. Errors of the
        disk."""
        manifest = await self._library.manifest(ask.model_id)
        if not 0 <= ask.block < manifest.n_blocks:
            raise NotFound(f"model {ask.model_id} has no block {ask.block}")
        last = ask.first + ask.count - 1
        if not 0 <= ask.first <= last < manifest.n_chunks(ask.block):
            raise NotFound(f"block {ask.block} of model {ask.model_id} has no chunk {last}")
        chunks = range(ask.first, last + 1)
        offset, nbytes = manifest.run_range(ask.block, chunks)
        if self._hosting.holds(ask.model_id, ask.block):
            return Lent(region=region_of(ask.model_id, ask.block), offset=offset)
        if nbytes > max(PIECE_BYTES, manifest.chunk_bytes):
            raise CapacityExceeded(f"a piece of {nbytes} bytes: at most {PIECE_BYTES} are lent")
        return await self._from_disk(ask, chunks)

    async def _from_disk(self, ask: LendPiece, chunks: range) -> Lent:
        loan = (ask.borrower, ask.model_id)
        await self._end(loan)
        if loan in self._reading or len(self._lent) + len(self._reading) >= LENT_MAX:
            raise CapacityExceeded("as many pieces are lent as this node lends at a time")
        self._reading.add(loan)
        try:
            piece = await self._library.piece(ask.model_id, ask.block, chunks)
            self._count += 1
            region = f"lent/{self._count}"
            await self._data.lend(region, piece)
            expiry = self._spawn(self._expire(loan), f"loan to {ask.borrower}")
            self._lent[loan] = _Lent(region, expiry)
        finally:
            self._reading.discard(loan)
        return Lent(region=region, offset=0)

    async def _expire(self, loan: _Loan) -> None:
        await asyncio.sleep(LENT_S)
        if lent := self._lent.pop(loan, None):
            await self._data.reclaim(lent.region)

    async def _end(self, loan: _Loan) -> None:
        if lent := self._lent.pop(loan, None):
            lent.expiry.cancel()
            await self._data.reclaim(lent.region)
