"""The node's scheduler: what its one engine runs next, and what follows from each result.

Every node leads paths (a complete replica is a path of one stage) and is a later stage of others',
all at once. Whatever can run stands in one order, by the tick at which it became runnable: new
micro-batches of led lanes and micro-batches that came from other nodes. The engine takes the
oldest, together with all others for the same blocks that fit in a step; so local and remote work
alternate, and no decode waits for more than the step before it.

Events are the methods; commands are what they return. `take` hands out one `Work` at a time, which
comes back through `ran`, `failed` or `no_room`. Events may come in between: rows of sequences that
end meanwhile are ignored.
"""

from collections.abc import Collection, Iterable, Sequence

from services.node.core.following import Follower
from services.node.core.leading import Leader
from services.node.core.microbatches import (
    BlockRange,
    Command,
    Failed,
    Failure,
    Forward,
    Free,
    Hidden,
    Part,
    Path,
    Sampled,
    Send,
    StageMessage,
    Work,
    range_of,
)
from services.node.core.rows import Row, SequenceKey
from services.node.core.sequences import Lane
from shared.errors import ProtocolViolation
from shared.ids import ModelId, NodeId
from shared.messages.serving import Cancel, Submit


class Batcher:
    def __init__(self, node: NodeId, *, slots: int, step_tokens: int, kv_capacity: int) -> None:
        self._leader = Leader(node, slots=slots, kv_capacity=kv_capacity)
        self._follower = Follower(node)
        self._step_tokens = step_tokens
        self._ticks = 0
        self._batches = 0
        self.tokens_out = 0
        """Tokens drawn on this node."""

    # --- events -------------------------------------------------------------

    def submit(self, submit: Submit, *, n_blocks: int, held: Collection[int]) -> list[Command]:
        return self._leader.submit(submit, n_blocks=n_blocks, held=held)

    def cancel(self, cancel: Cancel) -> list[Command]:
        return self._leader.cancel(cancel.request, cancel.attempt)

    def received(self, message: StageMessage, hidden: Hidden = None) -> list[Command]:
        match message:
            case Forward():
                return self._follower.forward(message, hidden, self._tick())
            case Sampled():
                return self._leader.sampled(message, self._tick())
            case Free():
                return self._follower.free(message)
            case Failed(sequences, code, text):
                return self._leader.failed(sequences, Failure(code, text))
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__} from a peer")

    def peer_lost(self, address: str, why: Failure) -> list[Command]:
        return self._leader.peer_lost(address, why) + self._follower.peer_lost(address, why)

    def model_closed(self, model_id: ModelId, why: Failure) -> list[Command]:
        led = self._leader.model_closed(model_id, why)
        return led + self._follower.model_closed(model_id, why)

    def close(self, why: Failure) -> list[Command]:
        """The node stops: everything that it leads or follows ends."""
        return self._leader.close(why) + self._follower.close(why)

    # --- the engine ---------------------------------------------------------

    def take(self) -> Work | None:
        """What to run now; None: nothing can run."""
        self._leader.admit(self.kv_reserved, self._tick())
        oldest = sorted(self._runnable(), key=lambda found: found[0])
        if not oldest:
            return None
        blocks = _blocks(oldest[0][1])
        parts: list[Part] = []
        room = self._step_tokens
        for _, source in oldest:
            if _blocks(source) != blocks:
                continue
            part = self._part(source, room, first=not parts)
            if part:
                parts.append(part)
                room = max(0, room - part.positions)
        taken = {id(part) for part in parts}
        self._follower.queue = [q for q in self._follower.queue if id(q[1]) not in taken]
        return Work(blocks, tuple(parts))

    def ran(
        self, work: Work, sampled: Sequence[int | None], hidden: Sequence[Hidden]
    ) -> list[Command]:
        """The result: `sampled` a row; `hidden` a part, where the work did not end in the head."""
        commands: list[Command] = []
        drawn = iter(sampled)
        for i, part in enumerate(work.parts):
            tokens = tuple((row.sequence, next(drawn)) for row in part.rows)
            if part.stage + 1 < len(part.path.stages):
                commands += self._passed_on(part, hidden[i])
                continue
            self.tokens_out += sum(token is not None for _, token in tokens)
            message = Sampled(part.batch, tokens)
            if part.stage == 0:
                commands += self._leader.sampled(message, self._tick())
            else:
                commands.append(Send(part.path.leader, message))
        return commands

    def failed(self, work: Work, why: Failure) -> list[Command]:
        """None of the work's rows could be run."""
        commands: list[Command] = []
        for part in work.parts:
            commands += self._fail(part, part.keys, why)
        return commands

    def no_room(self, work: Work, why: Failure) -> tuple[Work, list[Command]]:
        """The engine can't take all the new sequences: the last one ends, the rest may be run."""
        fresh = [(part, row) for part in work.parts for row in part.rows if row.position == 0]
        if not fresh:
            return Work(work.blocks, ()), self.failed(work, why)
        part, row = fresh[-1]
        return work.without({row.sequence}), self._fail(part, [row.sequence], why)

    # --- state --------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._leader.running) + len(self._follower.sequences)

    @property
    def waiting(self) -> int:
        return len(self._leader.waiting)

    @property
    def kv_reserved(self) -> int:
        """Positions that the sequences here may come to."""
        led = sum(sequence.limit for sequence in self._leader.running.values())
        return led + sum(followed.limit for followed in self._follower.sequences.values())

    def flights(self, path: Path) -> int:
        """Micro-batches of a led path that are out."""
        lane = self._leader.lanes.get(path)
        return len(lane.flights) if lane else 0

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _runnable(self) -> Iterable[tuple[int, Lane | Part]]:
        for lane in self._leader.lanes.values():
            if (since := lane.waiting_since) is not None:
                yield since, lane
        yield from self._follower.queue

    def _part(self, source: Lane | Part, room: int, *, first: bool) -> Part | None:
        """What of `source` goes into a step with `room` positions left; the first goes whole."""
        if isinstance(source, Part):
            return source if first or source.positions <= room else None
        self._batches += 1
        part = source.form(self._batches, room, self._tick())
        return part if part.rows else None

    def _passed_on(self, part: Part, hidden: Hidden) -> list[Command]:
        if not any(self._alive(part, key) for key in part.keys):
            return []
        rows = tuple(
            Row(row.sequence, row.position, row.count, row.limit, (), row.draw) for row in part.rows
        )
        message = Forward(part.path, part.stage + 1, part.batch, rows)
        return [Send(part.path.stages[part.stage + 1].address, message, hidden)]

    def _alive(self, part: Part, key: SequenceKey) -> bool:
        return key in (self._leader.running if part.stage == 0 else self._follower.sequences)

    def _fail(self, part: Part, keys: Iterable[SequenceKey], why: Failure) -> list[Command]:
        if part.stage == 0:
            return self._leader.failed(keys, why)
        return self._follower.failed(part.path, keys, why)


def _blocks(source: Lane | Part) -> BlockRange:
    return range_of(source.path, source.stage if isinstance(source, Part) else 0)
