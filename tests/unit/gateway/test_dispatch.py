"""Single steps of the dispatch core that the property test does not pin down."""

from itertools import pairwise

import pytest

from services.gateway.core.commands import (
    Command,
    Emit,
    End,
    Resumed,
    Scored,
    Send,
    Switched,
    Withdraw,
)
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.model import SILENCE_S
from services.gateway.core.requests import Request, State
from services.gateway.core.routing import AVOID_S, PROMPTS_AHEAD, Switch
from services.gateway.core.streams import Verdict, judge
from shared.errors import (
    BadInput,
    BusTimeout,
    CapacityExceeded,
    IllegalTransition,
    NotFound,
    NotReady,
    StaleEpoch,
)
from shared.ids import GatewayId, ModelId, ModelName, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.serving import AttemptFailed, Logprobs, Sampling, Scores, Token, Tokens
from shared.slots import OVERFULL
from tests.unit.gateway.support import path, replica

NAME, MODEL = ModelName("m"), ModelId("m-id")
STALL_S = 20.0
QUEUE_S = 60.0


class Driver:
    """A dispatch core with one model and its own time."""

    def __init__(self, *instances: Instance) -> None:
        rules = Rules(GatewayId("g"), lambda: 0.0, 50, QUEUE_S, STALL_S, 3)
        self.dispatch = Dispatch(rules)
        self.dispatch.add_model(NAME, MODEL)
        self.now = 0.0
        self.revision = 0
        self.publish(*instances)

    def publish(
        self,
        *instances: Instance,
        step_s: float = 0.0,
        node_slots: int = 8,
        fixed: int | None = None,
    ) -> list[Command]:
        """`step_s`: what they say that any pass takes, and each token more in it."""
        self.revision += 1
        new = InstanceSet(
            name=NAME,
            model_id=MODEL,
            epoch=1,
            revision=self.revision,
            instances=instances,
            node_slots={s.node: node_slots for i in instances for s in i.stages},
            fixed=fixed,
            decode_s=step_s,
            prefill_s_per_token=step_s,
        )
        return self.dispatch.on_instances(new, self.now)

    def admit(
        self, *names: str, prompt: int = 4, max_tokens: int = 100, score_from: int = 0
    ) -> list[Command]:
        requests = [
            Request(
                RequestId(name),
                MODEL,
                tuple(range(prompt)),
                max_tokens,
                (),
                Sampling(),
                self.now,
                score_from=score_from,
            )
            for name in names
        ]
        return self.dispatch.admit(requests, self.now)

    def give(self, name: str, attempt: int, index: int, finish: str = "") -> list[Command]:
        token = Token(RequestId(name), attempt, index, 7, finish)
        message = Tokens(node=replica(1).leader, tokens=(token,))
        return self.dispatch.on_tokens(message, self.now)

    def score(self, name: str, attempt: int, index: int, *logprobs: float) -> list[Command]:
        found = tuple(Logprobs(one, ()) for one in logprobs)
        scores = Scores(RequestId(name), attempt, index, found)
        message = Tokens(node=replica(1).leader, tokens=(), scores=(scores,))
        return self.dispatch.on_tokens(message, self.now)

    def refuse(self, name: str, attempt: int) -> list[Command]:
        error = CapacityExceeded("full")
        return self.dispatch.on_not_taken(RequestId(name), attempt, error, self.now)

    def later(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.dispatch.on_tick(self.now)


def sent(commands: list[Command]) -> list[tuple[str, str, int]]:
    return [
        (command.submit.request, command.submit.instance, command.submit.attempt)
        for command in commands
        if isinstance(command, Send)
    ]


@pytest.mark.parametrize(
    ("attempt", "index", "verdict"),
    [
        (2, 3, Verdict.NEXT),
        (2, 2, Verdict.DUPLICATE),
        (2, 0, Verdict.DUPLICATE),
        (2, 4, Verdict.GAP),
        (1, 3, Verdict.STALE),
        (3, 3, Verdict.STALE),
    ],
)
def test_tokens_are_judged_by_attempt_and_index(attempt: int, index: int, verdict: Verdict) -> None:
    request = Request(RequestId("a"), MODEL, (1,), 9, (), Sampling(), 0.0)
    request.attempt, request.tokens, request.instance = 2, [7, 7, 7], replica(1).id
    assert judge(request, Token(request.id, attempt, index, 7)) is verdict
    request.instance = None
    assert judge(request, Token(request.id, attempt, index, 7)) is Verdict.STALE


def test_a_story_names_the_cause_of_each_step() -> None:
    driver = Driver(replica(1, slots=1))
    first, *_ = driver.admit("a", "b")
    driver.give("a", 1, 0)
    assert isinstance(first, Send)
    assert first.submit.cause == "a"
    second = [c for c in driver.give("a", 1, 1, "stop") if isinstance(c, Send)]
    assert [c.submit.cause for c in second] == ["a"], "whose slot it gets"
    moves = driver.dispatch.on_node_gone(replica(1).leader, driver.now)
    assert [c.cancel.cause for c in moves if isinstance(c, Withdraw)] == [replica(1).leader]
    steps = [(told.cause, told.text.split()[0]) for told in driver.dispatch.story("b")]
    assert steps == [("a", "submitted"), (replica(1).leader, "queued")]
    on_instance = [told.subjects[0] for told in driver.dispatch.story("replica-1")]
    assert on_instance[:3] == ["a", "a", "b"]


@pytest.mark.parametrize("corrupt", ["lost", "twice", "tokens", "prompts", "node", "state"])
def test_a_state_that_contradicts_itself_is_found(corrupt: str) -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("a", "b")
    driver.dispatch.validate()
    (model,) = driver.dispatch._models.values()
    (route,) = model.table.routes.values()
    match corrupt:
        case "lost":
            model.queue.clear()
        case "twice":
            model.queue.append(route.requests[RequestId("a")])
        case "tokens":
            route.tokens += 1
        case "prompts":
            route.prompts += 1
        case "node":
            route.places[0].node.account.alone += 1
        case "state":
            route.requests[RequestId("a")].state = State.QUEUED
    with pytest.raises(IllegalTransition):
        driver.dispatch.validate()


def test_a_gap_ends_the_attempt_at_once() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    commands = driver.give("a", 1, 2)
    assert [type(command) for command in commands] == [Withdraw, Resumed]
    (send,) = [command for command in driver.later(AVOID_S * 2) if isinstance(command, Send)]
    assert send.submit.tokens == (0, 1, 2, 3, 7)


def ended(commands: list[Command]) -> list[tuple[RequestId, str]]:
    return [(c.request, str(c.error)) for c in commands if isinstance(c, End)]


def test_nobody_waits_for_a_model_that_its_operator_keeps_at_none() -> None:
    driver = Driver()
    driver.admit("waits")
    told_so = f"model {NAME!r} is kept at 0 instances by its operator"
    for commands in (driver.publish(fixed=0), driver.admit("late")):
        ((_, error),) = ended(commands)
        assert error.startswith(told_so)
    driver.publish(fixed=None)
    assert ended(driver.admit("again")) == []


def test_what_runs_goes_on_where_its_operator_wants_none() -> None:
    driver = Driver(replica(1))
    driver.admit("runs")
    assert ended(driver.publish(replica(1, state=InstanceState.DRAINING), fixed=0)) == []
    assert [c.request for c in driver.give("runs", 1, 0) if isinstance(c, Emit)] == ["runs"]


def told(commands: list[Command]) -> list[float]:
    """The log probabilities that a client gets."""
    return [one.drawn for c in commands if isinstance(c, Scored) for one in c.logprobs]


def test_each_score_is_taken_once_and_the_rest_asked_for_elsewhere() -> None:
    driver = Driver(replica(1))
    (send,) = driver.admit("a", prompt=6, score_from=1)
    assert isinstance(send, Send)
    assert send.submit.score_from == 1
    assert told(driver.score("a", 1, -5, 0.1, 0.2)) == [0.1, 0.2]
    assert driver.score("a", 1, -5, 0.1, 0.2) == []
    driver.publish(replica(2))
    assert told(driver.score("a", 1, -3, 0.3)) == []
    driver.publish(replica(3))
    (send,) = driver.publish(replica(1))[-1:]
    assert isinstance(send, Send)
    assert send.submit.score_from == 3
    attempt = send.submit.attempt
    assert told(driver.score("a", attempt, -3, 0.3, 0.4, 0.5)) == [0.3, 0.4, 0.5]
    (emit,) = driver.give("a", attempt, 0)[-1:]
    assert isinstance(emit, Emit)
    (send,) = driver.publish(replica(2))[-1:]
    assert isinstance(send, Send)
    assert send.submit.score_from == 6


def test_of_scores_that_overlap_at_a_move_each_counts_once() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a", prompt=6, score_from=1)
    (send,) = sent(driver.publish(MOVING, replica(3)))
    assert send == ("a", "replica-3", 2)
    assert told(driver.score("a", 1, -5, 0.1, 0.2)) == [0.1, 0.2], "the source goes on meanwhile"
    assert told(driver.score("a", 2, -5, 0.1, 0.2, 0.3, 0.4)) == [0.3, 0.4]
    assert told(driver.score("a", 2, -4, 0.2, 0.3, 0.4)) == []
    assert told(driver.score("a", 2, -1, 0.5)) == [0.5]
    assert emitted(driver.give("a", 2, 0))


@pytest.mark.parametrize("lost", ["score", "all"])
def test_a_score_that_is_lost_ends_the_attempt(lost: str) -> None:
    driver = Driver(replica(1))
    driver.admit("a", prompt=6, score_from=1)
    driver.score("a", 1, -5, 0.1, 0.2)
    commands = driver.score("a", 1, -2, 0.4) if lost == "score" else driver.give("a", 1, 0)
    assert [type(command) for command in commands] == [Withdraw, Resumed]
    (send,) = [command for command in driver.later(AVOID_S * 2) if isinstance(command, Send)]
    assert send.submit.score_from == 3


def test_requests_wait_in_order_for_a_slot() -> None:
    driver = Driver(replica(1, slots=2))
    assert [name for name, *_ in sent(driver.admit("a", "b", "c", "d"))] == ["a", "b"]
    assert sent(driver.give("b", 1, 0, "stop")) == [("c", "replica-1", 1)]
    assert [name for name, *_ in sent(driver.publish(replica(1, slots=3)))] == ["d"]


def test_a_resumed_request_goes_first() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("a", "b")
    assert not sent(driver.refuse("a", 1))
    assert sent(driver.publish(replica(2, slots=1))) == [("a", "replica-2", 2)]


def test_those_of_a_lost_instance_go_first_in_their_order() -> None:
    driver = Driver(replica(1, slots=3))
    driver.admit("a", "b", "c", "d")
    driver.publish()
    starts = sent(driver.publish(replica(2)))
    assert [name for name, *_ in starts] == ["a", "b", "c", "d"]


def test_who_is_refused_lets_others_go_first() -> None:
    """It may ask for more than the instance has, which must not hold up the rest."""
    driver = Driver(replica(1, slots=1))
    driver.admit("large", "small")
    assert not sent(driver.refuse("large", 1))
    assert sent(driver.later(AVOID_S)) == [("small", "replica-1", 1)]
    assert sent(driver.give("small", 1, 0, "stop")) == []
    assert sent(driver.later(AVOID_S)) == [("large", "replica-1", 2)]


def test_who_needs_what_is_not_there_yet_waits_alone() -> None:
    """The instance serves the others, and another one perhaps the request."""
    driver = Driver(replica(1))
    driver.admit("a")
    error = NotReady("no tokenizer")
    assert not sent(driver.dispatch.on_not_taken(RequestId("a"), 1, error, driver.now))
    assert sent(driver.admit("b")) == [("b", "replica-1", 1)]
    assert sent(driver.publish(replica(1), replica(2))) == [("a", "replica-2", 2)]
    node = replica(2).leader
    failed = AttemptFailed(RequestId("a"), 2, error.code, "no tokenizer")
    driver.dispatch.on_tokens(Tokens(node=node, tokens=(), failed=(failed,)), driver.now)
    starts = [start for _ in range(20) for start in sent(driver.later(AVOID_S))]
    assert starts[0] == ("a", "replica-1", 3)


def test_who_was_refused_for_too_long_is_told_why() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    ends: list[End] = []
    attempt = 0
    while not ends:
        attempt += 1
        error = NotReady("no tokenizer here")
        driver.dispatch.on_not_taken(RequestId("a"), attempt, error, driver.now)
        ends = [c for c in driver.later(2.0) if isinstance(c, End)]
    assert "for 60 s (the last one said: no tokenizer here): try again" in str(ends[0].error)
    assert attempt == QUEUE_S / 2


def test_a_lost_last_token_is_noticed() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    assert not driver.later(SILENCE_S - 0.5)
    assert sent(driver.later(0.5)) == [("a", "replica-1", 1)]  # does it go on?
    assert not driver.later(STALL_S - 1), "asked once in a while only"
    over = driver.dispatch.on_not_taken(RequestId("a"), 1, StaleEpoch("over"), driver.now)
    assert [c.reason for c in over if isinstance(c, Resumed)] == ["refused"]
    again = driver.later(0.1)
    (send,) = [command for command in again if isinstance(command, Send)]
    assert send.submit.tokens == (0, 1, 2, 3, 7)
    assert (send.submit.prompt_tokens, send.submit.attempt) == (4, 2)


def test_a_request_that_waits_on_its_node_stays_there() -> None:
    """However long, as long as its leader says that it goes on."""
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    for _ in range(20):
        assert sent(driver.later(STALL_S)) == [("a", "replica-1", 1)]
    (emit,) = driver.give("a", 1, 1)
    assert isinstance(emit, Emit)
    late = driver.dispatch.on_not_taken(RequestId("a"), 1, BusTimeout("late"), driver.now)
    assert late == []


def test_a_leader_that_does_not_answer_loses_its_requests() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    for attempt in range(1, 5):
        driver.give("a", attempt, attempt - 1)
        assert sent(driver.later(STALL_S)) == [("a", "replica-1", attempt)]
        error = BusTimeout("hung")
        commands = driver.dispatch.on_not_taken(RequestId("a"), attempt, error, driver.now)
        assert any(isinstance(c, Withdraw) for c in commands)
        driver.later(2.0)
    (end,) = [c for c in commands if isinstance(c, End)]
    assert "failed 4 times" in str(end.error)


def test_an_answer_about_an_instance_that_is_gone_changes_nothing() -> None:
    """Its leader was asked whether the attempt goes on, and its lease ended before it answered."""
    driver = Driver(replica(1))
    driver.admit("a")
    assert sent(driver.later(STALL_S)) == [("a", "replica-1", 1)]
    driver.dispatch.on_node_gone(replica(1).leader, driver.now)
    late = driver.dispatch.on_not_taken(RequestId("a"), 1, BusTimeout("silence"), driver.now)
    assert late == []
    assert sent(driver.publish(replica(2))) == [("a", "replica-2", 2)]


@pytest.mark.parametrize("token", [False, True])
def test_time_on_an_instance_is_no_wait_for_one(token: bool) -> None:
    """Nor what was before a token."""
    driver = Driver()
    driver.admit("a")
    driver.later(QUEUE_S / 2)
    driver.publish(replica(1))
    driver.later(QUEUE_S)
    if token:
        driver.give("a", 1, 0)
    driver.later(QUEUE_S)
    driver.publish()
    left = QUEUE_S if token else QUEUE_S / 2
    assert not driver.later(left - 1)
    (end,) = driver.later(1)
    assert isinstance(end, End)
    assert isinstance(end.error, CapacityExceeded)


def test_a_node_that_does_not_know_the_limit_is_cut_off() -> None:
    driver = Driver(replica(1))
    driver.admit("a", max_tokens=1)
    commands = driver.give("a", 1, 0)
    assert [c.finish for c in commands if isinstance(c, Emit)] == ["length"]
    assert any(isinstance(c, Withdraw) for c in commands)


def test_no_answer_counts_as_a_failure_and_is_withdrawn() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    for attempt in range(1, 5):
        commands = driver.dispatch.on_not_taken(
            RequestId("a"), attempt, BusTimeout("silence"), driver.now
        )
        assert any(isinstance(c, Withdraw) for c in commands)
        driver.later(2.0)
    (end,) = [c for c in commands if isinstance(c, End)]
    assert "failed 4 times" in str(end.error)


def test_an_answer_that_comes_after_tokens_changes_nothing() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    driver.give("a", 1, 0)
    assert driver.dispatch.on_not_taken(RequestId("a"), 1, BusTimeout("late"), 0.0) == []


def test_what_the_node_calls_wrong_is_not_tried_again() -> None:
    driver = Driver(replica(1))
    driver.admit("a")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 1, BadInput("no"), 0.0)
    assert [type(command) for command in commands] == [End]


