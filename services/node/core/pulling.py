"""Which chunks of a model's blocks are read from whom, and what follows as they come; pure.

A pull brings one block from one source, in reads of runs of chunks:

    state      to         when
    pulling    arrived    every chunk of the block is verified
    pulling    failed     the source cannot give it, or gives wrong bytes
    pulling    given up   another source is named, the block comes by other means, the model goes

A pull ends once. Chunks that its reads bring after that are verified all the same, for others may
have read them already; nothing else follows from them. Each read is answered once, by `read`,
`failed` or `stopped`; a second answer is ignored too. Chunks that were verified stay, whatever
becomes of their pull, and the next pull of the block goes on from there.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from services.node.core.residency import PlanId
from shared.errors import (
    BadInput,
    IllegalTransition,
    LambdaScaleError,
    PeerLost,
    ProtocolViolation,
    TransportTimeout,
)
from shared.ids import NodeId
from shared.messages.scaling import Pull

BLOCKS_AHEAD = 4
"""Blocks that are read from one source at a time. So the source knows what comes next, and a block
that it still waits for leaves room for later ones."""
BLOCK_WINDOW = 16
"""Chunks of each block that are in flight at a time."""
FIRST_WINDOW = 2
"""The same while the source has sent nothing yet: it may have to wait for the bytes itself, or to
learn of the plan, and the fewer reads there are, the sooner the first is answered. The second keeps
the link busy while the others are asked for."""
OF_THE_SOURCE = (PeerLost, ProtocolViolation, TransportTimeout)
"""Errors that end every pull from a source, not just one block's."""


LOCAL = "local"
"""The cause of what follows from bytes that came by other means than a pull."""


class PullState(enum.Enum):
    PULLING = "pulling"
    ARRIVED = "arrived"
    FAILED = "failed"
    GIVEN_UP = "given up"


PULL_STEPS = {
    PullState.PULLING: frozenset({PullState.ARRIVED, PullState.FAILED, PullState.GIVEN_UP}),
    PullState.ARRIVED: frozenset[PullState](),
    PullState.FAILED: frozenset[PullState](),
    PullState.GIVEN_UP: frozenset[PullState](),
}


@dataclass(slots=True, eq=False)
class Pulling:
    """One block from one source."""

    plan: PlanId
    step: int
    block: int
    source: NodeId
    address: str
    asked: int = 0
    """The chunks before this one were asked for, or were here already."""
    reading: set[int] = field(default_factory=set)
    """Chunks in flight."""
    state: PullState = PullState.PULLING

    @property
    def ended(self) -> bool:
        return self.state is not PullState.PULLING

    def end(self, state: PullState) -> None:
        """IllegalTransition if it has ended already."""
        if state not in PULL_STEPS[self.state]:
            raise IllegalTransition(
                f"block {self.block} from {self.source}: {state.value} is not a step; "
                f"it is {self.state.value}"
            )
        self.state = state


@dataclass(slots=True, eq=False)
class BlockChunks:
    verified: list[bool]
    """Whether each chunk is here and right. Chunks come in any order."""
    ready: int = 0
    """Number of leading verified chunks, which others may read."""

    @property
    def complete(self) -> bool:
        return self.ready == len(self.verified)


@dataclass(frozen=True, slots=True)
class _OfPull:
    """A command that follows from a pull."""

    pulling: Pulling

    @property
    def cause(self) -> str:
        """The scaling event that the block is pulled for."""
        return self.pulling.plan.event


@dataclass(frozen=True, slots=True)
class Read(_OfPull):
    """Read these chunks of the pull's block from its source."""

    run: range


@dataclass(frozen=True, slots=True)
class Stop(_OfPull):
    """The pull has ended before its block came: give its reads up."""


@dataclass(frozen=True, slots=True)
class Show:
    """Let others read the block's first `ready` chunks."""

    block: int
    ready: int
    cause: str
    """The scaling event that the block is pulled for, or LOCAL."""


@dataclass(frozen=True, slots=True)
class Arrived(_OfPull):
    """The pull has brought the last of its block, and has no read left."""


@dataclass(frozen=True, slots=True)
class Failed(_OfPull):
    """The block cannot be had from the pull's source."""

    error: LambdaScaleError


Command = Read | Stop | Show | Arrived | Failed


