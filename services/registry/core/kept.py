"""Keeps the wanted number of copies of each model in one tier: what is missing, and who makes it.

`orders` has the states of the copies that are ordered. Beside these, only the nodes are remembered
that went lately with copies: they are waited for, because restarts move nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

import msgspec

from services.registry.core.catalog import Catalog
from services.registry.core.goals import Choice, Goals, Need, Place, goals, hindrance, machine_of
from services.registry.core.holdings import Holdings, Key
from services.registry.core.leases import Leases
from services.registry.core.orders import REPORTED, Order, Orders
from shared.ids import Generation, ModelId, NodeId
from shared.messages.pool import (
    CopyProgress,
    Duty,
    ModelRecord,
    NodeInfo,
    NodeStatus,
    Source,
    Tier,
)
from shared.story import Story

T = TypeVar("T")

EVERY_S = 1.0
SOURCES = 4
"""The most sources of one copy."""
LINK_SHARE = 4
"""A copy takes 1 / LINK_SHARE of a link's rate."""
UNKNOWN_RATE = 100_000_000
"""bytes/s of a copy where no link's rate is known."""
RESTART = "restart"
"""The cause of copies that are lacking when the registry starts."""


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """How copies in a tier are kept: see `RegistryConfig`."""

    copies: int
    after_s: float
    at_a_time: int = 4
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class CopyOrdered:
    """To be sent to the node."""

    info: NodeInfo
    model_id: ModelId
    sources: tuple[Source, ...]
    bytes_per_s: int
    tier: Tier
    cause: str
    """What last made copies of the model needed, see `KeptCopies.cause`."""


@dataclass(frozen=True, slots=True)
class ModelSkipped:
    """A bug was met at one model's copies. The other models' were seen to all the same."""

    model_id: ModelId
    error: Exception


@dataclass(frozen=True, slots=True)
class _Left:
    """A node that went."""

    info: NodeInfo
    models: frozenset[ModelId]
    """What it held of what counts."""
    drafts: frozenset[ModelId]
    until: float