def test_moves_are_no_failures() -> None:
    driver = Driver(path(1, 2))
    driver.admit("a", max_tokens=500)
    for n in range(1, 21):
        commands = driver.publish(path(n, n + 1, state=InstanceState.MOVING), path(n + 1, n + 2))
        assert len(sent(commands)) == 1
    driver.give("a", 21, 0)
    assert driver.dispatch.loads()[0].running_tokens == 499


def streaming(driver: Driver, *, tokens: int, every_s: float) -> None:
    """Request a, on its way on a path."""
    driver.admit("a", prompt=10, max_tokens=100)
    for index in range(tokens):
        driver.give("a", 1, index)
        driver.now += every_s


def switches(commands: list[Command]) -> list[Switched]:
    return [command for command in commands if isinstance(command, Switched)]


def costs(found: Switch | None) -> tuple[float, float]:
    assert found is not None
    return found.stay_s, found.move_s


def test_a_request_stays_where_recomputing_costs_more_and_that_is_told_once() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=90, every_s=1.0)
    after = path(1, 2, state=InstanceState.MOVING), replica(2)
    commands = driver.publish(*after, step_s=0.2)
    assert sent(commands) == []
    (told,) = switches(commands)
    assert (told.moved, told.stayed, told.moved_costs) == ((), 1, None)
    assert costs(told.stayed_costs) == pytest.approx((10 * 1.0, (100 + 10) * 0.2))
    assert switches(driver.publish(*after, step_s=0.2)) == []
    assert sent(driver.later(0.1)) == []


