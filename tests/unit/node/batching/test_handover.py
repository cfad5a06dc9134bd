"""A sequence moves to another node with its KV: what its old and its new leader do."""

import msgspec
import pytest

from services.node.core.batching import Batcher
from services.node.core.handover import AHEAD_BYTES, FEW, secret_of
from services.node.core.kv import PAGE, movable
from services.node.core.microbatches import (
    Bring,
    Command,
    Emit,
    Failure,
    KvAsk,
    KvDone,
    KvHere,
    Send,
    Settled,
    StageMessage,
    Stop,
    Yield,
    Yielded,
)
from services.node.core.sequences import limit_of
from shared.errors import SourceLost
from shared.ids import RequestId
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Submit, Token
from tests.support.submits import BLOCKS, WHOLE, stages, submit
from tests.unit.node.batching.builders import FakeKv, batcher, queue, run, take

PROMPT = tuple(range(3 * PAGE))
END = movable(len(PROMPT) + 1)
ELSEWHERE = stages(("b", 0, BLOCKS))
NEW = "mem://b"


def tokens_of(commands: list[Command]) -> list[tuple[int, int]]:
    """(index, token) of what gateways are told."""
    said = [command.what for command in commands if isinstance(command, Emit)]
    return [(token.index, token.token) for token in said if isinstance(token, Token)]


def generating(core: Batcher) -> Submit:
    """A sequence that has generated one token, 7."""
    message = submit("r", WHOLE, prompt=PROMPT)
    queue(core, message)
    run(core, take(core), token=7)
    return message


@pytest.mark.parametrize("moving", [False, True], ids=["between steps", "in a step"])
def test_a_sequence_is_given_up_to_who_knows_its_prompt(moving: bool) -> None:
    core = batcher(step_tokens=64)
    message = generating(core)
    work = take(core) if moving else ()
    answers = core.received(Yield("r#1", secret_of(message), NEW, "r#2"))
    answers += run(core, work, token=8)
    (said,) = [command for command in answers if isinstance(command, Send)]
    assert (said.address, said.message) == (NEW, Yielded("r#2", (7, 8) if moving else (7,)))
    assert (core.running, core.take()) == (0, ())


@pytest.mark.parametrize("named", ["r#1", "s#1"])
def test_who_does_not_know_the_prompt_gets_nothing_and_ends_nothing(named: str) -> None:
    core = batcher(step_tokens=64)
    generating(core)
    other = secret_of(submit("r", WHOLE, prompt=PROMPT[:-1]))
    (said,) = core.received(Yield(named, other, NEW, "r#2"))
    assert isinstance(said, Send)
    assert (said.address, said.message) == (NEW, Yielded("r#2", ()))
    assert tokens_of(run(core, take(core), token=8)) == [(1, 8)]


