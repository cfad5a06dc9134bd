"""Gives the targets of an event their parts of one revision of its plan.

Targets that receive at once are told first, and the others when they have answered. So the first
bytes flow while the planner still writes the other orders, and where many nodes share few
processors, those with work at once do not wait for those that will wait themselves.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from services.planner.core.commands import SendPlan
from services.planner.core.desk import Desk
from services.planner.core.fleet import PACE_PER_MEMBER_S
from services.planner.core.stimuli import Answer, Failed
from shared.errors import CutOff, LambdaScaleError, NoResponders, NotFound, PlanError
from shared.ids import NodeId
from shared.messages.pool import ModelRecord, NodeInfo
from shared.messages.scaling import ApplyPlan, EventRecord, Pull, Transfer

APPLY_S = 12.0
"""Seconds after which an answer counts as lost: longer than the shell waits for it, also when it
must confirm first that this planner may speak."""
EARLY_S = 2.0
"""Seconds to wait for a target that is not ready to take an order yet: it, or the model, is new and
it does not know the model; or the bus was away and came back here first."""
AT_ONCE_S = 0.02
"""Blocks that come over links are reported one by one if there would be less than this between
reports."""
WAVE_S = 0.005
"""Seconds to wait for a wave's answers before the next wave is sent."""
NEVER = float("inf")

Target = TypeVar("Target")
Promoting = Mapping[NodeId, frozenset[int]]
"""For each target, the blocks that it loads from its own lower tiers."""


