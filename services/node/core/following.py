"""A node as a later stage of others' paths: what it keeps of their sequences, and what waits to
run.

    state      to         when
    ready      queued     a micro-batch with a row of it comes
               preparing  the same, and its grammar has to be made first
    preparing  queued     its grammar is made
    queued     ready      the row is run
    any        (none)     it is over: freed, failed, its leader or its model gone

A row that comes while another row of the sequence waits is refused: a leader has one micro-batch of
a sequence under way at a time.

A leader asks for room before it begins a sequence, and is answered at once. From then on the
sequence has a claim here (`services.node.core.room`).

Micro-batches come from the stage before, and the news that a sequence is over comes from the
leader: the two can overtake each other. So the keys of ended sequences are remembered for a while.
A row that comes after the end makes no KV; its leader is told, and ignores that if it knows.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from services.node.core.kv import Kv, whole_pages
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Command,
    Failed,
    Failure,
    Forward,
    Free,
    Handled,
    Hidden,
    Part,
    Path,
    Prepare,
    Pull,
    Release,
    Send,
)
from services.node.core.recent import Recent
from services.node.core.room import Room, kv_soon
from services.node.core.rows import Row, SequenceKey
from shared.errors import (
    CapacityExceeded,
    Conflict,
    IllegalTransition,
    NotFound,
    ProtocolViolation,
)
from shared.ids import ModelId, NodeId


class State(enum.Enum):
    READY = "ready"
    PREPARING = "preparing"
    QUEUED = "queued"


STEPS: Mapping[State, frozenset[State]] = {
    State.READY: frozenset({State.QUEUED, State.PREPARING}),
    State.PREPARING: frozenset({State.QUEUED}),
    State.QUEUED: frozenset({State.READY}),
}


@dataclass(slots=True)
class Followed:
    """A sequence of another leader for which this node keeps room, or which has begun here."""

    key: SequenceKey
    path: Path
    stage: int
    limit: int
    tokens: int
    """How many tokens it begins with."""
    keeps_kv: bool
    """Whether it has KV here."""
    since: int
    """When it came, in the scheduler's ticks."""
    certain: int = 0
    """Positions that stay. The positions after them hold proposed tokens."""
    position: int = 0
    """Positions that were run here or are queued."""
    ran: int = 0
    """Positions that were run here, or run now."""
    done: int = 0
    """Positions that were run here."""
    final: int = 0
    """Those of them that were not proposed."""
    alone_until: int = 0
    """See `Submit.alone_until`."""
    secret: bytes = b""
    """See `Admit.secret`."""
    waits: bool = False
    state: State = State.READY

    def to(self, state: State) -> None:
        """IllegalTransition if its table has no such step."""
        if state not in STEPS[self.state]:
            step = f"{self.state.value} -> {state.value}"
            raise IllegalTransition(f"sequence {self.key}: {step} is not a step")
        self.state = state

    @property
    def on_trial(self) -> bool:
        # The trial ends when the last token that it is tried for is run here, because then the
        # gateway has that token. Until then no other suspect may begin: it might kill this node,
        # and this suspect would be blamed.
        return self.position < self.alone_until

    @property
    def kv_soon(self) -> int:
        return kv_soon(max(self.tokens, self.position), self.limit) if self.keeps_kv else 0

    @property
    def kv_taken(self) -> int:
        return whole_pages(self.ran) if self.keeps_kv else 0