def test_a_request_moves_where_recomputing_costs_less() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=50, every_s=1.0)
    commands = driver.publish(path(1, 2, state=InstanceState.MOVING), replica(2), step_s=0.2)
    assert sent(commands) == [("a", "replica-2", 2)]
    (told,) = switches(commands)
    assert (told.moved, told.stayed, told.stayed_costs) == (("a",), 0, None)
    assert costs(told.moved_costs) == pytest.approx((50 * 1.0, (60 + 50) * 0.2))


def test_what_finds_no_room_is_told_apart_from_what_stays() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=90, every_s=1.0)
    driver.admit("b", "c", prompt=10)
    after = path(1, 2, state=InstanceState.MOVING), replica(2, slots=1)
    (told,) = switches(driver.publish(*after, step_s=0.2))
    assert (told.moved, told.stayed, told.waiting) == (("b",), 0, 2)
    after = path(1, 2, state=InstanceState.MOVING), replica(2, slots=3)
    (told,) = switches(driver.publish(*after, step_s=0.2))
    assert (told.moved, told.stayed, told.waiting) == (("c",), 1, 0)


def test_a_request_without_kv_moves_whatever_it_costs() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=99, every_s=1.0)
    driver.admit("b", prompt=1000, max_tokens=1)
    commands = driver.publish(path(1, 2, state=InstanceState.MOVING), replica(2), step_s=10.0)
    assert sent(commands) == [("b", "replica-2", 1 + 1)]


