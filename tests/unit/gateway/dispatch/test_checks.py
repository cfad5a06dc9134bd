"""Checks of idle replicas: when, of whom, and what comes of the answers."""

from services.gateway.core.agreement import TRIES
from services.gateway.core.checks import AGAIN_S, APART_S
from services.gateway.core.commands import Checked, Command, Emit, Scored, Send
from shared.errors import CapacityExceeded, EngineFailed, ModelError
from shared.known_tokens import TOKENS
from shared.messages.serving import Logprobs, Scores, Submit, Token, Tokens
from tests.unit.gateway.dispatch.builders import MODEL, NAME, Driver, sent
from tests.unit.gateway.dispatch.test_others import hear, said
from tests.unit.gateway.support import path, replica

EVERY_S = 30.0
RIGHT, WRONG = -1.0, -9.0


def checked(*numbers: int) -> Driver:
    """All of these replicas have served."""
    driver = Driver(*(replica(n) for n in numbers), check_s=EVERY_S)
    driver.dispatch.add_model(NAME, MODEL, checked=True)
    for route in driver.dispatch._models[MODEL].table.routes.values():
        route.served = True
    return driver


def checks(commands: list[Command]) -> list[Submit]:
    found = [command.submit for command in commands if isinstance(command, Send)]
    return [submit for submit in found if submit.request.startswith("check-")]


def answer(driver: Driver, submit: Submit, value: float) -> list[Command]:
    """As the node does."""
    logprobs = tuple(Logprobs(value, ()) for _ in range(len(TOKENS) - 1))
    scores = Scores(submit.request, submit.attempt, 1 - len(TOKENS), logprobs)
    token = Token(submit.request, submit.attempt, 0, 7, "length")
    message = Tokens(node=submit.stages[0].node, tokens=(token,), scores=(scores,))
    commands = driver.dispatch.on_tokens(message, driver.now)
    driver.dispatch.validate()
    return commands


def play(driver: Driver, wrong: set[str], seconds: float) -> tuple[list[str], list[str]]:
    """All answer for so long. Returns who was asked, and who was found wrong."""
    asked: list[str] = []
    found: list[str] = []
    end = driver.now + seconds
    while driver.now < end:
        for submit in checks(driver.later(AGAIN_S / 2)):
            node = submit.stages[0].node
            asked.append(node)
            commands = answer(driver, submit, WRONG if node in wrong else RIGHT)
            assert not [c for c in commands if isinstance(c, Scored)], "no client waits for it"
            found += [c.node for c in commands if isinstance(c, Checked) and c.verdict == "wrong"]
    return asked, found


def test_each_replica_is_asked_in_its_turn_as_often_as_was_said() -> None:
    driver = checked(1, 2, 3)
    asked, wrong = play(driver, set(), 10 * EVERY_S)
    assert not wrong
    assert 27 <= len(asked) <= 31
    assert {asked.count(f"node-{n}") for n in (1, 2, 3)} <= {9, 10, 11}


def test_what_is_asked() -> None:
    driver = checked(1, 2)
    (submit,) = checks(driver.later(0.0))
    assert submit.tokens == TOKENS
    assert (submit.score_from, submit.max_tokens, submit.sampling.logprobs) == (1, 1, 0)
    again = {each.request for each in checks(driver.later(2 * EVERY_S))}
    assert again <= {submit.request}, "one at a time"


def test_who_answers_otherwise_is_asked_again_at_once_and_then_taken_out() -> None:
    driver = checked(1, 2, 3)
    asked, wrong = play(driver, {"node-2"}, EVERY_S)
    assert wrong == ["node-2"]
    assert asked.count("node-2") == TRIES
    story = [step.text for step in driver.dispatch.story("node-2")]
    assert any("not that of other replicas" in text for text in story)


