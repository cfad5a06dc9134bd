"""The load that gateways report, and whether anything is heard over the bus at all.

A gateway reports every 100 ms while its load changes, and every 500 ms otherwise. Sums over the
gateways are kept up to date with every report, so that a question costs the same however many
gateways there are.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf

import msgspec

from services.planner.core.demand import Demand
from services.planner.core.tickets import Moment
from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.load import GatewayLoad, ModelLoad

FRESH_S = 2.0
"""A gateway no longer counts when it was silent for this long while others were heard."""
BLIND_S = 1.5
"""When nobody was heard for this long, it is the planner that is cut off from the bus, and the
silence of a node or gateway says nothing. It is less than FRESH_S, so that no gateway is forgotten
meanwhile."""


class Asked(msgspec.Struct, frozen=True, gc=False):
    requests: int = 0
    tokens: int = 0
    """Of their prompts."""


@dataclass(slots=True)
class _Gateway:
    """What a gateway has said."""

    seq: int
    at: float
    fresh_from: float
    """Its age counts from here: later than `at` if nobody could be heard for a while."""
    takes_changes: bool
    """See GatewayLoad."""
    behind_ns: int | None = None
    """How far its clock is behind this planner's time. None: it does not say what its clock
    shows."""
    models: dict[ModelName, ModelLoad] = field(default_factory=dict)
    asked: dict[ModelName, Asked] = field(default_factory=dict)
    """What it counted last, also of models that have no load now."""


@dataclass(slots=True)
class _Sum:
    """A model's load, over all gateways that still count."""

    loads: dict[GatewayId, ModelLoad] = field(default_factory=dict)
    queued_requests: int = 0
    queued_tokens: int = 0
    running_requests: int = 0
    running_tokens: int = 0
    prompt_tokens: int = 0
    on: dict[InstanceId, int] = field(default_factory=dict)
    """Requests on each instance that has any."""

    def change(self, before: ModelLoad, load: ModelLoad) -> None:
        """Takes in that a gateway's load is another. Most often it is the same on nearly all
        instances."""
        self.queued_requests += load.queued_requests - before.queued_requests
        self.queued_tokens += load.queued_tokens - before.queued_tokens
        self.running_requests += load.running_requests - before.running_requests
        self.running_tokens += load.running_tokens - before.running_tokens
        self.prompt_tokens += load.prompt_tokens - before.prompt_tokens
        now, then = load.instance_requests, before.instance_requests
        if now == then:
            return
        for instance, requests in now.items():
            if more := requests - then.get(instance, 0):
                self._add(instance, more)
        for instance, requests in then.items():
            if instance not in now:
                self._add(instance, -requests)

    def _add(self, instance: InstanceId, requests: int) -> None:
        left = self.on.get(instance, 0) + requests
        if left:
            self.on[instance] = left
        else:
            self.on.pop(instance, None)


_NOTHING = _Sum()
_IDLE = ModelLoad(model=ModelName(""))
"""In place of a load that is not there."""