def test_without_measurements_requests_move() -> None:
    driver = Driver(path(1, 2))
    streaming(driver, tokens=99, every_s=1.0)
    commands = driver.publish(path(1, 2, state=InstanceState.MOVING), replica(2))
    assert sent(commands) == [("a", "replica-2", 2)]


def test_a_poisonous_request_does_not_take_every_node_along() -> None:
    driver = Driver(*(replica(n) for n in range(9)))
    driver.admit("a")
    ended: list[Command] = []
    for _ in range(4):
        (busy,) = [key for key, n in driver.dispatch.loads()[0].instance_requests.items() if n]
        node = replica(int(busy.removeprefix("replica-"))).leader
        ended = driver.dispatch.on_node_gone(node, driver.now)
    assert any(isinstance(c, End) for c in ended)


def test_a_node_that_stops_as_it_was_told_fails_no_request() -> None:
    driver = Driver(*(replica(n) for n in range(9)))
    driver.admit("a")
    for _ in range(8):
        (busy,) = [key for key, n in driver.dispatch.loads()[0].instance_requests.items() if n]
        node = replica(int(busy.removeprefix("replica-"))).leader
        commands = driver.dispatch.on_node_gone(node, driver.now, graceful=True)
        assert len(sent(commands)) == 1
        assert not any(isinstance(command, End) for command in commands)


