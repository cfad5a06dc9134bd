"""The planner's core by itself: what it commands, at which time, and what it ignores."""

from dataclasses import replace

import msgspec
import pytest

from services.planner.core import commands
from services.planner.core.cluster import REMEMBER_S
from services.planner.core.commands import Command, Publish
from services.planner.core.desk import ASK_S
from services.planner.core.fleet import PACE_PER_MEMBER_S, PACE_S
from services.planner.core.machines import BROKEN_S
from services.planner.core.model import ModelMachine
from services.planner.core.orders import AT_ONCE_S, WAVE_S, report_s
from services.planner.core.planner import LOST_S
from services.planner.core.replicas import HURRY_S
from services.planner.core.standing import AVOID_S
from services.planner.core.stimuli import Asked, Failed, Pinged, Replied, Together
from shared.errors import BusTimeout, Conflict, LambdaScaleError, PeerLost
from shared.ids import Generation, NodeId
from shared.messages import Ok
from shared.messages.instances import InstanceSet
from shared.messages.pool import (
    Holding,
    ModelProfile,
    ModelRemoved,
    NodeGone,
    NodeJoined,
    Reserved,
    Source,
    Sources,
    Tier,
)
from shared.messages.scaling import EventState, PeerSuspect, PullFailed, SetInstances
from tests.unit.planner.driver import (
    EPOCH,
    EVERY,
    WALL_NS,
    Driver,
    id_of,
    info,
    model,
    settings,
    thought,
)
from tests.unit.planner.scripted import BLOCK_BYTES, BLOCKS, MODEL, NAME, record

A, B = NodeId("a"), NodeId("b")


def serving(driver: Driver | None = None, *free: str) -> Driver:
    """Node a serves the model; the others are there."""
    driver = driver or Driver()
    driver.join("a", *free)
    driver.publish()
    driver.holds("a")
    for node in free:
        driver.status(node)
    driver.wait(1.0)
    assert driver.replicas() == {"a"}
    return driver


def loading(*targets: str) -> Driver:
    """An event from a to the targets, which hold nothing yet."""
    driver = serving(None, *targets)
    driver.load(queued=20, a=4)
    driver.begin(*targets)
    assert driver.event.state is EventState.TRANSFERRING
    return driver


def of_kind(found: list[Command], kind: type[Command]) -> list[Command]:
    return [command for command in found if isinstance(command, kind)]


def sets_in(found: list[Command]) -> list[InstanceSet]:
    return [
        c.message for c in found if isinstance(c, Publish) and isinstance(c.message, InstanceSet)
    ]


# --- when it decides ---


def test_a_load_report_with_requests_that_wait_is_answered_at_once() -> None:
    driver = serving(None, "b")
    found = driver.load(queued=20, a=4)
    assert of_kind(found, commands.Reserve)
    assert of_kind(found, commands.FindSources)
    assert driver.event.state is EventState.DECIDED


def test_a_hold_runs_out_at_its_time_whatever_comes_meanwhile() -> None:
    driver = serving(Driver(settings(scale_up_hold_s=0.5)), "b")
    driver.load(queued=4, a=4)  # half of what would be answered at once
    assert not driver.all_asked(commands.Reserve)
    driver.wait(0.24)
    assert not driver.all_asked(commands.Reserve)
    driver.wait(0.02)
    assert driver.all_asked(commands.Reserve)
    decided_s = (driver.event.decided_ns - driver.event.detected_ns) / 1e9
    assert decided_s == pytest.approx(0.25, abs=0.002)


def test_an_event_begins_with_the_oldest_request_that_waits() -> None:
    driver = serving(None, "b")
    began = WALL_NS + round((driver.at - 1.5) * 1e9)
    driver.load(queued=20, since_ns=began, a=4)
    assert driver.event.waiting_ns == began
    assert driver.event.detected_ns == driver.event.decided_ns == began + 1_500_000_000


def test_a_wait_before_the_end_of_the_last_event_belongs_to_that_event() -> None:
    driver = serving(None, "b", "c")
    began = WALL_NS + round((driver.at - 1.5) * 1e9)
    driver.load(queued=4, since_ns=began, a=4)
    driver.begin("b")
    driver.wait(0.1)
    driver.holds("b")
    first = driver.event
    assert first.state is EventState.COMPLETE
    driver.wait(0.5)
    driver.load(queued=20, since_ns=began, a=4, b=4)
    assert driver.event.id != first.id
    assert driver.event.waiting_ns == first.history[-1][1] > began


