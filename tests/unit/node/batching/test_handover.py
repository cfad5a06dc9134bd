"""A sequence moves to another node with its KV: what its old and its new leader do."""

import msgspec
import pytest

from services.node.core.batching import Batcher
from services.node.core.handover import secret_of
from services.node.core.kv import PAGE, movable
from services.node.core.microbatches import (
    Bring,
    Command,
    Emit,
    KvAsk,
    KvHere,
    Send,
    Yield,
    Yielded,
)
from shared.messages.serving import Submit, Token
from tests.support.submits import BLOCKS, WHOLE, stages, submit
from tests.unit.node.batching.builders import FakeKv, batcher, queue, run, take

PROMPT = tuple(range(3 * PAGE))
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


def test_the_new_leader_goes_on_where_the_old_one_is() -> None:
    """What was generated meanwhile goes to the gateway from here too, under the next indices; only
    what has no KV is run."""
    kv = FakeKv()
    core = Batcher(
        WHOLE[0].node, slots=8, step_tokens=64, kv=kv, worth=lambda model, positions, nbytes: True
    )
    before = submit("r", ELSEWHERE, prompt=PROMPT)
    message = msgspec.structs.replace(
        before,
        attempt=2,
        takes_over=1,
        kv_from=ELSEWHERE,
        stages=WHOLE,
        tokens=(*PROMPT, 7),
    )
    (asks,) = core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS))
    assert isinstance(asks, Send)
    assert isinstance(asks.message, KvAsk)
    (bring,) = core.received(KvHere(asks.message.taker, asks.message.stage, "region"))
    assert isinstance(bring, Bring)
    *_, asks = core.brought(bring, right=True)
    assert isinstance(asks, Send)
    assert asks.message == Yield("r#1", secret_of(before), WHOLE[0].address, "r#2")

    assert tokens_of(core.received(Yielded("r#2", (7, 8, 9)))) == [(1, 8), (2, 9)]
    copied, known = movable(len(message.tokens)), (*PROMPT, 7, 8, 9)
    assert kv.came == {"r#2": known[:copied]}
    work = take(core)
    (row,) = work[0].rows
    assert (row.position, row.tokens) == (copied, known[copied:])
    assert tokens_of(run(core, work, token=10)) == [(3, 10)]