# --- moves ---------------------------------------------------------------------

MOVING = path(1, 2, state=InstanceState.MOVING)


def moving(*tokens: int) -> Driver:
    """Request a has these tokens from a path, and was submitted to a replica as attempt 2."""
    driver = Driver(path(1, 2))
    driver.admit("a")
    for index in tokens:
        driver.give("a", 1, index)
    commands = driver.publish(MOVING, replica(3))
    assert sent(commands) == [("a", "replica-3", 2)]
    assert withdrawn(commands) == [], "the target has not accepted it yet"
    return driver


def withdrawn(commands: list[Command]) -> list[tuple[str, int]]:
    return [(c.node, c.cancel.attempt) for c in commands if isinstance(c, Withdraw)]


def emitted(commands: list[Command]) -> list[Emit]:
    return [command for command in commands if isinstance(command, Emit)]


def on_instances(driver: Driver) -> dict[str, int]:
    (load,) = driver.dispatch.loads()
    assert load.running_requests + load.queued_requests == 1
    return {key: count for key, count in load.instance_requests.items() if count}


@pytest.mark.parametrize("tokens", [(), (0, 1)])
def test_the_source_lets_go_when_the_target_has_accepted(tokens: tuple[int, ...]) -> None:
    driver = moving(*tokens)
    assert on_instances(driver) == {"path-1-2": 1, "replica-3": 1}
    assert emitted(driver.give("a", 1, len(tokens))), "the source goes on"
    taken = driver.dispatch.on_taken(RequestId("a"), 2, driver.now)
    assert withdrawn(taken) == [("node-1", 1)]
    assert on_instances(driver) == {"replica-3": 1}
    assert not emitted(driver.give("a", 2, len(tokens))), "seen before"
    assert emitted(driver.give("a", 2, len(tokens) + 1))
    assert withdrawn(driver.give("a", 1, len(tokens) + 2)) == [("node-1", 1)], "late"


