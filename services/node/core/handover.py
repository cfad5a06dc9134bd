"""A running sequence moves to another node with its KV, so that its stream hardly pauses.

    new leader                                   each stage of the old path      old leader
    takes pages for the KV, asks for it  ------> copies it piece by piece,
    reads the pieces as they come        <------ says where each is
    has all of it: Yield                 --------------------------------------> ends the sequence
    runs the tokens since, and goes on   <-------------------------------------- its tokens so far

Meanwhile the sequence goes on where it is (live migration: Llumnix, OSDI 2024, section 4.2). It may
even be in its prompt: then pieces come as layers have run (`services.node.core.lending`). What is
copied are whole pages that nobody writes to any more. The positions after them, a page and what was
generated meanwhile, are run anew in one step.

Whatever goes wrong, the new leader goes on without the KV and computes it. Tokens that both
generate are the same, and gateways drop the second.

KV depends on nothing but the tokens and the model. So it is lent to whoever proves to know the
prompt: the *secret* of a sequence is a digest of its request and of its prompt.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from services.node.core.kv import Kv, movable
from services.node.core.microbatches import (
    Bring,
    Command,
    Handled,
    KvAsk,
    KvHere,
    Send,
    Yield,
)
from services.node.core.profile import token_s
from services.node.core.room import Room
from services.node.core.rows import SequenceKey
from services.node.core.sequences import Sequence, sequence_key
from shared.errors import CapacityExceeded
from shared.ids import ModelId
from shared.messages.instances import Stage
from shared.messages.pool import Profile
from shared.messages.serving import Submit

SECRET_BYTES = 16

Worth = Callable[[ModelId, int, int], bool]
"""(model, positions, their bytes): whether to copy KV takes less time than to compute it."""

COPIED_BYTES_PER_S = 1e9
"""How fast KV goes out of pages and into pages again, with two digests, on one core
(`benchmarks.handover`)."""
ASKING_S = 0.005
"""Two questions and their answers, and the turns of threads between them."""


def is_worth(
    profile: Profile, link_bytes_per_s: int, model_id: ModelId, positions: int, nbytes: int
) -> bool:
    """Whether to copy the KV of so many positions takes less time than to compute it. `profile`: of
    the node that would compute it. A link that was not measured counts as fast, an engine as slow.
    `link_bytes_per_s`: 0: not known."""
    asked_s = ASKING_S + copy_s(profile, link_bytes_per_s, nbytes)
    each_s = token_s(profile, model_id)
    return not each_s or asked_s < positions * each_s


def copy_s(profile: Profile, link_bytes_per_s: int, nbytes: int) -> float:
    """Seconds in which so many bytes of KV come from another node. `is_worth` says what the rates
    are."""
    rates = [rate for rate in (profile.in_bytes_per_s, link_bytes_per_s) if rate]
    return nbytes / COPIED_BYTES_PER_S + (nbytes / min(rates) if rates else 0.0)


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


@dataclass(slots=True)
class Taking:
    """A sequence whose KV comes from other nodes."""

    sequence: Sequence
    source: SequenceKey
    """Its key on the path that it leaves."""
    first: int
    """Positions before this one were cached here."""
    end: int
    pieces: list[Piece] = field(default_factory=list)
    """What has come of the rest."""
    came: bool = False
    """Whether all of it has."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.sequence.submit.kv_from

    @property
    def stop(self) -> int:
        return self.stages[-1].stop


