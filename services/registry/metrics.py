"""What the registry shows at `/metrics`: models, nodes, copies and reservations. A registry that
stands by shows none of it."""

from collections.abc import Callable

from services.registry.core.goals import machine_of
from services.registry.core.kept import KeptCopies
from services.registry.core.pool import Pool
from shared.metrics import Metrics, Series

_P = "lambdascale_registry"


class RegistryMetrics:
    def __init__(self, metrics: Metrics, pool: Callable[[], Pool | None]) -> None:
        """`pool`: once this process is the active one."""
        self._pool = pool
        self._watch(
            metrics, "models", "Published models", lambda pool: [((), len(pool.catalog.records))]
        )
        self._watch(
            metrics,
            "nodes",
            "Nodes whose lease stands, and nodes where that is in doubt as nobody can renew it",
            _nodes,
            "lease",
        )
        self._watch(
            metrics,
            "reserved_nodes",
            "Nodes that scaling events have reserved",
            lambda pool: [((), len(pool.reservations.all))],
        )
        self._watch(
            metrics,
            "wanted_copies",
            "Machines that shall have a copy of a model on a disk, or in a host cache",
            _wanted,
            "model",
            "tier",
        )
        self._watch(metrics, "copies", "Machines that have one", _there, "model", "tier")
        self._watch(metrics, "running_copies", "Copies that are being made", _running, "tier")

    def _watch(
        self, metrics: Metrics, name: str, text: str, read: Callable[[Pool], Series], *labels: str
    ) -> None:
        def read_now() -> Series:
            pool = self._pool()
            return [] if pool is None else read(pool)

        metrics.watch("gauge", f"{_P}_{name}", text, *labels, read=read_now)


def _nodes(pool: Pool) -> Series:
    standing = len(pool.leases.standing)
    return [(("standing",), standing), (("doubt",), len(pool.leases.present) - standing)]


def _kept(pool: Pool) -> tuple[KeptCopies, ...]:
    return pool.durable, pool.host


def _wanted(pool: Pool) -> Series:
    for record in pool.catalog.records:
        for kept in _kept(pool):
            yield (record.name, kept.tier.value), kept.wanted(record)


def _there(pool: Pool) -> Series:
    for record in pool.catalog.records:
        for kept in _kept(pool):
            machines = {machine_of(info) for info in kept.there(record)}
            yield (record.name, kept.tier.value), len(machines)


def _running(pool: Pool) -> Series:
    for kept in _kept(pool):
        yield (kept.tier.value,), sum(progress.running for _, progress in kept.copying())