def test_a_burst_is_answered_once() -> None:
    driver = serving(None, "b")
    for _ in range(5):
        driver.load(queued=20, a=4)
        driver.wait(0.05)
    assert len(driver.all_asked(commands.Reserve)) == 1


def test_what_an_event_moves_is_told_to_its_targets_with_the_planners_epoch_and_cause() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.reserve("b", sources=["a"])
    driver.think()
    plan = driver.asked(commands.SendPlan).message
    assert (plan.epoch, plan.event, plan.cause) == (EPOCH, driver.event.id, driver.event.id)
    assert {pull.source for pull in plan.pulls} == {"a"}
    assert len(plan.pulls) == BLOCKS


def test_predictions_count_from_the_decision() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.wait(0.5)
    driver.begin("b")
    first = driver.event.predicted.first_byte_s
    assert first is not None
    assert first == pytest.approx(0.5 + settings().step_overhead_s, abs=1e-6)


# --- answers that come late, twice, from elsewhere, or not at all ---


def test_the_planner_answers_while_it_plans() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.reserve("b", sources=["a"])
    assert driver.all_asked(commands.MakePlan)
    (reply,) = of_kind(driver.feed(Asked(1, SetInstances(name=NAME, instances=2))), commands.Answer)
    assert isinstance(reply, commands.Answer)
    assert isinstance(reply.reply, Conflict)


def test_a_model_that_was_published_before_any_node_is_served_by_the_first_that_has_it() -> None:
    driver = Driver()
    driver.publish(record(min_instances=1))
    driver.join("a")
    driver.holds("a")
    driver.wait(1.0)
    assert driver.replicas() == {"a"}


def test_a_plan_of_an_event_that_was_cancelled_meanwhile_sends_nothing() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.reserve("b", sources=["a"])
    driver.feed(ModelRemoved(name=NAME, model_id=MODEL))
    assert driver.events[-1].state is EventState.CANCELLED
    assert driver.all_asked(commands.Unreserve)
    driver.think()
    assert not driver.all_asked(commands.SendPlan)


def test_an_answer_counts_once() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.reserve("b", sources=["a"])
    question = driver.asked(commands.MakePlan)
    driver.think()
    before = len(driver.said)
    assert not driver.feed(thought(question))
    assert len(driver.said) == before


def test_an_answer_to_another_planner_is_ignored() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    question = driver.asked(commands.Reserve)
    ticket = msgspec.structs.replace(question.ticket, epoch=EPOCH - 1)
    assert not driver.feed(Replied(ticket, Reserved(targets=(info("b"),))))
    driver.begin("b")
    assert driver.event.targets == ("b",)


def test_an_answer_that_never_comes_counts_as_a_failure() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.wait(ASK_S + LOST_S)
    (failed,) = [event for event in driver.events if event.state is EventState.FAILED]
    assert failed.error == "no answer came"


def test_targets_that_answer_late_are_left_out_and_one_revision_follows() -> None:
    driver = serving(None, "b", "c", "d")
    driver.load(queued=40, a=4)
    driver.reserve("b", "c", "d", sources=["a"])
    driver.think()
    late, other, taken = driver.orders()
    driver.answer(late, BusTimeout("no answer"))
    driver.answer(other, LambdaScaleError("whatever"))
    assert not driver.all_asked(commands.Repair), "the last one has not answered"
    driver.answer(taken, Ok())
    driver.think()
    assert driver.event.revision == 1
    assert driver.event.targets == (taken.message.node,)
    assert {release.message.node for release in driver.all_asked(commands.Release)} == {
        late.message.node,
        other.message.node,
    }


def told(driver: Driver) -> set[str]:
    return {plan.message.node for plan in driver.all_asked(commands.SendPlan)}


def several_to_tell() -> tuple[Driver, set[str]]:
    """A driver whose event has told the first targets, and all its targets."""
    driver = serving(None, "b", "c", "d")
    driver.load(queued=40, a=4)
    driver.reserve("b", "c", "d", sources=["a"])
    driver.think()
    assert told(driver)
    assert told(driver) < {"b", "c", "d"}
    return driver, {"b", "c", "d"}


