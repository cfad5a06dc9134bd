"""What a scaling event does when something goes wrong while it loads.

Known failures are answered together: nodes in doubt are pinged (`judging`), nodes that cannot go on
are dropped, and another revision is planned (`repairing`). If pulls have failed and no node is
dropped, only what was to come over the same connections is planned again, and appended to what
flows. In other cases, and if nobody else can send that, all that is left is planned again from what
every participant holds.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable

from services.planner.core import commands, events
from services.planner.core.desk import ASK_S
from services.planner.core.event_base import MAX_REVISIONS, THINK_S, EventBase
from services.planner.core.event_phases import Case, Phase, Taken
from services.planner.core.orders import report_s
from services.planner.core.placement import Held
from services.planner.core.stimuli import Answer, Pinged
from services.planner.core.tickets import Ticket
from services.planner.core.tiers import machine, shares
from shared.errors import DigestMismatch, LambdaScaleError, PlanError
from shared.ids import NodeId
from shared.messages.pool import MEMORY
from shared.messages.scaling import PullFailed, Repair, Transfer

MAX_STALLS = 3
"""The event fails after more stalls than this without a block between them."""


class Mending(EventBase):
    @abstractmethod
    def _send(self, targets: Iterable[NodeId]) -> None:
        """Gives targets their parts of the current revision."""

    @abstractmethod
    def _load(self) -> None:
        """Enters `loading`, and leaves it at once if there is a reason."""

    # --- what calls for it ---

    def _mend(self) -> None:
        """Takes in all the troubles that have come, and answers them with one new revision."""
        troubles, self._troubles = self._troubles, []
        gone = frozenset(t.node for t in troubles if not isinstance(t, PullFailed))
        failures = tuple(
            t
            for t in troubles
            if isinstance(t, PullFailed)
            and self.loads(t.node)
            and self._orders.sent.get(t.node) == t.revision  # older ones have been answered
        )
        for failure in failures:
            self._log(
                "warning",
                "pull failed",
                node=failure.node,
                source=failure.source,
                block=failure.block,
                code=failure.code,
            )
        taken = {t.node: t.why for t in troubles if isinstance(t, Taken)}
        whys = [
            f"node {node} {taken.get(node, 'is gone')}"
            for node in sorted(gone & self._participants())
        ]
        whys += [_why(failure) for failure in failures]
        if not whys:
            self._out |= gone - set(self.record.targets)
            return
        for failure in failures:
            if failure.source == failure.node:
                self._unreadable.add((failure.node, failure.block))
                loads = self._promoting.get(failure.node, frozenset())
                self._promoting[failure.node] = loads - {failure.block}
        why = "; ".join(dict.fromkeys(whys))
        case = Case(why, failures, gone, taken=frozenset(taken))
        self._judge(case, {f.source for f in failures})

    def _stalled(self) -> None:
        """Looks into the event because no block has arrived for long."""
        self._news_at = self._desk.at
        if self._desk.cluster.loads.blind(self._desk.at):
            return  # cut off from the bus: silence says nothing
        self._stalls += 1
        waiting = ", ".join(self._incomplete)
        if self._stalls > MAX_STALLS:
            seconds = f"{self._stalls} x {self._patience:.0f} s"
            self.fail(PlanError(f"no block arrived for {seconds}: {waiting}"))
            return
        case = Case(f"no block arrived for {self._patience:.0f} s: {waiting}")
        self._judge(case, self._participants())

    def _look_for_slow_nodes(self) -> None:
        """Plans again if nodes are slow, so that others send in their stead where they can."""
        held, transfers = self._of_targets(), self.record.transfers
        untold_s = report_s(len(self.record.targets))
        self._trust.share(self._read_for_others(), self._desk.at)
        slow = self._trust.slow(transfers, held, self._expected_s(), self._desk.at, untold_s)
        if slow and self.revisions_left > 0 and self._receiving():
            why = "; ".join(f"node {node} is slow: {late}" for node, late in slow.items())
            self._replan(Case(why, slow=frozenset(slow)))

    def _read_for_others(self) -> list[NodeId]:
        """The nodes that may read this model from disks which are read for other events, too."""
        nodes, cluster = self._on_disk(), self._desk.cluster
        reads = self._desk.reads(self._model.model_id) if nodes else ()
        disks = {disk for read in reads for disk in read.left}
        return [node for node in nodes if machine(cluster.nodes, node) in disks]

    def _expected_s(self) -> Callable[[Transfer], float]:
        """What a transfer should take. The links are looked at once somebody asks, which is seldom:
        they are all nodes'."""
        seconds: Callable[[Transfer], float] | None = None

        def expected(transfer: Transfer) -> float:
            nonlocal seconds
            if seconds is None:
                seconds = self._links().expected(self._model.block_bytes)
            return seconds(transfer)

        return expected

    # --- who can go on ---

    def _judge(self, case: Case, nodes: Collection[NodeId]) -> None:
        self._step(Phase.JUDGING)
        self._case, case.begun_ns = case, self._desk.now.wall_ns
        for node in sorted(nodes):
            ticket = self._ask(ASK_S, node)
            self._do(commands.Ping(ticket=ticket, node=node, cause=self.record.id))
        self._judged()

    def _on_ping(self, node: NodeId, answer: Answer) -> None:
        there = isinstance(answer, Pinged) and answer.there
        if not there and not self._desk.cluster.loads.blind(self._desk.at):
            self._case.silent.add(node)
        self._judged()

    def _judged(self) -> None:
        """Goes on once every node has answered, or its answer counts as lost."""
        if self._waits:
            return
        case = self._case
        if case.failures:
            unable = self._trust.blame(case.failures, case.silent)
        else:
            unable = frozenset(case.silent)
        case.amends = bool(case.failures) and not self._participants() & (case.gone | unable)
        self._drop(case.gone | unable, fit=case.gone)
        self._replan(case)

    # --- the next revision ---

    def _replan(self, case: Case) -> None:
        """Plans the next revision."""
        self._case, case.receiving = case, self._receiving()
        if case.amends:
            failed = {failure.node for failure in case.failures}
            case.receiving = tuple(node for node in case.receiving if node in failed)
        if not self.record.targets and case.taken:
            self.cancel(case.why)
        elif not self.record.targets:
            self.fail(PlanError(f"no target is left: {case.why}"))
        elif not case.receiving:
            self._load()
        elif self.revisions_left <= 0:
            self.fail(PlanError(f"given up after {MAX_REVISIONS} plans: {case.why}"))
        else:
            self._repair(case)

    def _repair(self, case: Case) -> None:
        self._step(Phase.REPAIRING)
        self._tell(f"planned again: {case.why}", *sorted(self._out))
        case.since_ns = self._desk.now.wall_ns
        case.begun_ns = case.begun_ns or case.since_ns
        if case.amends:
            self._amend(case)
        else:
            self._replan_all(case)

    def _amend(self, case: Case) -> None:
        """Plans again only what was to come over the connections on which pulls failed."""
        broken = {(f.source, f.node) for f in case.failures}
        case.kept = tuple(t for t in self._to_come() if (t.src, t.dst) not in broken)
        coming = {node: {t.block for t in case.kept if t.dst == node} for node in case.receiving}
        held = self._to_send()
        lacked = {n: self._wanted_by(n) - held[n] - coming[n] for n in case.receiving}
        self._append(self._ask(THINK_S), case.kept, lacked, held)

    def _append(
        self,
        ticket: Ticket,
        running: tuple[Transfer, ...],
        wanted: Held,
        can_send: Held,
    ) -> None:
        """Asks how nodes get `wanted` blocks beside what is `running`. `can_send`: the nodes that
        may send besides, with what they can send."""
        named = {*(n for t in running for n in (t.src, t.dst)), *wanted}
        append = commands.Append(
            ticket=ticket,
            held={node: self._held(node) for node in named} | dict(can_send),
            running=running,
            wanted=wanted,
            model=self._model,
            links=self._links(),
            can_send={*can_send, *wanted} - self._trust.distrusted,
            cause=self.record.id,
        )
        self._do(append)

    def _to_come(self) -> tuple[Transfer, ...]:
        """The transfers that are still to come."""
        held, every = self._of_targets(), self._every
        return tuple(t for t in self.record.transfers if t.block not in held.get(t.dst, every))

    def _replan_all(self, case: Case) -> None:
        held = self._to_send()
        self._fall_back_on_disks(held)
        repair = commands.Repair(
            ticket=self._ask(THINK_S),
            held=held,
            targets={node: events.wanted(self.record, node) for node in case.receiving},
            model=self._model,
            links=self._links(),
            reluctant=frozenset(self._trust.distrusted),
            cause=self.record.id,
        )
        self._do(repair)

    def _to_send(self) -> dict[NodeId, frozenset[int]]:
        """For each node that may send, the blocks it can send. Targets may also send what they load
        themselves."""
        held = {
            node: blocks | self._promoting.get(node, frozenset())
            for node, blocks in self._of_targets().items()
        }
        holders = self._desk.cluster.holders(self._model.model_id, MEMORY)
        for node, blocks in holders.items():
            fit = node not in self._out and self._standing.fit(node, self._desk.at)
            if node not in held and fit:
                held[node] = blocks & self._every
        return held

    def _fall_back_on_disks(self, held: dict[NodeId, frozenset[int]]) -> None:
        """Adds to what nodes can send what only disks have: the disks of targets, which then load
        it themselves, and of others. Disks that were in the way before are the last resort."""
        links, at = self._links(), self._desk.at
        disks = {
            node: frozenset(b for b in blocks if (node, b) not in self._unreadable)
            for node, blocks in self._on_disk().items()
            if node not in self._out and self._standing.fit(node, at)
        }
        trusted = disks.keys() - self._trust.distrusted
        for nodes in (trusted, disks.keys() - trusted):
            lost = self._every.difference(*held.values())
            rates = {node: links.disk_rate(node) for node in sorted(nodes)}
            there = {node: disks[node] & lost for node in rates}
            for node, blocks in shares(rates, self._model.block_bytes, there, {}).items():
                held[node] = held.get(node, frozenset()) | blocks
                if node in self.record.targets:
                    blocks &= self._wanted_by(node)
                    self._promoting[node] = self._promoting.get(node, frozenset()) | blocks

    def _on_repaired(self, transfers: tuple[Transfer, ...]) -> None:
        case = self._case
        relieved = sum(t.src in case.slow for t in transfers) < self._sends_of(case.slow)
        if case.slow and not relieved:
            self._load()
        else:
            self._revise(transfers)

    def _on_amended(self, transfers: tuple[Transfer, ...]) -> None:
        together = (*self._case.kept, *transfers)
        self._revise(tuple(sorted(together, key=lambda transfer: transfer.step)))

    def _revise(self, transfers: tuple[Transfer, ...]) -> None:
        case = self._case
        self._desk.span(
            "replan", self.record.trace, since_ns=case.since_ns, attributes={"why": case.why}
        )
        repair = Repair(case.begun_ns, self._desk.now.wall_ns, case.why, case.receiving)
        revised = events.mend(self.record, repair, transfers)
        self._log("info", "re-planned", why=case.why, revision=revised.revision)
        self._set(revised)
        self._send(case.receiving)

    def _on_not_repaired(self, error: LambdaScaleError) -> None:
        case = self._case
        if case.slow:
            self._load()  # nobody else can send what is left
        elif case.amends:  # only who failed can: it is asked again
            case.amends, case.receiving = False, self._receiving()
            self._replan_all(case)
        else:
            self.fail(PlanError(f"{case.why}, and {error}"))

    def _sends_of(self, nodes: Collection[NodeId]) -> int:
        """How many transfers from these nodes are still to come."""
        return sum(t.src in nodes for t in self._to_come())


def _why(failure: PullFailed) -> str:
    got = "got wrong bytes of" if failure.code == DigestMismatch.code else "did not get"
    return f"{failure.node} {got} block {failure.block} from {failure.source}"
