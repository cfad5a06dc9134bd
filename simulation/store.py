"""A node's disk in virtual time, with the part of it that lies in host memory.

It is the twin of `services.node.checkpoints.store`.

Blocks come over the SSD, or over PCIe if a copy is in host memory. `Cache.KEEP_ALIVE` is
ServerlessLLM's cache (OSDI 2024): models that were read stay in host memory. The least recently
used model leaves when there is no room, and each model leaves when nobody has used it for a time.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.node.checkpoints.reading import Outcome, Unreadable, Verified, Wanted
from services.node.checkpoints.store import Imported
from shared.clock import now, wall_ns
from shared.errors import BadInput, LambdaScaleError, NotFound
from shared.ids import ModelId
from shared.layout import Manifest, model_id
from simulation.hardware import Channel
from simulation.models import Model, block_content
from simulation.systems import Cache

DISK_BYTES = 1 << 50
"""The size of a modelled disk: there is always room."""


@dataclass(slots=True)
class _Copy:
    """A copy of a model in host memory."""

    nbytes: dict[int, int] = field(default_factory=dict)
    """Bytes of each block."""
    used_at: float = 0.0


class HostCache:
    """LRU over models, with a byte budget and a keep-alive time. Blocks enter one by one.

    A model counts as used when it is read, and while an accelerator of the machine has it open.
    """

    def __init__(self, budget: float, keep_alive_s: float) -> None:
        self._budget = budget
        self._keep_alive_s = keep_alive_s
        self._copies: OrderedDict[ModelId, _Copy] = OrderedDict()
        """The least recently used copy is first."""
        self._open: Counter[ModelId] = Counter()

    def nbytes(self, at: float) -> int:
        self._expire(at)
        return sum(sum(copy.nbytes.values()) for copy in self._copies.values())

    def blocks(self, model: ModelId, at: float) -> int:
        """How many blocks of the model are here. Looking does not count as a use."""
        self._expire(at)
        copy = self._copies.get(model)
        return len(copy.nbytes) if copy else 0

    def has(self, model: ModelId, block: int, at: float) -> bool:
        """Whether the block is here. If so, its model counts as used."""
        self._expire(at)
        copy = self._copies.get(model)
        if copy is None or block not in copy.nbytes:
            return False
        self._touch(model, copy, at)
        return True

    def put(self, model: ModelId, block: int, nbytes: int, at: float) -> None:
        """Keeps a block that was read from below, if there is room for it beside its own model."""
        self._expire(at)
        copy = self._copies.setdefault(model, _Copy())
        self._touch(model, copy, at)
        while self.nbytes(at) + nbytes > self._budget and len(self._copies) > 1:
            self._copies.popitem(last=False)
        if self.nbytes(at) + nbytes <= self._budget:
            copy.nbytes[block] = nbytes

    def on_open(self, model: ModelId) -> None:
        self._open[model] += 1

    def on_close(self, model: ModelId, at: float) -> None:
        self._expire(at)
        self._open[model] -= 1
        if copy := self._copies.get(model):
            self._touch(model, copy, at)

    def _touch(self, model: ModelId, copy: _Copy, at: float) -> None:
        copy.used_at = at
        self._copies.move_to_end(model)

    def _expire(self, at: float) -> None:
        for model, copy in list(self._copies.items()):
            if self._open[model]:
                continue
            if copy.used_at + self._keep_alive_s > at:
                return
            del self._copies[model]


class ModelledDraft:
    """Stands for `Draft`. Writing takes no time: the link that brings the bytes is slower."""

    def __init__(self, name: ModelId, manifest: Manifest) -> None:
        self.model_id = name
        self.manifest = manifest
        self._chunks = [0] * manifest.n_blocks
        """How many of each block's chunks are written."""

    @property
    def missing(self) -> list[int]:
        chunks = enumerate(self._chunks)
        return [block for block, n in chunks if n < self.manifest.n_chunks(block)]

    @property
    def done(self) -> int:
        left = sum(self.manifest.blocks[block].nbytes for block in self.missing)
        return self.manifest.nbytes - left

    def write(self, block: int, chunks: range, data: memoryview) -> None:
        assert bytes(data) == self._content(block, chunks), "a piece came damaged"
        self._chunks[block] = chunks.stop

    def _content(self, block: int, chunks: range) -> bytes:
        offset, nbytes = self.manifest.run_range(block, chunks)
        return block_content(self.manifest, block)[offset : offset + nbytes]