def test_targets_that_receive_at_once_are_told_first() -> None:
    driver, _ = several_to_tell()
    first = told(driver)
    begins = {p.message.node: min(pull.step for pull in p.message.pulls) for p in driver.orders()}
    assert first == {node for node, step in begins.items() if step == min(begins.values())}


def test_the_others_are_told_when_the_first_have_answered() -> None:
    driver, targets = several_to_tell()
    first = driver.all_asked(commands.SendPlan)
    for plan in first:
        driver.answer(plan, Ok())
    assert told(driver) == targets - {plan.message.node for plan in first}


def test_the_others_are_told_soon_though_the_first_do_not_answer() -> None:
    driver, targets = several_to_tell()
    driver.wait(WAVE_S)
    assert told(driver) == targets


def test_the_others_are_told_though_the_first_are_gone() -> None:
    driver, targets = several_to_tell()
    gone = told(driver)
    for node in gone:
        driver.gone(node)
    driver.wait(WAVE_S)
    assert told(driver) >= targets - gone


# --- what nodes hold ---


def test_a_copy_that_is_found_serves() -> None:
    driver = serving()
    driver.status("a", Holding(MODEL, Tier.GPU, EVERY), Holding(id_of("x"), Tier.GPU, EVERY))
    assert driver.replicas() == {"a"}


def test_copies_in_other_tiers_serve_nothing() -> None:
    driver = Driver()
    driver.join("a")
    driver.publish()
    driver.holds("a", tier=Tier.HOST)
    driver.wait(0.1)
    assert driver.replicas() == set()


def test_a_model_that_is_published_later_finds_its_copies() -> None:
    driver = Driver()
    driver.join("a")
    driver.holds("a")
    driver.publish()
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


def test_a_node_that_says_what_it_holds_before_it_is_announced() -> None:
    driver = Driver()
    driver.publish()
    driver.holds("a")
    driver.join("a")
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


def test_no_event_begins_before_a_node_has_said_that_it_has_a_copy() -> None:
    """It would fail for want of a source, as the events of a cluster did that was started again."""
    driver = Driver()
    driver.join("a", "b")
    driver.publish(record(min_instances=1))
    driver.status("a")
    driver.wait(1.5)
    assert not driver.all_asked(commands.Reserve)
    driver.holds("b", tier=Tier.DISK)
    assert driver.all_asked(commands.Reserve)


def test_a_new_generation_that_holds_the_same_is_no_member_before_it_is_announced() -> None:
    """Its keeper has kept the weights. All that a planner missed may reach it in any order."""
    driver = serving()
    driver.status("a", Holding(MODEL, Tier.GPU, EVERY), generation=2)
    driver.wait(0.1)
    assert driver.replicas() == set()
    driver.feed(NodeJoined(info=info("a", generation=2)))
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


def test_a_member_that_lost_its_blocks_is_none() -> None:
    driver = serving()
    driver.status("a")
    driver.wait(0.1)
    assert driver.replicas() == set()


def test_a_report_that_was_made_before_a_block_arrived_does_not_take_it_back() -> None:
    driver = loading("b")
    event = driver.event
    for block in EVERY:
        driver.arrived("b", block, "a", event)
    assert driver.event.state is EventState.COMPLETE
    driver.holds("b", EVERY[:-1])
    driver.wait(0.1)
    assert driver.replicas() == {"a", "b"}
    driver.wait(1.0)
    driver.holds("b", EVERY[:-1])
    driver.wait(0.1)
    assert driver.replicas() == {"a"}, "by now it would say that it has it"


def test_a_node_that_is_gone_is_forgotten_in_the_end() -> None:
    driver = serving(None, "b")
    driver.feed(NodeGone(node=B, generation=Generation(1), reason=""))
    driver.holds("b")  # on its way since before
    driver.status("stranger")
    driver.wait(0.1)
    assert driver.replicas() == {"a"}
    cluster = driver.core._cluster
    assert set(cluster.over) == {"b"}
    assert set(cluster._said) == {"a", "stranger"}
    cluster.forget(driver.at + REMEMBER_S + 1, [])
    assert not cluster.over
    assert set(cluster._said) == {"a"}
    assert not cluster._holders.keys() - {MODEL}


# --- publications ---