class LoadReports:
    def __init__(self) -> None:
        self._gateways: dict[GatewayId, _Gateway] = {}
        """Those that still count."""
        self._sums: dict[ModelName, _Sum] = {}
        self._heard_at = float("-inf")
        self._stale_at = float("inf")
        """Before this, no gateway has been silent for too long."""
        self._asked: dict[ModelName, Asked] = {}
        self._oldest: float | None = None
        """When the gateway reported that has been silent for longest; None: to be found anew."""

    def on_load(self, load: GatewayLoad, now: float) -> AbstractSet[ModelName]:
        """Returns the models whose load differs from what the gateway said before."""
        self.on_sign_of_life(now)
        known = self._gateways.get(load.gateway)
        heard = known is not None
        if known is None:
            known = self._gateways[load.gateway] = _Gateway(load.seq, now, now, load.takes_changes)
        elif load.seq < known.seq:
            return frozenset()
        known.seq, known.at, known.fresh_from = load.seq, now, now
        self._oldest = None
        known.takes_changes = load.takes_changes
        known.behind_ns = round(now * 1e9) - load.sent_ns if load.sent_ns else None
        self._stale_at = min(self._stale_at, now + FRESH_S)
        changed = set[ModelName]()
        for each in load.models:
            name = each.model
            before, asked = known.models.get(name), known.asked.get(name)
            if before != each if before is not None else each.in_use:
                self._replace(load.gateway, known, name, each)
                changed.add(name)
            if asked is None or asked.requests != each.asked_requests:
                self._count(known, each, heard=heard)
                changed.add(name)
        if load.whole:
            for name in known.models.keys() - {each.model for each in load.models}:
                self._replace(load.gateway, known, name, None)
                changed.add(name)
        return changed

    def _replace(
        self, gateway: GatewayId, known: _Gateway, name: ModelName, load: ModelLoad | None
    ) -> None:
        total = self._sums.get(name)
        if total is None:
            total = self._sums[name] = _Sum()
        before = known.models.get(name, _IDLE)
        if load is not None and load.in_use:
            total.change(before, load)
            known.models[name] = total.loads[gateway] = load
            return
        total.change(before, _IDLE)
        known.models.pop(name, None)
        total.loads.pop(gateway, None)
        if not total.loads:
            del self._sums[name]

    def _count(self, known: _Gateway, load: ModelLoad, *, heard: bool) -> None:
        """Takes note of the requests that a gateway was asked for since it last named the model.
        `heard`: whether this planner knew the gateway. Then a model that it names for the first
        time had no requests but those that are there."""
        name, now = load.model, Asked(load.asked_requests, load.asked_tokens)
        before = known.asked.get(name)
        known.asked[name] = now
        requests, tokens = now.requests, now.tokens
        if before is None:
            there = min(requests, load.queued_requests + load.running_requests) if heard else 0
            tokens = tokens * there // max(1, requests)
            requests = there
        elif before.requests <= requests:  # it did not begin anew
            requests, tokens = requests - before.requests, tokens - before.tokens
        if requests or tokens:
            total = self._asked.get(name, Asked())
            self._asked[name] = Asked(total.requests + requests, total.tokens + max(0, tokens))

    def on_sign_of_life(self, now: float) -> None:
        """Takes note that something came over the bus."""
        if self.blind(now):
            for gateway in self._gateways.values():
                gateway.fresh_from = now
        self._heard_at = now
        if now >= self._stale_at:
            self._forget_silent()

    def _forget_silent(self) -> None:
        for name, gateway in list(self._gateways.items()):
            if self._heard_at - gateway.fresh_from > FRESH_S:
                for model in list(gateway.models):
                    self._replace(name, gateway, model, None)
                del self._gateways[name]
                self._oldest = None
        freshest = (gateway.fresh_from for gateway in self._gateways.values())
        self._stale_at = min(freshest, default=float("inf")) + FRESH_S

    def forget(self, models: AbstractSet[ModelName]) -> None:
        """Forgets what was asked of all but these models."""
        for name in self._asked.keys() - models:
            del self._asked[name]
        for gateway in self._gateways.values():
            for name in gateway.asked.keys() - models:
                del gateway.asked[name]

    def blind(self, now: float) -> bool:
        """Whether nobody was heard lately, so that what is known may no longer be so."""
        return now - self._heard_at > BLIND_S

    def demand(self, model: ModelName) -> Demand:
        total = self._sums.get(model, _NOTHING)
        return Demand(
            queued_requests=total.queued_requests,
            queued_tokens=total.queued_tokens,
            running_requests=total.running_requests,
            running_tokens=total.running_tokens,
            prompt_tokens=total.prompt_tokens,
        )

    @property
    def busy(self) -> int:
        """How many models have any load."""
        return len(self._sums)

    def waiting(self, model: ModelName) -> tuple[int, int]:
        """How many requests wait for an instance, and prompt tokens for their prefill."""
        total = self._sums.get(model, _NOTHING)
        return total.queued_requests, total.prompt_tokens

    def waiting_since_ns(self, model: ModelName, now: Moment) -> int:
        """When the oldest request that waits began to wait, by this planner's wall clock, whatever
        the gateways' clocks show. 0: none waits."""
        zero_ns = now.wall_ns - round(now.at * 1e9)
        found = []
        for gateway, load in self._sums.get(model, _NOTHING).loads.items():
            if load.waiting_since_ns:
                behind_ns = self._gateways[gateway].behind_ns
                right_ns = 0 if behind_ns is None else zero_ns + behind_ns
                found.append(load.waiting_since_ns + right_ns)
        return min(found, default=0)

    def asked(self, model: ModelName) -> Asked:
        """What gateways were asked for since this planner heard of them."""
        return self._asked.get(model, Asked())

    def running(self, model: ModelName) -> Mapping[InstanceId, int]:
        """Requests in flight on the model's instances, as the gateways last said."""
        return self._sums.get(model, _NOTHING).on

    def requests_on(self, model: ModelName, instance: InstanceId) -> int:
        return self.running(model).get(instance, 0)

    def reported_since(self, at: float) -> bool:
        """Whether every gateway that still counts has reported later than `at`."""
        if self._oldest is None:
            self._oldest = min((each.at for each in self._gateways.values()), default=inf)
        return self._heard_at > at and self._oldest > at

    @property
    def take_changes(self) -> bool:
        """Whether there are gateways, and all of them understand changes of instance sets."""
        gateways = self._gateways.values()
        return bool(gateways) and all(each.takes_changes for each in gateways)

    def validate(self) -> None:
        """Raises AssertionError if a report is newer than what was heard last, does not lie under
        its model's name, or is not in the sums."""
        oldest = min((each.at for each in self._gateways.values()), default=inf)
        assert self._oldest in (None, oldest)
        sums: dict[ModelName, _Sum] = {}
        for gateway, known in self._gateways.items():
            assert known.at <= known.fresh_from <= self._heard_at
            assert self._heard_at - known.fresh_from <= FRESH_S
            for name, load in known.models.items():
                assert load.model == name
                total = sums.setdefault(name, _Sum())
                total.loads[gateway] = load
                total.change(_IDLE, load)
        assert sums == self._sums
        for total in sums.values():
            assert all(total.on.values())
