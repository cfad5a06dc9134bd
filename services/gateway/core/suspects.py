"""Requests that may kill nodes.

    no suspect --its node died, or its engine failed--> suspect
    suspect    --it got past where that happened-------> no suspect
    suspect    --the same happens while it is tried----> refused (`RequestKillsNodes`)

When a node dies, one of the requests that ran there may be the reason, and nobody knows which: all
are suspects. Each goes on at once, but alone:

- It goes to an instance over whose nodes nothing runs, if there is one. If all are busy, it goes to
  an instance that runs requests already. In both cases the gateway and the nodes
  (`Submit.alone_until`) let nothing else begin there meanwhile, and no other suspect above all.
- So if that node dies too, at most one suspect was there. That suspect has killed two nodes. It is
  refused, also if its client asks again with the same Idempotency-Key. The requests beside it are
  suspects for the first time.
- A suspect is cleared when it has the tokens that the node may have come to before it died. That
  takes a prefill and a few steps. Then the next suspect has its turn.
- The suspect that has come last has the first turn: most of what kills a node does so at once. But
  where there are few streams, and many requests that have no token yet, the streams have theirs
  first (`_turns`).
- When a suspect is refused, it is known who killed its two nodes. Everybody who was a suspect only
  for these deaths is cleared, and who ran beside it becomes none. Other gateways hear of it with
  the next load report (`ModelLoad.explained`).
- Of a path or a group that is gone, one node has died, and the others live. Nobody is blamed for
  these: each gateway asks at once which one it was (`AskWhoDied`).
- A node that tries a suspect refuses those of other gateways. These ask again soon, in turn, since
  a trial is short: such refusals make no longer pauses, neither for the instance nor for the
  request.
- A request that has just moved away from the node, and does not have these tokens yet, is a suspect
  too: the node may not have heard in time that the request had left. So is a request that had to
  begin anew because another planner does not know its instance, or because the gateway has lost its
  id. Nodes may have died of it while nobody looked, so the gateway asks which of them live. What
  begins anew because its gateway was cut off is one if it hears that the node died.

What looks like a death may be a cut link or a paused process, or a replica that ended in good order
before it had the request. That makes suspects too, since they lose little by it (of such a replica
the gateway asks whether its node died). But a suspect is refused only if its node had said that it
has the request (on a path: after all other nodes had said that they have room for it, so that none
was dead before), and

- the node says that its engine failed, or
- the bus says that the node's process is connected no longer. The gateway asks this itself
  (`AskWhetherAlive`, or `AskWhoDied` where no request has to wait for the answer), unless registry
  or planner have said that the node is gone.

A node that is found dead gets nothing more. Otherwise its one death would count twice.

So a request that kills whatever runs it kills two nodes. It kills three

- if one of them died while its gateway could not hear it, because the bus was away. That node may
  have drawn more than MOST_UNHEARD tokens in vain, and then the request is cleared too early. It
  would have to run alone for much longer, and so would every other suspect.
- if it moved from one to the other just before its gateway heard that the first had died. It is
  blamed for both, and so may others be that moved with it, here or at other gateways. So only a
  trial says which of them it was. What moves with its KV never runs on two nodes
  (`services.node.core.handover`); what has no token yet may.

And if two requests that kill ran on one node, the second
is cleared when the first is refused, so it kills one node more.
"""

from collections.abc import Callable, Collection, Iterable, Sequence, Set

from services.gateway.core.attempts import Attempts
from services.gateway.core.commands import AskWhetherAlive, AskWhoDied
from services.gateway.core.ledger import Ledger
from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from shared.errors import EngineFailed, LambdaScaleError, RequestKillsNodes
from shared.ids import ModelId, NodeId

TOLD_S = 10.0
"""For so long a gateway tells others why nodes died."""
AT_ONCE = 0.5
"""The share of what kills nodes that does so before its first token, as is assumed."""
Requeue = Callable[[list[Request], str, str], None]
"""(requests, reason, detail): puts requests that were taken off their instances back to the head of
the queue."""


