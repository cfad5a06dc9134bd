"""Live scaling: a leader runs prompts on while the next stage is busy, and that pulls the rest."""

import msgspec

from services.node.core.batching import Batcher
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Command,
    Emit,
    Failed,
    Failure,
    Forward,
    Free,
    Part,
    Path,
    Pull,
    Sampled,
    Send,
)
from services.node.core.rows import Row
from shared.messages.serving import Cancel, LogitRules, Submit, Token
from tests.support.submits import BLOCKS, MODEL, THREE, TWO, WHOLE, stages, submit
from tests.unit.node.batching.builders import FakeKv, Named, ask, come, one, rows, take

B = "mem://b"


class Loading:
    """A node that has some blocks, and leads paths over them."""

    def __init__(self, blocks: int, step_tokens: int = 4) -> None:
        self.blocks = blocks
        self.core = Batcher(
            TWO[0].node,
            slots=8,
            step_tokens=step_tokens,
            kv=FakeKv(),
            held=lambda _: range(self.blocks),
        )

    def queue(self, *messages: Submit, takes_cuts: bool = True) -> None:
        for message in messages:
            for asked in ask(self.core, message):
                self.core.received(Admitted(asked.stage, asked.sequence, takes_cuts))

    def run(self) -> list[tuple[str, int, int]]:
        """Runs what there is to run, and returns what it was: (sequence, start, stop)."""
        work = take(self.core)
        self.sent = []
        for part in work:
            ends = part.stop == BLOCKS
            sampled = [(1,) if ends and row.draw else () for row in part.rows]
            self.sent += self.core.ran(part, sampled, None if ends else Named("hidden"))
        return [(part.keys[0], part.start, part.stop) for part in work]

    def pull(self, positions: int = 4) -> list[Command]:
        return self.core.received(Pull(B, positions))


def pieces(node: Loading) -> list[tuple[int, Part]]:
    """What could run on."""
    return list(node.core._leader.line.pieces())


def forwards(commands: list[Command]) -> list[tuple[str, int]]:
    """(sequence, where its path is cut), of what was passed on."""
    found = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, Forward)]
    return [(message.rows[0].sequence, message.path.stages[1].start) for message in found]


def test_the_earliest_prompt_goes_on_block_by_block_until_it_is_pulled() -> None:
    node = Loading(4)
    node.queue(one("x", TWO, 4), one("y", TWO, 4))
    assert node.run() == [("x#1", 0, 2)]
    assert node.run() == [("x#1", 2, 3)]
    assert node.run() == [("x#1", 3, 4)]
    assert node.run() == [("y#1", 0, 2)]
    node.blocks = BLOCKS - 1
    assert node.run() == [("x#1", 4, 5)]
    node.blocks = 3
    assert forwards(node.pull()) == [("x#1", 5)]
    assert node.run() == [("y#1", 2, 3)]
    assert not forwards(node.sent)
    assert forwards(node.pull()) == [("y#1", 3)]


def test_a_complete_node_runs_a_prompt_to_its_end_and_goes_on_alone() -> None:
    node = Loading(BLOCKS - 1)
    x = one("x", TWO, 4)
    node.queue(x)
    assert [node.run()[0][1:] for _ in range(4)] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    node.blocks = BLOCKS
    assert node.run() == [("x#1", 5, BLOCKS)]
    assert [c.message for c in node.sent if isinstance(c, Send)] == [Free(("x#1",))]
    (token,) = [c.what for c in node.sent if isinstance(c, Emit)]
    assert isinstance(token, Token)
    assert token.alone
    assert node.core.submit(x, n_blocks=BLOCKS, held=range(BLOCKS)) == []
    settled = msgspec.structs.replace(x, stages=WHOLE)
    assert node.core.submit(settled, n_blocks=BLOCKS, held=range(BLOCKS)) == []
    assert node.run() == [("x#1", 0, BLOCKS)]
    assert not node.pull()
    node.core.peer_lost(B, Failure("transport", "gone"))
    assert node.core.running == 1
    node.core.validate()


def test_a_prompt_that_ends_here_cannot_be_pulled() -> None:
    node = Loading(BLOCKS - 1)
    node.queue(one("x", TWO, 4))
    for _ in range(4):
        node.run()
    node.blocks = BLOCKS
    (part,) = take(node.core)
    assert not node.pull()
    assert not forwards(node.core.ran(part, [(1,)], None))


def test_the_last_block_of_others_is_left_to_their_last_stages() -> None:
    """A grammar is made there; and a third stage would have nothing before it."""
    for path, rules in ((TWO, LogitRules(grammar="g")), (THREE, None)):
        node = Loading(BLOCKS)
        node.queue(submit("x", path, prompt=(3, 1), rules=rules))
        node.run()
        while pieces(node):
            node.run()
        assert forwards(node.pull()) == [("x#1", path[1].stop - 1)]


def test_a_long_prompt_that_ends_here_goes_on_here() -> None:
    node = Loading(BLOCKS)
    node.queue(one("x", TWO, 6))
    assert [node.run()[0][1:] for _ in range(5)] == [(0, 2), (2, 3), (3, 4), (4, 5), (5, BLOCKS)]
    assert node.run() == [("x#1", 0, BLOCKS)]
    assert not [c for c in node.sent if isinstance(c, Send)]
    node.core.validate()


def test_what_was_pulled_before_it_was_there_goes_on_at_once() -> None:
    node = Loading(4)
    node.queue(one("x", TWO, 4), one("y", TWO, 4))
    assert not node.pull(positions=5)
    node.run()
    assert forwards(node.sent) == [("x#1", 2)]
    node.run()
    assert forwards(node.sent) == [("y#1", 2)]