def test_the_first_change_is_published_at_once_and_many_together() -> None:
    driver = loading("b", "c", "d")
    driver.think()
    driver.wait(1.0)
    event, before = driver.event, len(driver.sets)
    sent = driver.arrived("b", 0, "a", event)
    assert len(sets_in(sent)) <= 1
    for node in ("b", "c", "d"):
        for block in EVERY:
            driver.wait(PACE_S / 100)
            driver.arrived(node, block, "a", event)
            driver.think()
    driver.wait(2 * PACE_S)
    assert 1 <= len(driver.sets) - before <= 3
    assert driver.replicas() == {"a", "b", "c", "d"}
    revisions = [each.revision for each in driver.sets]
    assert revisions == sorted(revisions)


def test_a_new_replica_is_told_at_once_after_a_quiet_time() -> None:
    driver = loading("b")
    event = driver.event
    for block in EVERY[:-1]:
        driver.arrived("b", block, "a", event)
    driver.think()
    driver.wait(0.5)
    assert sets_in(driver.arrived("b", EVERY[-1], "a", event))


def test_a_new_replica_is_told_at_once_though_its_blocks_come_fast() -> None:
    driver = loading("b")
    event = driver.event
    driver.wait(1.0)
    for block in EVERY[:-1]:
        driver.arrived("b", block, "a", event)
        driver.wait(PACE_S / 8)
    assert sets_in(driver.arrived("b", EVERY[-1], "a", event))


def test_a_model_that_wakes_on_one_node_is_planned_no_paths_and_told_when_it_is_whole() -> None:
    driver = Driver()
    driver.join("b")
    driver.publish()
    driver.holds("b", tier=Tier.HOST)
    driver.wait(1.0)
    driver.load(queued=1)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("b"),)))
    source = Source(info("b"), Tier.HOST, EVERY, True)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=(source,)))
    driver.think()
    (order,) = driver.orders()
    assert order.message.report_s == AT_ONCE_S
    driver.answer(order, Ok())
    assert [i.opening for i in driver.core.sets()[0].instances] == [True]
    driver.arrived("b", EVERY[0], "b", driver.event)
    driver.wait(PACE_S / 8)
    driver.arrived_together("b", dict.fromkeys(EVERY[1:], 0.0), driver.event)
    driver.wait(PACE_S)
    assert [i.opening for i in driver.core.sets()[0].instances] == [False]
    assert not of_kind(driver.said, commands.PlanPaths)


def test_paths_are_planned_with_all_that_came_together() -> None:
    driver = loading("b", "c")
    event = driver.event
    while driver.all_asked(commands.PlanPaths):
        driver.think()
        driver.wait(0.1)
    reports = [driver.report(node, {EVERY[0]: 0.0}, event) for node in ("b", "c")]
    driver.feed(Together(event.id, reports))
    question = driver.asked(commands.PlanPaths)
    held = {node: member.held for node, member in question.members.items()}
    assert held == {"a": {*EVERY}, "b": {EVERY[0]}, "c": {EVERY[0]}}


def test_a_report_of_several_blocks_is_taken_in_at_once() -> None:
    driver = loading("b", "c")
    event = driver.event
    driver.wait(1.0)
    driver.arrived("b", EVERY[0], "a", event)
    driver.wait(1.0)
    driver.arrived_together("b", dict.fromkeys(EVERY[:-1], 0.4), event)
    assert driver.replicas() == {"a"}
    driver.arrived_together("b", {EVERY[-1]: 0.0}, event)
    assert driver.event.bytes_moved == len(EVERY) * BLOCK_BYTES
    past = driver.core.event(event.id, 0)
    assert [each.block for each in past.arrivals] == [EVERY[0], *EVERY]
    machine = driver.core._machines.by_id[MODEL].event
    assert machine is not None
    landed = machine._trust._pace._landed
    since_s = {block: driver.at - landed[NodeId("b")][block] for block in EVERY}
    assert since_s == pytest.approx(dict.fromkeys(EVERY, 0.4) | {EVERY[0]: 1.0, EVERY[-1]: 0})
    driver.think()
    driver.wait(2 * PACE_S)
    assert driver.replicas() == {"a", "b"}


def test_few_targets_report_each_block_and_many_report_several() -> None:
    assert report_s(8) == 0
    assert report_s(1000) == 1000 * PACE_PER_MEMBER_S


def test_blocks_that_come_over_no_link_are_reported_together() -> None:
    assert report_s(1, links=False) == AT_ONCE_S
    assert report_s(1000, links=False) == report_s(1000)