def test_who_answers_wrong_gets_no_requests_until_its_answers_are_right() -> None:
    driver = checked(1, 2, 3)
    play(driver, {"node-2"}, EVERY_S)
    names = [f"r{i}" for i in range(12)]
    begun = sent(driver.admit(*names))
    assert {instance for _, instance, _ in begun} == {"replica-1", "replica-3"}
    for name, _, attempt in begun:
        driver.give(name, attempt, 0, "length")
    asked, _ = play(driver, set(), APART_S + EVERY_S)
    assert "node-2" in asked, "it is checked on"
    later = sent(driver.admit(*(f"s{i}" for i in range(12))))
    assert "replica-2" in {instance for _, instance, _ in later}
    story = [step.text for step in driver.dispatch.story("replica-2")]
    assert any("is well again" in text for text in story)


def test_at_most_one_node_is_taken_out_in_a_while() -> None:
    driver = checked(1, 2, 3, 4)
    _, wrong = play(driver, {"node-3", "node-4"}, APART_S / 2)
    assert len(wrong) == 1
    _, later = play(driver, {"node-3", "node-4"}, 2 * APART_S)
    assert set(wrong + later) == {"node-3", "node-4"}


def test_two_that_differ_are_left_alone() -> None:
    driver = checked(1, 2)
    asked, wrong = play(driver, {"node-2"}, 5 * EVERY_S)
    assert asked
    assert not wrong


def test_only_idle_replicas_are_asked_and_only_while_nobody_waits() -> None:
    driver = checked(1, 2)
    names = [f"r{i}" for i in range(4)]
    driver.admit(*names)  # to both, or the rest of the test says little
    busy = {r.instance for r in driver.dispatch._ledger.requests.values()}
    assert len(busy) == 2
    assert not checks(driver.later(10 * EVERY_S))


def test_paths_and_replicas_that_never_served_are_not_asked() -> None:
    driver = Driver(path(1, 2), replica(3), replica(4), check_s=EVERY_S)
    driver.dispatch.add_model(NAME, MODEL, checked=True)
    assert not checks(driver.later(EVERY_S))


def test_a_check_is_no_load() -> None:
    driver = checked(1, 2)
    assert checks(driver.later(0.0))
    (load,) = driver.dispatch.loads(0)
    assert not load.in_use
    assert load.asked_requests == 0


def test_a_refused_check_is_not_repeated_and_the_next_comes_in_its_turn() -> None:
    driver = checked(1, 2)
    (submit,) = checks(driver.later(0.0))
    error = CapacityExceeded("full")
    commands = driver.dispatch.on_not_taken(submit.request, submit.attempt, error, driver.now)
    driver.dispatch.validate()
    assert not sent(commands)
    assert not driver.dispatch._models[MODEL].queue
    assert checks(driver.later(EVERY_S))


def test_after_a_check_that_broke_an_engine_there_are_no_more() -> None:
    driver = checked(1, 2, 3)
    (submit,) = checks(driver.later(0.0))
    error = EngineFailed("killed")
    driver.dispatch.on_not_taken(submit.request, submit.attempt, error, driver.now)
    driver.dispatch.validate()
    assert not checks(driver.later(10 * EVERY_S))


def test_who_gives_no_numbers_answers_otherwise() -> None:
    driver = checked(1, 2, 3)
    wrong: list[str] = []
    while not wrong and driver.now < 5 * EVERY_S:
        for submit in checks(driver.later(AGAIN_S / 2)):
            if submit.stages[0].node == "node-1":
                error = ModelError("not finite")
                found = driver.dispatch.on_not_taken(
                    submit.request, submit.attempt, error, driver.now
                )
                driver.dispatch.validate()
            else:
                found = answer(driver, submit, RIGHT)
            wrong += [c.node for c in found if isinstance(c, Checked) and c.verdict == "wrong"]
    assert wrong == ["node-1"]


def test_several_gateways_share_the_work() -> None:
    driver = checked(1, 2, 3)
    asked = 0
    for _ in range(int(20 * EVERY_S)):
        hear(driver, said("other", {}))
        for submit in checks(driver.later(0.5)):
            asked += 1
            answer(driver, submit, RIGHT)
    assert 13 <= asked <= 16, "half of what one gateway would"


def test_its_token_reaches_no_client() -> None:
    driver = checked(1, 2)
    (submit,) = checks(driver.later(0.0))
    commands = answer(driver, submit, RIGHT)
    assert {command.request for command in commands if isinstance(command, Emit)} <= {
        submit.request
    }