class Takings:
    """The new leader's part."""

    def __init__(self, kv: Kv, room: Room, handled: Handled, worth: Worth) -> None:
        self._kv = kv
        self._room = room
        self._handled = handled
        self._worth = worth
        self._takings: dict[SequenceKey, Taking] = {}

    def begin(self, sequence: Sequence) -> list[Command] | None:
        """Asks for the sequence's KV. None: it is better computed here."""
        submit, model_id = sequence.submit, sequence.path.model_id
        end = movable(len(sequence.tokens))
        bare = sequence.keeps_kv and not (submit.pooling or sequence.scoring)
        if not (submit.kv_from and end and bare) or sequence.path.followers:
            return None
        if submit.sampling.logprobs is not None:
            return None  # the tokens that are generated meanwhile would come without theirs
        if not self._worth(model_id, end, end * self._kv.position_bytes(model_id)):
            return None
        if sequence.kv_soon > self._room.free_kv(model_id):
            return None
        try:
            tokens, adapter = tuple(sequence.tokens), submit.adapter
            first = self._kv.receive(model_id, sequence.key, tokens, sequence.limit, adapter)
        except CapacityExceeded:
            return None
        source = sequence_key(submit.request, submit.takes_over)
        taking = Taking(sequence, source, first, end, came=first >= end)
        self._takings[sequence.key] = taking
        if taking.came:
            return self._ask_to_yield(taking)
        return [self._ask(taking, index) for index in range(len(submit.kv_from))]

    def here(self, message: KvHere) -> list[Command] | None:
        """A stage has lent a piece of its KV. None: it lends none, and the sequence goes on
        without."""
        taking = self._takings.get(message.taker)
        if taking is None or taking.came or message.stage >= len(taking.stages):
            return []
        stage = taking.stages[message.stage]
        blocks = (message.start, message.stop) if message.stop else (stage.start, stage.stop)
        positions = (message.first, message.end) if message.end else (taking.first, taking.end)
        inside = taking.first <= positions[0] < positions[1] <= taking.end
        if not message.region or blocks[1] > taking.stop or not inside:
            return None
        cause = self._handled.cause
        piece = message.taker, message.stage, blocks, positions
        return [Bring(*piece, stage.address, message, cause=cause)]

    def brought(self, bring: Bring) -> list[Command]:
        """A piece is in the sequence's pages."""
        taking = self._takings.get(bring.sequence)
        if taking is None or taking.came:
            return []
        taking.pieces.append((*bring.blocks, *bring.positions))
        if not self._all_came(taking):
            return []
        taking.came = True
        return self._ask_to_yield(taking)

    def _all_came(self, taking: Taking) -> bool:
        model_id = taking.sequence.path.model_id
        kept = [b for b in range(taking.stop) if self._kv.keeps(model_id, b, b + 1)]
        area = sum((stop - start) * (end - first) for start, stop, first, end in taking.pieces)
        enough = area >= len(kept) * (taking.end - taking.first)
        return enough and covers(taking.pieces, kept, taking.first, taking.end)

    def end(self, key: SequenceKey) -> int | None:
        """Forgets the taking. Returns how many positions have come: 0 if not all have; None if
        there was none."""
        taking = self._takings.pop(key, None)
        if taking is None:
            return None
        if not taking.came:
            return 0
        self._kv.received(key, tuple(taking.sequence.tokens[: taking.end]))
        return taking.end

    def has(self, key: SequenceKey) -> bool:
        return key in self._takings

    def newest_of(self, model_id: ModelId) -> SequenceKey | None:
        """The sequence of the model that began last."""
        keys = [key for key, t in self._takings.items() if t.sequence.path.model_id == model_id]
        return keys[-1] if keys else None

    def through(self, address: str) -> list[SequenceKey]:
        """The sequences that this peer has a part in."""
        return [
            key
            for key, taking in self._takings.items()
            if any(stage.address == address for stage in taking.stages)
        ]

    def _ask(self, taking: Taking, index: int) -> Command:
        stage, sequence = taking.stages[index], taking.sequence
        ask = KvAsk(
            taking.source,
            secret_of(sequence.submit),
            index,
            stage.start,
            stage.stop,
            taking.first,
            taking.end,
            sequence.path.leader,
            sequence.key,
            any_cut=True,
        )
        return Send(stage.address, ask, cause=self._handled.cause)

    def _ask_to_yield(self, taking: Taking) -> list[Command]:
        sequence = taking.sequence
        message = Yield(
            taking.source, secret_of(sequence.submit), sequence.path.leader, sequence.key
        )
        return [Send(taking.stages[0].address, message, cause=self._handled.cause)]