class Taker:
    """A scheduler that takes over a sequence of PROMPT that has generated a 7."""

    def __init__(
        self,
        *,
        kv: FakeKv | None = None,
        source: tuple[Stage, ...] = ELSEWHERE,
        short: bool = False,
        worth: bool = True,
    ) -> None:
        """`short`: its KV is so little that the first round begins once it is lent. `worth`: it is
        worth its time to copy KV."""
        self.kv = kv or FakeKv(each=100 if short else AHEAD_BYTES)
        self.core = Batcher(
            WHOLE[0].node,
            slots=8,
            step_tokens=64,
            kv=self.kv,
            worth=lambda *what: worth and what[1] >= 0,
        )
        self.before = submit("r", source, prompt=PROMPT, max_tokens=40)
        message = msgspec.structs.replace(
            self.before,
            attempt=2,
            takes_over=1,
            kv_from=source,
            stages=WHOLE,
            tokens=(*PROMPT, 7),
        )
        self.begins = self.core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS))

    @property
    def yields(self) -> Yield:
        return Yield("r#1", secret_of(self.before), WHOLE[0].address, "r#2")

    def here(self, first: int, end: int, *, ran: int, stage: int = 0) -> Bring:
        """A piece of the stage's KV is to be brought."""
        blocks = self.before.stages[stage].start, self.before.stages[stage].stop
        where = "region", "", b"", *blocks, first, end, ran
        (bring,) = self.core.received(KvHere("r#2", stage, *where))
        assert isinstance(bring, Bring)
        return bring

    def brought(self, bring: Bring, *, right: bool = True) -> list[StageMessage]:
        """What is said when it has come."""
        done, *said = messages(self.core.brought(bring, right=right))
        assert done == KvDone("region")
        return said

    def goes_on(self, generated: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The position and the tokens of the step with which it goes on after Yielded."""
        self.core.received(Yielded("r#2", generated))
        (row,) = take(self.core)[0].rows
        return row.position, row.tokens


def messages(commands: list[Command]) -> list[StageMessage]:
    return [command.message for command in commands if isinstance(command, Send)]


def asks(taker: Taker, first: int, *, stage: int = 0) -> KvAsk:
    """The question of a round."""
    blocks = taker.before.stages[stage].start, taker.before.stages[stage].stop
    limit, secret = limit_of(taker.before), secret_of(taker.before)
    where = stage, *blocks, first, limit, WHOLE[0].address, "r#2"
    return KvAsk("r#1", secret, *where, any_cut=True, more=True)


def test_the_new_leader_goes_on_where_the_old_one_is() -> None:
    """What was generated meanwhile goes to the gateway from here too, under the next indices; only
    what has no KV is run."""
    taker = Taker()
    core, kv = taker.core, taker.kv
    (ask,) = messages(taker.begins)
    assert isinstance(ask, KvAsk)
    (bring,) = core.received(KvHere(ask.taker, ask.stage, "region"))
    assert isinstance(bring, Bring)
    assert taker.brought(bring) == [taker.yields]

    assert tokens_of(core.received(Yielded("r#2", (7, 8, 9)))) == [(1, 8), (2, 9)]
    copied, known = movable(len(PROMPT) + 1), (*PROMPT, 7, 8, 9)
    assert kv.came == {"r#2": known[:copied]}
    work = take(core)
    (row,) = work[0].rows
    assert (row.position, row.tokens) == (copied, known[copied:])
    assert tokens_of(run(core, work, token=10)) == [(3, 10)]


def test_what_runs_meanwhile_follows_in_rounds_until_hardly_anything_is_missing() -> None:
    taker = Taker()
    first, second, third = END + 9, END + 13, END + 14
    bulk = taker.here(0, END, ran=first)
    assert taker.brought(bulk) == [asks(taker, END)]
    assert taker.brought(taker.here(END, first, ran=second)) == [asks(taker, first)]
    assert taker.brought(taker.here(first, second, ran=third)) == [taker.yields]
    known = (*PROMPT, 7, *range(100, 114))
    assert taker.goes_on(known[len(PROMPT) :]) == (second, known[second:])
    assert taker.kv.came == {"r#2": known[:second]}


def test_there_is_no_further_round_that_would_find_as_much() -> None:
    taker = Taker()
    assert taker.brought(taker.here(0, END, ran=END + 4)) == [asks(taker, END)]
    assert taker.brought(taker.here(END, END + 4, ran=END + 8)) == [taker.yields]


def test_who_does_not_say_how_far_it_is_is_not_asked_for_more() -> None:
    taker = Taker()
    assert taker.brought(taker.here(0, END, ran=0)) == [taker.yields]


def test_nothing_follows_that_is_as_soon_computed() -> None:
    taker = Taker()
    taker.core._leader.takings._worth = lambda model, positions, nbytes: positions > 20
    assert taker.brought(taker.here(0, END, ran=END + 20)) == [taker.yields]


def test_a_round_is_over_when_each_stage_has_had_its_part_in_it() -> None:
    taker = Taker(source=stages(("b", 0, 4), ("c", 4, BLOCKS)))
    assert taker.brought(taker.here(0, END, ran=END + 10)) == []
    rounds = [asks(taker, END), asks(taker, END, stage=1)]
    assert taker.brought(taker.here(0, END, ran=END + 11, stage=1)) == rounds
    later = taker.here(END, END + 12, ran=END + 13, stage=1)
    assert taker.brought(later) == []
    assert taker.brought(taker.here(END, END + 11, ran=END + 12)) == [taker.yields]
    generated = (7, *range(20))
    assert taker.goes_on(generated)[0] == END + 11, "as far as all blocks have come"


@pytest.mark.parametrize("what", ["refused", "wrong", "no room", "elsewhere", "past the limit"])
def test_if_a_round_brings_nothing_the_sequence_goes_on_with_what_came_before(what: str) -> None:
    taker = Taker()
    taker.brought(taker.here(0, END, ran=END + 9))
    match what:
        case "refused":
            said = messages(taker.core.received(KvHere("r#2", 0)))
        case "wrong":
            said = taker.brought(taker.here(END, END + 9, ran=END + 11), right=False)
        case "no room":
            taker.kv.kv_used = taker.kv.kv_capacity - END
            piece = KvHere("r#2", 0, "region", "", b"", 0, BLOCKS, END, END + 9)
            said = messages(taker.core.received(piece))
            taker.kv.kv_used = 0
        case "elsewhere":
            piece = KvHere("r#2", 0, "region", "", b"", 0, BLOCKS, END + 1, END + 9)
            said = messages(taker.core.received(piece))
        case _:
            end = limit_of(taker.before) + 1
            piece = KvHere("r#2", 0, "region", "", b"", 0, BLOCKS, END, end)
            said = messages(taker.core.received(piece))
    assert said == [taker.yields]
    assert taker.goes_on((7, 8, 9)) == (END, (*PROMPT, 7, 8, 9)[END:])


def test_what_is_being_brought_is_stopped_before_the_sequence_goes_on() -> None:
    taker = Taker()
    taker.brought(taker.here(0, END, ran=END + 9))
    bring = taker.here(END, END + 9, ran=END + 11)
    commands = taker.core.late("r#2")
    assert [command for command in commands if isinstance(command, Stop)] == [Stop("r#2")]
    (row,) = take(taker.core)[0].rows
    assert (row.position, row.tokens) == (END, (*PROMPT, 7)[END:])
    assert taker.brought(bring, right=False) == []


@pytest.mark.parametrize("phase", ["asked", "copying", "following", "yielding", "computed"])
@pytest.mark.parametrize("lost", [0, 1])
def test_what_another_node_may_have_died_of_is_not_run_here(phase: str, lost: int) -> None:
    source = stages(("b", 0, 4), ("c", 4, BLOCKS))
    taker = Taker(source=source, worth=phase != "computed")
    for stage in (0, 1) if phase in ("following", "yielding") else ():
        ran = END + 9 if phase == "following" else END
        taker.brought(taker.here(0, END, ran=ran, stage=stage))
    if phase == "copying":
        taker.here(0, END, ran=END)
    commands = taker.core.peer_lost(source[lost].address, Failure("peer_lost", "it died"))
    failed = AttemptFailed(RequestId("r"), 2, SourceLost.code, "it died")
    assert [each.what for each in commands if isinstance(each, Emit)] == [failed]
    assert Settled("r#2", over=True) in commands
    assert (taker.core.running, taker.core.waiting, taker.core.take()) == (0, 0, ())


def test_what_is_better_computed_here_runs_once_it_has_ended_there() -> None:
    taker = Taker(worth=False)
    assert messages(taker.begins) == [taker.yields]
    assert taker.core.take() == ()
    assert taker.goes_on((7, 8)) == (0, (*PROMPT, 7, 8))


@pytest.mark.parametrize("what", ["refused", "wrong"])
def test_what_cannot_be_had_is_computed_once_it_has_ended_there(what: str) -> None:
    taker = Taker()
    if what == "refused":
        said = messages(taker.core.received(KvHere("r#2", 0)))
    else:
        said = taker.brought(taker.here(0, END, ran=END), right=False)
    assert said == [taker.yields]
    assert taker.core.take() == ()
    assert taker.goes_on((7, 8)) == (0, (*PROMPT, 7, 8))


def test_more_may_have_come_than_the_tokens_that_are_known() -> None:
    """The old leader is gone before it could say what was generated."""
    taker = Taker()
    taker.brought(taker.here(0, END, ran=END + 17))
    assert taker.brought(taker.here(END, END + 17, ran=END + 18)) == [taker.yields]
    assert taker.goes_on(()) == (len(PROMPT), (7,))


# --- a short sequence: the first round begins before the whole pages have come ---


def lent(taker: Taker, end: int, *, ran: int, stage: int = 0) -> tuple[Bring, list[StageMessage]]:
    """The stage has lent its KV of the whole pages: what is to be brought, and what is said."""
    blocks = taker.before.stages[stage].start, taker.before.stages[stage].stop
    where = "region", "", b"", *blocks, 0, end, ran
    bring, *said = taker.core.received(KvHere("r#2", stage, *where))
    assert isinstance(bring, Bring)
    return bring, messages(said)


@pytest.mark.parametrize("sooner", [False, True], ids=["in order", "round first"])
def test_the_first_round_of_a_short_sequence_comes_with_its_whole_pages(sooner: bool) -> None:
    taker = Taker(short=True)
    bulk, said = lent(taker, END, ran=END + 9)
    assert said == [asks(taker, END)]
    more = taker.here(END, END + 11, ran=END + 11)
    first, second = (more, bulk) if sooner else (bulk, more)
    assert taker.brought(first) == []
    assert taker.brought(second) == [taker.yields]
    known = (*PROMPT, 7, *range(100, 114))
    assert taker.goes_on(known[len(PROMPT) :]) == (END + 11, known[END + 11 :])
    assert taker.kv.came == {"r#2": known[: END + 11]}


def test_the_first_round_begins_once_all_stages_have_lent_their_part() -> None:
    taker = Taker(source=stages(("b", 0, 4), ("c", 4, BLOCKS)), short=True)
    bulk, said = lent(taker, END, ran=END + 9)
    assert said == []
    assert taker.brought(bulk) == []
    bulk, said = lent(taker, END, ran=END + 8, stage=1)
    assert said == [asks(taker, END), asks(taker, END, stage=1)]
    assert taker.brought(taker.here(END, END + 10, ran=END + 10, stage=1)) == []
    assert taker.brought(bulk) == []
    assert taker.brought(taker.here(END, END + 9, ran=END + 10)) == [taker.yields]
    assert taker.goes_on((7, *range(20)))[0] == END + 9


def test_no_round_of_a_short_sequence_begins_for_a_few_positions() -> None:
    taker = Taker(short=True)
    bulk, said = lent(taker, END, ran=END + FEW)
    assert said == []
    assert taker.brought(bulk) == [taker.yields]


@pytest.mark.parametrize("what", ["refused", "wrong"])
def test_a_first_round_that_fails_does_not_cost_the_whole_pages(what: str) -> None:
    taker = Taker(short=True)
    bulk, _ = lent(taker, END, ran=END + 9)
    if what == "refused":
        assert messages(taker.core.received(KvHere("r#2", 0))) == []
    else:
        assert taker.brought(taker.here(END, END + 9, ran=END + 11), right=False) == []
    assert taker.brought(bulk) == [taker.yields]
    assert taker.goes_on((7, 8, 9)) == (END, (*PROMPT, 7, 8, 9)[END:])


def test_whole_pages_that_fail_are_computed_whatever_has_come_of_a_round() -> None:
    taker = Taker(short=True)
    bulk, _ = lent(taker, END, ran=END + 9)
    taker.brought(taker.here(END, END + 9, ran=END + 11))
    assert taker.brought(bulk, right=False) == [taker.yields]
    assert taker.goes_on((7, 8)) == (0, (*PROMPT, 7, 8))
    assert taker.kv.came == {}


def test_a_round_is_stopped_when_the_whole_pages_have_failed() -> None:
    taker = Taker(short=True)
    bulk, _ = lent(taker, END, ran=END + 9)
    more = taker.here(END, END + 9, ran=END + 11)
    commands = taker.core.brought(bulk, right=False)
    assert [command for command in commands if isinstance(command, Stop)] == [Stop("r#2")]
    assert messages(commands) == [KvDone("region"), taker.yields]
    assert taker.brought(more, right=False) == []
    assert taker.goes_on((7, 8)) == (0, (*PROMPT, 7, 8))