class Follower:
    def __init__(self, node: NodeId, kv: Kv, room: Room, handled: Handled) -> None:
        self._handled = handled
        self._node = node
        self._kv = kv
        self._room = room
        self.sequences: dict[SequenceKey, Followed] = {}
        self.queue: list[tuple[int, Part]] = []
        """(tick of arrival, micro-batch), in order."""
        self.preparing: dict[SequenceKey, Part] = {}
        """Rows whose grammars are being made. After that they are queued."""
        self._over: Recent[SequenceKey, None] = Recent()
        self._unbegun: dict[SequenceKey, str] = {}
        """Sequences of which this node is the second stage, and has run nothing, with their
        leaders."""
        self._pulled_from: str | None = None
        """The leader that was asked for prompts, and has not sent any yet."""

    def admit(self, message: Admit, tick: int) -> list[Command]:
        """Keeps room for a sequence, or tells its leader why not. ProtocolViolation if the question
        is not for this node."""
        path, key = message.path, message.sequence
        stage = path.stages[message.stage]
        self._check_mine(path, message.stage)
        if key in self.sequences or key in self._over:
            return [self._failed(path, [key], Failure(Conflict.code, f"{key} came here before"))]
        keeps_kv = self._kv.keeps(path.model_id, stage.start, stage.stop)
        if keeps_kv and not self._kv.kv_share(path.model_id):
            why = Failure(NotFound.code, f"node {self._node} has not opened {path.model_id}")
            return [self._failed(path, [key], why)]
        followed = Followed(
            key,
            path,
            message.stage,
            message.limit,
            message.tokens,
            keeps_kv,
            tick,
            alone_until=message.alone_until,
            secret=message.secret,
        )
        try:
            self._room.check(followed)
        except CapacityExceeded as error:
            return [self._failed(path, [key], Failure(error.code, str(error)))]
        self.sequences[key] = followed
        if message.pulls and message.stage == 1:
            self._unbegun[key] = path.leader
        admitted = Admitted(message.stage, key, takes_cuts=message.pulls)
        return [Send(path.leader, admitted, cause=self._handled.cause)]

    @property
    def may_pull(self) -> bool:
        """Whether leaders may have prompts for this node, and none was asked for them."""
        return bool(self._unbegun) and self._pulled_from is None

    def pull(self, positions: int) -> list[Command]:
        """Asks the leader of the earliest sequence for its prompts."""
        key, leader = next(iter(self._unbegun.items()))
        followed = self.sequences[key]
        self._pulled_from = leader
        mine = followed.path.stages[followed.stage].address
        return [Send(leader, Pull(mine, positions), cause=self._handled.cause)]

    def forward(self, message: Forward, hidden: Hidden | None, tick: int) -> list[Command]:
        """Takes in a micro-batch to run. ProtocolViolation if it is not for this node."""
        self._check_mine(message.path, message.stage)
        astray = [row.sequence for row in message.rows if not self._goes_on(row, message.path)]
        part = Part.of(message, hidden).without(astray)
        if message.path.leader == self._pulled_from:
            self._pulled_from = None
        for row in part.rows:
            self._unbegun.pop(row.sequence, None)
            followed = self.sequences[row.sequence]
            followed.path = message.path
            followed.position = row.position + row.count
            followed.certain = followed.position - row.proposed
        return [*self._queue(part, tick), *self._refused(message.path, astray)]

    def _check_mine(self, path: Path, stage: int) -> None:
        if (node := path.stages[stage].node) != self._node:
            raise ProtocolViolation(f"a message for {node} came to {self._node}")

    def _queue(self, part: Part, tick: int) -> list[Command]:
        """Queues the rows. A row whose grammar is followed here is queued later, once the grammar
        is made."""
        commands: list[Command] = []
        ends = part.stage + 1 == len(part.path.stages)
        for row in part.rows if ends else ():
            if row.draw and row.draw.context and row.draw.context.has_grammar:
                commands.append(
                    Prepare(
                        part.model_id, row.sequence, row.draw.context, cause=self._handled.cause
                    )
                )
                others = set(part.keys) - {row.sequence}
                self.sequences[row.sequence].to(State.PREPARING)
                self.preparing[row.sequence] = part.without(others)
        self._append(part.without(self.preparing), tick)
        return commands

    def _append(self, part: Part, tick: int) -> None:
        for key in part.keys:
            self.sequences[key].to(State.QUEUED)
        if part.rows:
            self.queue.append((tick, part))

    def prepared(self, key: SequenceKey, failure: Failure | None, tick: int) -> list[Command]:
        """The grammar of a preparing sequence is made, or cannot be made."""
        part = self.preparing.pop(key)
        if failure:
            return self.failed(part.path, [key], failure)
        self._append(part, tick)
        return []

    def _refused(self, path: Path, astray: list[SequenceKey]) -> list[Command]:
        if not astray:
            return []
        ours = [key for key in astray if self._path_of(key) in (None, path)]
        why = f"node {self._node} does not have the sequence at that position"
        return [*self.end(ours), self._failed(path, astray, Failure(NotFound.code, why))]

    def _goes_on(self, row: Row, path: Path) -> bool:
        """Whether the row continues its sequence, and no other row of it waits."""
        followed = self.sequences.get(row.sequence)
        if followed is None:
            return False
        fits = row.position + row.count <= followed.limit == row.limit
        follows = followed.certain <= row.position <= followed.position
        ready = followed.state is State.READY
        known = followed.path == path or (not followed.position and _recut(followed.path, path))
        return known and follows and fits and ready

    def _path_of(self, key: SequenceKey) -> Path | None:
        followed = self.sequences.get(key)
        return followed.path if followed else None

    @property
    def count_with_kv(self) -> int:
        """The number of sequences of any model that may have pages here."""
        return sum(each.keeps_kv for each in self.sequences.values())

    def with_kv(self, model_id: ModelId) -> dict[SequenceKey, Followed]:
        """The model's sequences that may have pages here."""
        return {
            key: each
            for key, each in self.sequences.items()
            if each.keeps_kv and each.path.model_id == model_id
        }

    def take(self, parts: Collection[Part]) -> None:
        """Takes parts that are being run out of the queue."""
        for part in parts:
            for row in part.rows if part.stage else ():
                followed = self.sequences[row.sequence]
                followed.to(State.READY)
                followed.ran = row.position + row.count
        taken = {id(part) for part in parts}
        self.queue = [queued for queued in self.queue if id(queued[1]) not in taken]

    def done(self, part: Part) -> None:
        """The part was run."""
        for row in part.rows:
            if followed := self.sequences.get(row.sequence):
                followed.done = row.position + row.count
                followed.final = followed.done - row.proposed

    def free(self, message: Free) -> list[Command]:
        for key in message.tried:
            if followed := self.sequences.get(key):
                followed.alone_until = 0
        return self.end(message.sequences)

    def failed(self, path: Path, keys: Iterable[SequenceKey], why: Failure) -> list[Command]:
        """Sequences of one path cannot be run on this node: frees them here, and tells their
        leader."""
        known = [key for key in keys if key in self.sequences]
        return self.end(known) + ([self._failed(path, known, why)] if known else [])

    def peer_lost(self, address: str, why: Failure) -> list[Command]:
        """Ends the peer's sequences. The leader is told even if it is the lost peer, since it may
        be back."""
        return self._fail_where(lambda _, path: path.goes_through(address), why)

    def give_up(self, keys: Collection[SequenceKey], why: Failure) -> list[Command]:
        return self._fail_where(lambda key, _: key in keys, why)

    def model_closed(self, model_id: ModelId, why: Failure) -> list[Command]:
        return self._fail_where(lambda _, path: path.model_id == model_id, why)

    def close(self, why: Failure) -> list[Command]:
        return self._fail_where(lambda *_: True, why)

    def _fail_where(self, ends: Callable[[SequenceKey, Path], bool], why: Failure) -> list[Command]:
        by_path: dict[Path, list[SequenceKey]] = {}
        for key, sequence in self.sequences.items():
            if ends(key, sequence.path):
                by_path.setdefault(sequence.path, []).append(key)
        commands: list[Command] = []
        for path, keys in by_path.items():
            commands += self.failed(path, keys, why)
        return commands

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        queued = [row for _, part in self.queue for row in part.rows]
        waiting = [*queued, *(part.rows[0] for part in self.preparing.values())]
        keys = {row.sequence for row in waiting}
        assert len(keys) == len(waiting), "a sequence waits in two places"
        assert keys <= self.sequences.keys(), "a row waits whose sequence is over"
        assert all(part.keys == (key,) for key, part in self.preparing.items())
        assert all(part.rows for _, part in self.queue), "an empty part waits"
        for row in waiting:
            followed = self.sequences[row.sequence]
            assert row.position + row.count == followed.position, "rows do not follow each other"
        for key, followed in self.sequences.items():
            assert key not in self._over, "a sequence is over and goes on"
            assert key == followed.key
            assert (followed.state is State.READY) == (key not in keys)
            assert (followed.state is State.PREPARING) == (key in self.preparing)
            assert 0 <= followed.certain <= followed.position <= followed.limit
            assert followed.ran <= followed.limit

    def end(self, keys: Collection[SequenceKey]) -> list[Command]:
        """Forgets sequences, takes their rows out of the queue, and frees their KV."""
        for key in keys:
            self._over[key] = None
            self.preparing.pop(key, None)
            self._unbegun.pop(key, None)
        if self._pulled_from not in self._unbegun.values():
            self._pulled_from = None
        known = tuple(key for key in keys if self.sequences.pop(key, None) is not None)
        if not known:
            return []
        pruned = ((tick, part.without(known)) for tick, part in self.queue)
        self.queue = [(tick, part) for tick, part in pruned if part.rows]
        return [Release(known, cause=self._handled.cause)]

    def _failed(self, path: Path, keys: Collection[SequenceKey], why: Failure) -> Send:
        failed = Failed(tuple(keys), why.code, why.message)
        return Send(path.leader, failed, cause=self._handled.cause)


def _recut(known: Path, path: Path) -> bool:
    """Whether only the first stage of `path` reaches further than that of `known`, at the cost of
    the second one (`services.node.core.live_scaling`)."""
    cut = path.stages[0].stop
    return known.stages[0].stop < cut < known.stages[1].stop and known.cut_at(cut) == path