def test_later_rows_keep_to_the_cut() -> None:
    node = Loading(3)
    node.queue(one("x", TWO, 6))
    node.run()
    node.run()
    assert forwards(node.pull()) == [("x#1", 3)]
    node.core.received(Sampled(1, (("x#1", ()),)))
    assert node.run() == [("x#1", 0, 3)]
    assert forwards(node.sent) == [("x#1", 3)]


def test_what_runs_on_cannot_be_pulled_and_is_not_run_twice() -> None:
    node = Loading(4)
    node.queue(one("x", TWO, 4))
    node.run()
    (part,) = take(node.core)
    assert not node.core.take()
    assert not node.pull()
    assert forwards(node.core.ran(part, [()], Named("hidden"))) == [("x#1", 3)]


def test_a_stage_of_the_release_before_gets_its_own_blocks_at_once() -> None:
    node = Loading(4)
    node.queue(one("x", TWO, 4), takes_cuts=False)
    node.run()
    assert forwards(node.sent) == [("x#1", 2)]


def test_prompts_that_end_in_line_are_forgotten() -> None:
    node = Loading(2)
    node.queue(one("x", TWO, 2), one("y", TWO, 4))
    node.run()
    node.core.cancel(Cancel(request=submit("x", TWO).request, attempt=1))
    assert not node.pull()
    node.run()
    assert forwards(node.sent) == [("y#1", 2)]
    node.core.validate()


def test_a_prompt_in_line_is_not_stuck() -> None:
    node = Loading(2)
    message = one("x", TWO, 4)
    node.queue(message)
    node.run()
    for _ in range(3):
        assert node.core.submit(message, n_blocks=BLOCKS, held=range(2)) == []


def follower() -> Batcher:
    return Batcher(TWO[1].node, slots=8, step_tokens=4, kv=FakeKv())


def admit(core: Batcher, name: str) -> None:
    core.received(Admit(Path(MODEL, TWO), 1, f"{name}#1", 4, 11, pulls=True))


def pulls(core: Batcher) -> list[tuple[str, Pull]]:
    found = [c for c in core.pull(()) if isinstance(c, Send)]
    return [(c.address, c.message) for c in found if isinstance(c.message, Pull)]


def test_an_idle_stage_pulls_once() -> None:
    core = follower()
    assert not pulls(core)
    admit(core, "x")
    admit(core, "y")
    assert pulls(core) == [("mem://a", Pull(B, 4))]
    assert not pulls(core)


def test_a_stage_pulls_again_when_nothing_of_a_prompt_is_left_to_run() -> None:
    core = follower()
    admit(core, "x")
    admit(core, "y")
    pulls(core)
    come(core, Forward(Path(MODEL, TWO).cut_at(4), 1, 1, (Row("x#1", 0, 4, 11),)), Named("h"))
    assert not pulls(core)
    (part,) = take(core)
    assert (part.start, part.stop) == (4, BLOCKS)
    assert not core.pull([part])
    core.ran(part, [()], None)
    assert len(pulls(core)) == 1


def test_a_stage_with_prompts_of_its_own_does_not_pull() -> None:
    core = follower()
    admit(core, "x")
    own = one("own", stages(("b", 0, BLOCKS)), 4)
    core.submit(own, n_blocks=BLOCKS, held=range(BLOCKS))
    assert not pulls(core)


def test_a_leader_of_the_release_before_is_not_asked() -> None:
    core = follower()
    (told,) = core.received(Admit(Path(MODEL, TWO), 1, "x#1", 4, 11))
    assert isinstance(told, Send)
    assert told.message == Admitted(1, "x#1")
    assert not pulls(core)


def test_a_stage_with_a_short_prompt_pulls_what_fits_beside_it() -> None:
    core = Batcher(TWO[1].node, slots=8, step_tokens=16, kv=FakeKv())
    admit(core, "x")
    core.submit(one("own", stages(("b", 0, BLOCKS)), 2), n_blocks=BLOCKS, held=range(BLOCKS))
    assert pulls(core) == [("mem://a", Pull(B, 14))]


def test_a_leader_that_has_nothing_left_is_not_waited_for() -> None:
    core = follower()
    admit(core, "x")
    pulls(core)
    core.give_up(["x#1"], Failure("engine_failed", ""))
    admit(core, "y")
    assert len(pulls(core)) == 1


def test_a_stage_takes_other_cuts_only_before_anything_has_run() -> None:
    core = follower()
    admit(core, "x")
    wider, wrong = Path(MODEL, TWO).cut_at(3), Path(MODEL, TWO).cut_at(1)
    told = come(core, Forward(wrong, 1, 1, (Row("x#1", 0, 4, 11),)), Named("h"))
    assert any(isinstance(c, Send) and isinstance(c.message, Failed) for c in told)
    admit(core, "y")
    assert not come(core, Forward(wider, 1, 2, (Row("y#1", 0, 4, 11),)), Named("h"))
    (part,) = take(core)
    core.ran(part, [(1,)], None)
    assert not come(core, Forward(wider, 1, 3, (Row("y#1", 4, 1, 11),)), Named("h"))
    (part,) = take(core)
    core.ran(part, [(1,)], None)
    told = come(core, Forward(wider.cut_at(4), 1, 4, (Row("y#1", 5, 1, 11),)), Named("h"))
    assert any(isinstance(c, Send) and isinstance(c.message, Failed) for c in told)


def test_rows_of_requests_that_decode_do_not_wait() -> None:
    node = Loading(4, step_tokens=8)
    node.queue(one("x", TWO, 2))
    node.run()
    node.pull()
    node.core.received(Sampled(1, (("x#1", (1,)),)))
    assert rows(work := take(node.core)) == [("x#1", 2, 1)]
    assert forwards(node.core.ran(work[0], [()], Named("h"))) == [("x#1", 2)]
