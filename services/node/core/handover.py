"""A running sequence moves to another node with its KV, so that its stream hardly pauses.

    new leader                                   each stage of the old path      old leader
    takes pages for the KV, asks for it  ------> copies it piece by piece,
    reads the pieces as they come        <------ says where each is
    has all of it, and asks for more     ------> copies what has run since
    reads that, and may ask for more     <------ says where it is
    lacks hardly anything: Yield         --------------------------------------> ends the sequence
    runs what it lacks, and goes on      <-------------------------------------- its tokens so far

Meanwhile the sequence goes on where it is (live migration: Llumnix, OSDI 2024, section 4.2). It may
even be in its prompt: then pieces come as layers have run (`services.node.core.lending`). What is
copied first are whole pages that nobody writes to any more. What is generated meanwhile, and the
page before it, follow in rounds, each of which finds less to copy than the one before. Of a short
sequence the whole pages are there about as soon as the answer to a round, so the first one begins
once they are lent. A few positions are left, which are run in the step that draws the next token.

    phase      to         when
    copying    following  the whole pages have come, and a round is worth its time or under way
               yielding   the whole pages have come, and no round is worth its time; or they
                          cannot be had, or are not worth their time
    following  following  a round is over, and another one is worth its time
               yielding   a round is over, and no other is worth its time; or a round has failed
    any        (none)     the old leader has yielded; it took too long; it is over

Whatever goes wrong before all of the first has come, the new leader goes on without the KV and
computes it. After that it goes on with what it has. Tokens that both generate are the same, and
gateways drop the second.

Unless that takes too long, or pages run out, the sequence runs on one of both only: it may be what
kills nodes. If a node of the old path is lost, the sequence is over at the new leader too, and its
gateway finds out whether that node lives.

KV depends on nothing but the tokens and the model. So it is lent to whoever proves to know the
prompt: the *secret* of a sequence is a digest of its request and of its prompt.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf

import msgspec

from services.node.core.kv import Kv, movable
from services.node.core.kv_host import CopyRate
from services.node.core.microbatches import (
    Bring,
    Command,
    Handled,
    KvAsk,
    KvHere,
    Send,
    Stop,
    Yield,
)
from services.node.core.profile import token_s
from services.node.core.room import Room
from services.node.core.rows import SequenceKey
from services.node.core.sequences import Sequence, sequence_key
from shared.errors import CapacityExceeded, IllegalTransition
from shared.ids import ModelId
from shared.messages.instances import Stage
from shared.messages.pool import Profile
from shared.messages.serving import Submit

SECRET_BYTES = 16

Worth = Callable[[ModelId, int, int], bool]
"""(model, positions, their bytes): whether to copy KV takes less time than to compute it."""

COPIED_BYTES_PER_S = 2e9
"""How fast KV is copied out of pages, or into pages, with its digest, until that was measured: one
core's (`benchmarks.handover`)."""
MEASURED_BYTES = 256 << 10
"""Copies of less say more of the processor's caches than of their rate."""
TRIAL_S = 0.25
"""What is copied only to measure the rate may be expected to take so long at most."""
ASKING_S = 0.005
"""Two questions and their answers, and the turns of threads between them."""
AHEAD_BYTES = 4 << 20
"""So little KV takes hardly longer to come than a round: over 1 Gbit/s 34 ms, in which the sequence
has two or three more steps."""
FEW = 2
"""So many positions are run as soon as one, or as another node has been asked for them."""


def is_worth(
    profile: Profile,
    link_bytes_per_s: int,
    copied_bytes_per_s: float,
    model_id: ModelId,
    positions: int,
    nbytes: int,
) -> bool:
    """Whether to copy the KV of so many positions takes less time than to compute it. `profile`: of
    the node that would compute it, and `copied_bytes_per_s`: how fast that one copies, with a
    digest. A link that was not measured counts as fast, an engine as slow. `link_bytes_per_s`: 0:
    not known."""
    asked_s = ASKING_S + copy_s(profile, link_bytes_per_s, copied_bytes_per_s, nbytes)
    each_s = token_s(profile, model_id)
    return not each_s or asked_s < positions * each_s


