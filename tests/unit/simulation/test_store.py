import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.node.checkpoints.packing import digest
from services.node.checkpoints.reading import Outcome, Unreadable, Verified, Wanted
from shared.errors import BadInput, NotFound
from shared.layout import Manifest, model_id
from simulation.hardware import Channel
from simulation.loop import run
from simulation.models import Model, model, modelled_manifest
from simulation.store import HostCache, ModelledStore
from simulation.systems import Cache

BLOCKS = 4
A, B, C = (modelled_manifest(model("demo", name), blocks=BLOCKS, unit=4096) for name in "abc")
NBYTES = model("demo").nbytes
SSD_S, PCIE_S = 10.0, 1.0
"""Seconds in which a whole model is read from the SSD, and copied over PCIe."""
KEEP_ALIVE_S = 100.0

Read = Callable[[Manifest], Awaitable[float]]


async def read(store: ModelledStore, manifest: Manifest, *wanted: Wanted) -> list[Outcome]:
    return [outcome async for outcome in store.read(model_id(manifest), wanted)]


class Disk:
    """A store, and how long reading whole models from it takes."""

    def __init__(self, cache: Cache, budget: float = 2 * NBYTES) -> None:
        self.store = ModelledStore(
            (A, B, C),
            cache,
            ssd=Channel(NBYTES / SSD_S),
            pcie=Channel(NBYTES / PCIE_S),
            host=HostCache(budget, KEEP_ALIVE_S),
        )

    async def read(self, *manifests: Manifest) -> list[float]:
        return [await self._read(manifest) for manifest in manifests]

    async def _read(self, manifest: Manifest) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for block, spec in enumerate(manifest.blocks):
            into = memoryview(bytearray(spec.nbytes))
            (outcome,) = await read(self.store, manifest, Wanted(block, into))
            assert isinstance(outcome, Verified)
            assert (outcome.block, list(outcome.chunks)) == (block, [0])
            assert digest(into) == spec.digests[0]
        return loop.time() - began

    @property
    def copies(self) -> float:
        """How many copies of a model are in host memory."""
        return self.store.host_bytes / NBYTES


def test_what_a_store_has() -> None:
    assert Disk(Cache.NONE).store.manifests() == {model_id(m): m for m in (A, B, C)}


@pytest.mark.parametrize(
    ("cache", "taken", "copies"),
    [
        (Cache.NONE, [SSD_S, SSD_S, SSD_S], 0),
        (Cache.KEEP_ALIVE, [SSD_S, PCIE_S, SSD_S], 2),
        (Cache.ALL, [PCIE_S, PCIE_S, PCIE_S], 3),
        (Cache.INSTANT, [0, 0, 0], 0),
    ],
)
def test_blocks_take_the_way_that_the_cache_leaves(
    cache: Cache, taken: list[float], copies: int
) -> None:
    async def main() -> None:
        disk = Disk(cache)
        assert await disk.read(A, A, B) == pytest.approx(taken)
        assert disk.copies == pytest.approx(copies)

    run(main())


def test_the_least_recently_read_model_makes_room() -> None:
    async def main() -> None:
        disk = Disk(Cache.KEEP_ALIVE)
        await disk.read(A, B, A, C)
        assert disk.copies == pytest.approx(2)
        assert await disk.read(A, C) == pytest.approx([PCIE_S, PCIE_S])
        assert await disk.read(B) == pytest.approx([SSD_S])

    run(main())


def test_a_model_that_does_not_fit_is_kept_in_part() -> None:
    async def main() -> None:
        disk = Disk(Cache.KEEP_ALIVE, budget=0.6 * NBYTES)
        assert await disk.read(A) == pytest.approx([SSD_S])
        assert disk.copies <= 0.6
        (again,) = await disk.read(A)
        assert PCIE_S < again < SSD_S

    run(main())


def test_what_nobody_reads_leaves_after_a_time() -> None:
    async def main() -> None:
        disk = Disk(Cache.KEEP_ALIVE)
        await disk.read(A)
        await asyncio.sleep(KEEP_ALIVE_S - 1)
        assert await disk.read(A) == pytest.approx([PCIE_S])
        await asyncio.sleep(KEEP_ALIVE_S - 1)
        assert disk.copies == pytest.approx(1)
        await asyncio.sleep(1)
        assert disk.copies == 0
        assert await disk.read(A) == pytest.approx([SSD_S])

    run(main())


def test_a_model_that_is_open_is_used() -> None:
    cache = HostCache(NBYTES, KEEP_ALIVE_S)
    a, b = model_id(A), model_id(B)
    cache.on_open(a)
    cache.on_open(a)
    for name in (a, b):
        cache.put(name, 0, 10, 0.0)
    cache.on_close(a, 10.0)
    assert cache.nbytes(1000.0) == 10
    cache.on_close(a, 1000.0)
    assert cache.nbytes(999.0 + KEEP_ALIVE_S) == 10
    assert cache.nbytes(1000.0 + KEEP_ALIVE_S) == 0


def test_a_read_that_is_cancelled_writes_and_keeps_nothing() -> None:
    async def main() -> None:
        disk = Disk(Cache.KEEP_ALIVE)
        into = memoryview(bytearray(A.blocks[0].nbytes))
        work = asyncio.create_task(read(disk.store, A, Wanted(0, into)), name="read")
        await asyncio.sleep(SSD_S / BLOCKS / 2)
        work.cancel()
        await asyncio.wait([work])
        assert not any(into)
        assert disk.copies == 0

    run(main())


def test_chunks_that_are_there_are_not_touched() -> None:
    async def main() -> None:
        manifest = modelled_manifest(model("demo", "chunked"), blocks=2, unit=4096, chunks=4)
        store = ModelledStore(
            [manifest], Cache.INSTANT, ssd=Channel(1), pcie=Channel(1), host=HostCache(0, 0)
        )
        into = memoryview(bytearray(manifest.blocks[1].nbytes))
        (outcome,) = await read(store, manifest, Wanted(1, into, frozenset({0, 2})))
        assert isinstance(outcome, Verified)
        assert set(outcome.chunks) == set(range(manifest.n_chunks(1))) - {0, 2}
        for chunk in range(manifest.n_chunks(1)):
            offset, length = manifest.chunk_range(1, chunk)
            piece = into[offset : offset + length]
            assert any(piece) == (chunk not in (0, 2))
            assert chunk in (0, 2) or digest(piece) == manifest.blocks[1].digests[chunk]

    run(main())


def test_what_is_not_there_is_refused() -> None:
    async def main() -> None:
        store = Disk(Cache.INSTANT).store
        into = memoryview(bytearray(A.blocks[0].nbytes))
        for wanted, code in (
            (Wanted(BLOCKS, into), NotFound.code),
            (Wanted(0, into[1:]), BadInput.code),
        ):
            refused, (last,) = await read(store, A, wanted), await read(store, A, Wanted(0, into))
            assert [(o.block, o.error.code) for o in refused if isinstance(o, Unreadable)] == [
                (wanted.block, code)
            ]
            assert isinstance(last, Verified)
        store.remove(model_id(A))
        (gone,) = await read(store, A, Wanted(0, into))
        assert isinstance(gone, Unreadable)
        assert isinstance(gone.error, NotFound)
        with pytest.raises(NotFound):
            store.remove(model_id(A))
        assert model_id(A) not in store.manifests()
        with pytest.raises(BadInput):
            store.import_checkpoint(Path("checkpoint"), blocks=1)

    run(main())


def test_the_times_are_those_of_the_modelled_bytes() -> None:
    assert A.nbytes < NBYTES / 4000
    assert Model.of(A).nbytes == NBYTES
