"""One instance, as a gateway sees it: what runs there, and whether it has room for more."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from services.gateway.core.breaker import Breaker
from services.gateway.core.others import NONE, Work
from services.gateway.core.requests import Request
from shared.ids import InstanceId, NodeId, RequestId
from shared.messages.instances import Instance, InstanceState, Role
from shared.slots import Account

SMOOTHING = 16
"""The time from one token to the next is averaged over this many tokens."""
AHEAD_S = 0.2
"""Nothing more is sent to a node, or to an instance of capacity 1, whose prompts will take it so
long to prefill. They keep it busy until the next ones are there, and further requests would wait
there in vain when another instance appears."""
PROMPTS_AHEAD = 4096
"""No more tokens of prompts than these, however fast a node is, or if its speed is not known."""
IN_LINE = 2.0
"""As many times as much is sent to a path of two stages, unless the first stage's part of that
keeps it as busy as a replica. More would only wait there: it has run most of the blocks of so many
prompts before the second stage takes them. On longer paths prompts would wait while other nodes
become complete."""
KV_TOLD_S = 1.0
"""For so long counts what a node said of its free KV. It says so with each token."""
PAST = 3
"""A node may be a step ahead of the last token that came from it, and in the next one."""
MOST_UNHEARD = 16
"""The most tokens that a node is taken to have sent in vain."""
FAST_S = 0.02
"""The assumed time between two tokens, in seconds, of an instance that was not measured yet."""
_NOTHING = 1e-6
"""Sums of weights are no less than this, but for what rounding leaves of them."""


class Node:
    """What requests take of a node. Those of other gateways count as slots only."""

    __slots__ = ("account", "prompts", "prompts_ahead", "suspects")

    def __init__(self, slots: int, prompts_ahead: float) -> None:
        self.account = Account(slots)
        self.prompts_ahead = prompts_ahead
        self.prompts = 0.0
        """Tokens to prefill. A token of a path counts by the share of the model that the node's
        stage is."""
        self.suspects = 0
        """Suspects that are tried over this node, at most one."""

    @property
    def idle(self) -> bool:
        """Whether no request of the model runs here, as far as is known."""
        return not self.account.alone and self.account.on_paths < _NOTHING


@dataclass(frozen=True, slots=True)
class Place:
    """A stage of an instance, and what a request there takes of the stage's node."""

    node: Node
    weight: float
    """The share of a slot that a sequence takes (`shared.slots.weight`)."""
    share: float
    """The share of the model that the stage is."""


@dataclass(slots=True)
class Total:
    """Outstanding tokens of all routes of a table, those of other gateways included."""

    tokens: int = 0


