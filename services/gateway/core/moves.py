"""Which requests leave a path once replicas can take them over, when, and the record of it.

A request that has its first token goes on where it is, however slowly. So a free slot goes first to
requests of paths that wait for theirs, then to the queue, and only then to those that have it.
"""

from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from services.gateway.core import routing
from services.gateway.core.attempts import Attempts
from services.gateway.core.commands import Switched
from services.gateway.core.ledger import Ledger
from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from shared.ids import ModelName

WORTH_MOVING = 4
"""A request with fewer tokens to come ends where it was prefilled."""
EARLY_S = 0.05
"""A request is handed over before its first token if its prefill is expected to begin within so
many seconds: then its KV moves while it is made. Earlier, it would only take a slot where instances
decode."""
LATE_S = 1.0
"""But not if the prefill is expected to take longer: a node does not wait for KV that long."""

SHORT_S = 0.4
"""So long a prompt waits for KV inside its node before it goes elsewhere. Most begin earlier; and
what a prompt computes while it moves is lost."""

RELIEVED = 8
"""So many of them are looked at."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A request whose instance is moving, and what was decided for it."""

    request: Request
    source: Route
    costs: routing.Switch | None
    """None: they cannot be told yet, or the request has no KV that it would lose."""
    stays: bool


class Moves:
    def __init__(
        self,
        name: ModelName,
        table: Table,
        attempts: Attempts,
        ledger: Ledger,
        draw: routing.Draw,
    ) -> None:
        self._draw = draw
        self._name = name
        self._table = table
        self._attempts = attempts
        self._ledger = ledger

    def begin(self, now: float, *, with_token: bool) -> list[Judged]:
        """Submits elsewhere the requests that better leave their path, as far as there is room: of
        those that have their first token, or of the others.

        A request that finds no room goes on where it is. That is better than to wait in the queue.
        """
        judged: list[Judged] = []
        routes = self._table.routes.values()
        moving = [
            (request, route)
            for route in self._table.moving
            for request in route.runs()
            if request.move is None
            and not (request.suspect or request.alone)
            and request.has_token == with_token
        ]
        for request, source in sorted(moving, key=lambda pair: _turn(pair[0])):
            target = routing.refuge(routes, request, now)
            if target is None and not request.shunned:
                break  # nobody has room
            if target is None:
                continue
            costs = None
            if with_token:
                context = len(request.prompt) + len(request.tokens)
                costs = routing.switch(
                    self._table,
                    source,
                    target,
                    remaining=request.remaining,
                    context=context,
                    behind=target.unanswered,
                    bare=is_bare(request),
                )
            stays = costs.stays if costs else not with_token and self._runs(source, target)
            judged.append(Judged(request, source, costs, stays))
            if not stays:
                with_kv = costs is not None and costs.with_kv
                self._attempts.begin_move(request, target, now, with_kv=with_kv)
        return judged

    def _runs(self, path: Route, target: Route) -> bool:
        """Whether the path's prompts are run as soon as on the target: its first two stages share
        them as they can (`services.node.core.live_scaling`). If it has no others, either of them
        runs them whole once it is complete; elsewhere what has run would be run anew."""
        first_two = {stage.node for stage in path.instance.stages[:2]}
        if path.is_pair:
            return not first_two.isdisjoint(self._table.replicas)
        return target.instance.is_replica and target.instance.leader in first_two

    def share(self, now: float) -> None:
        """Submits prompts that wait for a replica to the pair of a node that loads beside it and
        the replica: they begin there at once, through the blocks that have come, and the replica
        goes on with them as soon as it would have begun."""
        for pair in self._table.pairs:
            replica = self._table.replicas.get(pair.instance.stages[1].node)
            for request in _waiting(replica) if replica else ():
                if pair.is_free(now, request.shunned):
                    self._attempts.begin_move(request, pair, now)

    def relieve(self, now: float) -> None:
        """Submits prompts that have long waited for KV inside their nodes to instances that have
        enough for them by now. A few are looked at, on the nodes that have been short of KV for
        longest, since this happens again and again. Of a node that is silent nothing is known."""
        short = (route for route in self._table.short.values() if route.kv_left(now) < 0)
        waiting = filter(None, map(_last_to_begin, short))
        found = islice(waiting, RELIEVED)
        for request in sorted(found, key=lambda request: request.submitted_at):
            if now - request.submitted_at < SHORT_S:
                break
            free = (r for r in self._table.open if r.begins(now, request.shunned))
            roomy = routing.roomy(free, request, now)
            if not roomy:
                break
            self._attempts.begin_move(request, min(roomy, key=lambda r: r.load()), now)

    def hand_over(self, now: float) -> None:
        """Submits requests that have their first token, or will soon, to instances that decode, as
        far as these have room. The others go on where they are meanwhile."""
        for source in self._table.prefilling:
            ready = [r for r in source.runs() if r.has_token]
            for request in (*ready, *self._early(source)):
                if request.move is not None or not _goes_on(request):
                    continue
                target = routing.decoding(self._table, request, now, self._draw)
                if target is not None:
                    self._attempts.begin_move(request, target, now, with_kv=True)
                elif not request.shunned:
                    return  # nobody has room

    def _early(self, source: Route) -> list[Request]:
        """The requests whose prefill runs there, or is about to. Its node knows them."""
        ahead, found = 0, []
        for request in sorted(source.runs(), key=lambda r: r.submitted_at):
            if request.has_token:
                continue
            begins_s = ahead * self._table.prefill_s
            ahead += request.prefill
            if begins_s > EARLY_S or request.answered_at is None:
                break
            if 0 < ahead * self._table.prefill_s <= LATE_S:
                found.append(request)
        return found

    def tell(self, judged: list[Judged], trace: str) -> None:
        """Adds a record of what was decided: whenever a request moved, and the first time that all
        requests of an instance stay."""
        if all(each.stays and each.source.told for each in judged):
            return
        for each in judged:
            each.source.told = True
        moved = [each for each in judged if not each.stays]
        stayed = [each for each in judged if each.stays]
        left = sum(request.move is None for route in self._table.moving for request in route.runs())
        switched = Switched(
            name=self._name,
            trace=trace,
            moved=tuple(each.request.id for each in moved),
            stayed=len(stayed),
            waiting=left - len(stayed),
            sources=tuple(dict.fromkeys(each.source.instance.id for each in judged)),
            moved_costs=_mean(moved),
            stayed_costs=_mean(stayed),
            cause=self._ledger.cause,
        )
        self._ledger.out.append(switched)


