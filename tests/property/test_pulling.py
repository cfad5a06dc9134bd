"""The pulls of a model under plans that change and replies that come late, in any order, twice or
never.

The machine stands for a mover: it keeps the reads that `Pulls` asks for, and hypothesis chooses
what becomes of each, also after its pull has ended.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.node.core.pulling import (
    BLOCK_WINDOW,
    FIRST_WINDOW,
    Arrived,
    Command,
    Failed,
    Pulling,
    Pulls,
    PullState,
    Read,
    Show,
    Stop,
)
from services.node.core.residency import PlanId
from shared.errors import (
    BadInput,
    DigestMismatch,
    IllegalTransition,
    LambdaScaleError,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportTimeout,
)
from shared.ids import EventId, NodeId
from shared.messages.scaling import Pull
from tests.support.amounts import examples

SOURCES = [NodeId(name) for name in "abc"]
ADDRESSES = {source: f"mem://{source}" for source in SOURCES}
OF_A_BLOCK = [DigestMismatch("wrong"), RegionUnknown("unknown"), LambdaScaleError("bug")]
OF_A_SOURCE = [PeerLost("gone"), ProtocolViolation("nonsense"), TransportTimeout("silent")]


@dataclass(frozen=True)
class Reply:
    """What a read brought."""

    pulling: Pulling
    run: range
    error: LambdaScaleError | None


class Mover(RuleBasedStateMachine):
    @initialize(chunks=st.lists(st.integers(1, 40), min_size=1, max_size=6), most=st.integers(1, 8))
    def host(self, chunks: list[int], most: int) -> None:
        self.pulls = Pulls(chunks, most)
        self.most = most
        self.revision = 0
        self.reads: list[Read] = []
        """Reads under way, of ended pulls too: their bytes may still come."""
        self.replies: list[Reply] = []
        """Replies that were given, to be repeated."""
        self.shown = [0] * len(chunks)
        self.ends: Counter[Pulling] = Counter()
        self.heard: set[NodeId] = set()

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            assert command.cause, f"nothing caused {command}"
            match command:
                case Read(pulling, run):
                    self.begun(pulling, run)
                case Show(block, ready):
                    assert ready > self.shown[block], "what was shown is shown again"
                    self.shown[block] = ready
                case Stop(pulling):
                    assert pulling.state in (PullState.GIVEN_UP, PullState.FAILED)
                    self.ends[pulling] += 1
                case Arrived(pulling):
                    assert pulling.state is PullState.ARRIVED
                    assert self.pulls.blocks[pulling.block].complete
                    assert not pulling.reading
                    self.ends[pulling] += 1
                case Failed(pulling):
                    assert pulling.state is PullState.FAILED
                    assert self.ends[pulling] == 1

    def begun(self, pulling: Pulling, run: range) -> None:
        assert 0 < len(run) <= self.most
        assert not pulling.ended
        verified = self.pulls.blocks[pulling.block].verified
        assert not any(verified[chunk] for chunk in run), "what is here is read again"
        for other in self.reads:
            if other.pulling is pulling:
                assert not set(other.run) & set(run), "a chunk is read twice"
        self.reads.append(Read(pulling, run))

    # --- what may happen ---

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(range(len(self.shown))), unique=True))
        pulls = [
            Pull(step, block, data.draw(st.sampled_from(SOURCES)))
            for step, block in enumerate(blocks, 1)
        ]
        self.revision += 1
        before = dict(self.pulls.live)
        self.do(self.pulls.apply(PlanId(EventId("ev"), self.revision), pulls, ADDRESSES))
        for pull in pulls:
            now, was = self.pulls.live.get(pull.block), before.get(pull.block)
            assert (now is None) == self.pulls.blocks[pull.block].complete
            if now is not None:
                assert (now.source, now.plan.revision) == (pull.source, self.revision)
                assert (now is was) == (was is not None and was.source == pull.source)
        assert set(self.pulls.live) <= set(blocks)

    @rule(block=st.integers(-1, 6), source=st.sampled_from(["a", "nobody"]))
    def nonsense(self, block: int, source: str) -> None:
        """A plan that cannot be meant changes nothing."""
        pull = Pull(1, block, NodeId(source))
        wrong = not 0 <= block < len(self.shown) or source == "nobody"
        pulls = [pull] if wrong else [pull, pull]
        live = dict(self.pulls.live)
        with pytest.raises(BadInput):
            self.pulls.apply(PlanId(EventId("ev"), self.revision + 1), pulls, ADDRESSES)
        assert self.pulls.live == live

    @precondition(lambda self: any(len(read.run) > 1 for read in self.reads))
    @rule(data=st.data())
    def part_comes(self, data: st.DataObject) -> None:
        """Chunks are right of a read that goes on, so its last chunk is not among them."""
        read = data.draw(st.sampled_from([read for read in self.reads if len(read.run) > 1]))
        chunks = st.lists(st.sampled_from(read.run[:-1]), min_size=1)
        self.do(self.pulls.verified(read.pulling, data.draw(chunks)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def read_ends(self, data: st.DataObject) -> None:
        self.reply(data.draw(st.sampled_from(self.reads)), None)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), error=st.sampled_from(OF_A_BLOCK + OF_A_SOURCE))
    def read_fails(self, data: st.DataObject, error: LambdaScaleError) -> None:
        read = data.draw(st.sampled_from(self.reads))
        live = [p for p in self.pulls.live.values() if p.source == read.pulling.source]
        counts = not read.pulling.ended
        self.reply(read, error)
        if counts:
            failed = live if error in OF_A_SOURCE else [read.pulling]
            assert all(pulling.state is PullState.FAILED for pulling in failed)

    @precondition(lambda self: any(read.pulling.ended for read in self.reads))
    @rule()
    def reads_stop(self) -> None:
        """Reads that were given up have ended."""
        for read in [read for read in self.reads if read.pulling.ended]:
            self.reads.remove(read)
            self.pulls.stopped(read.pulling, read.run)

    @precondition(lambda self: self.replies)
    @rule(data=st.data())
    def repeated(self, data: st.DataObject) -> None:
        """A reply comes again, when its chunks may be in flight again or its pull may be over."""
        reply = data.draw(st.sampled_from(self.replies))
        again = any(
            other.pulling is reply.pulling and set(other.run) & set(reply.run)
            for other in self.reads
        )
        if not again:
            assert self.answer(reply) == []

    @rule(data=st.data())
    def held(self, data: st.DataObject) -> None:
        """Chunks come by other means."""
        block = data.draw(st.integers(0, len(self.shown) - 1))
        count = len(self.pulls.blocks[block].verified)
        chunks = data.draw(st.none() | st.lists(st.integers(0, count - 1)))
        self.do(self.pulls.hold(block, chunks))
        assert block not in self.pulls.live

    @rule(data=st.data())
    def given_up(self, data: st.DataObject) -> None:
        self.do(self.pulls.give_up(data.draw(st.integers(0, len(self.shown) - 1))))

    def reply(self, read: Read, error: LambdaScaleError | None) -> None:
        self.reads.remove(read)
        reply = Reply(read.pulling, read.run, error)
        self.replies.append(reply)
        if error is None and not read.pulling.ended:
            self.heard.add(read.pulling.source)
        self.do(self.answer(reply))

    def answer(self, reply: Reply) -> list[Command]:
        if reply.error is None:
            return self.pulls.read(reply.pulling, reply.run)
        return self.pulls.failed(reply.pulling, reply.run, reply.error)

    # --- what must hold ---

    @invariant()
    def is_sound(self) -> None:
        self.pulls.validate()
        assert self.shown == [block.ready for block in self.pulls.blocks]
        for pulling in self.pulls.live.values():
            flying = {chunk for read in self.reads if read.pulling is pulling for chunk in read.run}
            assert flying == pulling.reading
            assert not self.ends[pulling]
        assert all(count == 1 for count in self.ends.values()), "a pull ended twice"

    @invariant()
    def keeps_to_its_windows(self) -> None:
        for source in SOURCES:
            window = BLOCK_WINDOW if source in self.heard else FIRST_WINDOW
            live = [p for p in self.pulls.live.values() if p.source == source]
            assert all(len(pulling.reading) <= window for pulling in live)

    def teardown(self) -> None:
        """Whatever happened: when sources answer, every block that is pulled comes."""
        if not hasattr(self, "pulls"):
            return
        wanted = list(self.pulls.live.values())
        while self.reads:
            self.reply(self.reads[0], None)
            self.pulls.validate()
        assert not self.pulls.live
        assert all(pulling.state is PullState.ARRIVED for pulling in wanted)
        self.do(self.pulls.close())


TestMover = Mover.TestCase
TestMover.settings = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)


def test_a_pull_that_ended_cannot_end_again() -> None:
    pulling = Pulling(PlanId(EventId("ev"), 0), 1, 0, SOURCES[0], "mem://a")
    pulling.end(PullState.ARRIVED)
    with pytest.raises(IllegalTransition, match="block 0 from a: failed is not a step"):
        pulling.end(PullState.FAILED)