@dataclass(slots=True, eq=False)
class Route:
    """An instance, and what this gateway has running on it."""

    instance: Instance
    trace: str
    """The trace of the set that brought the instance."""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    others: Work = NONE
    """What other gateways have running on it."""
    tokens: int = 0
    """Outstanding tokens: the sum of its requests' charges."""
    prompts: int = 0
    """Tokens to prefill, for requests that have no token from here yet."""
    breaker: Breaker = field(default_factory=Breaker)
    served: bool = False
    """Whether it has given a token."""
    token_s: float = 0.0
    """Mean time from a request's token to its next one, lately. 0: not known."""
    measured: int = 0
    """How many such times were measured."""
    kv_free: int = 0
    """How many positions of KV its leader had free when it last said so, less those of requests
    that were sent since. Below 0: a request waits there for its KV."""
    kv_told_at: float = float("-inf")
    """When that was."""
    slow_looks: int = 0
    """How many times in a row it was slow (`speed`)."""
    told: bool = False
    """Whether it is moving, and what was decided for its requests was recorded."""
    places: tuple[Place, ...] = ()
    """Its stages."""
    prompts_ahead: float = PROMPTS_AHEAD
    open: list["Route"] = field(default_factory=list)
    """The routes of its table that have room, in no order. It is one of them while it has."""
    place_in_open: int = -1
    """Its index there; -1: it has no room."""

    total: Total = field(default_factory=Total)
    """That of its table, which its tokens are part of."""

    def __post_init__(self) -> None:
        self._note_room()

    @property
    def has_room(self) -> bool:
        """Whether the instance takes another request, as far as only it is concerned."""
        instance = self.instance
        return (
            instance.state is InstanceState.SERVING
            and len(self.requests) + self.others.requests < instance.slots
            and instance.capacity > 0
            and self.prompts < self._most_prompts
        )

    @property
    def _most_prompts(self) -> float:
        """The first stage of a pair works ahead of the second one."""
        if self.is_pair:
            return self.prompts_ahead * min(1 / self.places[0].share, IN_LINE)
        return self.prompts_ahead * self.instance.capacity

    @property
    def is_pair(self) -> bool:
        """Whether the instance is a node and another one behind it, which takes prompts from it as
        it can (`services.node.core.live_scaling`)."""
        return len(self.places) == 2

    def _note_room(self) -> None:
        """To be called after each change that `has_room` depends on."""
        if self.has_room == (self.place_in_open >= 0):
            return
        if self.place_in_open < 0:
            self.place_in_open = len(self.open)
            self.open.append(self)
        else:
            last = self.open.pop()
            if last is not self:
                self.open[self.place_in_open] = last
                last.place_in_open = self.place_in_open
            self.place_in_open = -1

    def become(self, instance: Instance, prompts_ahead: float | None = None) -> None:
        """A newer set says this of the instance, whose tokens take another time in another role.
        `prompts_ahead`: if it has changed, too."""
        if prompts_ahead is not None:
            self.prompts_ahead = prompts_ahead
        if instance.role is not self.instance.role:
            self.forget_speed()
        self.instance = instance
        self._note_room()

    def leave(self) -> None:
        """The instance is no longer in its table."""
        self.hear(NONE)
        self.total.tokens -= self.tokens
        self.total = Total(self.tokens)
        self.become(msgspec.structs.replace(self.instance, state=InstanceState.DRAINING))

    def takes(self, now: float, *, suspect: bool = False) -> bool:
        return (
            self.place_in_open >= 0
            and self.breaker.admits(now, suspect=suspect)
            and all(self._fits(place) for place in self.places)
        )

    def is_free(self, now: float, shunned: Mapping[InstanceId, float]) -> bool:
        """`shunned` names instances that are no candidates before some time."""
        return self.takes(now) and shunned.get(self.instance.id, now) <= now

    def begins(self, now: float, shunned: Mapping[InstanceId, float]) -> bool:
        """Whether a request may begin here. Those that have their first token may come to any
        instance that `is_free`."""
        return self.instance.role is not Role.DECODE and self.is_free(now, shunned)

    def hear_kv(self, positions: int, now: float) -> None:
        """Its leader says how many positions of KV are free, besides those of requests that it
        has. It has those of which it has said so."""
        sent = (r for r in self.requests.values() if self._is_on_its_way(r))
        self.kv_free = positions - sum(request.context for request in sent)
        self.kv_told_at = now

    def _is_on_its_way(self, request: Request) -> bool:
        """Whether nothing says that the leader has the request."""
        if request.instance != self.instance.id:
            return True
        return request.prefill > 0 and request.answered_at is None

    def kv_left(self, now: float) -> float:
        """How many positions of KV are free there. Infinite if that is not known: of paths, and of
        instances that are silent."""
        return self.kv_free if now - self.kv_told_at <= KV_TOLD_S else inf

    @property
    def lets_wait(self) -> bool:
        """Whether a request may wait for its KV there: none does yet, or nothing runs there, so
        that its node makes room, or refuses what is larger than it can ever have."""
        return self.kv_free >= 0 or not (self.requests or self.others.requests)

    def _fits(self, place: Place) -> bool:
        """Whether the stage's node has room. All paths over a node share its slots, including paths
        that get no new requests. A replica has the slots that it was granted. The prompts of a
        pair wait at its first node. Where a suspect is tried, nothing else begins."""
        node, stages = place.node, len(self.places)
        return (
            not node.suspects
            and (node.prompts < node.prompts_ahead or (self.is_pair and place is self.places[1]))
            and (stages == 1 or node.account.has_room(stages, place.weight))
        )

    @property
    def nodes(self) -> frozenset[NodeId]:
        """The nodes that it leads over."""
        return frozenset(stage.node for stage in self.instance.stages)

    def runs(self) -> Iterator[Request]:
        """The requests whose attempt runs here. Requests about to move here do not count."""
        return (r for r in self.requests.values() if r.instance == self.instance.id)

    @property
    def unanswered(self) -> int:
        """How many of its requests have no token from here yet."""
        return sum(r.instance != self.instance.id or r.prefill > 0 for r in self.requests.values())

    def begin(self, request: Request, charge: int, prefill: int) -> None:
        """The request runs here from now on."""
        self.requests[request.id] = request
        self.breaker.begin(request.id)
        self._try(int(request.suspect))
        self._count(1)
        self.charge(charge)
        self.prefill(prefill)
        self.kv_free -= request.context

    def end(self, request: Request, charge: int, prefill: int) -> None:
        """The request runs here no longer. `charge` and `prefill` are what was left of them."""
        del self.requests[request.id]
        self.breaker.end(request.id)
        self._try(-int(request.suspect))
        self._count(-1)
        self.charge(-charge)
        self.prefill(-prefill)

    def charge(self, tokens: int) -> None:
        self.tokens += tokens
        self.total.tokens += tokens

    def prefill(self, tokens: int) -> None:
        self.prompts += tokens
        for place in self.places:
            place.node.prompts += place.share * tokens
        self._note_room()

    def clear(self, request: Request) -> None:
        """A request that was tried here is a suspect no longer."""
        request.cleared_at = None
        self._try(-1)

    def _try(self, suspects: int) -> None:
        for place in self.places:
            place.node.suspects += suspects

    @property
    def idle(self) -> bool:
        """Whether nothing runs over its nodes, as far as is known."""
        return all(place.node.idle for place in self.places)

    @property
    def begins_at_once(self) -> bool:
        """Whether no prompt of this gateway waits or runs over its nodes."""
        return all(place.node.prompts < 1 for place in self.places)

    def _count(self, sequences: int) -> None:
        for place in self.places:
            place.node.account.add(len(self.places), place.weight, sequences)

    def hear(self, others: Work) -> None:
        """Takes in what other gateways have running on it now."""
        self._count(others.requests - self.others.requests)
        self.total.tokens += others.tokens - self.others.tokens
        self.others = others
        self._note_room()

    def load(self, more: int = 0) -> float:
        """Outstanding tokens, with `more` of them, per unit of capacity."""
        return (self.tokens + self.others.tokens + more) / self.instance.capacity

    def measure(self, token_s: float) -> None:
        """Takes in the time from a request's token to its next one."""
        before = self.token_s or token_s
        self.token_s = before + (token_s - before) / SMOOTHING
        self.measured += 1

    def beyond(self, request: Request, now: float) -> int:
        """The index of a token that a request's attempt here has surely not come to, at the pace of
        the instance, if no more than MOST_UNHEARD tokens were lost."""
        silent_s = now - request.progress_at
        unheard = round(silent_s / (self.token_s or FAST_S))
        return request.due + PAST + min(unheard, MOST_UNHEARD)

    def forget_speed(self) -> None:
        """What is measured from now on counts."""
        self.token_s, self.measured, self.slow_looks = 0.0, 0, 0