def _waiting(replica: Route) -> list[Request]:
    """The requests that a replica has not begun: those behind half of what keeps it busy."""
    ahead, found = 0, []
    for request in sorted(replica.runs(), key=lambda r: r.submitted_at):
        free = request.move is None and not (request.suspect or request.check)
        if free and not request.has_token and ahead >= replica.prompts_ahead / 2:
            found.append(request)
        ahead += request.prefill
    return found


def _last_to_begin(route: Route) -> Request | None:
    """The request that waits for KV on an instance that is short of it: what came last."""
    waiting = (r for r in route.runs() if not r.has_token and r.answered_at is not None)
    last = max(waiting, key=lambda request: request.submitted_at, default=None)
    if last is None or last.move is not None or last.suspect or last.check:
        return None
    return last


def _goes_on(request: Request) -> bool:
    """Whether it is to go on where instances decode. One whose KV would be computed anew there
    would hold up the others."""
    known = not (request.suspect or request.check)
    return is_bare(request) and known and request.remaining >= WORTH_MOVING


def is_bare(request: Request) -> bool:
    """Whether its KV may move (`Takings.begin`)."""
    return not request.image and request.sampling.logprobs is None


def _mean(judged: list[Judged]) -> routing.Switch | None:
    costs = [each.costs for each in judged if each.costs is not None]
    if not costs:
        return None
    return routing.Switch(fmean(c.stay_s for c in costs), fmean(c.move_s for c in costs))


def _turn(request: Request) -> tuple[int, int]:
    """The order in which requests move: first those that have the least KV to compute anew, and of
    these the ones with the most tokens to come."""
    context = len(request.prompt) + len(request.tokens)
    return context, -request.remaining