# --- suspects ---


def test_a_suspect_that_does_not_answer_is_not_used_for_a_while_whatever_it_reports() -> None:
    driver = serving(None, "b")
    driver.feed(PeerSuspect(reporter=B, node=A, reason="reset"))
    driver.ping(there=False)
    driver.wait(0.1)
    assert driver.replicas() == set()
    for _ in range(8):
        driver.wait(1.0)
        driver.holds("a")
        assert driver.replicas() == set()
    driver.wait(AVOID_S - 8.0)
    driver.holds("a")
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


def test_a_node_that_says_that_it_is_unfit_is_used_no_longer() -> None:
    driver = serving(None, "b")
    driver.status("a", Holding(MODEL, Tier.GPU, tuple(EVERY)), unfit="its engine hangs")
    driver.wait(0.1)
    assert driver.replicas() == set()


def test_the_whole_copy_of_a_suspect_is_no_stray() -> None:
    driver = serving(Driver(replace(settings(), stray_s=2.0)), "b")
    driver.feed(PeerSuspect(reporter=B, node=A, reason="reset"))
    driver.ping(there=False)
    for _ in range(int(AVOID_S) + 2):
        driver.wait(1.0)
        driver.holds("a")
        assert not driver.all_asked(commands.Release)
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


def test_a_target_that_fails_a_ping_while_its_event_judges_others_may_say_what_it_holds() -> None:
    driver = loading("b", "c")
    failed = PullFailed(
        event=driver.event.id,
        revision=driver.event.revision,
        node=NodeId("c"),
        generation=Generation(1),
        block=0,
        source=A,
        code=PeerLost.code,
        message="reset",
    )
    driver.feed(failed)
    (judging,) = driver.all_asked(commands.Ping)
    driver.feed(PeerSuspect(reporter=A, node=B, reason="reset"))
    suspect = next(ping for ping in driver.all_asked(commands.Ping) if ping.node == B)
    driver.reply(suspect, Pinged(suspect.ticket, False))
    for block in EVERY:
        driver.arrived("b", block, "a", driver.event)
    driver.reply(judging, Pinged(judging.ticket, True))
    driver.think()
    for plan in driver.orders():
        driver.answer(plan, Ok())
    assert driver.event.targets == (NodeId("c"),)
    assert driver.replicas() == {"a"}


def test_a_suspect_that_answers_stays() -> None:
    driver = serving(None, "b")
    for _ in range(3):
        driver.feed(PeerSuspect(reporter=B, node=A, reason="reset"))
    assert len(driver.all_asked(commands.Ping)) == 1
    driver.ping(there=True)
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


# --- sources ---


def test_a_copy_in_host_memory_is_not_freed_while_an_event_reads_from_it() -> None:
    driver = serving(None, "b", "c")
    driver.holds("c", tier=Tier.HOST)
    driver.load(queued=20, a=4)
    driver.begin("b", sources=["c"])
    for _ in range(30):
        driver.wait(1.0)
        driver.holds("c", tier=Tier.HOST)
        driver.holds("a")
        driver.ping(there=True)
        driver.think()
        if driver.event.state is EventState.FAILED:
            break
        assert "c" not in {r.message.node for r in driver.all_asked(commands.Release)}


