"""A running event takes in more targets, and what flows goes on."""

import pytest

from services.planner.core import commands
from services.planner.core.commands import Span
from services.planner.core.growing import GROW_AGAIN_S
from services.planner.core.replicas import HURRY_S
from services.planner.core.stimuli import Asked
from shared.errors import CapacityExceeded, Conflict, LambdaScaleError, PeerLost, PlanError
from shared.ids import Generation, NodeId
from shared.messages import Ok
from shared.messages.pool import Holding, Reserved, Tier
from shared.messages.scaling import EventState, PullFailed, ScaleAccepted, SetInstances
from tests.unit.planner.driver import EVERY, Driver, info, settings, thought
from tests.unit.planner.scripted import MODEL, NAME


def loading(strategy: str = "auto", queued: int = 4) -> Driver:
    """An event from a to b, which holds two blocks; c and d are free."""
    driver = Driver(settings(strategy=strategy))
    driver.join("a", "b", "c", "d")
    driver.publish()
    driver.holds("a")
    for node in ("b", "c", "d"):
        driver.status(node)
    driver.wait(1.0)
    driver.load(queued=queued, a=4)
    driver.begin("b")
    if strategy == "broadcast":
        driver.wait(0.5)
        driver.answer(driver.asked(commands.SendPlan), Ok())
    for block in (0, 1):
        driver.arrived("b", block, "a", driver.event)
    assert driver.event.targets == ("b",)
    return driver


def grow(driver: Driver, *newcomers: str) -> list[commands.SendPlan]:
    """More load comes, the registry names the newcomers, and their part is planned."""
    driver.load(queued=12, a=4)
    reserve = driver.asked(commands.Reserve)
    driver.answer(reserve, Reserved(targets=tuple(info(node) for node in newcomers)))
    driver.think()
    return driver.orders()


def fail(driver: Driver, node: str, source: str, block: int) -> None:
    message = PullFailed(
        event=driver.event.id,
        revision=driver.event.revision,
        node=NodeId(node),
        generation=Generation(1),
        block=block,
        source=NodeId(source),
        code=PeerLost.code,
        message="reset",
    )
    driver.feed(message)


def test_newcomers_are_appended_and_only_they_are_given_parts() -> None:
    driver = loading()
    before = driver.event
    plans = grow(driver, "c", "d")
    event = driver.event
    assert event.id == before.id
    assert event.targets == ("b", "c", "d")
    assert event.revision == before.revision + 1
    assert {plan.message.node for plan in plans} == {"c", "d"}
    assert {plan.message.revision for plan in plans} == {event.revision}
    assert set(before.transfers) <= set(event.transfers)
    steps = [transfer.step for transfer in event.transfers]
    assert steps == sorted(steps)
    (growth,) = event.growths
    assert growth.nodes == ("c", "d")
    assert growth.cause.startswith("12 requests queued and 4 running")
    for plan in plans:
        driver.answer(plan, Ok())
    for node in ("b", "c", "d"):
        driver.holds(node)
    assert driver.event.state is EventState.COMPLETE
    driver.wait(0.1)
    assert driver.replicas() == {"a", "b", "c", "d"}


def test_a_chain_grows_at_its_tail() -> None:
    driver = loading()
    grow(driver, "c", "d")
    feeds = {(t.src, t.dst) for t in driver.event.transfers}
    assert feeds == {("a", "b"), ("b", "c"), ("c", "d")}


def test_what_an_event_or_its_growth_has_asked_for_is_not_asked_for_again() -> None:
    driver = loading()
    for _ in range(5):
        driver.load(queued=12, a=4)
        driver.wait(0.05)
    (asked,) = driver.all_asked(commands.Reserve)
    assert asked.message.event == driver.event.id
    assert asked.message.count == 2
    assert set(asked.message.exclude) >= {"a", "b"}
    driver.answer(asked, Reserved(targets=(info("c"), info("d"))))
    for _ in range(5):
        driver.load(queued=12, a=4)
        driver.wait(0.05)
    assert not driver.all_asked(commands.Reserve)


