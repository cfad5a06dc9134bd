"""A process that runs a slice of a node's models on a device of its own, as its node says
(`device_ranks.py`).
"""

import mmap
import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from services.node.core.kv import PAGE
from services.node.engine.attention import Span
from services.node.engine.base import SequenceKey
from services.node.engine.collective import Group
from services.node.engine.decoder import Decoder
from services.node.engine.devices import own_stream
from services.node.engine.kv_memory import KvMemory
from services.node.engine.kv_sequence import KvSequence
from services.node.engine.model import Model
from services.node.engine.obeying import begin, decoder_config, obey
from services.node.engine.orders import (
    AttachBlock,
    CloseModel,
    CopyPages,
    Done,
    DropCache,
    ErasePages,
    Head,
    Kv,
    OpenModel,
    Order,
    Rows,
    Run,
    TakeCache,
    WarmUp,
)
from services.node.engine.processors import Processors
from services.node.engine.share import Share
from services.node.engine.step import Step
from services.node.engine.team import use_threads
from services.node.engine.warmup import warm_up
from services.node.engine.weights import check_manifest
from services.node.memory.page_lock import try_page_lock
from shared import telemetry
from shared.errors import CapacityExceeded, as_typed
from shared.ids import ModelId


class DeviceRank:
    def __init__(self, group: Group, arena: torch.Tensor) -> None:
        self._group, self._device = group, group.device
        self._arena = arena
        self._kv = KvMemory(group.device)
        self._cache = torch.empty(0, dtype=torch.uint8)
        self._models: dict[ModelId, Model] = {}
        self._warming: dict[ModelId, Iterator[None]] = {}
        self._stepping: tuple[Model, Step] | None = None
        self._hidden = torch.empty(0)
        self._handed_on = False
        """Whether `_hidden` are the states of the step."""

    def obey(self, order: Order, descriptor: int | None) -> Done | None:
        """Returns the answer, if the order is answered."""
        match order:
            case TakeCache() | AttachBlock():
                try:
                    self._take(order) if isinstance(order, TakeCache) else self._attach(order)
                except Exception as error:  # rank 0 says what that means for the node
                    known = as_typed(error)
                    return Done(known.code, f"rank {self._group.share.rank}: {known}")
                return Done()
            case DropCache():
                self._cache = torch.empty(0, dtype=torch.uint8)
            case OpenModel():
                self._open(order)
            case CloseModel(model=model_id):
                self._warming.pop(model_id, None)
                closed = self._models.pop(model_id, None)
                if self._stepping is not None and self._stepping[0] is closed:
                    self._stepping = None
            case WarmUp(model=model_id):
                next(self._warming[model_id], None)
            case Rows():
                self._plan(order)
            case Run():
                self._run(order)
            case Head():
                self._head(order)
            case ErasePages(kv=kv, pages=pages):
                self._kv.erase(kv.model, self._view(kv), pages)
            case CopyPages(kv=kv, source=source, target=target):
                self._kv.copy(kv.model, self._view(kv), source, target)
            case _:
                raise AssertionError(f"no order for ranks on devices: {order}")
        return None

    def _take(self, order: TakeCache) -> None:
        self._cache = torch.empty(0, dtype=torch.uint8)
        try:
            self._cache = self._kv.allocate(order.nbytes)
        except RuntimeError as error:
            raise CapacityExceeded(
                f"the memory for KV caches, {order.nbytes} bytes, cannot be allocated on "
                f"{self._device}: lower node.kv_bytes"
            ) from error

    def _open(self, order: OpenModel) -> None:
        manifest = order.manifest
        config = decoder_config(manifest.config)
        dtype = check_manifest(manifest, config)
        fused = self._device.type == "cuda"
        decoder = Decoder(
            config, dtype, self._device, order.longest, fused=fused, group=self._group
        )
        self._models[order.model] = Model(manifest, decoder, Processors(manifest.config))
        self._warming[order.model] = warm_up(decoder)

    def _attach(self, order: AttachBlock) -> None:
        model = self._models[order.model]
        spec = model.manifest.blocks[order.block]
        weights = self._arena[order.offset : order.offset + spec.nbytes]
        model.blocks.pop(order.block, None)
        model.blocks[order.block] = model.network.units(spec, weights, "stored")

    def _plan(self, order: Rows) -> None:
        model = self._models[order.model]
        self._stepping = model, model.network.step(spans_of(order))
        width, dtype = model.network.config.hidden_size, model.network.dtype
        self._hidden = torch.empty(sum(order.counts), width, dtype=dtype, device=self._device)
        self._handed_on = False

    def _run(self, order: Run) -> None:
        assert self._stepping is not None
        model, step = self._stepping
        if not self._handed_on:
            self._group.hand_on(self._hidden)
            self._handed_on = True
        blocks = [model.layer_units(order.block + n) for n in range(order.count)]
        layers = sum(map(len, blocks))
        kv = self._of_layers(model, layers, order.cache_at, order.cache_step)
        step.run(order.block, blocks, self._hidden, kv)

    def _head(self, order: Head) -> None:
        model = self._models[order.model]
        network, unit = model.network, model.head_unit(model.manifest.n_blocks - 1)
        assert unit is not None
        width = network.config.hidden_size
        x = torch.empty(order.rows, width, dtype=network.dtype, device=self._device)
        self._group.hand_on(x)
        unit.head(x, torch.float32)

    def _view(self, kv: Kv) -> torch.Tensor:
        return self._of_layers(self._models[kv.model], kv.layers, kv.at, kv.step)

    def _of_layers(self, model: Model, layers: int, at: int, step: int) -> torch.Tensor:
        """As `KvCache.of_layers`, of this rank's heads."""
        attention = cast(Decoder, model.network).attention
        heads, dim, dtype = attention.n_kv_heads, attention.head_dim, attention.dtype
        memory, slot = self._cache.view(dtype), 2 * heads * dim
        first, pitch = at // dtype.itemsize, step // dtype.itemsize
        slots = (memory.numel() - first - (layers - 1) * pitch) // (PAGE * slot) * PAGE
        return memory.as_strided(
            (layers, slots, 2, heads, dim), (pitch, slot, heads * dim, dim, 1), first
        )


def spans_of(rows: Rows) -> list[Span]:
    spans: list[Span] = []
    at = 0
    for first, count, n in zip(rows.firsts, rows.counts, rows.pages_each, strict=True):
        pages = list(rows.pages[at : at + n])
        sequence = KvSequence(
            SequenceKey(""), rows.model, (0, 1), range(1), first + count, pages=pages
        )
        spans.append((sequence, first, count))
        at += n
    return spans


def mapped(descriptor: int, device: torch.device) -> torch.Tensor:
    """The arena, page-locked for the device if that can be had. Nobody may write to it."""
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nobody may
        blocks = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        why = try_page_lock(device, blocks.data_ptr(), len(blocks), read_only=True)
        if why:
            telemetry.logger("rank").warning(f"blocks go to {device} slower", why=why)
    return blocks


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    rank, devices, threads, connection, meeting, arena = argv
    channel = begin(connection)
    use_threads(int(threads))
    every = [torch.device(name) for name in devices.split(",")]
    share = Share(int(rank), len(every))
    if every[share.rank].type == "cuda":
        own_stream(every[share.rank])
    blocks = mapped(int(arena), every[share.rank])
    channel.send(Done())
    group = Group(share, every, int(meeting))
    group.meet()
    obey(channel, DeviceRank(group, blocks).obey)
