"""Nothing that arrives, and nothing that the planner calls, ends it or holds other models up."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner import shell
from services.planner.core import commands
from services.planner.core.arbiter import Claim
from services.planner.core.model import ModelMachine
from services.planner.core.stimuli import Asked, Failed
from shared import subjects, telemetry
from shared.bus.memory import MemoryBus
from shared.config import TelemetryConfig
from shared.errors import LambdaScaleError, NotFound, PlanError, Superseded
from shared.ids import Generation, NodeId
from shared.messages import Message
from shared.messages.decisions import DecisionsQuery
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    Holding,
    ModelAdded,
    ModelRemoved,
    NodeGone,
    NodeJoined,
    NodeStatus,
    Tier,
)
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    EventState,
    FirstPartialToken,
    PeerSuspect,
    PlannerQuery,
    PullFailed,
    SetInstances,
)
from shared.messages.story import StoryQuery, Told
from simulation.checked import CheckedPlanner
from tests.support.amounts import examples
from tests.support.malformed import ERRORS, Likely, well_framed, with_every_error
from tests.unit.planner.cluster import Cluster
from tests.unit.planner.driver import EVERY, Driver, id_of, model
from tests.unit.planner.scripted import MODEL, NAME, record

M = TypeVar("M", bound=Message)
HEARD: tuple[type[Message], ...] = (
    NodeStatus,
    NodeJoined,
    NodeGone,
    ModelAdded,
    ModelRemoved,
    GatewayLoad,
    BlockArrived,
    BlocksArrived,
    PullFailed,
    FirstPartialToken,
    PeerSuspect,
)
LIKELY: Likely = {
    "node": ["a", "b"],
    "generation": [1],
    "model_id": [MODEL],
    "model": [NAME],
    "name": [NAME],
    "event": ["ev-0"],
    "gateway": ["gateway-0"],
    "source": ["a"],
    "revision": [0],
    "block": [0, 1],
    "seq": [1000],
    "slots": [4],
    "n_blocks": [4],
}
NONSENSE = {
    kind: st.lists(well_framed(kind, nan=True, **LIKELY), min_size=1, max_size=3) for kind in HEARD
}
OTHER = "sound"


def loading() -> Driver:
    """An event of the model that absurd things are said of, and another model that serves."""
    driver = Driver(checked=False)
    driver.join("a", "b", "x", "y")
    driver.publish()
    driver.publish(model(OTHER))
    driver.holds("a")
    driver.status("x", Holding(id_of(OTHER), Tier.GPU, EVERY))
    driver.wait(1.0)
    driver.load(queued=20, a=4)
    driver.begin("b")
    return driver


def still_scales(driver: Driver) -> None:
    """The other model serves, and gets a replica more when it has too little."""
    driver.wait(3.0)
    driver.status("x", Holding(id_of(OTHER), Tier.GPU, EVERY), free=400)
    driver.wait(0.1)
    assert driver.replicas(OTHER) == {"x"}
    slots = driver.core._cluster.slots  # absurd nodes may say that all have many
    driver.load(queued=2 * slots + 50, name=OTHER, gateway="gateway-1")
    driver.wait(2.0)
    events = {c.message.model_id for c in driver.said if isinstance(c, commands.Reserve)}
    assert id_of(OTHER) in events


@given(data=st.data())
@settings(max_examples=examples(8))
@pytest.mark.parametrize("kind", HEARD, ids=lambda kind: kind.__name__)
def test_what_makes_no_sense_holds_no_other_model_up(
    kind: type[Message], data: st.DataObject
) -> None:
    driver = loading()
    for message in data.draw(NONSENSE[kind]):
        driver.feed(message)  # type: ignore[arg-type]
        driver.wait(0.2)
    still_scales(driver)


@given(
    state=well_framed(PlannerQuery, nan=True, **LIKELY),
    decisions=well_framed(DecisionsQuery, nan=True, **LIKELY),
    story=well_framed(StoryQuery, subject=["a", MODEL, "ev-0"]),
)
def test_whoever_asks_a_query_of_nonsense_is_answered(
    state: PlannerQuery, decisions: DecisionsQuery, story: StoryQuery
) -> None:
    core = loading().core
    assert len(core.events(state.events)) <= max(0, state.events)
    assert Told.of(core.story(story.subject), 100.0, 1).steps is not None
    with suppress(NotFound):
        core.decisions(decisions.name, decisions.limit)
    core.validate()


@given(message=well_framed(SetInstances, nan=True, **LIKELY))
def test_an_operator_who_asks_for_nonsense_is_answered(message: SetInstances) -> None:
    driver = loading()
    (answer,) = (c for c in driver.feed(Asked(1, message)) if isinstance(c, commands.Answer))
    assert isinstance(answer.reply, Message | LambdaScaleError)
    still_scales(driver)


@pytest.mark.parametrize(
    "method", ["on_load", "on_answer", "on_blocks", "on_gone", "settle", "claim"]
)
@pytest.mark.parametrize(
    "error", [ZeroDivisionError("injected"), AssertionError("injected"), PlanError("injected")]
)
def test_a_core_that_raises_for_one_model_serves_the_others(
    error: Exception, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = loading()
    real: Callable[..., Any] = getattr(ModelMachine, method)

    def raising(machine: ModelMachine, *args: Any) -> Any:
        if machine.record.name == NAME:
            raise error
        return real(machine, *args)

    monkeypatch.setattr(ModelMachine, method, raising)
    event = driver.event
    driver.load(queued=30, a=4)
    driver.arrived("b", 0, "a", event)
    driver.feed(NodeGone(node=NodeId("b"), generation=Generation(1), reason=""))
    still_scales(driver)


def test_a_model_whose_claim_fails_keeps_no_other_from_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(checked=False)
    driver.join("a")
    on_disk = [Holding(id_of(name), Tier.DISK, EVERY) for name in ("one", "two", "three")]
    for name in ("one", "two", "three"):
        driver.publish(model(name))
    asleep = [Holding(id_of(name), Tier.HOST, EVERY) for name in ("one", "two")]
    driver.status("a", *asleep, *on_disk, free=200)
    real = ModelMachine.claim

    def claim(machine: ModelMachine) -> Claim:
        if machine.record.name == "one":
            raise ZeroDivisionError("injected")
        return real(machine)

    monkeypatch.setattr(ModelMachine, "claim", claim)
    driver.load(1, name="three")
    assert [r.message.model_id for r in driver.all_asked(commands.Release)] == [id_of("two")]
    complaints = [c for c in driver.said if isinstance(c, commands.Log) and c.error is not None]
    assert {c.fields["model"] for c in complaints} == {"one"}


@with_every_error
def test_whatever_a_question_fails_with_the_event_ends_and_says_so(error: BaseException) -> None:
    driver = Driver()
    driver.join("a", "b")
    driver.publish()
    driver.holds("a")
    driver.status("b")
    driver.load(queued=20, a=4)
    typed = error if isinstance(error, LambdaScaleError) else LambdaScaleError(repr(error))
    question = driver.asked(commands.Reserve)
    driver.reply(question, Failed(question.ticket, typed))
    assert driver.event.state is EventState.FAILED
    assert driver.event.error == str(typed)
    driver.wait(0.1)
    assert driver.replicas() == {"a"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks of hundreds of errors take longer to print than all the rest."""
    telemetry.configure("planner", TelemetryConfig(log_level="off"))
    yield
    telemetry.shutdown()
    structlog.reset_defaults()