class ModelledStore:
    """Holds every model that it is given, whole. It stands for `Store` where the library asks for
    one."""

    def __init__(
        self,
        manifests: Iterable[Manifest],
        cache: Cache,
        *,
        ssd: Channel,
        pcie: Channel,
        host: HostCache,
    ) -> None:
        """`host` is used with `Cache.KEEP_ALIVE` only. Stores of one machine may share it."""
        self._manifests = {model_id(manifest): manifest for manifest in manifests}
        self._models = {name: Model.of(m) for name, m in self._manifests.items()}
        self._cache = cache
        self._ssd = ssd
        self._pcie = pcie
        self._host = host
        self._drafts: dict[ModelId, ModelledDraft] = {}

    @property
    def host_bytes(self) -> int:
        """Modelled bytes of copies in host memory, now."""
        if self._cache is Cache.ALL:
            return sum(model.nbytes for model in self._models.values())
        return self._host.nbytes(now()) if self._cache is Cache.KEEP_ALIVE else 0

    def cached(self, name: ModelId) -> int:
        """How many blocks of the model are in host memory, where models that were read stay."""
        return self._host.blocks(name, now()) if self._cache is Cache.KEEP_ALIVE else 0

    def manifests(self) -> dict[ModelId, Manifest]:
        return dict(self._manifests)

    async def read(self, name: ModelId, wanted: Sequence[Wanted]) -> AsyncGenerator[Outcome, None]:
        """As `Store.read`, block by block. Nothing of a block is written before all of it has
        arrived."""
        for each in wanted:
            began = wall_ns()
            try:
                manifest = self._manifest(name, each)
            except LambdaScaleError as error:
                yield Unreadable(each.block, error)
                continue
            chunks = [c for c in range(manifest.n_chunks(each.block)) if c not in each.skip]
            if not chunks:
                continue
            nbytes = self._models[name].block_bytes(manifest.blocks[each.block])
            await self._carry(name, each.block, nbytes)
            content = memoryview(block_content(manifest, each.block))
            for chunk in chunks:
                offset, length = manifest.chunk_range(each.block, chunk)
                each.into[offset : offset + length] = content[offset : offset + length]
            yield Verified(each.block, chunks, began)

    def _manifest(self, name: ModelId, wanted: Wanted) -> Manifest:
        """The model's manifest. NotFound; BadInput if it has no such block."""
        manifest, index = self._manifests.get(name), wanted.block
        if manifest is None or not 0 <= index < manifest.n_blocks:
            raise NotFound(f"there is no block {index} of model {name} on this disk")
        if wanted.into.nbytes != manifest.blocks[index].nbytes:
            raise BadInput(f"block {index} of model {name} does not fit {wanted.into.nbytes} bytes")
        return manifest

    async def piece(self, name: ModelId, block: int, chunks: range) -> memoryview:
        if name not in self._manifests:
            raise NotFound(f"model {name} is not on this disk")
        manifest, model = self._manifests[name], self._models[name]
        offset, nbytes = manifest.run_range(block, chunks)
        whole = manifest.blocks[block]
        await self._ssd.carry(model.block_bytes(whole) * nbytes / whole.nbytes)
        return memoryview(block_content(manifest, block))[offset : offset + nbytes]

    def room(self) -> tuple[int, int]:
        used = sum(manifest.nbytes for manifest in self._manifests.values())
        return DISK_BYTES - used, DISK_BYTES

    def draft(self, name: ModelId, manifest: Manifest) -> "ModelledDraft":
        return self._drafts.setdefault(name, ModelledDraft(name, manifest))

    def drafts(self) -> Sequence["ModelledDraft"]:
        return list(self._drafts.values())

    def discard(self, name: ModelId) -> None:
        self._drafts.pop(name, None)

    def adopt(self, name: ModelId, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        del self._drafts[name]
        self._manifests[name] = manifest
        self._models[name] = Model.of(manifest)

    def import_checkpoint(self, path: Path, *, blocks: int) -> Imported:
        raise BadInput(f"{path}: a modelled disk has the models that it was made with, no others")

    def import_adapter(self, path: Path, base: ModelId, manifest: Manifest) -> Imported:
        raise BadInput(f"{path}: a modelled disk has no adapters")

    def remove(self, name: ModelId) -> None:
        if self._manifests.pop(name, None) is None:
            raise NotFound(f"model {name} is not on this disk")
        del self._models[name]

    async def _carry(self, name: ModelId, index: int, nbytes: int) -> None:
        if self._cache is Cache.INSTANT:
            return
        keeps = self._cache is Cache.KEEP_ALIVE
        if self._cache is Cache.ALL or (keeps and self._host.has(name, index, now())):
            await self._pcie.carry(nbytes)
            return
        await self._ssd.carry(nbytes)
        if keeps:
            self._host.put(name, index, nbytes, now())
