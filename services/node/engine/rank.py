"""`python -m services.node.engine.rank ...`: a process that runs a share of a node's models, as its
node says (`ranks.py`). It ends with the thread of the node that started it.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.adapters import Adapter, read_adapter
from services.node.engine.decoder import Decoder
from services.node.engine.kernel_step import KernelStep
from services.node.engine.linear import Form
from services.node.engine.model import Model
from services.node.engine.processors import Processors
from services.node.engine.share import Share
from services.node.engine.shared_pages import PackedBlocks
from services.node.engine.team import (
    AttachBlock,
    Channel,
    CloseModel,
    Done,
    DropAdapter,
    Head,
    OpenModel,
    Order,
    Plan,
    Run,
    Shared,
    Team,
    UseAdapter,
    UseCache,
    UseRoom,
    head_room,
    write_share,
)
from services.node.engine.weights import check_manifest
from services.node.memory.shelf import Shelf
from shared.errors import as_typed
from shared.ids import ModelId

_PR_SET_PDEATHSIG = 1
CPU = torch.device("cpu")


class Rank:
    def __init__(
        self, team: Team, compiled: kernels.Kernels, arena: Shared, form: Form, kept_bytes: int
    ) -> None:
        self._team = team
        self._compiled = compiled
        self._arena = arena.bytes
        self._form: Form = form
        self._packed = PackedBlocks(Shelf(), form, compiled, kept_bytes)
        self._cache = torch.empty(0, dtype=torch.uint8)
        self._models: dict[ModelId, Model] = {}
        self._adapters: dict[ModelId, Adapter] = {}
        self._stepping: tuple[Model, KernelStep] | None = None

    def obey(self, order: Order, descriptor: int | None) -> Done | None:
        """Returns the answer, if the order is answered."""
        match order:
            case UseRoom():
                self._team.use_room(_taken(descriptor))
            case UseCache():
                self._cache = _taken(descriptor).bytes
            case OpenModel():
                self._open(order)
            case AttachBlock():
                return self._attach(order)
            case CloseModel():
                self._close(order)
            case UseAdapter():
                self._adapters[order.name] = self._adapter(order, _taken(descriptor))
            case DropAdapter(name=name):
                self._adapters.pop(name, None)
            case Plan(model=model_id, plan=plan):
                model = self._models[model_id]
                self._stepping = model, cast(Decoder, model.network).planned(plan)
            case Run():
                self._run(order)
            case Head():
                self._head(order)
        return None

    def _open(self, order: OpenModel) -> None:
        manifest = order.manifest
        config = _decoder_config(manifest.config)
        decoder = Decoder(
            config,
            check_manifest(manifest, config),
            CPU,
            order.longest,
            compiled=self._compiled,
            adapters=self._adapters,
            team=self._team,
        )
        self._models[order.model] = Model(manifest, decoder, Processors(manifest.config))

    def _attach(self, order: AttachBlock) -> Done:
        model = self._models[order.model]
        spec = model.manifest.blocks[order.block]
        weights = self._arena[order.offset : order.offset + spec.nbytes]
        try:
            with self._packed.of(order.model, order.block, spec.nbytes) as pages:
                units = model.network.units(spec, weights, self._form, pages)
        except Exception as error:  # rank 0 says what that means for the node
            known = as_typed(error)
            return Done(known.code, f"rank {self._team.share.rank}: {known}")
        model.blocks[order.block] = units
        return Done()

    def _close(self, order: CloseModel) -> None:
        self._stepping = None
        self._models.pop(order.model, None)
        if not order.asleep:
            self._packed.leave(order.model)
        if not self._models:
            self._cache = torch.empty(0, dtype=torch.uint8)

    def _adapter(self, order: UseAdapter, shared: Shared) -> Adapter:
        config, share = _decoder_config(order.base), self._team.share
        return read_adapter(order.manifest, shared.bytes, config, CPU, compiled=True, share=share)

    def _run(self, order: Run) -> None:
        assert self._stepping is not None
        model, step = self._stepping
        blocks = [model.layer_units(order.block + n) for n in range(order.count)]
        layers = sum(map(len, blocks))
        kv = self._cache.as_strided((layers, 1), (order.cache_step, 1), order.cache_at)
        step.run(order.block, blocks, step.hidden, kv)

    def _head(self, order: Head) -> None:
        model = self._models[order.model]
        decoder, unit = cast(Decoder, model.network), model.head_unit(model.manifest.n_blocks - 1)
        assert unit is not None
        x, logits = head_room(self._team, decoder.config, decoder.dtype, order.rows)
        write_share(unit, x, logits)
        self._team.meet()


def _decoder_config(raw: dict[str, Any]) -> ModelConfig:
    config = read_config(raw)
    assert isinstance(config, ModelConfig)
    return config


def _taken(descriptor: int | None) -> Shared:
    assert descriptor is not None
    return Shared(descriptor)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        os._exit(1)


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    rank, degree, threads, form, kept, parent, connection, place, arena = argv
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):  # the node's to obey: it ends its ranks
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(int(threads))
    compiled = kernels.load()
    assert compiled is not None
    team = Team(Share(int(rank), int(degree)), Shared(int(place)))
    seen = Shared(int(arena), copied=True)
    one = Rank(team, compiled, seen, cast(Form, form), int(kept))
    channel = Channel(socket.socket(fileno=int(connection)), answers=False)
    with suppress(EOFError, ConnectionError):  # rank 0 is gone
        channel.send(Done())
        while True:
            order, descriptor = channel.receive()
            answer = one.obey(cast(Order, order), descriptor)
            if answer is not None:
                channel.send(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