class RaisingBus(MemoryBus):
    """Requests on subjects that begin so raise `error` while there is one."""

    error: BaseException | None = None
    begin = ""
    raised = 0

    async def publish(self, subject: str, message: Message) -> None:
        if self.error is not None and subject == self.begin:
            self.raised += 1
            raise self.error.with_traceback(None)
        await super().publish(subject, message)

    async def request(self, subject: str, message: Message, reply: type[M], *, timeout: float) -> M:
        if self.error is not None and subject.startswith(self.begin):
            raise self.error.with_traceback(None)
        return await super().request(subject, message, reply, timeout=timeout)


@pytest.mark.virtual_time
@pytest.mark.parametrize("begin", [subjects.REGISTRY_RESERVE, subjects.REGISTRY_POOL, "ls.node."])
@with_every_error
async def test_the_service_outlives_whatever_the_bus_raises(
    cluster: Cluster, error: BaseException, begin: str
) -> None:
    bus = RaisingBus(cluster.world.broker, "planner")
    await cluster.add_nodes(2)
    await cluster.start_planner(bus)
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    bus.error, bus.begin = error, begin
    await cluster.scale(2)
    before = await cluster.until_more_sets(8)
    assert len(cluster.sets) > before
    bus.error = None
    await cluster.until_replicas("n0", "n1")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "error", [e for e in ERRORS if not isinstance(e, Superseded)], ids=lambda e: type(e).__name__
)
async def test_what_cannot_be_published_is_dropped_and_the_next_goes_out(
    cluster: Cluster, error: BaseException
) -> None:
    bus = RaisingBus(cluster.world.broker, "planner")
    await cluster.add_nodes(2)
    await cluster.start_planner(bus)
    await cluster.publish_model(record(min_instances=1))
    await cluster.until_replicas("n0")
    bus.error, bus.begin = error, subjects.INSTANCES
    await cluster.scale(2)
    await asyncio.sleep(2.0)
    assert bus.raised > 0
    bus.error = None
    await cluster.until_replicas("n0", "n1")


@pytest.mark.virtual_time
async def test_a_planner_that_has_lost_its_role_ends_when_it_would_publish(
    cluster: Cluster,
) -> None:
    await cluster.add_nodes(1)
    bus = RaisingBus(cluster.world.broker, "planner")
    bus.error, bus.begin = Superseded("injected"), subjects.INSTANCES

    async def live() -> None:
        async with bus, CheckedPlanner(bus, cluster.config):
            await cluster.publish_model(record(min_instances=1))
            await asyncio.sleep(5.0)

    with pytest.raises(Superseded, match="injected"):
        await live()


@pytest.mark.virtual_time
@with_every_error
async def test_a_plan_that_raises_fails_its_event_and_the_next_one_is_made(
    cluster: Cluster, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.serve(nodes=2)

    def raising(*args: Any, **kwargs: Any) -> None:
        raise error.with_traceback(None)

    with monkeypatch.context() as patched:
        for name in ("plan_parts", "repair_parts"):
            patched.setattr(shell, name, raising)
        await cluster.scale(2)
        failed = await cluster.until_event(EventState.FAILED)
    assert "injected" in failed.error or "No space" in failed.error or "peer" in failed.error
    await cluster.until_replicas("n0", "n1")
