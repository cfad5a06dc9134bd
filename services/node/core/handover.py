"""A running sequence moves to another node with its KV, so that its stream hardly pauses.

    new leader                                   each stage of the old path      old leader
    takes pages for the KV, asks for it  ------> copies it, says where
    reads it, all stages at once         <------
    has all of it: Yield                 --------------------------------------> ends the sequence
    runs the tokens since, and goes on   <-------------------------------------- its tokens so far

Meanwhile the sequence goes on where it is (live migration: Llumnix, OSDI 2024, section 4.2). What
was copied are whole pages that nobody writes to any more. The positions after them, a page and what
was generated meanwhile, are run anew in one step.

Whatever goes wrong, the new leader goes on without the KV and computes it. Tokens that both
generate are the same, and gateways drop the second.

KV depends on nothing but the tokens and the model. So it is lent to whoever proves to know the
prompt: the *secret* of a sequence is a digest of its request and of its prompt.
"""

from collections.abc import Callable
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
    Lend,
    Path,
    Send,
    Yield,
)
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
    rates = [rate for rate in (profile.in_bytes_per_s, link_bytes_per_s) if rate]
    copy_s = ASKING_S + nbytes / COPIED_BYTES_PER_S + (nbytes / min(rates) if rates else 0.0)
    token_s = next((m.prefill_s_per_token for m in profile.models if m.model_id == model_id), 0.0)
    return not token_s or copy_s < positions * token_s


def secret_of(submit: Submit) -> bytes:
    prompt = msgspec.msgpack.encode(submit.tokens[: submit.prompt_tokens])
    return blake2b(prompt, digest_size=SECRET_BYTES, key=submit.request.encode()[:64]).digest()


def lend(ask: KvAsk, path: Path | None, stage: int, secret: bytes, cause: str) -> Command:
    """A stage's answer to the new leader. `path`: of the sequence, whose `stage` this node is.
    None: the sequence is not here."""
    if path is not None and secret and ask.secret == secret:
        ours = path.stages[stage]
        if ask.any_cut or (ours.start, ours.stop) == (ask.start, ask.stop):
            ask = msgspec.structs.replace(ask, start=ours.start, stop=ours.stop)
            return Lend(ask, cause=cause)
    return Send(ask.to, KvHere(ask.taker, ask.stage), cause=cause)


@dataclass(slots=True)
class Taking:
    """A sequence whose KV comes from other nodes."""

    sequence: Sequence
    source: SequenceKey
    """Its key on the path that it leaves."""
    first: int
    """Positions before this one were cached here."""
    end: int
    left: set[int]
    """Stages of that path whose KV is not here yet."""
    blocks: set[int] = field(default_factory=set)
    """The blocks of the other stages."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.sequence.submit.kv_from


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
        left = set(range(len(submit.kv_from))) if first < end else set()
        source = sequence_key(submit.request, submit.takes_over)
        taking = Taking(sequence, source, first, end, left)
        self._takings[sequence.key] = taking
        if not left:
            return self._ask_to_yield(taking)
        return [self._ask(taking, index) for index in sorted(left)]

    def here(self, message: KvHere) -> list[Command] | None:
        """A stage has lent its KV. None: it has not, and the sequence goes on without."""
        taking = self._takings.get(message.taker)
        if taking is None or message.stage not in taking.left:
            return []
        stage = taking.stages[message.stage]
        start, stop = (message.start, message.stop) if message.stop else (stage.start, stage.stop)
        if stop > taking.stages[-1].stop:
            return None
        if not message.region:
            model_id = taking.sequence.path.model_id
            nothing = message.stop and not self._kv.keeps(model_id, start, stop)
            return self._came(taking, message.stage, (start, stop)) if nothing else None
        return [
            Bring(
                message.taker,
                message.stage,
                (start, stop),
                (taking.first, taking.end),
                stage.address,
                message,
                cause=self._handled.cause,
            )
        ]

    def brought(self, bring: Bring) -> list[Command] | None:
        """A stage's KV is in the sequence's pages. None: the stages' parts do not make a whole."""
        taking = self._takings.get(bring.sequence)
        if taking is None or bring.stage not in taking.left:
            return []
        return self._came(taking, bring.stage, bring.blocks)

    def _came(self, taking: Taking, stage: int, blocks: tuple[int, int]) -> list[Command] | None:
        taking.left.remove(stage)
        taking.blocks.update(range(*blocks))
        if taking.left:
            return []
        whole = len(taking.blocks) == taking.stages[-1].stop
        return self._ask_to_yield(taking) if whole else None

    def end(self, key: SequenceKey) -> int | None:
        """Forgets the taking. Returns how many positions have come: 0 if not all have; None if
        there was none."""
        taking = self._takings.pop(key, None)
        if taking is None:
            return None
        if taking.left or (taking.blocks and len(taking.blocks) < taking.stages[-1].stop):
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
