"""The load that gateways report, and whether anything is heard over the bus at all.

A gateway reports every 100 ms while its load changes, and every 500 ms otherwise.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.planner.core.scaling import Demand
from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.load import GatewayLoad, ModelLoad

FRESH_S = 2.0
"""A gateway no longer counts when it was silent for this long while others were heard."""
BLIND_S = 1.5
"""When nobody was heard for this long, it is the planner that is cut off from the bus, and the
silence of a node or gateway says nothing. It is less than FRESH_S, so that no gateway is forgotten
meanwhile."""


@dataclass(frozen=True, slots=True)
class _Report:
    at: float
    fresh_from: float
    """Its age counts from here: later than `at` if nobody could be heard for a while."""
    models: dict[ModelName, ModelLoad]


@dataclass(frozen=True, slots=True)
class Asked:
    requests: int = 0
    tokens: int = 0
    """Of their prompts."""


class LoadReports:
    def __init__(self) -> None:
        self._loads: dict[GatewayId, _Report] = {}
        self._heard_at = float("-inf")
        self._asked: dict[ModelName, Asked] = {}

    def on_load(self, load: GatewayLoad, now: float) -> frozenset[ModelName]:
        """Returns the models whose load differs from what the gateway said before."""
        self.on_sign_of_life(now)
        before = self._loads.get(load.gateway)
        known: Mapping[ModelName, ModelLoad] = before.models if before is not None else {}
        models = {each.model: each for each in load.models}
        self._loads[load.gateway] = _Report(now, now, models)
        names = models.keys() | known.keys()
        changed = frozenset(name for name in names if models.get(name) != known.get(name))
        for name in changed:
            self._count(name, known.get(name), models.get(name), heard=before is not None)
        return changed

    def _count(
        self, name: ModelName, before: ModelLoad | None, load: ModelLoad | None, *, heard: bool
    ) -> None:
        """Takes note of the requests that a gateway was asked for since its last report. `heard`:
        whether there was one."""
        if load is None:
            if not self._of(name):
                self._asked.pop(name, None)
            return
        requests, tokens = load.asked_requests, load.asked_tokens
        if before is not None and before.asked_requests <= requests:  # it did not begin anew
            requests, tokens = requests - before.asked_requests, tokens - before.asked_tokens
        if heard:
            known = self._asked.get(name, Asked())
            self._asked[name] = Asked(known.requests + requests, known.tokens + max(0, tokens))

    def on_sign_of_life(self, now: float) -> None:
        """Takes note that something came over the bus."""
        live = {gateway: r for gateway, r in self._loads.items() if self._counts(r)}
        if self.blind(now):
            live = {gateway: replace(r, fresh_from=now) for gateway, r in live.items()}
        self._loads = live
        self._heard_at = now

    def blind(self, now: float) -> bool:
        """Whether nobody was heard lately, so that what is known may no longer be so."""
        return now - self._heard_at > BLIND_S

    def demand(self, model: ModelName) -> Demand:
        loads = self._of(model)
        return Demand(
            queued_requests=sum(load.queued_requests for load in loads),
            queued_tokens=sum(load.queued_tokens for load in loads),
            running_requests=sum(load.running_requests for load in loads),
            running_tokens=sum(load.running_tokens for load in loads),
            prompt_tokens=sum(load.prompt_tokens for load in loads),
        )

    def waiting_since_ns(self, model: ModelName) -> int:
        """When the oldest request that waits began to wait. 0: none waits."""
        since = (load.waiting_since_ns for load in self._of(model))
        return min(filter(None, since), default=0)

    def asked(self, model: ModelName) -> Asked:
        """What gateways were asked for since this planner heard of them."""
        return self._asked.get(model, Asked())

    def running(self, model: ModelName) -> Mapping[InstanceId, int]:
        """Requests in flight on the model's instances, as the gateways last said."""
        loads = self._of(model)
        if len(loads) == 1:
            return loads[0].instance_requests
        total: Counter[InstanceId] = Counter()
        for load in loads:
            total.update(load.instance_requests)
        return total

    def requests_on(self, model: ModelName, instance: InstanceId) -> int:
        return self.running(model).get(instance, 0)

    def reported_since(self, at: float) -> bool:
        """Whether every gateway that still counts has reported later than `at`."""
        return self._heard_at > at and all(report.at > at for report in self._reports())

    def validate(self) -> None:
        """Raises AssertionError if a report is newer than what was heard last, or does not lie
        under its model's name."""
        for report in self._loads.values():
            assert report.at <= report.fresh_from <= self._heard_at
            assert all(load.model == name for name, load in report.models.items())

    def _counts(self, report: _Report) -> bool:
        return self._heard_at - report.fresh_from <= FRESH_S

    def _reports(self) -> list[_Report]:
        """The reports of the gateways that still count."""
        return [report for report in self._loads.values() if self._counts(report)]

    def _of(self, model: ModelName) -> list[ModelLoad]:
        loads = (report.models.get(model) for report in self._reports())
        return [load for load in loads if load is not None]
