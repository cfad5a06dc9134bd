"""The node's scheduler: what its one engine runs next, and what follows from each result.

Every node leads paths (a complete replica is a path of one stage) and is at the same time a later
stage of paths that others lead. All runnable work stands in one order, by the tick at which it
became runnable: new micro-batches of led lanes, and micro-batches that came from other nodes. The
engine takes the oldest, together with all others of the same model that fit in a step, in one sweep
over the blocks (`services.node.engine.base`). So one pass over the weights serves every path, and
no decode waits for more than the sweep before it. Work that arrives during a sweep may still join
it, if it begins at a block ahead. A step with room to spare also runs proposed tokens
(`services.node.core.speculation`).

Events are the methods; commands are what they return. `take` and `join` hand out parts, each of
which comes back through `ran` or `failed`, or is tried again after `no_room`. A `Prepare` is
answered by `prepared`. Events may come in between: rows of sequences that end meanwhile are
ignored.

When the KV cache has no page left, the sequence that began here last gives its pages back. If this
node runs it alone, it is preempted, and waits here until it begins again. On a path it fails for
lack of capacity, and its gateway takes it elsewhere or brings it again after a pause. Neither loses
anything, and the sequence that began first always goes on, so all of them end.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from services.node.core.following import Follower
from services.node.core.handover import Worth, secret_of
from services.node.core.kv import Kv
from services.node.core.leading import Leader
from services.node.core.lending import Lendings, lend, refused
from services.node.core.live_scaling import Held, Line
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Bring,
    Command,
    Failed,
    Failure,
    Forward,
    Free,
    Handled,
    Hidden,
    KvAsk,
    KvDone,
    KvHere,
    Lend,
    Part,
    Path,
    Pull,
    Return,
    Sampled,
    Send,
    StageMessage,
    Yield,
    Yielded,
)
from services.node.core.room import Claim, Room
from services.node.core.rows import SequenceKey
from services.node.core.sequences import Lane
from services.node.core.speculation import STEP_POSITIONS
from shared.errors import ProtocolViolation, TransportTimeout
from shared.ids import ModelId, NodeId
from shared.messages.serving import Cancel, Logprobs, Submit

GROW_AFTER = 100
"""Steps become smaller when the engine has no memory. They grow again whenever this many parts have
run."""
BUSY = 8
"""A stage that has this part of a step of prompts to run asks for no more. To run fewer than that
takes hardly less time, as the weights are read in any case."""
STOP, BUG, GRAMMAR, LATE, PULL = "stop", "bug", "grammar", "late KV", "idle"
"""Causes of commands that no message and no batch caused."""


class Batcher:
    def __init__(
        self,
        node: NodeId,
        *,
        slots: int,
        step_tokens: int,
        speculation: int = 0,
        kv: Kv,
        worth: Worth = lambda model_id, positions, nbytes: False,
        held: Held = lambda model_id: (),
    ) -> None:
        """`speculation`: the most tokens that are proposed for a sequence in a step. `worth`: when
        KV is copied from another node. `held`: the blocks that can be run here."""
        self._handled = Handled()
        self._kv = kv
        self._room = Room(node, slots, kv, self._claims)
        self._lendings = Lendings(kv, self._handled)
        self._together: set[ModelId] = set()
        """See `open`."""
        self._leader = Leader(
            node,
            speculation=speculation,
            kv=kv,
            room=self._room,
            handled=self._handled,
            worth=worth,
            line=Line(held),
            lendings=self._lendings,
            together=self._together,
        )
        self._follower = Follower(node, kv, self._room, self._handled)
        self._step_tokens = self._most_tokens = step_tokens
        """How many positions a step takes now, and at most."""
        self._parts_ran = 0
        self._speculative = min(STEP_POSITIONS, step_tokens) if speculation else 0
        """The number of positions up to which proposals fill a step."""
        self._ticks = 0
        self._batches = 0
        self.tokens_out = 0
        """Tokens drawn on this node."""
        self.preemptions = 0
        """How often a sequence gave its KV back to make room for others."""

    # --- events -------------------------------------------------------------

    def open(self, model_id: ModelId, *, together: bool) -> None:
        """`together`: this node runs its part of the model with other devices of its machine, and
        they theirs with it. Then paths have one micro-batch at a time: stages that ran at once
        would take the same threads from each other."""
        if together:
            self._together.add(model_id)
        else:
            self._together.discard(model_id)

    def submit(self, submit: Submit, *, n_blocks: int, held: Collection[int]) -> list[Command]:
        self._handled.cause = submit.cause or submit.request
        return self._leader.submit(submit, n_blocks=n_blocks, held=held)

    def cancel(self, cancel: Cancel) -> list[Command]:
        self._handled.cause = cancel.cause or f"cancel of {cancel.request}"
        return self._leader.cancel(cancel.request, cancel.attempt)

    def received(
        self, message: StageMessage, hidden: Hidden | None = None, cause: str = ""
    ) -> list[Command]:
        """`cause`: what made the peer say it, if it told."""
        self._handled.cause = cause or type(message).__name__.lower()
        match message:
            case Admit():
                return self._follower.admit(message, self._tick())
            case Admitted():
                return self._leader.admitted(message, self._tick())
            case Pull():
                return self._leader.pulled(message)
            case Forward():
                return self._follower.forward(message, hidden, self._tick())
            case Sampled():
                return self._leader.sampled(message, self._tick())
            case Free():
                return self._follower.free(message)
            case KvAsk():
                return self._lend(message)
            case KvHere():
                return self._leader.takings.here(message)
            case KvDone(region):
                return [Return(region, cause=self._handled.cause)]
            case Yield():
                return self._leader.yield_up(message)
            case Yielded():
                return self._leader.yielded(message)
            case Failed(sequences, code, text):
                return self._leader.failed(sequences, Failure(code, text))
            case _:
                raise ProtocolViolation(f"unexpected {type(message).__name__} from a peer")

    def prepared(self, key: SequenceKey, failure: Failure | None = None) -> list[Command]:
        """Continues a waiting sequence whose `Prepare` is done, or has failed. The result for a
        sequence that ended is released."""
        self._handled.cause = GRAMMAR
        if key in self._leader.led.preparing:
            return self._leader.prepared(key, failure)
        return self._follower.prepared(key, failure, self._tick())

    def brought(self, bring: Bring, *, right: bool) -> list[Command]:
        """KV has come from another node, or could not be had."""
        self._handled.cause = bring.cause
        done = Send(bring.address, KvDone(bring.here.region), cause=bring.cause)
        return [done, *self._leader.takings.brought(bring, right=right)]

    def unsettled(self, key: SequenceKey) -> bool:
        """Whether a `Settled` of the sequence will follow."""
        return self._leader.takings.has(key) or self._leader.asks_on_trial(key)

    def late(self, key: SequenceKey) -> list[Command]:
        """The sequence waits for other nodes no longer: it goes on without their KV, or ends if it
        may kill nodes and not all of its path have answered."""
        self._handled.cause = LATE
        if self._leader.asks_on_trial(key):
            why = Failure(TransportTimeout.code, "not all nodes of the path have answered in time")
            return self._leader.give_up([key], why)
        return self._leader.take_over(key)

    def lends(self, parts: Iterable[Part]) -> bool:
        """Whether other nodes have asked for the KV of these parts' sequences."""
        return any(self._lendings.wants(part.keys) for part in parts)

    def reached(self, parts: Iterable[Part], block: int) -> list[Command]:
        """Lends the KV that others have asked for, now that these parts have run up to `block`."""
        commands: list[Command] = []
        for part in parts:
            if block > part.start:
                for row in part.rows:
                    commands += self._lendings.reached(row, block)
        return commands

    def _lend(self, ask: KvAsk) -> list[Command]:
        led = self._leader.led.known(ask.sequence)
        if led is not None:
            lends = lend(ask, led.path, 0, secret_of(led.submit))
            comes = led.keeps_kv and not led.path.followers
            if lends and (comes or ask.more or led.position >= ask.end):
                lends = msgspec.structs.replace(lends, sequence=led.key)
                return self._begin_to_lend(lends, led.path.model_id, led.position)
        followed = self._follower.sequences.get(ask.sequence)
        if followed and (ask.more or followed.final >= ask.end):
            lends = lend(ask, followed.path, followed.stage, followed.secret)
            if lends:
                return self._begin_to_lend(lends, followed.path.model_id, followed.final)
        return [refused(ask, self._handled.cause)]

    def _begin_to_lend(self, ask: KvAsk, model_id: ModelId, ran: int) -> list[Command]:
        begin = self._lendings.more if ask.more else self._lendings.begin
        return begin(ask, model_id, ran)

    def lent(self, lend: Lend, here: KvHere) -> list[Command]:
        """A piece can be read, or cannot be lent after all: tells who has asked."""
        self._handled.cause = lend.cause
        key = lend.ask.sequence
        led, followed = self._leader.led.running.get(key), self._follower.sequences.get(key)
        ran = led.position if led else followed.final if followed else 0
        here = msgspec.structs.replace(here, ran=ran)
        return [Send(lend.ask.to, here, cause=lend.cause)]

    def peer_lost(self, address: str, why: Failure) -> list[Command]:
        self._handled.cause = f"loss of {address}"
        return self._leader.peer_lost(address, why) + self._follower.peer_lost(address, why)

    def model_closed(self, model_id: ModelId, why: Failure) -> list[Command]:
        self._handled.cause = model_id
        led = self._leader.model_closed(model_id, why)
        return led + self._follower.model_closed(model_id, why)

    def give_up(self, keys: Collection[SequenceKey], why: Failure) -> list[Command]:
        """Ends these sequences, wherever they are. Unknown ones are ignored."""
        self._handled.cause = BUG
        return self._leader.give_up(keys, why) + self._follower.give_up(keys, why)

    def close(self, why: Failure, cause: str = STOP) -> list[Command]:
        """Ends everything that this node leads or follows."""
        self._handled.cause = cause
        return self._leader.close(why) + self._follower.close(why)

    # --- the engine ---------------------------------------------------------

    def take(self) -> tuple[Part, ...]:
        """The parts to run in a new sweep, of one model, the oldest first. Empty if nothing can
        run."""
        tick = self._tick()
        if self._leader.led.waiting:
            self._leader.admit(tick)
        oldest = sorted(self._runnable(), key=lambda found: found[0])
        parts: list[Part] = []
        room = self._step_tokens
        for _, source in oldest:
            if source.path.model_id != oldest[0][1].path.model_id:
                continue
            part = self._part(source, room, first=not parts)
            if part:
                parts.append(part)
                room = max(0, room - part.positions)
        self._follower.take(parts)
        self._leader.line.take(parts)
        return tuple(self._speculated(parts))

    def restore(self) -> list[Command]:
        """Brings a portion of KV from host memory, between two sweeps."""
        return self._leader.restore()

    @property
    def restoring(self) -> bool:
        """Whether sequences wait for KV from host memory."""
        return bool(self._leader.led.restoring)

    def join(self, model_id: ModelId, at: int, aboard: Iterable[Part]) -> tuple[Part, ...]:
        """The parts that may join a sweep which has come to block `at` with these parts aboard."""
        if not (self._follower.queue or self._leader.line):
            return ()
        waiting = [*self._leader.line.pieces(), *self._follower.queue]
        room = self._step_tokens - sum(part.positions for part in aboard)
        parts: list[Part] = []
        for _, part in sorted(waiting, key=lambda found: found[0]):
            if part.model_id == model_id and part.start >= at and part.positions <= room:
                parts.append(part)
                room -= part.positions
        self._follower.take(parts)
        self._leader.line.take(parts)
        return tuple(parts)

    def stuck(self, parts: Iterable[Part], *, over: bool = False) -> None:
        """These parts wait for blocks that are not here yet, or do so no longer. Meanwhile others
        of their paths are formed."""
        self._leader.stuck((key for part in parts for key in part.keys), over=over)

    def pull(self, aboard: Iterable[Part]) -> list[Command]:
        """Asks for prompts that first stages have run, if there is room for them in a step.
        `aboard`: the parts of the sweep that is under way."""
        if not self._follower.may_pull:
            return []
        if self._leader.led.waiting:  # those that can begin count as the node's own work
            self._leader.admit(self._tick())
        parts = (*aboard, *(part for _, part in self._follower.queue))
        rows = (row for part in parts for row in part.rows)
        busy = sum(row.count for row in rows if row.position == 0 or row.count - row.proposed > 1)
        busy += self._leader.backlog
        if busy > self._step_tokens // BUSY:
            return []
        self._handled.cause = PULL
        return self._follower.pull(self._step_tokens - busy)

    def ran(
        self,
        part: Part,
        sampled: Sequence[tuple[int, ...]],
        hidden: Hidden | None,
        logprobs: Mapping[SequenceKey, tuple[Logprobs, ...]] | None = None,
        vectors: Mapping[SequenceKey, bytes] | None = None,
    ) -> list[Command]:
        """Takes the part's result: the tokens drawn after each row, and `hidden` if it did not end
        in the head."""
        self._handled.cause = _batch_of(part)
        self._parts_ran += 1
        if self._parts_ran % GROW_AFTER == 0:
            self._step_tokens = min(self._step_tokens + 1, self._most_tokens)
        if part.stage:
            self._follower.done(part)
        if part.stage + 1 < len(part.path.stages):
            return self._passed_on(part, hidden)
        self.tokens_out += sum(map(len, sampled))
        tokens = tuple(zip(part.keys, sampled, strict=True))
        message = Sampled(part.batch, tokens, dict(logprobs or {}), dict(vectors or {}))
        if part.stage == 0:
            freed = self._leader.ended(part) if part.resumes_at else []
            return freed + self._leader.sampled(message, self._tick())
        return [Send(part.path.leader, message, cause=self._handled.cause)]

    def failed(self, part: Part, why: Failure) -> list[Command]:
        """None of the part's rows could be run."""
        return self._fail(part, part.keys, why)

    def refused(self, part: Part, keys: Collection[SequenceKey], why: Failure) -> list[Command]:
        """The engine cannot serve these sequences of the part: they end, and the rest may be
        run."""
        return self._fail(part, keys, why)

    def no_room(self, part: Part, why: Failure) -> list[Command]:
        """The engine has no pages for the part: the sequence of its model that began last gives its
        pages back. A sequence that its model's share takes waits for those of other models."""
        self._handled.cause = _batch_of(part)
        if taking := self._leader.takings.newest_of(part.model_id):
            return self._leader.take_over(taking)
        everybody = [s for s in self._leader.led.running.values() if s.started and s.keeps_kv]
        led = [s for s in everybody if s.path.model_id == part.model_id]
        followed = self._follower.with_kv(part.model_id)
        others = len(everybody) - len(led) + self._follower.count_with_kv - len(followed)
        too_long = part.rows[0].limit > self._kv.kv_share(part.model_id)
        if len(led) + len(followed) == 1 and (too_long or not others):
            return self.failed(part, why)
        self.preemptions += 1
        last = max(reversed(led), key=lambda s: s.admitted, default=None)
        newest = max(reversed(followed), key=lambda key: followed[key].since, default=None)
        if newest is None or (last and last.admitted > followed[newest].since):
            assert last
            return self._leader.preempt(last, why)
        return self._follower.failed(followed[newest].path, [newest], why)

    def shrink(self) -> bool:
        """A sweep had no memory: from now on they take half as many positions, and one more with
        every `GROW_AFTER` parts that run. Returns False if they are as small as they get."""
        before, self._step_tokens = self._step_tokens, max(1, self._step_tokens // 2)
        return self._step_tokens < before

    def live(self, part: Part) -> Part:
        """The part without the rows of sequences that are over or were preempted."""
        return part.without([key for key in part.keys if not self._alive(part, key)])

    # --- state --------------------------------------------------------------

    def kv_left(self, models: Iterable[ModelId]) -> dict[ModelId, int]:
        """See `Room.left`."""
        return self._room.left(models)

    @property
    def running(self) -> int:
        return len(self._leader.led.running) + len(self._follower.sequences)

    @property
    def waiting(self) -> int:
        return len(self._leader.led.preparing) + len(self._leader.led.waiting)

    @property
    def prompt_tokens(self) -> int:
        return self._leader.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._leader.cached_tokens

    @property
    def received_tokens(self) -> int:
        return self._leader.received_tokens

    @property
    def restored_tokens(self) -> int:
        return self._leader.restored_tokens

    @property
    def tokens_proposed(self) -> int:
        """Tokens that were proposed for sequences led here, and run."""
        return self._leader.proposed

    @property
    def tokens_accepted(self) -> int:
        return self._leader.accepted

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        self._leader.led.validate()
        self._follower.validate()

    def flights(self, path: Path) -> int:
        """Number of micro-batches of a led path that are out."""
        lane = self._leader.led.lanes.get(path)
        return len(lane.flights) if lane else 0

    def _claims(self) -> Iterator[Claim]:
        yield from self._leader.led
        yield from self._follower.sequences.values()

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _runnable(self) -> Iterable[tuple[int, Lane | Part]]:
        for lane in self._leader.led.lanes.values():
            if (since := lane.waiting_since) is not None:
                yield since, lane
        yield from self._leader.line.pieces()
        yield from self._follower.queue

    def _part(self, source: Lane | Part, room: int, *, first: bool) -> Part | None:
        """The part of `source` for a step with `room` positions left. The first part is taken
        whole."""
        if isinstance(source, Part):
            return source if first or source.positions <= room else None
        self._batches += 1
        part = source.form(self._batches, room, self._tick())
        return part if part.rows else None

    def _speculated(self, parts: Iterable[Part]) -> Iterator[Part]:
        """A step's parts, with proposals if the step is small and there is KV for everything that
        runs."""
        parts = tuple(parts)
        spare = self._speculative - sum(part.positions for part in parts)
        speculates = spare > 0 and bool(parts) and self._room.free_kv(parts[0].model_id) >= 0
        for part in parts:
            if speculates and part.start == 0:
                plain = part.positions
                part = self._leader.propose(part, spare)
                spare -= part.positions - plain
            yield part

    def _passed_on(self, part: Part, hidden: Hidden | None) -> list[Command]:
        if part.stage == 0:
            return self._leader.passed(part, hidden)
        if not any(self._alive(part, key) for key in part.keys):
            return []
        rows = tuple(msgspec.structs.replace(row, tokens=(), image=b"") for row in part.rows)
        message = Forward(part.path, part.stage + 1, part.batch, rows)
        to = part.path.stages[part.stage + 1].address
        return [Send(to, message, hidden, cause=self._handled.cause)]

    def _alive(self, part: Part, key: SequenceKey) -> bool:
        return key in (self._leader.led.running if part.stage == 0 else self._follower.sequences)

    def _fail(self, part: Part, keys: Iterable[SequenceKey], why: Failure) -> list[Command]:
        self._handled.cause = _batch_of(part)
        if part.stage == 0:
            return self._leader.failed(keys, why)
        return self._follower.failed(part.path, keys, why)


def _batch_of(part: Part) -> str:
    """The id of a micro-batch, as causes name it."""
    return f"batch {part.batch} of {part.path.stages[0].node}"