@pytest.mark.parametrize("tokens", [(), (0, 1)])
@pytest.mark.parametrize("error", [CapacityExceeded("full"), BusTimeout("silent")])
def test_a_move_that_is_refused_costs_nothing(
    tokens: tuple[int, ...], error: CapacityExceeded | BusTimeout
) -> None:
    driver = moving(*tokens)
    commands = driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now)
    assert sent(commands) == []
    assert withdrawn(commands) == [("node-3", 2)]
    assert on_instances(driver) == {"path-1-2": 1}
    assert emitted(driver.give("a", 1, len(tokens)))
    assert sent(driver.later(2 * AVOID_S)) == [("a", "replica-3", 3)], "and is tried again"


def test_a_target_that_refused_one_request_takes_others() -> None:
    driver = moving(0)
    driver.refuse("a", 2)
    driver.later(AVOID_S)
    assert sent(driver.admit("b")) == [("b", "replica-3", 1)]
    assert sent(driver.later(0.0)) == [], "it keeps away twice as long"
    assert sent(driver.later(AVOID_S)) == [("a", "replica-3", 3)]


def test_a_request_that_one_replica_refuses_moves_to_another() -> None:
    driver = moving(0)
    driver.publish(MOVING, replica(3), replica(4))
    error = NotReady("no tokenizer here")
    commands = driver.dispatch.on_not_taken(RequestId("a"), 2, error, driver.now)
    assert sent(commands) == [("a", "replica-4", 3)]


