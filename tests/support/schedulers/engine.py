"""An engine that only checks what it is told to do, block by block."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.node.core.kv import PAGE, Need, Restoration, movable, pages_of, whole_pages
from services.node.core.microbatches import (
    Part,
)
from services.node.core.rows import Row, SequenceKey
from shared.errors import CapacityExceeded
from shared.ids import NO_ADAPTER, ModelId, NodeId
from shared.messages.instances import Stage
from shared.messages.serving import (
    Logprobs,
    Pooling,
)

NODES = ("a", "b", "c")
MODELS = (ModelId("m"), ModelId("m"), ModelId("other"))
BLOCKS = 6
SLOTS = 3
STEP_TOKENS = 4
STOP_ID = 7


def stage(node: str, start: int, stop: int) -> Stage:
    return Stage(NodeId(node), f"mem://{node}", start, stop)


PATHS = (
    (stage("a", 0, 6),),
    (stage("b", 0, 6),),
    (stage("a", 0, 3), stage("b", 3, 6)),
    (stage("b", 0, 3), stage("a", 3, 6)),
    (stage("c", 0, 3), stage("b", 3, 6)),
    (stage("a", 0, 2), stage("b", 2, 4), stage("c", 4, 6)),
    (stage("c", 0, 2), stage("a", 2, 4), stage("b", 4, 6)),
)


@dataclass
class CheckedEngine:
    """Knows only how far each sequence is; refuses when it has no pages left."""

    kv_capacity: int
    kv: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """key -> (positions that stay, positions run, limit)"""
    made: set[str] = field(default_factory=set)
    preempted: int = 0
    averaged: dict[str, int] = field(default_factory=dict)
    """How many positions of each sequence."""
    filled: dict[str, dict[int, int]] = field(default_factory=dict)
    """How many positions of each block have come of a sequence's KV from other nodes."""
    restoring: dict[str, int] = field(default_factory=dict)
    """Sequences whose KV comes from host memory, with the positions that lie there."""
    moved: int = 0
    """How many sequences go on with KV from other nodes."""
    beyond: int = 0
    """How many of them have more of it than whole pages."""
    blocks: set[int] = field(default_factory=set)
    """The blocks that have arrived here."""
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The blocks in which each sequence that began here has KV."""
    ran_on: int = 0
    """How often a part went on where one before had left its sequences."""

    def held(self, model_id: ModelId) -> set[int]:
        return self.blocks

    def room_with(self, more: Mapping[int, int]) -> int:
        """Positions of whole pages that are free with so many more positions in parts of pages, by
        how many a page has."""
        parts = Counter({parts: pages_of(positions) for parts, positions in more.items()})
        for key, (_, run, _) in self.kv.items():
            parts[parts_of(*self.stages.get(key, (0, BLOCKS)))] += pages_of(run)
        return self.kv_capacity - sum(-(-count // each) for each, count in parts.items()) * PAGE

    @property
    def kv_used(self) -> int:
        return self.kv_capacity - self.room_with({})

    def kv_share(self, model_id: ModelId) -> int:
        return self.kv_capacity

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        return parts_of(start, stop)

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        more: Counter[int] = Counter()
        for (_, parts), positions in promised.items():
            more[parts] += whole_pages(positions)
        return self.room_with(more)

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """Models do not differ."""

    def adopt(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        """Now and then something is cached."""
        assert key not in self.made, "KV made twice"
        found = max(len(tokens) - 1, 0) // PAGE * PAGE if (len(tokens) + len(self.made)) % 3 else 0
        if found:
            self.made.add(key)
            self.kv[key] = (found, found, limit)
        return found

    def restorable(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> Restoration | None:
        """Now and then something lies in host memory, and mostly it is worth copying."""
        assert key not in self.restoring
        had, end = self.kv.get(key, (0, 0, 0))[0], movable(len(tokens))
        if end <= had or (len(tokens) + len(self.made)) % 2:
            return None
        found = Restoration(end - had, 1.0, len(tokens) % 5)
        if found.worth:
            self.restoring[key] = end
            self.kv[key] = (had, had, limit)
        return found

    def restore(self, key: str) -> tuple[int, bool]:
        """Page by page. Some of it may be gone by now."""
        had, _, limit = self.kv[key]
        now = had + PAGE
        gone = self.kv_used + PAGE > self.kv_capacity or (now + len(self.made)) % 7 == 0
        if gone:
            now = had
        else:
            self.made.add(key)
        self.kv[key] = (now, now, limit)
        more = now < self.restoring[key] and not gone
        if not more:
            del self.restoring[key]
            if not now:
                del self.kv[key]
        return now, more

    def position_bytes(self, model_id: ModelId) -> int:
        return 1

    def receive(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        assert key not in self.made, "KV made twice"
        end = movable(len(tokens))
        if self.kv_used + end > self.kv_capacity:
            raise CapacityExceeded("full")
        self.made.add(key)
        self.kv[key] = (end, end, limit)
        self.filled[key] = dict.fromkeys(range(BLOCKS), 0)
        return 0

    def receive_more(self, key: str, end: int) -> None:
        _, had, limit = self.kv[key]
        end = max(end, had)
        if self.kv_used + whole_pages(end) - whole_pages(had) > self.kv_capacity:
            raise CapacityExceeded("full")
        self.kv[key] = (end, end, limit)

    def fill(self, key: str, blocks: tuple[int, int], positions: tuple[int, int]) -> None:
        first, end = positions
        if key not in self.kv:
            return  # it is over, and nobody else has its pages yet
        assert end <= self.kv[key][1], "there are no pages for it"
        for block in range(*blocks):
            assert self.filled[key][block] == first, "positions come twice, or are left out"
            self.filled[key][block] = end

    def received(self, key: str, tokens: tuple[int, ...]) -> None:
        assert min(self.filled[key].values()) >= len(tokens), "positions without KV"
        _, had, limit = self.kv[key]
        assert had >= len(tokens)
        self.kv[key] = (len(tokens), len(tokens), limit)
        self.moved += 1
        self.beyond += len(tokens) % PAGE > 0

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        return True

    def run_on(self, part: Part) -> None:
        before = dict(self.stages)
        for row in part.rows:
            self.stages[row.sequence] = self.stages[row.sequence][0], part.stop
        full, self.stages = self.room_with({}) < 0, before
        if full:
            raise CapacityExceeded("full")
        self.ran_on += 1
        for row in part.rows:
            start, stop = self.stages[row.sequence]
            assert (stop, row.tokens) == (part.start, ())
            assert self.kv[row.sequence] == (row.count, row.count, row.limit)
            self.stages[row.sequence] = start, part.stop

    def join(self, part: Part) -> None:
        if part.stage == 0:
            assert set(range(part.start, part.stop)) <= self.blocks
        if part.resumes_at:
            self.run_on(part)
            return
        rows = part.rows
        had = {row.sequence: self.kv.get(row.sequence, (0, 0, 0))[1] for row in rows}
        ends = {row.sequence: max(row.position + row.count, had[row.sequence]) for row in rows}
        new = sum(whole_pages(ends[key]) - whole_pages(had[key]) for key in had)
        if self.room_with({parts_of(part.start, part.stop): new}) < 0:
            raise CapacityExceeded("full")
        for row in part.rows:
            if row.position == 0:
                assert row.sequence not in self.made, "KV made twice"
                self.made.add(row.sequence)
                self.kv[row.sequence] = (0, 0, row.limit)
                self.stages[row.sequence] = part.start, part.stop
            if row.sequence in self.stages:
                assert self.stages[row.sequence] == (part.start, part.stop), "cut elsewhere"
            stays, reached, limit = self.kv[row.sequence]
            assert stays <= row.position <= reached
            assert limit == row.limit >= row.position + row.count
            assert len(row.tokens) == (row.count if part.start == 0 else 0)
            end = row.position + row.count
            self.kv[row.sequence] = (end - row.proposed, end, limit)

    def finish(self, part: Part) -> tuple[Part, list[tuple[int, ...]]]:
        """What is left of the part, and what it drew."""
        part = part.without(set(part.keys) - set(self.kv))
        drawn = [drawn_of(row) for row in part.rows]
        return part, drawn if part.stop == BLOCKS else [()] * len(part.rows)

    def vectors(self, part: Part) -> dict[SequenceKey, bytes]:
        """As if a vector said how many positions it is made of."""
        found = {}
        for row in part.rows if part.stop == BLOCKS else ():
            if row.pooling is Pooling.MEAN:
                assert row.position == self.averaged.get(row.sequence, 0)
                self.averaged[row.sequence] = row.position + row.count
            if row.gives_vector:
                found[row.sequence] = b"%d" % self.averaged.get(row.sequence, 1)
        return found


def parts_of(start: int, stop: int) -> int:
    """Into how many parts a page is divided for sequences that run these blocks."""
    return BLOCKS // (stop - start)


def scored(part: Part) -> dict[SequenceKey, tuple[Logprobs, ...]]:
    """As if the log probability of a prompt's token were the number of the position before it."""
    found = {}
    for row in part.rows if part.stop == BLOCKS else ():
        if row.score:
            first, count = row.position + row.score.first, len(row.score.tokens)
            assert row.score.tokens == tuple(range(first + 1, first + count + 1))
            assert first >= row.position
            assert first + count <= row.position + row.count
            found[row.sequence] = tuple(Logprobs(float(first + i), ()) for i in range(count))
    return found


def token_after(position: int, limit: int) -> int:
    """What is drawn: it often repeats what was drawn before."""
    if position % 13 == 12:
        return STOP_ID
    return (position // 3 if limit % 2 else position) % 3


def drawn_of(row: Row) -> tuple[int, ...]:
    if row.draw is None:
        return ()
    last = row.position + row.count - row.proposed - 1
    tokens = [token_after(last, row.limit)]
    for proposed in row.draw.proposed:
        if proposed != tokens[-1]:
            break
        tokens.append(token_after(last + len(tokens), row.limit))
    return tuple(tokens)