class Orders:
    def __init__(self, desk: Desk, model: ModelRecord) -> None:
        self.sent: dict[NodeId, int] = {}
        """The revision that each target follows."""
        self.refused: dict[NodeId, LambdaScaleError] = {}
        """Targets that did not take the current revision."""
        self.gone: set[NodeId] = set()
        """Those of them whose process is gone. Nothing is wrong with the next one of the name."""
        self._desk = desk
        self._model = model
        self._open: dict[int, NodeId] = {}
        """The open questions, with the node that was asked."""
        self._again: dict[NodeId, float] = {}
        """When targets are asked again: they do not know the model yet, or this planner was cut off
        from them."""
        self._parts: dict[NodeId, list[Transfer]] = {}
        """What each target receives by the current revision."""
        self._later: list[list[NodeId]] = []
        """Targets that have not been told yet, in waves, the next one last."""
        self._wave_ends_at = NEVER
        """When the next wave is sent, unless all targets of the last one answer before."""
        self._give_up_at = NEVER
        self._was_cut_off = False
        """Whether this planner was cut off from the bus while it gave these orders."""

    @property
    def done(self) -> bool:
        """Whether every target has taken its part or refused it."""
        return not self._open and not self._again and not self._later

    @property
    def next_wake(self) -> float:
        return min((self._wave_ends_at, *self._again.values()))

    def send(self, record: EventRecord, targets: Iterable[NodeId], promoting: Promoting) -> None:
        """Begins to send the record's revision."""
        self.refused, self.gone, self._open, self._again = {}, set(), {}, {}
        self._give_up_at = self._desk.at + EARLY_S
        self._was_cut_off = False
        self._parts = _parts(record)
        # A target that receives nothing loads all of its part from its own disk: at once.
        begins = {n: min((t.step for t in self._parts.get(n, ())), default=0) for n in targets}
        self._later = waves(begins)[::-1]
        self._send_wave(record, promoting)

    def _send_wave(self, record: EventRecord, promoting: Promoting) -> None:
        wave = self._later.pop() if self._later else []
        self._wave_ends_at = self._desk.at + WAVE_S if self._later else NEVER
        for node in wave:
            self._send(record, node, promoting)

    def _send(self, record: EventRecord, node: NodeId, promoting: Promoting) -> None:
        nodes = self._desk.cluster.nodes
        if node not in nodes:
            self._lose(node)
            return
        held = self._desk.cluster.executable(node, self._model.model_id)
        part = self._parts.get(node, ())
        # A sender that went a moment ago is left out. The revision that follows replaces it.
        pulls = tuple(Pull(t.step, t.block, t.src) for t in part if t.src in nodes)
        plan = ApplyPlan(
            event=record.id,
            epoch=self._desk.settings.epoch,
            revision=record.revision,
            node=node,
            generation=nodes[node].generation,
            model_id=record.model_id,
            pulls=pulls,
            promote=tuple(sorted(promoting.get(node, frozenset()) - held)),
            peers=tuple(nodes[peer] for peer in sorted({pull.source for pull in pulls})),
            part=record.parts.get(node),
            devices=self._devices(record, node),
            report_s=report_s(len(record.targets), links=bool(record.transfers)),
            trace=record.trace,
            cause=record.id,
        )
        ticket = self._desk.ask(
            within=APPLY_S, model=record.model_id, event=record.id, revision=record.revision
        )
        self.sent[node] = record.revision
        self._open[ticket.number] = node
        self._desk.do(SendPlan(ticket=ticket, message=plan, cause=record.id))

    def _devices(self, record: EventRecord, node: NodeId) -> int:
        """How many devices of the node's machine run its part together: those with a part each."""
        cluster, id_ = self._desk.cluster, record.model_id
        if not record.together or node not in record.parts:
            return 1
        there = {each: cluster.part(each, id_) for each in cluster.with_space(id_)} | record.parts
        host = cluster.nodes[node].host
        mates = (part for n, part in there.items() if _host(cluster.nodes.get(n)) == host)
        count = len({part for part in mates if part is not None})
        measured = {costs.devices for costs in cluster.profile(node).steps}
        return count if count in measured else 1

    def on_answer(self, answer: Answer, record: EventRecord, promoting: Promoting) -> None:
        node = self._open.pop(answer.ticket.number, None)
        if node is None:
            return
        if isinstance(answer, Failed):
            if self._may_take_it_yet(answer.error):
                self._again[node] = self._desk.at + self._desk.settings.tick_s
            else:
                self.refused[node] = answer.error
        if not self._open:
            self._send_wave(record, promoting)

    def _may_take_it_yet(self, error: LambdaScaleError) -> bool:
        if isinstance(error, CutOff):  # it may even have taken it
            self._was_cut_off, self._give_up_at = True, self._desk.at + EARLY_S
            return True
        is_early = isinstance(error, NotFound) or (
            self._was_cut_off and isinstance(error, NoResponders)
        )
        return is_early and self._desk.at < self._give_up_at

    def on_gone(self, node: NodeId) -> None:
        """The node will not answer any question."""
        asked = {number: each for number, each in self._open.items() if each == node}
        if asked or self._again.pop(node, None) is not None:
            self._lose(node)
        for number in asked:
            del self._open[number]

    def _lose(self, node: NodeId) -> None:
        self.refused[node] = PlanError(f"node {node} is gone")
        self.gone.add(node)

    def wake(self, record: EventRecord, promoting: Promoting) -> None:
        if self._desk.at >= self._wave_ends_at:
            self._send_wave(record, promoting)
        for node in [node for node, at in self._again.items() if at <= self._desk.at]:
            del self._again[node]
            self._send(record, node, promoting)


def waves(begins: Mapping[Target, int]) -> list[list[Target]]:
    """Targets, by the step in which each begins to receive, in the order of their orders: first
    all that receive at once, then the others."""
    first = min(begins.values(), default=0)
    now = [target for target, step in begins.items() if step == first]
    later = [target for target, step in begins.items() if step > first]
    return [wave for wave in (now, later) if wave]


def _parts(record: EventRecord) -> dict[NodeId, list[Transfer]]:
    """What each target receives."""
    parts: dict[NodeId, list[Transfer]] = {}
    for transfer in record.transfers:
        parts.setdefault(transfer.dst, []).append(transfer)
    return parts


def report_s(targets: int, *, links: bool = True) -> float:
    """`ApplyPlan.report_s` for an event of so many targets: what they say is taken in as often as
    paths are planned anew. `links`: whether blocks come over links. If not, a copy from memory may
    bring one in a millisecond, and a node would take longer to say so than to copy it."""
    seconds = PACE_PER_MEMBER_S * targets
    if not links:
        return max(seconds, AT_ONCE_S)
    return seconds if seconds >= AT_ONCE_S else 0.0


def _host(info: NodeInfo | None) -> str | None:
    return info.host if info is not None else None