def copy_s(
    profile: Profile, link_bytes_per_s: int, copied_bytes_per_s: float, nbytes: int
) -> float:
    """The seconds that `nbytes` of KV take to come from another node. That node is assumed to copy
    as fast as this one. `is_worth` says what the rates are."""
    rates = [rate for rate in (profile.in_bytes_per_s, link_bytes_per_s) if rate]
    return 2 * nbytes / copied_bytes_per_s + (nbytes / min(rates) if rates else 0.0)


class KvWorth:
    """Whether KV is copied from other nodes, by how fast this node copies. `worth` is for one
    thread, `copied` for one too."""

    def __init__(self, link_bytes_per_s: int) -> None:
        """`link_bytes_per_s`: 0: not known."""
        self._link = link_bytes_per_s
        self._rate = CopyRate(COPIED_BYTES_PER_S)

    def copied(self, nbytes: int, seconds: float) -> None:
        """KV was copied out of pages or into pages, with its digest."""
        if nbytes >= MEASURED_BYTES:
            self._rate.add(nbytes, seconds)

    def seconds(self, profile: Profile, nbytes: int) -> float:
        """The seconds that `nbytes` of KV take to come here. `profile`: this node's."""
        return copy_s(profile, self._link, self._rate.bytes_per_s, nbytes)

    def worth(self, profile: Profile, model_id: ModelId, positions: int, nbytes: int) -> bool:
        """If only this node's copies would be too slow, some are made to know how fast they are."""
        if is_worth(profile, self._link, self._rate.bytes_per_s, model_id, positions, nbytes):
            return True
        small = self.seconds(profile, nbytes) <= TRIAL_S
        may = small and is_worth(profile, self._link, inf, model_id, positions, nbytes)
        return may and nbytes >= MEASURED_BYTES and self._rate.tries()


def secret_of(submit: Submit) -> bytes:
    prompt = msgspec.msgpack.encode(submit.tokens[: submit.prompt_tokens])
    return blake2b(prompt, digest_size=SECRET_BYTES, key=submit.request.encode()[:64]).digest()


Piece = tuple[int, int, int, int]
"""KV of blocks and positions: (start, stop, first, end)."""


def covers(pieces: Iterable[Piece], blocks: Iterable[int], first: int, end: int) -> bool:
    """Whether the pieces bring each position of first <= position < end once in these blocks."""
    known = sorted(pieces, key=lambda piece: piece[2])
    for block in blocks:
        position = first
        for start, stop, begin, until in known:
            if start <= block < stop:
                if begin != position:
                    return False
                position = until
        if position != end:
            return False
    return True


class Phase(enum.Enum):
    COPYING = "copying"
    FOLLOWING = "following"
    YIELDING = "yielding"


STEPS: Mapping[Phase, frozenset[Phase]] = {
    Phase.COPYING: frozenset({Phase.FOLLOWING, Phase.YIELDING}),
    Phase.FOLLOWING: frozenset({Phase.FOLLOWING, Phase.YIELDING}),
    Phase.YIELDING: frozenset(),
}


