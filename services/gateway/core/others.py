"""The requests that the other gateways have running, as their load reports say.

So an instance that others have filled is no candidate here, and the two choices weigh all of its
work. Reports are up to 0.1 s old: two gateways may still choose the same slot at once, and then its
leader refuses one of the requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.load import GatewayLoad, ModelLoad

SILENT_S = 2.0
"""A gateway that has reported nothing for so long counts as gone. Gateways report twice a second at
least."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests on an instance, and their outstanding tokens: their share of all that their gateway
    has running, because a report has no tokens by instance."""

    requests: int = 0
    tokens: int = 0

    def replaced(self, before: "Work", after: "Work") -> "Work":
        return Work(
            self.requests - before.requests + after.requests,
            self.tokens - before.tokens + after.tokens,
        )


NONE = Work()
OnInstances = dict[InstanceId, Work]
Changed = dict[ModelName, set[InstanceId]]
"""The instances of each model of which something has changed."""


@dataclass(slots=True)
class _Gateway:
    heard_at: float = 0.0
    seq: int = 0
    models: dict[ModelName, OnInstances] = field(default_factory=dict)


class Others:
    def __init__(self) -> None:
        self._own: set[GatewayId] = set()
        self._gateways: dict[GatewayId, _Gateway] = {}
        self._totals: dict[ModelName, OnInstances] = {}

    def is_own(self, gateway: GatewayId) -> None:
        """Reports under this id are this gateway's own."""
        self._own.add(gateway)

    @property
    def count(self) -> int:
        """How many other gateways there are."""
        return len(self._gateways)

    def of(self, model: ModelName) -> Mapping[InstanceId, Work]:
        """All that others have running on a model's instances."""
        return self._totals.get(model, {})

    def hear(self, load: GatewayLoad, now: float) -> Changed:
        """Takes in a report."""
        changed: Changed = {}
        if load.gateway in self._own:
            return changed
        known = self._gateways.setdefault(load.gateway, _Gateway())
        if load.seq < known.seq:
            return changed
        known.heard_at, known.seq = now, load.seq
        said = {each.model: _running(each) for each in load.models}
        if load.whole:
            said = {name: {} for name in known.models.keys() - said.keys()} | said
        self._replace(known, said, changed)
        return changed

    def silent(self, now: float) -> list[GatewayId]:
        """Gateways that were not heard for SILENT_S."""
        found = self._gateways.items()
        return [name for name, known in found if now - known.heard_at > SILENT_S]

    def forget(self, gateway: GatewayId) -> Changed:
        """The gateway has gone."""
        changed: Changed = {}
        known = self._gateways.pop(gateway)
        self._replace(known, {model: {} for model in known.models}, changed)
        return changed

    def _replace(
        self, known: _Gateway, said: dict[ModelName, OnInstances], changed: Changed
    ) -> None:
        for model, after in said.items():
            before = known.models.pop(model, {})
            if before != after:
                self._count(model, before, after, changed.setdefault(model, set()))
            if after:
                known.models[model] = after

    def _count(
        self, model: ModelName, before: OnInstances, after: OnInstances, changed: set[InstanceId]
    ) -> None:
        totals = self._totals.setdefault(model, {})
        for instance in before.keys() | after.keys():
            old, new = before.get(instance, NONE), after.get(instance, NONE)
            if old == new:
                continue
            changed.add(instance)
            total = totals.get(instance, NONE).replaced(old, new)
            if total == NONE:
                totals.pop(instance, None)
            else:
                totals[instance] = total
        if not totals:
            del self._totals[model]


def _running(load: ModelLoad) -> OnInstances:
    counts = {instance: n for instance, n in load.instance_requests.items() if n > 0}
    each = max(0, load.running_tokens) / max(1, sum(counts.values()))
    return {instance: Work(n, round(n * each)) for instance, n in counts.items()}
