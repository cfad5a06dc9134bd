"""A registry that knows what nodes cache in host memory below their disks, and prefers those nodes
as targets: ServerlessLLM's scheduler (OSDI 2024, section 6)."""

from collections.abc import Callable
from dataclasses import replace

from services.registry.core.placement import Candidate
from services.registry.core.pool import Pool
from services.registry.core.reservations import Reservation
from services.registry.core.survey import Survey
from services.registry.service import RegistryService
from shared.bus.base import Bus
from shared.config import RegistryConfig
from shared.ids import EventId, ModelId, NodeId
from shared.messages.pool import NodeInfo, NodeStatus
from simulation.checked import CheckedPool

Cached = Callable[[NodeId, ModelId], int]
"""How many blocks of a model lie in the cache of a node's store."""


class _Survey(Survey):
    cached: Cached

    def _candidate(self, info: NodeInfo, status: NodeStatus, held: Reservation | None) -> Candidate:
        found = super()._candidate(info, status, held)
        cached = self.cached(info.node, self.record.model_id)
        return replace(found, in_memory=max(found.in_memory, cached))


class _Pool(Pool):
    cached: Cached

    def _survey(self, model_id: ModelId, event: EventId | None) -> Survey:
        record = self.catalog.identified(model_id)
        survey = _Survey(record, event, self.leases, self.holdings, self.reservations)
        survey.cached = self.cached
        return survey


class _CheckedPool(CheckedPool, _Pool):
    """Is validated, as `CheckedPool` is."""


class LocalityRegistry(RegistryService):
    pool_type = _Pool

    def __init__(self, bus: Bus, config: RegistryConfig, cached: Cached) -> None:
        super().__init__(bus, config)
        assert isinstance(self.pool, _Pool)
        self.pool.cached = cached


class CheckedLocality(LocalityRegistry):
    pool_type = _CheckedPool