def test_a_move_to_a_node_that_is_not_ready_is_tried_ever_more_rarely() -> None:
    """Although the request gets tokens where it is."""
    driver, at, attempt = moving(0), [0.0], 2
    for index in range(1, 100):
        error = NotReady("no tokenizer yet")
        commands = driver.dispatch.on_not_taken(RequestId("a"), attempt, error, driver.now)
        commands += driver.give("a", 1, index)
        commands += driver.later(AVOID_S / 5)
        for _, _, number in sent(commands):
            attempt = number
            at.append(driver.now)
    pauses = [after - before for before, after in pairwise(at)]
    assert pauses == sorted(pauses)
    assert min(pauses) >= 2 * AVOID_S
    assert len(pauses) < 6


def test_refusals_of_one_burst_count_once() -> None:
    driver = Driver(replica(1))
    driver.admit("a", "b", "c", "d", "e")
    for name in "abcde":
        driver.refuse(name, 1)
    assert len(sent(driver.later(2 * AVOID_S))) == 5


def test_a_token_of_the_target_says_that_it_has_accepted() -> None:
    driver = moving(0)
    commands = driver.give("a", 2, 1)
    assert withdrawn(commands) == [("node-1", 1)]
    assert [emit.first for emit in emitted(commands)] == [True]
    assert on_instances(driver) == {"replica-3": 1}


def test_a_source_that_fails_leaves_its_request_to_the_target() -> None:
    driver = moving(0)
    failed = AttemptFailed(RequestId("a"), 1, "peer_lost", "gone")
    message = Tokens(node=replica(1).leader, tokens=(), failed=(failed,))
    driver.dispatch.on_tokens(message, driver.now)
    assert on_instances(driver) == {"replica-3": 1}
    driver = moving(0)
    driver.publish(replica(3))
    assert on_instances(driver) == {"replica-3": 1}


def test_a_target_that_goes_leaves_its_request_where_it_is() -> None:
    driver = moving(0)
    driver.publish(MOVING)
    assert on_instances(driver) == {"path-1-2": 1}
    assert emitted(driver.give("a", 1, 1))


def test_what_ends_while_it_moves_is_withdrawn_from_both() -> None:
    driver = moving(0)
    both = [("node-1", 1), ("node-3", 2)]
    assert withdrawn(driver.dispatch.cancel(RequestId("a"), driver.now)) == both
    driver = moving(0)
    assert withdrawn(driver.give("a", 1, 1, "stop")) == [("node-3", 2)]
    assert driver.dispatch.loads()[0].running_requests == 0


def test_unlisted_models_take_nothing() -> None:
    driver = Driver(replica(1))
    driver.dispatch.remove_model(MODEL, driver.now)
    with pytest.raises(NotFound):
        driver.admit("a")
    assert driver.dispatch.loads() == ()


def test_nothing_stays_of_a_model_that_is_over() -> None:
    """Once it was removed, its requests have ended and its instances are gone."""
    driver = Driver(replica(1))
    driver.admit("a")
    driver.dispatch.remove_model(MODEL, driver.now)
    driver.later(1)
    assert driver.dispatch.knows(MODEL)
    driver.give("a", 1, 0, "stop")
    driver.publish()
    driver.later(1)
    assert not driver.dispatch.knows(MODEL)


def test_work_is_counted_as_it_shrinks() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("a", "b", prompt=10, max_tokens=5)
    (load,) = driver.dispatch.loads()
    assert (load.running_tokens, load.queued_tokens) == (15, 15)
    driver.give("a", 1, 0)
    assert driver.dispatch.loads()[0].running_tokens == 4
    driver.give("a", 1, 1)
    assert driver.dispatch.loads()[0].running_tokens == 3
    driver.dispatch.cancel(RequestId("a"), driver.now)
    (load,) = driver.dispatch.loads()
    assert (load.running_tokens, load.queued_requests) == (15, 0)