class Suspects:
    def __init__(
        self,
        model_id: ModelId,
        table: Table,
        attempts: Attempts,
        ledger: Ledger,
        requeue: Requeue,
    ) -> None:
        self._model_id = model_id
        self._table = table
        self._attempts = attempts
        self._ledger = ledger
        self._requeue = requeue
        self._explained: dict[NodeId, float] = {}
        """Nodes whose death was the doing of a request that was refused for it, and since when that
        is known."""

    def break_off(
        self, gone: Collection[Route], why: str, now: float, dead: Collection[NodeId] = ()
    ) -> None:
        """Nodes of these routes may have died; of `dead` it is known. Requests that were to move
        there stay where they are. Those that ran there are suspects, and so are those that have
        just left these nodes."""
        for route in gone:
            for request in list(route.requests.values()):
                if request.instance != route.instance.id:
                    self._attempts.stay(route, request, why)
        # What nothing runs on may have left the set for another reason.
        nodes = frozenset(dead).union(*(route.nodes for route in gone if route.requests))
        ran = [(request, route) for route in gone for request in reversed(route.requests.values())]
        ran.sort(key=_turns([request for request, _ in ran]))
        deaths = {self._lost(route.nodes, dead) for _, route in ran}
        unsure = {self._lost(r.nodes, dead) for each, r in ran if not _is_sure(each, r, dead)}
        for request, route in ran:
            self.broke(request, route, "gone", LambdaScaleError(why), now, dead)
        for request in self._requests() if nodes else ():
            if left := _left(request, nodes):
                death = self._lost(left, dead)
                deaths |= {death} - request.blamed
                self._broke_there(request, death, why, now)
        self._ask_who_died(death for death in deaths if len(death) > 1 or death in unsure)

    def doubt(self, gone: Collection[Route], why: str, now: float) -> None:
        """What ran on these routes is to begin anew, and nobody knows whether nodes died. Another
        planner does not name these routes, say: some died while there was none, or it names its
        instances in another way. Those that were no suspects will have left (`Request.left`)."""
        self._ask_who_died(route.nodes for route in gone if any(route.runs()))
        for route in gone:
            for request in [each for each in route.runs() if each.suspect and each.begun]:
                self.broke(request, route, "gone", LambdaScaleError(why), now, doubted=True)

    def _ask_who_died(self, deaths: Iterable[frozenset[NodeId]]) -> None:
        """Asks which of these nodes are dead: of a path or a group that breaks off, most live, and
        so may the node of a replica that had not taken its requests."""
        if nodes := sorted(frozenset[NodeId]().union(*deaths)):
            ask = AskWhoDied(self._model_id, tuple(nodes), cause=self._ledger.cause)
            self._ledger.out.append(ask)

    def found_dead(self, nodes: Collection[NodeId], *, asked: bool = False) -> None:
        """These nodes are dead. Whoever may be the reason is not blamed for those beside them.
        `asked`: AskWhoDied was answered, so that all others live."""
        dead = frozenset(nodes)
        for request in self._suspects():
            request.surely = request.surely or not request.unsure.isdisjoint(dead)
            request.unsure = frozenset() if asked else request.unsure - dead
        self._blame_for(dead)

    def _blame_for(self, dead: frozenset[NodeId]) -> None:
        for request in self._suspects():
            request.blamed = frozenset(death & dead or death for death in request.blamed)
            self._clear_if_explained(request)

    def _broke_there(
        self, request: Request, death: frozenset[NodeId], why: str, now: float
    ) -> None:
        """The request is a suspect for what happened where it was before."""
        request.blamed |= {death}
        if request.suspect:
            return
        running = request.running
        if running:
            route = self._attempts.route(request)
            if request.move is not None:
                self._attempts.stay(self._table.routes[request.move.instance], request, why)
            self._attempts.take_off(route, request, why, now)
        assert request.left is not None
        request.cleared_at, request.surely = request.left.before, True
        self._clear_if_explained(request)
        if running:
            self._requeue([request], "gone", why)

    def broke(
        self,
        request: Request,
        route: Route,
        reason: str,
        error: LambdaScaleError,
        now: float,
        dead: Collection[NodeId] = (),
        *,
        doubted: bool = False,
    ) -> None:
        """The request's attempt on `route` broke off: a node may have died (of `dead` it is known),
        or its engine failed (EngineFailed: it says so itself). `doubted`: nothing speaks for it but
        that the route is gone."""
        why = str(error)
        if request.move is not None:
            self._attempts.stay(self._table.routes[request.move.instance], request, why)
        # What killed the node before the request had come there is not known.
        tried = request.suspect and (request.begun or isinstance(error, EngineFailed))
        known = request.suspect and request.surely
        sure = _is_sure(request, route, dead)
        self._attempts.take_off(route, request, why, now)
        request.tried = tried
        failed = isinstance(error, EngineFailed)
        died = reason == "gone" and not doubted
        if failed or died:
            request.blamed |= {self._lost(route.nodes, dead)}
        if request.tried and failed and request.surely:
            self._convict(request, why)
            return
        if failed or not request.tried:  # else the answer says it
            request.surely = known or failed or (died and sure)
        if not request.tried:
            request.unsure |= route.nodes if died and not sure else frozenset()
            request.cleared_at = route.beyond(request, now)
        if request.tried or not died:
            self._ask(request, route)
        self._clear_if_explained(request)
        self._requeue([request], reason, why)

    def _lost(self, nodes: frozenset[NodeId], dead: Collection[NodeId]) -> frozenset[NodeId]:
        """Those of a route's nodes that may be what broke it off."""
        left = frozenset(node for node in nodes if not self._table.leads_over(node))
        return nodes.intersection(dead) or left or nodes

    def _ask(self, request: Request, route: Route) -> None:
        """Has the request wait until it is known which nodes of the route live. A dead one must not
        be taken for one that the request killed later."""
        request.in_doubt = True
        nodes = tuple(stage.node for stage in route.instance.stages)
        ask = AskWhetherAlive(
            request.id, request.attempt, nodes, request.tried, cause=self._ledger.cause
        )
        self._ledger.out.append(ask)

    def judged(self, request: Request, attempt: int, dead: Collection[NodeId]) -> bool:
        """`AskWhetherAlive` was answered. Returns whether the request has ended."""
        if not request.in_doubt or request.attempt != attempt:
            return False
        request.in_doubt = False
        self._blame_for(frozenset(dead))
        if dead:
            request.blamed |= {frozenset(dead)}
        guilty = request.tried and request.surely and bool(dead)
        request.surely = request.surely or bool(dead)
        if guilty:
            self._convict(request, f"{', '.join(dead)} died")
        else:
            self._clear_if_explained(request)
        return guilty

    def _convict(self, request: Request, why: str) -> None:
        """The request is what killed its nodes. So nobody else did."""
        self._attempts.fail(request, _refusal(why))
        nodes = frozenset[NodeId]().union(*request.blamed)
        self._explained |= dict.fromkeys(nodes, self._ledger.now)
        for other in self._suspects():
            self._clear_if_explained(other)

    def _clear_if_explained(self, request: Request) -> None:
        self._clear_if_of(request, self._explained.keys())

    def _clear_if_of(self, request: Request, explained: Set[NodeId]) -> bool:
        known = bool(request.blamed) and all(death <= explained for death in request.blamed)
        if not (request.suspect and known) or request.in_doubt:
            return False
        self._clear(request, "cleared: another request killed its nodes")
        return True

    @property
    def explained(self) -> tuple[NodeId, ...]:
        """See ModelLoad."""
        return tuple(self._explained)

    def hear(self, explained: Collection[NodeId]) -> bool:
        """Another gateway knows why these nodes died. Returns whether that clears anybody. What it
        says is not kept: such a node may be back, and die again."""
        known = self._explained.keys() | explained
        cleared = [each for each in self._suspects() if self._clear_if_of(each, known)]
        return bool(cleared)

    def _requests(self) -> list[Request]:
        requests = self._ledger.requests.values()
        return [each for each in requests if each.model_id == self._model_id]

    def _suspects(self) -> list[Request]:
        return [each for each in self._requests() if each.suspect]

    def seen(self, nodes: Iterable[NodeId]) -> None:
        """Instances lead over these nodes: if they had died, they are back."""
        if self._explained:
            for node in nodes:
                self._explained.pop(node, None)

    def forget(self, now: float) -> None:
        """Forgets what everybody has heard."""
        for node, since in list(self._explained.items()):
            if now - since > TOLD_S:
                del self._explained[node]

    def clear(self, request: Request) -> bool:
        """Clears a suspect that got past where its node died. Returns whether it did now."""
        if request.cleared_at is None or request.due < request.cleared_at:
            return False
        self._clear(request, "cleared: it got past where its node died")
        return True

    def _clear(self, request: Request, why: str) -> None:
        if request.running:
            self._attempts.route(request).clear(request)
        request.cleared_at, request.blamed, request.unsure = None, frozenset(), frozenset()
        self._ledger.tell(request, why)


