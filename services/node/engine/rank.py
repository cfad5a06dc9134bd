"""A process that runs a share of a node's models, as its node says (`ranks.py`)."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from services.node.engine import kernels
from services.node.engine.adapters import Adapter, read_adapter
from services.node.engine.decoder import Decoder
from services.node.engine.kernel_step import KernelStep
from services.node.engine.linear import Form
from services.node.engine.model import Model
from services.node.engine.obeying import begin, decoder_config, obey
from services.node.engine.orders import (
    AttachBlock,
    CloseModel,
    Done,
    DropAdapter,
    DropCache,
    Head,
    Meet,
    OpenModel,
    Order,
    Plan,
    Rehearse,
    Run,
    UseAdapter,
    UseCache,
    UseRoom,
)
from services.node.engine.processors import Processors
from services.node.engine.rehearsal import Times, rehearse
from services.node.engine.share import Share
from services.node.engine.shared_pages import PackedBlocks
from services.node.engine.team import Shared, Team, head_room, use_threads, write_share
from services.node.engine.weights import check_manifest
from services.node.memory.shelf import Shelf
from shared.errors import as_typed
from shared.ids import ModelId

CPU = torch.device("cpu")


class Rank:
    def __init__(
        self,
        teams: Mapping[int, Team],
        compiled: kernels.Kernels,
        arena: Shared,
        form: Form,
        kept_bytes: int,
    ) -> None:
        """`teams`: those that it is in, by degree."""
        self._teams = teams
        self._compiled = compiled
        self._arena = arena.bytes
        self._form: Form = form
        self._packed = PackedBlocks(Shelf(), form, compiled, kept_bytes)
        self._cache = torch.empty(0, dtype=torch.uint8)
        self._models: dict[ModelId, tuple[Model, Team]] = {}
        self._adapters: dict[ModelId, Adapter] = {}
        self._stepping: tuple[Model, KernelStep] | None = None

    def obey(self, order: Order, descriptor: int | None) -> Done | None:
        """Returns the answer, if the order is answered."""
        match order:
            case UseRoom(degree=degree):
                self._teams[degree].use_room(_taken(descriptor))
            case UseCache():
                self._cache = _taken(descriptor).bytes
            case DropCache():
                self._cache = torch.empty(0, dtype=torch.uint8)
            case Meet(degree=degree):
                self._teams[degree].meet()
            case Rehearse(degree=degree, devices=devices):
                team = self._teams[degree]
                rehearse(team, team.threads(devices), self._form, self._compiled, Times())
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
                model, _ = self._models[model_id]
                use_threads(model.threads)
                self._stepping = model, cast(Decoder, model.network).planned(plan)
            case Run():
                self._run(order)
            case Head():
                self._head(order)
        return None

    def _open(self, order: OpenModel) -> None:
        manifest, team = order.manifest, self._teams[order.degree]
        config = decoder_config(manifest.config)
        decoder = Decoder(
            config,
            check_manifest(manifest, config),
            CPU,
            order.longest,
            compiled=self._compiled,
            adapters=self._adapters,
            team=team,
        )
        threads = team.threads(order.devices)
        model = Model(manifest, decoder, Processors(manifest.config), threads)
        self._models[order.model] = model, team

    def _attach(self, order: AttachBlock) -> Done:
        model, team = self._models[order.model]
        use_threads(model.threads)
        spec = model.manifest.blocks[order.block]
        weights = self._arena[order.offset : order.offset + spec.nbytes]
        try:
            with self._packed.of(order.model, order.block, spec.nbytes, team.share) as pages:
                units = model.network.units(spec, weights, self._form, pages)
        except Exception as error:  # rank 0 says what that means for the node
            known = as_typed(error)
            return Done(known.code, f"rank {team.share.rank}: {known}")
        model.blocks[order.block] = units
        return Done()

    def _close(self, order: CloseModel) -> None:
        """It may not have the model: it may sleep, or another team runs it."""
        model, _ = self._models.pop(order.model, (None, None))
        if self._stepping is not None and self._stepping[0] is model:
            self._stepping = None
        if not order.asleep:
            self._packed.leave(order.model)

    def _adapter(self, order: UseAdapter, shared: Shared) -> Adapter:
        config, share = decoder_config(order.base), self._teams[order.degree].share
        made = read_adapter(order.manifest, shared.bytes, config, CPU, compiled=True, share=share)
        made.settle()
        return made

    def _run(self, order: Run) -> None:
        assert self._stepping is not None
        model, step = self._stepping
        blocks = [model.layer_units(order.block + n) for n in range(order.count)]
        layers = sum(map(len, blocks))
        kv = self._cache.as_strided((layers, 1), (order.cache_step, 1), order.cache_at)
        step.run(order.block, blocks, step.hidden, kv)

    def _head(self, order: Head) -> None:
        model, team = self._models[order.model]
        use_threads(model.threads)
        decoder, unit = cast(Decoder, model.network), model.head_unit(model.manifest.n_blocks - 1)
        assert unit is not None
        x, logits = head_room(team, decoder.config, decoder.dtype, order.rows)
        write_share(unit, x, logits)
        team.meet()


def _taken(descriptor: int | None) -> Shared:
    assert descriptor is not None
    return Shared(descriptor)


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    rank, degrees, threads, form, kept, connection, place, arena = argv
    channel = begin(connection)
    compiled = kernels.load()
    assert compiled is not None
    own, met = int(rank), Shared(int(place))
    teams = {
        degree: Team(Share(own, degree), met, int(threads))
        for degree in map(int, degrees.split(","))
        if own < degree
    }
    seen = Shared(int(arena), copied=True)
    one = Rank(teams, compiled, seen, cast(Form, form), int(kept))
    channel.send(Done())
    obey(channel, one.obey)