def test_prompts_wait_here_for_whoever_can_prefill_them_first() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first)
    half = PROMPTS_AHEAD // 2 + 1
    assert [r for r, *_ in sent(driver.admit("a", "b", "c", "d", prompt=half))] == ["a", "b"]
    assert sent(driver.publish(first, second)) == [("c", second.id, 1), ("d", second.id, 1)]


def test_no_instance_gets_more_prompts_because_others_could_take_some() -> None:
    driver = Driver(replica(1), replica(2, slots=1))
    assert len(sent(driver.admit("a", "b"))) == 2
    first = sent(driver.admit("c", "d", "e", prompt=PROMPTS_AHEAD // 2 + 1))
    assert [r for r, *_ in first] == ["c", "d"], "room for e is only where no slot is"


def test_a_first_token_makes_room_for_the_next_prompt() -> None:
    driver = Driver(replica(1))
    assert len(sent(driver.admit("a", "b", prompt=PROMPTS_AHEAD + 1))) == 1, "one in any case"
    assert [r for r, *_ in sent(driver.give("a", 1, 0))] == ["b"]


def test_prompts_before_a_path_that_is_no_longer_used_count_on_its_nodes() -> None:
    driver = Driver(path(1, 2))
    assert len(sent(driver.admit("a", prompt=3 * PROMPTS_AHEAD))) == 1
    drains = path(1, 2, state=InstanceState.DRAINING)
    driver.publish(drains, replica(1))
    assert sent(driver.admit("b")) == []
    assert sent(driver.publish(drains, replica(1), replica(3))) == [("b", "replica-3", 1)]
    assert sent(driver.admit("c", "d"))[0][1] == "replica-3"
    driver.give("a", 1, 0)
    driver.publish(drains, replica(1))
    assert [i for _, i, _ in sent(driver.admit("e"))] == ["replica-1"]


def test_paths_over_a_node_share_its_slots() -> None:
    """Those that drain as well; half a slot a sequence, in every second pass."""
    driver = Driver()
    most = round(OVERFULL * 2 * 4)
    driver.publish(path(1, 2, slots=100), node_slots=2)
    assert len(sent(driver.admit("a", max_tokens=10))) == 1
    names = [str(i) for i in range(most + 3)]
    for name in names:
        driver.admit(name)
    assert driver.dispatch.loads()[0].running_requests == most
    drains = path(1, 2, state=InstanceState.DRAINING, slots=100)
    assert sent(driver.publish(drains, path(1, 3, slots=100), node_slots=2)) == []
    (moved,) = sent(driver.give("a", 1, 0, "stop"))
    assert moved[1] == "path-1-3"


def test_those_without_a_token_move_first_and_then_those_with_the_least_kv() -> None:
    driver = Driver(path(1, 2))
    driver.admit("long", prompt=50)
    driver.admit("short", prompt=5)
    driver.admit("none", prompt=500)
    driver.give("long", 1, 0)
    driver.give("short", 1, 0)
    moving = path(1, 2, state=InstanceState.MOVING)
    (first,) = sent(driver.publish(moving, replica(1, slots=1)))
    assert first[0] == "none"
    (second,) = sent(driver.publish(moving, replica(1, slots=1), replica(2, slots=1)))
    assert second[0] == "short"


def test_load_presses_when_requests_begin_to_wait_and_when_an_instance_is_full_of_them() -> None:
    driver = Driver(replica(1, slots=2))
    pressing = driver.dispatch.pressing
    driver.admit("a", "b")
    assert not pressing(MODEL)
    driver.admit("c")
    assert pressing(MODEL)
    driver.dispatch.loads()
    driver.admit("d")
    assert not pressing(MODEL), "told, and less than an instance takes came since"
    driver.admit("e")
    assert pressing(MODEL)
    driver.dispatch.loads()
    for name in "ab":
        driver.give(name, 1, 0, "stop")
    assert not pressing(MODEL), "fewer wait"
    assert not pressing(ModelId("unknown"))