def test_an_event_grows_again() -> None:
    driver = loading()
    driver.load(queued=8, a=4)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("c"),)))
    driver.think()
    driver.answer(driver.asked(commands.SendPlan), Ok())
    driver.wait(HURRY_S)
    (plan,) = grow(driver, "d")
    assert plan.message.node == "d"
    assert [growth.nodes for growth in driver.event.growths] == [("c",), ("d",)]
    assert driver.event.revision == 2


@pytest.mark.parametrize("nobody", [True, False])
def test_an_event_that_cannot_grow_goes_on_and_says_so(nobody: bool) -> None:
    driver = loading()
    driver.load(queued=12, a=4)
    reserve = driver.asked(commands.Reserve)
    driver.answer(reserve, Reserved(targets=()) if nobody else CapacityExceeded("full"))
    assert driver.event.state is EventState.TRANSFERRING
    why = "no node has room for another replica" if nobody else "full"
    assert f"does not grow: {why}" in [told.text for told in driver.core.story(driver.event.id)]
    driver.wait(GROW_AGAIN_S / 2)
    assert not driver.all_asked(commands.Reserve)
    driver.load(queued=12, a=4)
    driver.wait(GROW_AGAIN_S)
    assert driver.asked(commands.Reserve).message.event == driver.event.id


def test_newcomers_that_nobody_can_feed_are_given_back() -> None:
    driver = loading()
    driver.load(queued=12, a=4)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("c"),)))
    driver.answer(driver.asked(commands.Append), PlanError("nobody holds block 3"))
    assert driver.asked(commands.Unreserve).message.nodes == ("c",)
    assert driver.event.state is EventState.TRANSFERRING


def test_growth_waits_until_trouble_is_mended_and_is_then_planned_anew() -> None:
    driver = loading()
    driver.load(queued=12, a=4)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("c"), info("d"))))
    stale = driver.asked(commands.Append)
    fail(driver, "b", "a", block=2)
    driver.ping(there=True)
    (_, amends) = driver.all_asked(commands.Append)
    driver.reply(stale, thought(stale))
    assert set(driver.event.targets) == {"b"}
    driver.reply(amends, thought(amends))
    repair = driver.asked(commands.Repair)  # nobody else has what a was to send
    driver.reply(repair, thought(repair))
    driver.answer(driver.asked(commands.SendPlan), Ok())
    driver.think()
    assert set(driver.event.targets) == {"b", "c", "d"}
    assert driver.event.revision == 2


def test_a_failed_pull_moves_only_what_was_to_come_over_its_connection() -> None:
    driver = loading()
    for plan in grow(driver, "c", "d"):
        driver.answer(plan, Ok())
    before = driver.event
    fail(driver, "c", "b", block=0)
    driver.ping(there=True)
    driver.think()
    after = driver.event
    (plan,) = driver.all_asked(commands.SendPlan)
    assert plan.message.node == "c"
    assert {pull.source for pull in plan.message.pulls} == {"a"}
    assert {pull.block for pull in plan.message.pulls} == set(EVERY)
    kept = {t for t in before.transfers if t.dst != "c" and t.block not in (0, 1)}
    assert kept < set(after.transfers)
    assert {t for t in after.transfers if t.dst == "d"} == {
        t for t in before.transfers if t.dst == "d"
    }
    (repair,) = after.repairs
    assert repair.nodes == ("c",)
    driver.answer(plan, Ok())
    for node in ("b", "c", "d"):
        driver.holds(node)
    assert driver.event.state is EventState.COMPLETE


def test_pulls_of_one_node_that_fail_together_are_answered_together() -> None:
    driver = loading()
    for plan in grow(driver, "c", "d"):
        driver.answer(plan, Ok())
    fail(driver, "c", "b", block=0)
    fail(driver, "c", "b", block=1)
    fail(driver, "d", "c", block=0)
    driver.ping(there=True)
    driver.think()
    driver.answer(driver.asked(commands.SendPlan), Ok())
    driver.ping(there=True)
    driver.think()
    assert driver.asked(commands.SendPlan).message.node == "d"
    assert driver.event.revision == 3


