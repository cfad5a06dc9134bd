"""Micro-batches: what the stages of a path tell each other, and what the scheduler asks of its
shell.

`Admit`, `Admitted`, `Pull`, `Forward`, `Sampled`, `Free`, `Failed` and the messages about KV that
moves (`services.node.core.handover`) cross between nodes
(`services.node.execution.activations` has their wire form). `Send`, `Release`, `Prepare`, `Lend`,
`Bring`, `Stop`, `Return`, `Settled`, `Weighed` and `Emit` are commands of the scheduler; each names
its cause, and a message carries that of its `Send` along.
The scheduler passes hidden states on and never looks inside.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

import msgspec

from services.node.core.kv import Restoration
from services.node.core.rows import Context, Row, SequenceKey
from shared.ids import GatewayId, ModelId
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Logprobs, Scores, Token


class Hidden(Protocol):
    """Hidden states of a batch, [sum(count), hidden_size]. The scheduler only passes them on."""

    @property
    def shape(self) -> Sequence[int]: ...


class Path(msgspec.Struct, frozen=True):
    """The stages of a model, in order, which together cover every block once. The first stage
    leads."""

    model_id: ModelId
    stages: tuple[Stage, ...]

    @property
    def leader(self) -> str:
        return self.stages[0].address

    @property
    def followers(self) -> tuple[str, ...]:
        return tuple(stage.address for stage in self.stages[1:])

    def goes_through(self, address: str) -> bool:
        return any(stage.address == address for stage in self.stages)

    def cut_at(self, block: int) -> "Path":
        """The path with its first stage up to this block, and the second one from there on, if
        anything is left for it."""
        if block == self.stages[0].stop:
            return self
        first = msgspec.structs.replace(self.stages[0], stop=block)
        if block == self.stages[1].stop:
            return Path(self.model_id, (first, *self.stages[2:]))
        second = msgspec.structs.replace(self.stages[1], start=block)
        return Path(self.model_id, (first, second, *self.stages[2:]))


class StageMessage(msgspec.Struct, frozen=True, tag_field="kind"):
    """A message from one node of a path to another."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        """The sequences that it is about."""
        return ()


class Admit(StageMessage, frozen=True, tag="admit"):
    """Leader -> each other stage, before anything of a sequence is run: keep room for it
    (`services.node.core.room`). Answered with Admitted or Failed."""

    path: Path
    stage: int
    sequence: SequenceKey
    tokens: int
    """How many tokens it begins with."""
    limit: int
    """The most positions that it will ever have."""
    alone_until: int = 0
    """See `Submit.alone_until`."""
    secret: bytes = b""
    """Who takes this stage's KV over names it: see `services.node.core.handover`. Empty: nobody
    can."""
    pulls: bool = False
    """Whether the second stage may ask for prompts (`Pull`), and gets them then."""
    trace: str = ""
    """The W3C traceparent of the attempt's span; empty: it has none."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return (self.sequence,)


class Admitted(StageMessage, frozen=True, tag="admitted"):
    """Stage -> leader: there is room here for the sequence, and it is kept."""

    stage: int
    sequence: SequenceKey
    takes_cuts: bool = False
    """Whether the sequence's first micro-batch may come with a path whose first stage reaches
    further than was asked about (`services.node.core.live_scaling`)."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return (self.sequence,)


class Pull(StageMessage, frozen=True, tag="pull"):
    """Second stage -> leader: it has hardly any prompts to run, and takes some that the first stage
    has run (`services.node.core.live_scaling`)."""

    by: str
    """Its address."""
    positions: int
    """How many it takes. It takes a first micro-batch whole."""


class Forward(StageMessage, frozen=True, tag="forward"):
    """Previous stage -> this stage: run your blocks over these rows. Hidden states come along."""

    path: Path
    stage: int
    batch: int
    """The leader's number of the micro-batch."""
    rows: tuple[Row, ...]

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return tuple(row.sequence for row in self.rows)