def _is_sure(request: Request, route: Route, dead: Collection[NodeId]) -> bool:
    """Whether the request's route seems to be gone because a node of it died. A replica that ended
    in good order is gone, too, and a request may still have been on its way there."""
    return request.begun or not route.nodes.isdisjoint(dead)


def _turns(requests: Sequence[Request]) -> Callable[[tuple[Request, Route]], tuple[bool, int]]:
    """Orders requests with their routes by their turns, the last one first.

    To try a stream ends the wait of that stream. To try one of n requests that have no token yet
    ends the wait of all streams with a probability of AT_ONCE / n.
    """
    begun = sum(bool(request.tokens) for request in requests)
    streams_first = begun * AT_ONCE <= len(requests) - begun
    return lambda each: (streams_first and bool(each[0].tokens), -len(each[0].tokens))


def _left(request: Request, nodes: frozenset[NodeId]) -> frozenset[NodeId]:
    """Those of these nodes that the request left, and may have killed. If it killed them, it will
    again before it has the tokens that its attempts there may have come to."""
    left = request.left
    return left.nodes & nodes if left and request.due < left.before else frozenset()


def _refusal(why: str) -> RequestKillsNodes:
    return RequestKillsNodes(
        f"two nodes failed while they ran the request, the second while the request was tried "
        f"alone ({why}): it is not tried again, so do not repeat it"
    )