class Pulls:
    """The pulls of one model, and what is verified of its blocks."""

    def __init__(self, chunks: Sequence[int], most: int) -> None:
        """`chunks`: how many chunks each block has. `most`: the most chunks of one read."""
        self.blocks = [BlockChunks([False] * count) for count in chunks]
        self.live: dict[int, Pulling] = {}
        """By block."""
        self._most = most
        self._queues: dict[NodeId, list[Pulling]] = {}
        """The pulls from each source, in order of steps; ended ones may be among them."""
        self._heard: set[NodeId] = set()
        """Sources that have sent something."""

    # --- events ---

    def apply(
        self, plan: PlanId, pulls: Sequence[Pull], addresses: Mapping[NodeId, str]
    ) -> list[Command]:
        """Pulls these blocks, in step order from each source, instead of what was pulled before. A
        block in flight from the same source goes on. BadInput: nothing was changed."""
        self._check(pulls, addresses)
        wanted = {pull.block: pull for pull in pulls if not self.blocks[pull.block].complete}
        commands: list[Command] = []
        for pulling in list(self.live.values()):
            pull = wanted.get(pulling.block)
            if pull and (pull.source, addresses[pull.source]) == (pulling.source, pulling.address):
                pulling.plan, pulling.step = plan, pull.step
                del wanted[pull.block]
            else:
                commands += self._end(pulling, PullState.GIVEN_UP)
        for pull in wanted.values():
            self.live[pull.block] = Pulling(
                plan, pull.step, pull.block, pull.source, addresses[pull.source]
            )
        self._queues = {}
        for pulling in sorted(self.live.values(), key=lambda pulling: pulling.step):
            self._queues.setdefault(pulling.source, []).append(pulling)
        for source in list(self._queues):
            commands += self._fill(source)
        return commands

    def hold(self, block: int, chunks: Iterable[int] | None = None) -> list[Command]:
        """These chunks are here and verified, by other means than a pull. None: all of them."""
        commands = self.give_up(block)
        held = self.blocks[block]
        for chunk in range(len(held.verified)) if chunks is None else chunks:
            held.verified[chunk] = True
        return commands + self._advance(block)

    def give_up(self, block: int) -> list[Command]:
        """Ends the block's pull, if there is one. Its place in the window goes to the source's
        other blocks."""
        pulling = self.live.get(block)
        if pulling is None:
            return []
        return self._end(pulling, PullState.GIVEN_UP) + self._fill(pulling.source)

    def close(self) -> list[Command]:
        """Ends all pulls."""
        commands: list[Command] = []
        for pulling in list(self.live.values()):
            commands += self._end(pulling, PullState.GIVEN_UP)
        return commands

    def verified(self, pulling: Pulling, chunks: Iterable[int]) -> list[Command]:
        """These chunks of a read that is not answered are right, and may have been shown already:
        this counts even if the pull has ended. The last chunk of a read comes with `read`."""
        known = pulling.reading.intersection(chunks)
        if not known:
            return []
        for chunk in known:
            self.blocks[pulling.block].verified[chunk] = True
        commands = self._advance(pulling.block)
        return commands + self._come(pulling.block) if pulling.ended else commands

    def read(self, pulling: Pulling, run: range) -> list[Command]:
        """A read is over, and all its chunks are right. Others may have read them already, so they
        count even if the pull has ended."""
        known = pulling.reading.issuperset(run)
        counts = self._answered(pulling, run)
        if not known:
            return []
        for chunk in run:
            self.blocks[pulling.block].verified[chunk] = True
        commands = self._advance(pulling.block)
        if counts:
            self._heard.add(pulling.source)
        come = self._come(pulling.block)
        return commands + (come or (self._fill(pulling.source) if counts else []))

    def failed(self, pulling: Pulling, run: range, error: LambdaScaleError) -> list[Command]:
        """A read cannot be had, or its bytes are wrong."""
        if not self._answered(pulling, run):
            return []
        if not isinstance(error, OF_THE_SOURCE):
            return self._fail(pulling, error) + self._fill(pulling.source)
        commands: list[Command] = []
        for each in self._of(pulling.source):
            commands += self._fail(each, type(error)(str(error)))
        return commands

    def stopped(self, pulling: Pulling, run: range) -> None:
        """A read was given up."""
        self._answered(pulling, run)

    # --- what follows ---

    def _answered(self, pulling: Pulling, run: range) -> bool:
        """Whether the answer counts."""
        known = pulling.reading.issuperset(run)
        pulling.reading.difference_update(run)
        return known and not pulling.ended

    def _fill(self, source: NodeId) -> list[Command]:
        """Keeps the window to a source full, the earliest step first. Reads of later steps that are
        under way do not count: they may wait at the source, and must not hold up an urgent one."""
        commands: list[Command] = []
        window = BLOCK_WINDOW if source in self._heard else FIRST_WINDOW
        room = window * BLOCKS_AHEAD
        for pulling in self._of(source):
            room -= len(pulling.reading)
            if room <= 0:
                break
            chunks = list(islice(self._missing(pulling), window))
            of_block = min(room, window - len(pulling.reading))
            if not chunks or of_block < min(window // 2, len(chunks)):
                continue  # a few now and the rest later would be two reads, which cost more
            del chunks[of_block:]
            room -= len(chunks)
            pulling.asked = chunks[-1] + 1
            pulling.reading.update(chunks)
            commands += [Read(pulling, run) for run in runs_of(chunks, self._most)]
        return commands

    def _come(self, index: int) -> list[Command]:
        """Ends the block's pull if the block is complete, and nothing of it is under way."""
        pulling = self.live.get(index)
        if pulling is None or pulling.reading or not self.blocks[index].complete:
            return []
        pulling.end(PullState.ARRIVED)
        del self.live[index]
        return [Arrived(pulling), *self._fill(pulling.source)]

    def _of(self, source: NodeId) -> list[Pulling]:
        """The pulls from a source, the earliest step first."""
        pulls = self._queues.get(source, ())
        self._queues[source] = [p for p in pulls if p.state is PullState.PULLING]
        return self._queues[source]

    def _missing(self, pulling: Pulling) -> Iterator[int]:
        verified = self.blocks[pulling.block].verified
        for chunk in range(pulling.asked, len(verified)):
            if not verified[chunk]:
                yield chunk

    def _advance(self, index: int) -> list[Command]:
        """Shows others the verified chunks, as far as they lead without a gap."""
        block, ready = self.blocks[index], self.blocks[index].ready
        while ready < len(block.verified) and block.verified[ready]:
            ready += 1
        if ready == block.ready:
            return []
        block.ready = ready
        pulling = self.live.get(index)
        return [Show(index, ready, pulling.plan.event if pulling else LOCAL)]

    def _fail(self, pulling: Pulling, error: LambdaScaleError) -> list[Command]:
        return [*self._end(pulling, PullState.FAILED), Failed(pulling, error)]

    def _end(self, pulling: Pulling, state: PullState) -> list[Command]:
        pulling.end(state)
        del self.live[pulling.block]
        return [Stop(pulling)]

    def _check(self, pulls: Sequence[Pull], addresses: Mapping[NodeId, str]) -> None:
        blocks = [pull.block for pull in pulls]
        if len(set(blocks)) < len(blocks):
            raise BadInput("a plan pulls a block twice")
        for pull in pulls:
            if not 0 <= pull.block < len(self.blocks):
                raise BadInput(f"the model has no block {pull.block}")
            if pull.source not in addresses:
                raise BadInput(f"no address is known of {pull.source}, the source of {pull.block}")

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        for index, block in enumerate(self.blocks):
            assert all(block.verified[: block.ready]), "a chunk is shown that is not verified"
            assert block.complete or not block.verified[block.ready], "a chunk is not shown"
            pulling = self.live.get(index)
            assert not (pulling and block.complete and not pulling.reading), "a pull of nothing"
        for index, pulling in self.live.items():
            assert (pulling.block, pulling.ended) == (index, False)
            assert pulling in self._queues[pulling.source], "a pull that nobody serves"
            assert len(pulling.reading) <= BLOCK_WINDOW
            assert any(p.reading for p in self._of(pulling.source)), "a source has pulls, no read"


def runs_of(chunks: Sequence[int], most: int) -> Iterator[range]:
    """Runs of consecutive chunks, of at most `most` chunks each."""
    start = 0
    for index in range(1, len(chunks) + 1):
        if index == len(chunks) or chunks[index] != chunks[index - 1] + 1 or index - start == most:
            yield range(chunks[start], chunks[index - 1] + 1)
            start = index