class Sampled(StageMessage, frozen=True, tag="sampled"):
    """Last stage -> leader: the micro-batch has come through."""

    batch: int
    tokens: tuple[tuple[SequenceKey, tuple[int, ...]], ...]
    """For each row the tokens drawn: none if none was due, several if proposed tokens were
    accepted."""
    logprobs: dict[SequenceKey, tuple[Logprobs, ...]] = {}
    """Log probabilities: one for each token to be scored, and for each drawn token whose draw asks
    for them."""
    vectors: dict[SequenceKey, bytes] = {}
    """See `Token.vector`: of the rows that complete one."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return tuple(key for key, _ in self.tokens)


class Free(StageMessage, frozen=True, tag="free"):
    """Leader -> other stages: these sequences are over, or others may begin beside them."""

    sequences: tuple[SequenceKey, ...]
    tried: tuple[SequenceKey, ...] = ()
    """Sequences that have as many tokens as they were tried for (`Submit.alone_until`), and go on.
    """

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return self.sequences + self.tried


class Failed(StageMessage, frozen=True, tag="failed"):
    """Stage -> leader: these sequences cannot go on, and nothing of them is kept here."""

    sequences: tuple[SequenceKey, ...]
    code: str
    message: str

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return self.sequences


class KvAsk(StageMessage, frozen=True, tag="kv_ask"):
    """New leader -> each stage of the path that a sequence leaves: lend me its KV. Answered with a
    KvHere for each piece of it (`services.node.core.lending`)."""

    sequence: SequenceKey
    """On the path that it leaves."""
    secret: bytes
    stage: int
    """Of that path."""
    start: int
    stop: int
    """The blocks of that stage, as the path was planned."""
    first: int
    end: int
    """The positions, first <= position < end: whole pages, but for `more`."""
    to: str
    """The new leader's address."""
    taker: SequenceKey
    """The sequence there."""
    any_cut: bool = False
    """Whether the stage may lend other blocks, if the path was cut elsewhere for this sequence
    (`services.node.core.live_scaling`)."""
    more: bool = False
    """Lend one piece of all blocks, as far as these positions have run by now. Answered with one
    KvHere."""
    reads_device: bool = False
    """Whether the new leader reads the device memory of the stage's node."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return (self.sequence,)


class KvHere(StageMessage, frozen=True, tag="kv_here"):
    """Stage -> new leader: a piece of the KV lies in this region, to be read once."""

    taker: SequenceKey
    stage: int
    region: str = ""
    """Empty: this stage does not have it."""
    form: str = ""
    """What its bytes mean."""
    digest: bytes = b""
    """BLAKE3; or of bytes that stay on the lender's device, the checksum of
    `services.node.memory.checksum`."""
    start: int = 0
    stop: int = 0
    """The piece's blocks."""
    first: int = 0
    end: int = 0
    """Its positions. 0 and 0: all that were asked for."""
    ran: int = 0
    """How many positions have run by now. 0: more cannot be asked for."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return (self.taker,)


class KvDone(StageMessage, frozen=True, tag="kv_done"):
    """New leader -> stage: the region was read, or is not wanted any more."""

    region: str


class Yield(StageMessage, frozen=True, tag="yield"):
    """New leader -> leader of the path that a sequence leaves: the KV is here, so end it there.
    Answered with Yielded."""

    sequence: SequenceKey
    secret: bytes
    to: str
    taker: SequenceKey

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return (self.sequence,)


class Yielded(StageMessage, frozen=True, tag="yielded"):
    """The sequence is over here."""

    taker: SequenceKey
    generated: tuple[int, ...]
    """All tokens that its request has generated."""

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return (self.taker,)


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch at one stage."""

    path: Path
    stage: int
    batch: int
    rows: tuple[Row, ...]
    hidden: Hidden | None = None
    offsets: tuple[int, ...] = ()
    """Where each row's positions begin in `hidden`."""
    resumes_at: int = 0
    """The block from which on it runs, if a part before has brought it there."""

    @classmethod
    def of(cls, forward: Forward, hidden: Hidden | None) -> "Part":
        offsets = offsets_of(forward.rows)
        return cls(forward.path, forward.stage, forward.batch, forward.rows, hidden, offsets)

    @property
    def model_id(self) -> ModelId:
        return self.path.model_id

    @property
    def start(self) -> int:
        return self.resumes_at or self.path.stages[self.stage].start

    @property
    def stop(self) -> int:
        return self.path.stages[self.stage].stop

    @property
    def positions(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def keys(self) -> tuple[SequenceKey, ...]:
        return tuple(row.sequence for row in self.rows)

    def without(self, gone: Collection[SequenceKey]) -> "Part":
        kept = [i for i, row in enumerate(self.rows) if row.sequence not in gone]
        if len(kept) == len(self.rows):
            return self
        return replace(
            self,
            rows=tuple(self.rows[i] for i in kept),
            offsets=tuple(self.offsets[i] for i in kept) if self.offsets else (),
        )


def offsets_of(rows: Sequence[Row]) -> tuple[int, ...]:
    """Where each row's positions begin if they come one after the other."""
    return tuple(accumulate((row.count for row in rows), initial=0))[:-1]


class Failure(msgspec.Struct, frozen=True):
    """Why sequences end before their time. `code` is the code of a `shared.errors` class."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class _Command:
    cause: str = field(default="", kw_only=True, compare=False)
    """The id of the event that the command follows from."""


@dataclass(frozen=True, slots=True)
class Send(_Command):
    """Deliver a message to a peer, with its cause."""

    address: str
    message: StageMessage
    hidden: Hidden | None = None
    offsets: tuple[int, ...] = ()
    """Where the positions of each row of a `Forward` begin in `hidden`."""


@dataclass(frozen=True, slots=True)
class Release(_Command):
    """Free the KV of these sequences in this node's engine."""

    sequences: tuple[SequenceKey, ...]


@dataclass(frozen=True, slots=True)
class Prepare(_Command):
    """Make the grammar of this sequence, away from the engine, and say when that is done. Nothing
    of the sequence that needs the grammar runs before."""

    model_id: ModelId
    sequence: SequenceKey
    context: Context


@dataclass(frozen=True, slots=True)
class Lend(_Command):
    """Make a copy of the KV that is asked for readable by the asking node, and tell it."""

    ask: KvAsk


@dataclass(frozen=True, slots=True)
class Bring(_Command):
    """Read a piece of the KV of another node's sequence into the pages of this one, and say when
    that is done."""

    sequence: SequenceKey
    stage: int
    blocks: tuple[int, int]
    """(start, stop)"""
    positions: tuple[int, int]
    """(first, end)"""
    address: str
    here: KvHere


@dataclass(frozen=True, slots=True)
class Stop(_Command):
    """The sequence goes on without the KV that is still to be brought. Once this is obeyed, nobody
    writes to its pages."""

    sequence: SequenceKey


@dataclass(frozen=True, slots=True)
class Return(_Command):
    """Nobody reads this region any more."""

    region: str


@dataclass(frozen=True, slots=True)
class Settled(_Command):
    """Its leader waits for nothing of other nodes any more, neither for KV that the sequence takes
    over, nor, if it may kill nodes, for room on its path."""

    sequence: SequenceKey
    over: bool = False
    """Whether it has ended meanwhile."""


@dataclass(frozen=True, slots=True)
class Weighed(_Command):
    """Tell what it costs to copy the sequence's KV from host memory, and to compute it: the cheaper
    is done."""

    sequence: SequenceKey
    restoration: Restoration
    trace: str


@dataclass(frozen=True, slots=True)
class Emit(_Command):
    """Send this to a gateway."""

    gateway: GatewayId
    what: Token | AttemptFailed | Scores


Command = Send | Release | Prepare | Lend | Bring | Stop | Return | Settled | Weighed | Emit


class Finish(enum.Enum):
    """How a request ends well. The values are those of `Token.finish`."""

    NOT_YET = ""
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Handled:
    """What a node's scheduler is handling."""

    cause: str = ""
    """The id of the event. Every command of the scheduler names it."""


def frees(pairs: Sequence[tuple[str, SequenceKey]], cause: str) -> list[Command]:
    """One Free for each peer, from (address, sequence) pairs."""
    by_address: dict[str, list[SequenceKey]] = {}
    for address, key in pairs:
        by_address.setdefault(address, []).append(key)
    return [Send(address, Free(tuple(keys)), cause=cause) for address, keys in by_address.items()]
