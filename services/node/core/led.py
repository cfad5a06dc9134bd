"""The sequences that a node leads, by state (`services.node.core.leading` has the table)."""

from collections import deque
from collections.abc import Container, Iterable, Iterator

from services.node.core.microbatches import Path
from services.node.core.rows import SequenceKey, attempt_of
from services.node.core.sequences import Lane, Sequence, State
from shared.ids import ModelId, RequestId
from shared.messages.serving import Submit


class Led:
    def __init__(self, together: Container[ModelId] = ()) -> None:
        """`together`: the models of which the same devices run all stages together."""
        self._together = together
        self.preparing: dict[SequenceKey, Sequence] = {}
        """Sequences whose grammars are being made, which wait after that, and sequences for which
        other stages were asked for room, which run once all have it."""
        self.waiting: deque[Sequence] = deque()
        """Sequences that this node runs alone, and that it has no KV for yet."""
        self.running: dict[SequenceKey, Sequence] = {}
        self.restoring: dict[SequenceKey, Sequence] = {}
        """Those of them whose KV comes from host memory, in the order in which they began."""
        self.lanes: dict[Path, Lane] = {}

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running.values()
        yield from self.preparing.values()
        yield from self.waiting

    def attempt(self, key: SequenceKey) -> Sequence | None:
        """The running sequence that had this key first."""
        return next((s for s in self.running.values() if attempt_of(s.key) == key), None)

    def known(self, key: SequenceKey) -> Sequence | None:
        """The sequence that had this key first, in any state."""
        return next((s for s in self if attempt_of(s.key) == key), None)

    def prepare(self, sequence: Sequence) -> None:
        if sequence.state is not State.PREPARING:  # its KV may have come before
            sequence.to(State.PREPARING)
        self.preparing[sequence.key] = sequence

    def wait(self, sequence: Sequence) -> None:
        sequence.to(State.WAITING)
        if sequence.preempted:
            self.waiting.appendleft(sequence)
        else:
            self.waiting.append(sequence)

    def run(self, sequence: Sequence) -> None:
        sequence.to(State.RUNNING)
        self.running[sequence.key] = sequence
        if sequence.restoring:
            self.restoring[sequence.key] = sequence
        self._join_lane(sequence)

    def _join_lane(self, sequence: Sequence) -> None:
        path = sequence.path
        lane = self.lanes.setdefault(path, Lane(path, path.model_id in self._together))
        lane.sequences[sequence.key] = sequence

    def _leave_lane(self, sequence: Sequence) -> None:
        lane = self.lanes[sequence.path]
        del lane.sequences[sequence.key]
        if not lane.sequences:
            del self.lanes[sequence.path]

    def cut(self, sequence: Sequence, path: Path) -> None:
        """The running sequence goes on over this path: the same nodes, cut elsewhere."""
        self._leave_lane(sequence)
        sequence.path = path
        self._join_lane(sequence)

    def end(self, sequence: Sequence) -> None:
        sequence.to(State.OVER)
        if self.preparing.pop(sequence.key, None) is not None:
            return
        if self.running.pop(sequence.key, None) is None:
            self.waiting.remove(sequence)
            return
        self.restoring.pop(sequence.key, None)
        self._leave_lane(sequence)

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        sequences = list(self)
        assert len({s.key for s in sequences}) == len(sequences), "a sequence is in two places"
        if len({s.submit.request for s in sequences}) < len(sequences):
            _validate_attempts([s.submit for s in sequences])
        for key, sequence in (*self.preparing.items(), *self.running.items()):
            assert key == sequence.key
        for sequence in (*self.preparing.values(), *self.waiting):
            assert not sequence.started, "a sequence that waits has KV"
        assert all(s.state is State.PREPARING for s in self.preparing.values())
        assert all(s.state is State.WAITING for s in self.waiting)
        for sequence in self.waiting:
            assert not sequence.path.followers, "a sequence on a path waits for KV"
        laned = 0
        for path, lane in self.lanes.items():
            laned += len(lane.sequences)
            for key in lane.sequences:
                found_there = self.running.get(key)
                assert found_there is not None, "running is being in a lane"
                assert found_there.path == path, "running is being in a lane"
        assert laned == len(self.running), "running is being in a lane"
        for sequence in self.running.values():
            _validate_running(sequence)
            assert sequence.restoring == (sequence.key in self.restoring)
        assert self.restoring.keys() <= self.running.keys()


def _validate_attempts(submits: Iterable[Submit]) -> None:
    attempts: dict[RequestId, list[Submit]] = {}
    for submit in submits:
        attempts.setdefault(submit.request, []).append(submit)
    for found in attempts.values():
        if len(found) > 1:
            *others, last = sorted(found, key=lambda submit: submit.attempt)
            assert [s.attempt for s in others] == [last.takes_over], "attempts left behind"


def _validate_running(sequence: Sequence) -> None:
    assert sequence.admitted > 0
    assert sequence.state is State.RUNNING
    assert not sequence.unanswered, "a sequence runs on a path that may lack room"
    assert (sequence.flight is None) == (sequence.row is None)
    assert sequence.flight is not None or not sequence.in_line
    assert not sequence.restoring or sequence.flight is None, "it runs without its KV"
    assert not sequence.restoring or not sequence.path.followers, "other stages lack its KV"
    assert sequence.prompt <= len(sequence.tokens), "a sequence lost tokens"
    assert 0 <= sequence.position < len(sequence.tokens), "nothing is left to run"
    if row := sequence.row:
        assert row.position == sequence.position
        assert row.position + row.count - row.proposed <= len(sequence.tokens)
        assert row.position + row.count <= sequence.limit