# --- what cannot be ---


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Models one and two, on a and b; the machine of the first raises when its load changes."""
    driver = Driver(checked=False)
    driver.join("a", "b", "c")
    for name in ("one", "two"):
        driver.publish(model(name))
    driver.status("a", Holding(id_of("one"), Tier.GPU, EVERY))
    driver.status("b", Holding(id_of("two"), Tier.GPU, EVERY))
    driver.wait(0.1)
    on_load = ModelMachine.on_load

    def failing(machine: ModelMachine) -> float:
        if machine.record.name == "one":
            raise ZeroDivisionError("of one")
        return on_load(machine)

    monkeypatch.setattr(ModelMachine, "on_load", failing)
    return driver


def test_a_machine_that_raises_holds_no_other_up(two: Driver) -> None:
    found = two.load(queued=20, name="one")
    (complaint,) = of_kind(found, commands.Log)
    assert isinstance(complaint, commands.Log)
    assert isinstance(complaint.error, ZeroDivisionError)
    assert of_kind(two.load(queued=20, name="two", gateway="other"), commands.Reserve)
    assert {s.name for s in two.core.sets()} == {"one", "two"}
    assert two.replicas("one") == {"a"}, "gateways go on with what they know"


def test_a_machine_that_raised_is_made_anew(two: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    two.load(queued=20, name="one")
    monkeypatch.undo()
    two.wait(BROKEN_S + 0.1)
    revisions = [s.revision for s in two.sets if s.name == "one"]
    assert revisions[-1] > revisions[0]
    assert two.replicas("one") == {"a"}
    assert two.event.name == "one", "what waits is answered"


def test_the_event_of_a_machine_that_raises_has_failed(
    two: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    two.load(queued=20, name="one")
    two.wait(HURRY_S)
    monkeypatch.setattr(ModelMachine, "settle", lambda self: 1 / 0)
    two.load(queued=21, name="one")
    assert two.events[-1].state is EventState.FAILED
    assert "ZeroDivisionError" in two.events[-1].error
    assert two.all_asked(commands.Unreserve)


# --- for people ---


def test_the_story_of_an_event_says_what_led_to_what() -> None:
    driver = loading("b")
    for block in EVERY:
        driver.arrived("b", block, "a", driver.event)
    told = driver.core.story(driver.event.id)
    texts = [step.text for step in told]
    assert texts[0].startswith("begins")
    assert "reserving -> planning" in texts
    assert texts[-1] == "complete"
    assert told[0].cause == "gateway_load"
    assert told[-1].cause == driver.event.id
    assert "member with 0 of 4 blocks" in [step.text for step in driver.core.story("b")]
    assert driver.core.story(MODEL)
    assert not driver.core.story("nobody")


def test_a_pool_that_answers_an_error_is_asked_again() -> None:
    driver = serving()
    driver.wait(5.1)
    question = driver.asked(commands.ReadPool)
    driver.reply(question, Failed(question.ticket, LambdaScaleError("of no known kind")))
    driver.wait(5.1)
    assert driver.all_asked(commands.ReadPool)
    assert driver.replicas() == {"a"}


def test_a_plan_that_fails_with_any_error_fails_its_event_only() -> None:
    driver = serving(None, "b")
    driver.load(queued=20, a=4)
    driver.reserve("b", sources=["a"])
    question = driver.asked(commands.MakePlan)
    driver.reply(
        question, Failed(question.ticket, LambdaScaleError("the planner failed: KeyError"))
    )
    assert driver.event.state is EventState.FAILED
    assert driver.replicas() == {"a"}
    driver.wait(1.1)
    driver.load(queued=21, a=4)
    assert driver.all_asked(commands.Reserve), "it is tried again"


@pytest.mark.parametrize("taken", [False, True], ids=["before it answers", "while it loads"])
def test_a_target_that_went_may_be_chosen_again_once_it_is_back(taken: bool) -> None:
    driver = Driver()
    driver.join("a", "b")
    driver.publish()
    driver.holds("a")
    driver.status("b")
    driver.wait(1.0)
    driver.load(queued=4, a=4)
    driver.reserve("b", sources=["a"])
    driver.think()
    if taken:
        driver.answer(driver.asked(commands.SendPlan), Ok())
    driver.gone("b")
    driver.ping(there=True)
    assert driver.event.state is EventState.FAILED
    driver.feed(NodeJoined(info=info("b", generation=2)))
    driver.status("b", generation=2)
    driver.load(queued=4, a=4)
    assert set(driver.asked(commands.Reserve).message.exclude) == {"a"}


# --- what replicas are granted ---


def test_replicas_get_no_more_sequences_than_keep_the_objective_for_tokens() -> None:
    """A step takes 20 ms, and 10 ms more for each further sequence."""
    driver = Driver()
    driver.join("a")
    driver.publish(msgspec.structs.replace(record(min_instances=1), tpot_s=0.041))
    driver.holds("a")
    driver.wait(1.0)
    assert [i.slots for i in driver.sets[-1].instances] == [4], "nothing is measured yet"
    for further_s, slots in ((0.01, 3), (0.02, 2), (0.001, 4)):
        ran = ModelProfile(model_id=MODEL, decode_s=0.02, prefill_s_per_token=further_s)
        driver.status("a", Holding(MODEL, Tier.GPU, EVERY), ran=(ran,))
        driver.load(0, a=1)
        driver.wait(1.0)
        assert [i.slots for i in driver.sets[-1].instances] == [slots]