def test_a_failed_pull_that_was_answered_by_its_block_changes_nothing() -> None:
    driver = loading()
    for plan in grow(driver, "c", "d"):
        driver.answer(plan, Ok())
    fail(driver, "c", "b", block=0)
    driver.holds("c")
    revision = driver.event.revision
    driver.ping(there=True)
    assert not driver.all_asked(commands.Append)
    assert driver.event.revision == revision


def test_an_event_that_ends_first_grows_no_more_and_the_model_decides_anew() -> None:
    driver = loading()
    driver.load(queued=12, a=4)
    first = driver.event.id
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("c"), info("d"))))
    driver.holds("b")
    ended = next(record for record in driver.core.events(2) if record.id == first)
    assert ended.state is EventState.COMPLETE
    assert ended.targets == ("b",)
    assert driver.asked(commands.Unreserve).message.nodes == ()
    assert driver.asked(commands.Reserve).message.event != first


def test_a_newcomer_that_is_gone_before_it_joined_is_left_out() -> None:
    driver = loading()
    driver.load(queued=12, a=4)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("c"), info("d"))))
    driver.gone("d")
    driver.think()
    driver.think()
    assert driver.event.targets == ("b", "c")


def test_a_newcomer_with_a_copy_in_host_memory_brings_it_up_itself() -> None:
    driver = loading()
    driver.status("c", Holding(MODEL, Tier.HOST, EVERY))
    (plan,) = grow(driver, "c")
    assert plan.message.promote == EVERY
    assert not plan.message.pulls


def test_a_newcomer_loads_from_its_disk_only_if_that_is_known_to_beat_its_link() -> None:
    for rate, own in ((0.0, False), (0.5, False), (2.0, True)):
        driver = loading()
        link = settings().link_bytes_per_s
        disk = Holding(MODEL, Tier.DISK, EVERY)
        driver.status("c", disk, load_bytes_per_s=rate * link)
        (plan,) = grow(driver, "c")
        assert plan.message.promote == (EVERY if own else ())
        assert bool(plan.message.pulls) != own


def test_where_a_group_forms_first_the_event_does_not_grow() -> None:
    driver = loading("broadcast")
    driver.load(queued=12, a=4)
    driver.wait(0.5)
    assert not driver.all_asked(commands.Reserve)


def test_what_was_predicted_and_what_is_possible_are_for_all_targets() -> None:
    driver = loading()
    before = driver.event
    driver.wait(0.5)
    grow(driver, "c", "d")
    after = driver.event
    assert before.predicted.all_complete_s
    assert after.predicted.all_complete_s
    assert before.physical_limit_s
    assert after.physical_limit_s
    assert after.predicted.all_complete_s > before.predicted.all_complete_s
    assert after.predicted.all_complete_s >= after.physical_limit_s > 0.5
    assert after.predicted.first_complete_s == before.predicted.first_complete_s


def test_the_growth_is_a_span_of_the_events_trace() -> None:
    driver = loading()
    grow(driver, "c", "d")
    (span,) = (c for c in driver.said if isinstance(c, Span) and c.name == "grow")
    assert span.attributes["targets"] == "c,d"


def scale(driver: Driver, count: int) -> ScaleAccepted | LambdaScaleError:
    found = driver.feed(Asked(1, SetInstances(name=NAME, instances=count)))
    (answer,) = (command for command in found if isinstance(command, commands.Answer))
    assert isinstance(answer.reply, ScaleAccepted | LambdaScaleError)
    return answer.reply


def test_an_operator_may_ask_for_more_while_an_event_runs_and_for_less_when_it_is_over() -> None:
    driver = loading()
    reply = scale(driver, 4)
    assert isinstance(reply, ScaleAccepted)
    assert reply.event == driver.event.id
    assert driver.asked(commands.Reserve).message.count == 2
    assert isinstance(scale(driver, 1), Conflict)
