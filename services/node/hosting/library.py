"""The models that this node knows: their manifests, and packed copies on its disk."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from services.node.checkpoints.reading import Outcome, Unreadable, Wanted
from services.node.checkpoints.store import Imported
from services.node.hosting.small_files import SmallFiles
from services.node.parts import AnyDraft, AnyStore
from shared import subjects
from shared.bus.base import Bus
from shared.clock import wall_ns
from shared.errors import BadInput, CorruptCheckpoint, LambdaScaleError, NotFound
from shared.ids import ModelId, ModelName, check_model_name
from shared.layout import Manifest, decode_manifest, encode_manifest, model_id
from shared.messages import Ok
from shared.messages.pool import Holding, ModelAdd, ModelRecord, Models, ModelsQuery, Task, Tier
from shared.messages.scaling import ImportModel
from shared.threads import to_its_end
from shared.vectors import is_encoder
from shared.vision import is_classifier

REGISTRY_TIMEOUT_S = 2.0


DRAFT_KEPT_S = 600.0


class Library:
    tier = Tier.DISK
    draft_kept_s = DRAFT_KEPT_S

    def __init__(self, bus: Bus, store: AnyStore, *, changed: Callable[[], None]) -> None:
        """`changed` is called when the content of the disk has changed."""
        self._bus = bus
        self._store = store
        self._changed = changed
        self._known: set[ModelId] = set()
        """Models that were published or stored, and not removed since."""
        self.names: dict[ModelId, ModelName] = {}
        """The names of the models that are published."""
        self._manifests: dict[ModelId, Manifest] = {}
        self._files: dict[ModelId, Mapping[str, str]] = {}
        """Names in the asset store of the small files of their checkpoints."""
        self._small = SmallFiles()
        self._disk: dict[ModelId, frozenset[int]] = {}
        """Blocks on the disk that are not known to be damaged."""
        self._listed: tuple[Holding, ...] | None = None
        """The disk's content as it was last reported. None: it has changed since."""
        self._writing = asyncio.Lock()
        """Imports and removals run one at a time."""

    async def read_store(self) -> None:
        """Finds the packed models on this node's disk."""
        for model, manifest in (await asyncio.to_thread(self._store.manifests)).items():
            self._shelve(model, manifest)

    def holdings(self) -> tuple[Holding, ...]:
        if self._listed is None:
            self._listed = tuple(
                Holding(model, Tier.DISK, tuple(sorted(self._disk[model])))
                for model in sorted(self._disk)
            )
        return self._listed

    # --- manifests ---

    async def learn(self, record: ModelRecord) -> None:
        """Fetches a published model's manifest ahead of any plan. CorruptCheckpoint, BusError."""
        self._known.add(record.model_id)
        self._files[record.model_id] = record.files
        self.names[record.model_id] = record.name
        if record.model_id in self._manifests:
            return
        objects = await self._bus.objects()
        manifest = _decoded(record, await objects.get(record.manifest))
        if record.model_id in self._known:
            self._manifests[record.model_id] = manifest

    async def manifest(self, model: ModelId) -> Manifest:
        """The manifest. Asks the registry if it is not known, because the model's announcement may
        have been missed."""
        if model not in self._manifests:
            await self._ask_for(model)
        if model not in self._manifests:
            raise NotFound(f"model {model} is not published")
        return self._manifests[model]

    async def file(self, model: ModelId, name: str) -> bytes | None:
        """A small file of a published model's checkpoint; None if it has no such file. NotFound if
        the registry does not know the model, or if the file is not in the asset store; BusError."""
        if model not in self._files:
            await self._ask_for(model)
        if model not in self._files:
            raise NotFound(f"model {model} is not published")
        if name not in self._files[model]:
            return None
        asset = self._files[model][name]
        data = self._small.get(asset)
        if data is None:
            objects = await self._bus.objects()
            data = await objects.get(asset)
            self._small.put(asset, data)
        return data

    async def _ask_for(self, model: ModelId) -> None:
        for record in (await self._published()).records:
            if record.model_id == model:
                await self.learn(record)

    async def _published(self) -> Models:
        return await self._bus.request(
            subjects.REGISTRY_MODELS, ModelsQuery(), Models, timeout=REGISTRY_TIMEOUT_S
        )

    # --- the disk ---

    async def read(self, model: ModelId, wanted: Sequence[Wanted]) -> AsyncGenerator[Outcome, None]:
        """The same as `Store.read`. A block that could not be read is not offered again until the
        model is imported anew."""
        async with aclosing(self._store.read(model, wanted)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, Unreadable):
                    self._on_damaged(model, outcome.block)
                yield outcome

    def stored(self, model: ModelId, block: int) -> Manifest:
        """The manifest of a model. NotFound if the disk does not have this block of it."""
        if block not in self._disk.get(model, ()):
            raise NotFound(f"block {block} of model {model} is not on this node's disk")
        return self._manifests[model]

    async def piece(self, model: ModelId, block: int, chunks: range) -> memoryview:
        """Some consecutive chunks of a stored block. DigestMismatch, ModelError: the block does not
        count as stored any more."""
        try:
            return await self._store.piece(model, block, chunks)
        except LambdaScaleError:
            self._on_damaged(model, block)
            raise

    def is_stored(self, model: ModelId) -> bool:
        """Whether the disk has the whole model, and no block is known to be damaged."""
        manifest = self._manifests.get(model)
        return manifest is not None and len(self._disk.get(model, ())) == manifest.n_blocks

    def room(self) -> tuple[int, int]:
        """(bytes that are free, size in bytes) of the disk."""
        return self._store.room()

    # --- copies that come from peers ---

    async def drafts(self) -> Sequence[AnyDraft]:
        return await asyncio.to_thread(self._store.drafts)

    async def draft(self, model: ModelId, manifest: Manifest) -> AnyDraft:
        """CapacityExceeded, ModelError: see `Draft`."""
        return await asyncio.to_thread(self._store.draft, model, manifest)

    async def discard(self, draft: AnyDraft) -> None:
        await to_its_end(partial(self._store.discard, draft.model_id))

    async def adopt(self, draft: AnyDraft) -> None:
        """Takes a whole draft onto the shelf. NotFound: the model was removed meanwhile, and what
        it had on the disk is deleted."""
        model = draft.model_id
        if model not in self._files:
            await self._ask_for(model)
        names = self._files.get(model, {})
        files = {name: await self.file(model, name) for name in names}
        async with self._writing:
            self._check_known(model)
            found = {name: data for name, data in files.items() if data is not None}
            try:
                await to_its_end(partial(self._store.adopt, model, draft.manifest, found))
            finally:
                if model not in self._known:
                    with suppress(NotFound):
                        await to_its_end(partial(self._store.remove, model))
            self._check_known(model)
            self._shelve(model, draft.manifest)
        self._changed()

    def _check_known(self, model: ModelId) -> None:
        if model not in self._known:
            raise NotFound(f"model {model} is not published")

    def _on_damaged(self, model: ModelId, block: int) -> None:
        if model in self._disk:
            self._disk[model] -= {block}
            self._listed = None
            self._changed()

    async def pack(self, message: ImportModel) -> ModelRecord:
        """Packs a checkpoint onto the disk, and its small files into the asset store."""
        check_model_name(message.name)
        base = await self._base(message.base) if message.base else None
        async with self._writing:
            imported = await asyncio.to_thread(self._import, message, base)
            self._shelve(imported.model_id, imported.manifest)
        self._changed()
        record = await self._upload(message, imported)
        return replace(record, base=base[0]) if base else record

    def _import(self, message: ImportModel, base: tuple[ModelId, Manifest] | None) -> Imported:
        path = Path(message.path)
        if base is None:
            return self._store.import_checkpoint(path, blocks=message.blocks)
        return self._store.import_adapter(path, *base)

    async def _base(self, name: ModelName) -> tuple[ModelId, Manifest]:
        """The model that an adapter is for. NotFound; BadInput: it is an adapter itself."""
        for record in (await self._published()).records:
            if record.name == name:
                if record.base:
                    raise BadInput(f"model {name!r} is an adapter: name the base that it is for")
                return record.model_id, await self.manifest(record.model_id)
        raise NotFound(f"no model is named {name!r}: publish the base before its adapters")

    async def publish(self, record: ModelRecord, *, cause: str) -> None:
        message = ModelAdd(record=record, cause=cause)
        await self._bus.request(
            subjects.REGISTRY_MODEL_ADD, message, Ok, timeout=REGISTRY_TIMEOUT_S
        )

    def forget(self, model: ModelId) -> bool:
        """Forgets a model that was removed from the pool. Returns whether its files are still to be
        deleted."""
        self._known.discard(model)
        self._manifests.pop(model, None)
        self._files.pop(model, None)
        self.names.pop(model, None)
        stored = self._disk.pop(model, None) is not None
        self._listed = None
        self._changed()
        return stored

    async def delete(self, model: ModelId) -> None:
        """Deletes the files of a forgotten model, unless it was imported again meanwhile."""
        async with self._writing:
            if model not in self._disk:
                await to_its_end(partial(self._store.remove, model))

    def _shelve(self, model: ModelId, manifest: Manifest) -> None:
        self._known.add(model)
        self._manifests[model] = manifest
        self._disk[model] = frozenset(range(manifest.n_blocks))
        self._listed = None

    async def _upload(self, message: ImportModel, imported: Imported) -> ModelRecord:
        objects = await self._bus.objects()
        files = {name: await objects.put(data) for name, data in imported.files.items()}
        for name, asset in files.items():
            self._small.put(asset, imported.files[name])
        return ModelRecord(
            name=message.name,
            model_id=imported.model_id,
            manifest=await objects.put(encode_manifest(imported.manifest)),
            files=files,
            nbytes=imported.nbytes,
            n_blocks=imported.manifest.n_blocks,
            block_bytes=tuple(block.nbytes for block in imported.manifest.blocks),
            context_length=imported.context_length,
            created_ns=wall_ns(),
            min_instances=message.min_instances,
            max_instances=message.max_instances,
            chunk_bytes=imported.manifest.chunk_bytes,
            task=Task.CLASSIFY if is_classifier(imported.manifest.config) else Task.TEXT,
            embeds=is_encoder(imported.manifest.config),
            shape=imported.shape,
        )


def _decoded(record: ModelRecord, data: bytes) -> Manifest:
    try:
        manifest = decode_manifest(data)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(
            f"the manifest of model {record.name} cannot be read: {error}; import it again"
        ) from error
    if model_id(manifest) != record.model_id:
        raise CorruptCheckpoint(
            f"the manifest of model {record.name} is not that of {record.model_id}; import it again"
        )
    return manifest