@dataclass(slots=True)
class Taking:
    """A sequence whose KV comes from other nodes."""

    sequence: Sequence
    source: SequenceKey
    """Its key on the path that it leaves."""
    first: int
    """Positions before this one were cached here."""
    end: int
    """Those before this one are asked for first. 0: none are, and it has no pages yet."""
    kept: tuple[int, ...]
    """The blocks that keep KV."""
    pieces: list[Piece] = field(default_factory=list)
    """What has come of the positions up to `end`."""
    phase: Phase = Phase.COPYING
    ran: dict[int, int] = field(default_factory=dict)
    """How far each stage was when it last said so."""
    asked: dict[int, int] = field(default_factory=dict)
    """In rounds: the position from which on each stage is asked, or was asked last."""
    came: dict[int, int] = field(default_factory=dict)
    """In rounds: how many positions of each block have come."""
    ahead: list[Bring] = field(default_factory=list)
    """What has come of the first round, before the rest of the whole pages."""
    told: int = 0
    """How much of the whole pages has been lent: positions, counted once for each block."""
    awaited: set[int] = field(default_factory=set)
    """The stages whose part of this round has not come."""
    lacks: int = 0
    """How many positions were missing when the last round began. 0: none has begun."""
    bringing: int = 0
    """Pieces that are being brought."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.sequence.submit.kv_from

    @property
    def stop(self) -> int:
        return self.stages[-1].stop

    @property
    def whole(self) -> int:
        """The whole pages that are asked for, counted as `told`."""
        return len(self.kept) * (self.end - self.first)

    @property
    def has(self) -> int:
        """How many positions have come in all blocks."""
        if self.phase is Phase.COPYING:
            return 0
        return min(self.came.values(), default=0)

    def to(self, phase: Phase) -> None:
        """IllegalTransition if its table has no such step."""
        if phase not in STEPS[self.phase]:
            step = f"{self.phase.value} -> {phase.value}"
            raise IllegalTransition(f"KV of {self.source}: {step} is not a step")
        self.phase = phase


class Takings:
    """The new leader's part."""

    def __init__(self, kv: Kv, room: Room, handled: Handled, worth: Worth) -> None:
        self._kv = kv
        self._room = room
        self._handled = handled
        self._worth = worth
        self._takings: dict[SequenceKey, Taking] = {}

    def begin(self, sequence: Sequence) -> list[Command] | None:
        """Asks for the sequence's KV, or, if that is better computed here, only for the sequence:
        so no two nodes run it at once, and both may not die of it. None: nothing is asked for."""
        submit = sequence.submit
        bare = sequence.keeps_kv and not (submit.pooling or sequence.scoring)
        if not (submit.kv_from and bare) or sequence.path.followers:
            return None
        if submit.sampling.logprobs is not None:
            return None  # the tokens that are generated meanwhile would come without theirs
        source = sequence_key(submit.request, submit.takes_over)
        end = movable(len(sequence.tokens))
        first = self._take_pages(sequence, end)
        if first is None:
            taking = Taking(sequence, source, 0, 0, ())
            self._takings[sequence.key] = taking
            return self._yield(taking)
        blocks = range(submit.kv_from[-1].stop)
        kept = tuple(b for b in blocks if self._kv.keeps(sequence.path.model_id, b, b + 1))
        taking = Taking(sequence, source, first, end, kept)
        self._takings[sequence.key] = taking
        if first >= end:
            return self._all_came(taking)
        return [self._ask(taking, index, first, end) for index in range(len(submit.kv_from))]

    def _take_pages(self, sequence: Sequence, end: int) -> int | None:
        """Takes pages for KV up to `end`. Returns up to where it is cached here. None: it is better
        computed, and no pages were taken."""
        model_id = sequence.path.model_id
        if not end or not self._worth(model_id, end, end * self._kv.position_bytes(model_id)):
            return None
        if sequence.kv_soon > self._room.free_kv(model_id):
            return None
        tokens, adapter = tuple(sequence.tokens), sequence.submit.adapter
        try:
            return self._kv.receive(model_id, sequence.key, tokens, sequence.limit, adapter)
        except CapacityExceeded:
            return None

    def here(self, message: KvHere) -> list[Command]:
        """A stage has lent a piece of its KV, or says that it lends none."""
        taking = self._takings.get(message.taker)
        if taking is None or message.stage >= len(taking.stages):
            return []
        match taking.phase:
            case Phase.COPYING | Phase.FOLLOWING if message.stage in taking.awaited:
                return self._more_here(taking, message)
            case Phase.COPYING:
                return self._first_here(taking, message)
            case _:
                return []

    def _first_here(self, taking: Taking, message: KvHere) -> list[Command]:
        stage = taking.stages[message.stage]
        blocks = (message.start, message.stop) if message.stop else (stage.start, stage.stop)
        positions = (message.first, message.end) if message.end else (taking.first, taking.end)
        inside = taking.first <= positions[0] < positions[1] <= taking.end
        if not message.region or blocks[1] > taking.stop or not inside:
            return self._yield(taking)
        lent = sum(blocks[0] <= block < blocks[1] for block in taking.kept)
        taking.told += lent * (positions[1] - positions[0])
        return [self._bring(taking, message, blocks, positions), *self._ask_ahead(taking)]

    def _ask_ahead(self, taking: Taking) -> list[Command]:
        """Begins the first round as soon as the whole pages are lent, if they are few."""
        each = self._kv.position_bytes(taking.sequence.path.model_id)
        few = (taking.end - taking.first) * each <= AHEAD_BYTES
        if not few or taking.told < taking.whole or taking.asked:
            return []
        taking.lacks = self._lack(taking, taking.end)
        return self._ask_for_more(taking) if taking.lacks > FEW else []

    def _more_here(self, taking: Taking, message: KvHere) -> list[Command]:
        blocks, positions = (message.start, message.stop), (message.first, message.end)
        follows = message.first == taking.asked[message.stage] < message.end
        inside = message.end <= taking.sequence.limit and message.stop <= taking.stop
        if not message.region or not (follows and inside):
            return self._lacking(taking, message.stage)
        try:
            self._kv.receive_more(message.taker, message.end)
        except CapacityExceeded:
            return self._lacking(taking, message.stage)
        return [self._bring(taking, message, blocks, positions)]

    def _bring(
        self, taking: Taking, message: KvHere, blocks: tuple[int, int], positions: tuple[int, int]
    ) -> Command:
        taking.ran[message.stage] = message.ran
        taking.bringing += 1
        piece = message.taker, message.stage, blocks, positions
        address = taking.stages[message.stage].address
        return Bring(*piece, address, message, cause=self._handled.cause)

    def brought(self, bring: Bring, *, right: bool) -> list[Command]:
        """A piece is in the sequence's pages, or could not be had."""
        taking = self._takings.get(bring.sequence)
        if taking is None:
            return []
        taking.bringing -= 1
        match taking.phase:
            case Phase.COPYING if bring.positions[0] >= taking.end:
                if not right:
                    return self._lacking(taking, bring.stage)
                taking.ahead.append(bring)
                return []
            case Phase.COPYING if not right:
                return self._yield(taking)
            case Phase.COPYING:
                taking.pieces.append((*bring.blocks, *bring.positions))
                return self._all_came(taking) if self._is_whole(taking) else []
            case Phase.FOLLOWING if not right:
                return self._lacking(taking, bring.stage)
            case Phase.FOLLOWING:
                return self._more_came(taking, bring)
            case Phase.YIELDING:
                return []

    def _is_whole(self, taking: Taking) -> bool:
        kept, pieces = taking.kept, taking.pieces
        area = sum((stop - start) * (end - first) for start, stop, first, end in pieces)
        return area >= taking.whole and covers(pieces, kept, taking.first, taking.end)

    def _all_came(self, taking: Taking) -> list[Command]:
        taking.came = dict.fromkeys(taking.kept, taking.end)
        if not taking.asked:
            return self._go_on(taking)
        taking.to(Phase.FOLLOWING)
        for bring in taking.ahead:
            self._add(taking, bring)
        return [] if taking.awaited else self._go_on(taking)

    def _more_came(self, taking: Taking, bring: Bring) -> list[Command]:
        self._add(taking, bring)
        return [] if taking.awaited else self._go_on(taking)

    def _add(self, taking: Taking, bring: Bring) -> None:
        first, end = bring.positions
        taking.asked[bring.stage] = end
        for block in range(*bring.blocks):
            if taking.came.get(block) == first:
                taking.came[block] = end
        taking.awaited.discard(bring.stage)

    def _lacking(self, taking: Taking, stage: int) -> list[Command]:
        """The stage has nothing more that could be had. What the others have comes yet."""
        taking.ran[stage] = 0
        taking.awaited.discard(stage)
        waits = taking.awaited or taking.phase is Phase.COPYING
        return [] if waits else self._go_on(taking)

    def _go_on(self, taking: Taking) -> list[Command]:
        """Asks for what has run meanwhile, or for the sequence."""
        before, taking.lacks = taking.lacks, self._lack(taking, min(taking.came.values()))
        if taking.lacks > FEW and (not before or taking.lacks < before):
            taking.to(Phase.FOLLOWING)
            return self._ask_for_more(taking)
        return self._yield(taking)

    def _ask_for_more(self, taking: Taking) -> list[Command]:
        """Begins a round."""
        taking.asked = taking.asked or dict.fromkeys(taking.ran, taking.end)
        taking.awaited = set(taking.asked)
        limit = taking.sequence.limit
        return [
            self._ask(taking, index, first, limit, more=True)
            for index, first in taking.asked.items()
        ]

    def _lack(self, taking: Taking, has: int) -> int:
        """How many positions are missing that another round would bring, if it is worth it. `has`:
        those that have come, or will."""
        ran = taking.ran.values()
        lacks = max(ran, default=0) - has
        model_id = taking.sequence.path.model_id
        nbytes = lacks * self._kv.position_bytes(model_id)
        return lacks if all(ran) and self._worth(model_id, lacks, nbytes) else 0

    def end(self, key: SequenceKey) -> int | None:
        """Forgets the taking. Returns how many positions have come, and can be used: 0 if not all
        have that were asked for first; None if there was none."""
        taking = self._takings.pop(key, None)
        if taking is None:
            return None
        tokens = taking.sequence.tokens
        has = min(taking.has, len(tokens) - 1)
        if has:
            self._kv.received(key, tuple(tokens[:has]))
        return has

    def is_coming(self, key: SequenceKey) -> bool:
        """Whether KV of the sequence is being brought."""
        return key in self._takings and self._takings[key].bringing > 0

    def has(self, key: SequenceKey) -> bool:
        return key in self._takings

    def newest_of(self, model_id: ModelId) -> SequenceKey | None:
        """The sequence of the model, of those that have pages, that began last."""
        takings = self._takings.items()
        keys = [key for key, t in takings if t.end and t.sequence.path.model_id == model_id]
        return keys[-1] if keys else None

    def through(self, address: str) -> list[Sequence]:
        """The sequences that this peer has a part in."""
        return [
            taking.sequence
            for taking in self._takings.values()
            if any(stage.address == address for stage in taking.stages)
        ]

    def _ask(
        self, taking: Taking, index: int, first: int, end: int, *, more: bool = False
    ) -> Command:
        stage, sequence = taking.stages[index], taking.sequence
        ask = KvAsk(
            taking.source,
            secret_of(sequence.submit),
            index,
            stage.start,
            stage.stop,
            first,
            end,
            sequence.path.leader,
            sequence.key,
            any_cut=True,
            more=more,
        )
        return Send(stage.address, ask, cause=self._handled.cause)

    def _yield(self, taking: Taking) -> list[Command]:
        """Asks the old leader for the sequence. What is still being brought is of no use then."""
        taking.to(Phase.YIELDING)
        sequence, cause = taking.sequence, self._handled.cause
        message = Yield(
            taking.source, secret_of(sequence.submit), sequence.path.leader, sequence.key
        )
        stop = [Stop(sequence.key, cause=cause)] if taking.bringing else []
        return [*stop, Send(taking.stages[0].address, message, cause=cause)]