class KeptCopies(ABC):
    tier: ClassVar[Tier]
    counted: ClassVar[frozenset[Tier]]
    """The tiers whose blocks make up a copy."""
    least_handed_over: ClassVar[int]
    """A node that is about to end waits for its copy to be made elsewhere, if at least this many
    are wanted."""

    def __init__(
        self,
        settings: Keeping,
        catalog: Catalog,
        leases: Leases,
        holdings: Holdings,
        story: Story,
    ) -> None:
        self.settings = settings
        self.reasons: dict[ModelId, str] = {}
        """Why models lack copies that nobody makes, as of the last step."""
        self.skipped: list[ModelSkipped] = []
        """The pool tells of them, and empties the list."""
        self._catalog = catalog
        self._leases = leases
        self._holdings = holdings
        self._known: dict[NodeId, NodeInfo] = {}
        """Nodes that are not gone."""
        self._orders = Orders(self.tier.value, story)
        self._causes: dict[ModelId, str] = {}
        """See `cause`. A model that has all its copies has no entry."""
        self._left: dict[NodeId, _Left] = {}
        self._patient_until: dict[ModelId, float] = {}
        """Models from before a restart: nodes that held them may not be back yet."""
        self._next_at = float("inf")

    # --- what happens ---

    def start(self, now: float) -> None:
        """The nodes have reported: orders may be given from now on."""
        self._next_at = now
        for record in self._catalog.records:
            self._patient_until[record.model_id] = now + self.settings.after_s
            self._causes.setdefault(record.model_id, RESTART)

    def changed(self, model: ModelId, cause: str) -> None:
        """The model was added, or other copies of it are wanted than before."""
        self._causes[model] = cause

    def leaves(self, node: NodeId) -> None:
        """The node drains or is about to end: its copies count no more."""
        info = self._known.get(node)
        for model in self._models_of(info) if info is not None else ():
            self.changed(model, node)

    def look_soon(self, now: float) -> None:
        """What nodes may be used for has changed. What draining nodes hold counts no more, and can
        still be copied."""
        if self._next_at < float("inf"):  # it has started
            self._next_at = min(self._next_at, now)

    def hands_over(self, record: ModelRecord, node: NodeId, givers: frozenset[NodeId]) -> bool:
        """Whether a draining node should wait before it ends: it has a copy, no machine that stays
        has one, and one is about to."""
        holders = {info.node for info in self.there(record)}
        if (
            self.wanted(record) < self.least_handed_over
            or node not in holders
            or any(self._staying(record))
        ):
            return False
        need = replace(self._need(record, givers), wanted=1)
        busy = {order.node for order in self._orders.under_way}
        found = goals([need], list(self._places(busy)), 1)
        return bool(need.coming or found.choices or found.waiting)

    def hurried(self) -> list[Choice]:
        """Copies under way of models that only draining nodes hold: they are ordered once more, at
        a higher rate."""
        found: list[Choice] = []
        for order in self._orders.made:
            record, info = self._catalog.get(order.model_id), self._leases.info(order.node)
            if record is None or info is None or not self._is_urgent(record):
                continue
            if self._orders.hurry(order):
                found.append(Choice(order.model_id, info))
        return found

    def _is_urgent(self, record: ModelRecord) -> bool:
        return not any(self._staying(record)) and any(self.there(record))

    def _staying(self, record: ModelRecord) -> Iterator[NodeInfo]:
        """The nodes that have a copy and do not drain."""
        return filter(self._stays, self.there(record))

    def joined(self, info: NodeInfo) -> None:
        self._known[info.node] = info

    def gone(self, node: NodeId, generation: Generation, now: float) -> None:
        """A node's lease has ended. What its disk holds may come back with it. What was in
        memory is lost."""
        info = self._known.get(node)
        if info is None or info.generation != generation:
            return
        del self._known[node]
        models, drafts = self._models_of(info), self._drafts(self._holdings.of(info))
        self._left[node] = _Left(info, models, drafts, now + self.settings.after_s)
        for model in models | drafts:
            self.changed(model, node)

    def failed(self, order: CopyOrdered, why: str, now: float) -> None:
        """The node refused, or did not answer. Late answers to older orders change nothing."""
        key = Order(order.model_id, order.info.node, order.info.generation)
        self._orders.refuse(key, why, now)

    # --- what follows ---

    def attempt(self, model: ModelId, act: Callable[[], T], otherwise: T) -> T:
        """What `act` returns, which concerns this model only; `otherwise` if it raises."""
        try:
            return act()
        except Exception as error:
            self.skipped.append(ModelSkipped(model, error))
            return otherwise

    def due(self, now: float) -> bool:
        return now >= self._next_at

    def step(self, models: Mapping[ModelId, frozenset[NodeId]], now: float) -> Goals:
        """The copies to order now. `models`: those that lack some (see `lacking`), each with the
        nodes that can give its blocks."""
        needs = [
            need
            for model, givers in models.items()
            if (need := self.attempt(model, partial(self._need_of, model, givers), None))
        ]
        under_way = self._orders.under_way
        busy = {order.node for order in under_way}
        most = self.settings.at_a_time - len(under_way)
        found = goals(needs, list(self._places(busy)), most)
        self.reasons = dict(found.reasons)
        for choice in found.choices:
            info = choice.info
            order = Order(choice.model_id, info.node, info.generation)
            self._orders.ask(order, self.cause(choice.model_id), now)
        return found

    def settle(self, now: float) -> None:
        """Takes in what nodes have reported, and forgets what is over."""
        self._next_at = now + EVERY_S
        for node, left in list(self._left.items()):
            info = self._leases.info(node)
            if now >= left.until or (info is not None and self._holdings.of(info) is not None):
                del self._left[node]
        for model in list(self._causes):
            if self.attempt(model, partial(self._is_settled, model), False):
                del self._causes[model]
        reported = {
            Order(progress.model_id, info.node, info.generation): progress
            for info, progress in self.copying()
        }
        for order in {**dict.fromkeys(self._orders.known), **reported}:
            look = partial(self._look, order, reported.get(order), now)
            self.attempt(order.model_id, look, None)

    def _is_settled(self, model: ModelId) -> bool:
        """Whether nothing is lacking of the model, or it was removed."""
        record = self._catalog.get(model)
        return record is None or self._is_complete(record)

    def _look(self, order: Order, progress: CopyProgress | None, now: float) -> None:
        """Takes in what has become of one copy."""
        gone = not self._stands(order)
        made = not gone and self._is_made(order)
        self._orders.report(order, progress, now, gone=gone, made=made)

    def _stands(self, order: Order) -> bool:
        """Whether the order's node and model are still there."""
        info = self._leases.info(order.node)
        known = self._catalog.get(order.model_id) is not None
        return known and info is not None and info.generation == order.generation

    def _is_made(self, order: Order) -> bool:
        record, info = self._catalog.identified(order.model_id), self._leases.info(order.node)
        return info is not None and self._has(info, record)

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        self._orders.validate()
        assert all(info.node == node for node, info in self._known.items())
        assert all(left.info.node == node for node, left in self._left.items())

    # --- what is there ---

    def lacking(self, record: ModelRecord, now: float) -> bool:
        """Whether the model is on fewer machines than wanted, and that is to be changed now."""
        if self._is_complete(record):
            return False
        patient_until = self._patient_until.get(record.model_id, now)
        return now >= patient_until or not any(self._staying(record))

    def _is_complete(self, record: ModelRecord) -> bool:
        """Whether as many machines as are wanted have a copy."""
        wanted, machines = self.wanted(record), set[str]()
        for info in self._staying(record) if wanted else ():
            machines.add(machine_of(info))
            if len(machines) >= wanted:
                return True
        return len(machines) + self.in_parts(record) >= wanted

    def in_parts(self, record: ModelRecord) -> int:
        """How many copies there are beside those that one node has whole: in parts, on several
        nodes that stay."""
        return 0

    def cause(self, model: ModelId) -> str:
        """What last made copies of the model needed: a node that went or leaves, a request that
        added or changed the model, its schedule, or the registry's restart. If none of these did,
        what nodes report: a copy is gone, or the model is in use."""
        return self._causes.get(model, REPORTED)

    def there(self, record: ModelRecord) -> Iterator[NodeInfo]:
        """Nodes that are not gone and have a copy, in no order."""
        for node, generation in self._possible(record.model_id):
            info = self._leases.info(node)
            if info is not None and info.generation == generation and self._has(info, record):
                yield info

    def _possible(self, model: ModelId) -> Collection[Key]:
        """Who may have a copy."""
        return self._holdings.reporters(model)

    def size(self, record: ModelRecord) -> int:
        """The room that a copy takes."""
        return record.nbytes

    @abstractmethod
    def wanted(self, record: ModelRecord) -> int:
        """How many machines are to have a copy."""

    @abstractmethod
    def worth(self, record: ModelRecord) -> float:
        """Of models with as many copies, the one that is worth most is copied first."""

    @abstractmethod
    def _has(self, info: NodeInfo, record: ModelRecord) -> bool:
        """Whether what the node holds counts as a copy."""

    @abstractmethod
    def _places(self, busy: set[NodeId]) -> Iterator[Place]:
        """Where copies can be made. `busy`: nodes that make a copy already."""

    def awaited(self, model: ModelId) -> list[NodeId]:
        """Nodes that went lately with a copy, and may come back."""
        left = self._left.values()
        return [each.info.node for each in left if model in each.models | each.drafts]

    def copying(self) -> Iterator[tuple[NodeInfo, CopyProgress]]:
        """Every copy that is not whole, with its node."""
        for info in self._leases.present:
            status = self._holdings.of(info)
            for progress in status.copying if status else ():
                if progress.tier is self.tier:
                    yield info, progress

    def _models_of(self, info: NodeInfo) -> frozenset[ModelId]:
        """The models of which the node holds something that counts."""
        models = self._holdings.models(info.node, info.generation)
        return frozenset(model for model, tiers in models.items() if tiers.keys() & self.counted)

    def _drafts(self, status: NodeStatus | None) -> frozenset[ModelId]:
        """Models of which a part lies on a node."""
        copying = status.copying if status else ()
        return frozenset(each.model_id for each in copying if each.tier is self.tier)

    def _stays(self, info: NodeInfo) -> bool:
        return not info.duty.leaves

    def hindrance(self, record: ModelRecord, sources: frozenset[NodeId]) -> str:
        """Why no node can make one more copy, in words; empty if one can. `sources`: the nodes that
        can give the model's blocks."""
        return hindrance(self._need(record, sources), list(self._places(set())))

    def _need_of(self, model: ModelId, sources: frozenset[NodeId]) -> Need:
        return self._need(self._catalog.identified(model), sources)

    def _need(self, record: ModelRecord, sources: frozenset[NodeId]) -> Need:
        model = record.model_id
        coming = filter(None, map(self._leases.info, self._orders.expected(model)))
        return Need(
            model,
            self.size(record),
            wanted=self.wanted(record) - self.in_parts(record),
            there=tuple(sorted(self._staying(record), key=lambda info: info.node)),
            awaited=tuple(self._left[node].info for node in self.awaited(model))
            + tuple(info for info in self.there(record) if info.duty is Duty.ENDING),
            coming=tuple(filter(self._stays, coming)),
            sources=sources,
            refused=self._orders.passed_over(model),
            worth=self.worth(record),
            own=self.tier is not Tier.DISK,
        )

    def rate(self, model: ModelId, target: NodeInfo, sources: Iterable[NodeInfo]) -> int:
        """bytes/s of a copy. It is LINK_SHARE times as much if all holders are about to end."""
        hurry = LINK_SHARE if self._is_urgent(self._catalog.identified(model)) else 1
        known = [info.link_bytes_per_s for info in (target, *sources) if info.link_bytes_per_s]
        usual = max(1, min(known) // LINK_SHARE) if known else UNKNOWN_RATE
        return hurry * (self.settings.bytes_per_s or usual)
