"""What a node asks its engine of KV: who has how much of it, and what comes and goes."""

from collections.abc import Mapping

import torch

from services.node.core.kv import PAGE, Need, Restoration, movable
from services.node.core.load import HostTierLoad
from services.node.engine.base import SequenceKey
from services.node.engine.kv import KvCache
from services.node.engine.kv_loan import KvLoan
from services.node.engine.leading import EngineRanks
from services.node.engine.model import Model
from shared.errors import CapacityExceeded, NotFound
from shared.ids import NO_ADAPTER, ModelId


class EngineKv:
    """The part of the engine that implements services.node.core.kv.Kv."""

    _kv: KvCache
    _device: torch.device
    _models: dict[ModelId, Model]
    _ranks: EngineRanks | None

    def _model(self, model_id: ModelId) -> Model:
        if model_id not in self._models:
            raise NotFound(f"model {model_id} is not open here")
        return self._models[model_id]

    def receive(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        blocks = (0, self._model(model_id).manifest.n_blocks)
        layers = self._model(model_id).layers_with_kv(*blocks)
        sequence = self._kv.start(model_id, blocks, layers, key, limit, adapter)
        found = self._kv.adopt(sequence, tokens)
        try:
            self._kv.extend(sequence, movable(len(tokens)) - found)
        except CapacityExceeded:
            self._kv.free((key,))
            raise
        return found

    def receive_more(self, key: SequenceKey, end: int) -> None:
        sequence = self._kv.find(key)
        if sequence is not None and end > sequence.length:
            self._kv.extend(sequence, end - sequence.length)

    def received(self, key: SequenceKey, tokens: tuple[int, ...]) -> None:
        if sequence := self._kv.find(key):
            self._kv.cut(sequence, len(tokens))
            first = sequence.known * PAGE
            self._kv.keep(sequence, first, tokens[first:])

    def position_bytes(self, model_id: ModelId) -> int:
        return self._kv.position_bytes(model_id)

    def lend(self, key: SequenceKey, blocks: tuple[int, int], first: int, stop: int) -> KvLoan:
        if self._ranks is not None and self._ranks.kv_ranks > 1:
            raise NotFound(f"the KV of sequence {key} lies on several devices, and stays there")
        sequence = self._kv.find(key)
        if sequence is None:
            raise NotFound(f"there is no KV of sequence {key}")
        layers = self._model(sequence.model_id).layers_with_kv(*blocks)
        loan = self._kv.lend(key, layers, first, stop)
        if self._device.type == "cuda":  # the step that writes these pages may still run there
            loan.written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            loan.written.record()
        return loan

    def give_back(self, loan: KvLoan) -> None:
        loan.end()
        self._kv.give_back(loan)

    def adopt(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        blocks = (0, self._model(model_id).manifest.n_blocks)
        layers = self._model(model_id).layers_with_kv(*blocks)
        if not layers:
            return 0
        sequence = self._kv.start(model_id, blocks, layers, key, limit, adapter)
        found = self._kv.adopt(sequence, tokens)
        # Without a cached prefix, the sweep starts the sequence itself.
        if not found:
            self._kv.free((key,))
        return found

    def restorable(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> Restoration | None:
        if self._kv.host is None or not tokens:
            return None
        sequence = self._kv.find(key)
        if sequence is None:
            blocks = (0, self._model(model_id).manifest.n_blocks)
            layers = self._model(model_id).layers_with_kv(*blocks)
            sequence = self._kv.start(model_id, blocks, layers, key, limit, adapter)
        found = self._kv.restorable(sequence, tokens)
        if not sequence.length and not (found and found.worth):
            self._kv.free((key,))
        return found

    def restore(self, key: SequenceKey) -> tuple[int, bool]:
        sequence = self._kv.find(key)
        if sequence is None:
            raise NotFound(f"there is no KV of sequence {key}")
        more = self._kv.restore(sequence)
        return sequence.length, more

    @property
    def host_tier(self) -> HostTierLoad:
        host = self._kv.host
        if host is None:
            return HostTierLoad()
        return HostTierLoad(host.tier.nbytes, host.tier.used, host.saved, host.restored)

    @property
    def kv_used(self) -> int:
        return self._kv.used

    @property
    def kv_capacity(self) -> int:
        return self._kv.capacity

    def kv_share(self, model_id: ModelId) -> int:
        return self._kv.share(model_id)

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        model = self._models.get(model_id)
        if model is None or stop > model.manifest.n_blocks:
            return 1
        return self._kv.parts(model_id, model.layers_with_kv(start, stop))

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        return self._kv.free_for(model_id, promised)

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        self._kv.make_room(wanted)

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        model = self._models.get(model_id)
        if model is None or stop > model.manifest.n_blocks:
            return True
        return bool(model.layers_with_kv(start, stop))
