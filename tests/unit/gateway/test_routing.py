from collections import Counter
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.ledger import Ledger
from services.gateway.core.others import Others, Work
from services.gateway.core.requests import NEXT, Request, State
from services.gateway.core.routes import Route
from services.gateway.core.routing import FEW, PROBES, Switch, choose, refuge, switch
from services.gateway.core.table import Table
from shared.errors import IllegalTransition
from shared.ids import ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.serving import Sampling
from tests.unit.gateway.support import path, replica


def request(name: str) -> Request:
    return Request(RequestId(name), ModelId("m"), (1, 2), 10, (), Sampling(), 0.0)


def route(instance: Instance, *, tokens: int = 0, requests: int = 0) -> Route:
    running = {RequestId(str(i)): request(str(i)) for i in range(requests)}
    return Route(instance, "", running, tokens=tokens)


def instance_set(epoch: int, revision: int, *instances: Instance, trace: str = "") -> InstanceSet:
    return InstanceSet(
        name=ModelName("m"),
        model_id=ModelId("m"),
        epoch=epoch,
        revision=revision,
        instances=instances,
        trace=trace,
    )


def table_of(*given: tuple[Instance, int, int]) -> Table:
    """A table of instances, each with the number of outstanding tokens and of requests there."""
    table = Table()
    table.apply(instance_set(1, 1, *(instance for instance, _, _ in given)))
    for instance, tokens, requests in given:
        for number in range(requests):
            running = request(f"{instance.id}.{number}")
            table.routes[instance.id].begin(running, tokens if number == 0 else 0, 0)
    return table


def draw_0() -> float:
    return 0.0


# --- the table -----------------------------------------------------------------


def test_newer_sets_replace_older_ones_and_a_new_planner_all() -> None:
    table = Table()
    table.apply(instance_set(5, 3, replica(1)))
    for epoch, revision, expected in ((5, 2, 1), (4, 9, 1), (5, 4, 2), (6, 0, 3)):
        table.apply(instance_set(epoch, revision, replica(expected)))
        assert list(table.routes) == [f"replica-{expected}"]


def test_what_left_the_set_is_handed_back_with_its_requests() -> None:
    table = Table()
    table.apply(instance_set(1, 1, replica(1), replica(2), trace="first"))
    table.routes[replica(1).id].requests[RequestId("a")] = request("a")
    gone = table.apply(instance_set(1, 2, replica(2, slots=3), replica(3), trace="second"))
    assert [list(route.requests) for route in gone] == [["a"]]
    assert table.routes[replica(2).id].instance.slots == 3
    traces = {key: route.trace for key, route in table.routes.items()}
    assert traces == {"replica-2": "first", "replica-3": "second"}


def test_a_node_takes_its_paths_along_until_the_set_says_otherwise() -> None:
    table = Table()
    known = instance_set(1, 1, replica(1), path(2, 1), replica(2))
    table.apply(known)
    gone = table.drop_node(NodeId("node-1"))
    assert {route.instance.id for route in gone} == {"replica-1", "path-2-1"}
    assert list(table.routes) == ["replica-2"]
    assert set(table.open) == set(table.routes.values())
    assert table.apply(known) == []
    assert len(table.routes) == 3
    assert set(table.open) == set(table.routes.values())


# --- choices -------------------------------------------------------------------


@pytest.mark.parametrize("instances", [3, 2 * FEW])
@pytest.mark.parametrize("tokens", [1, 5000])
def test_a_prompt_goes_where_no_prompt_is_before_it(instances: int, tokens: int) -> None:
    """The others have fewer tokens, all of them of prompts."""
    table = table_of(*((replica(i), 1000 if i == 0 else 10, 1) for i in range(instances)))
    for number in range(1, instances):
        table.routes[replica(number).id].prefill(10)
    wanted = Request(RequestId("r"), ModelId("m"), (1,) * tokens, 10, (), Sampling(), 0.0)
    draws = Random(0).random
    chosen = [choose(table, wanted, 0.0, draws) for _ in range(50 * instances)]
    share = sum(c is table.routes[replica(0).id] for c in chosen) / len(chosen)
    # Of many instances only two are looked at, one of which has to be that.
    assert share >= (1 if instances <= FEW else 1 / instances)


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 500), st.booleans(), st.sampled_from([0.5, 1.0, 2.0])),
        min_size=1,
        max_size=3 * FEW,
    ),
    shunned=st.sets(st.integers(0, 2 * FEW)),
    seed=st.integers(0, 1 << 20),
)
def test_the_choice_is_free_and_not_the_fullest(
    loads: list[tuple[int, bool, float]], shunned: set[int], seed: int
) -> None:
    table = table_of(
        *(
            (replica(i, slots=2, capacity=capacity), tokens, 2 if full else 1)
            for i, (tokens, full, capacity) in enumerate(loads)
        )
    )
    asking = request("new")
    asking.shunned = {replica(i).id: 1.0 for i in shunned}
    chosen = choose(table, asking, 0.0, Random(seed).random)
    free = [
        r for key, r in table.routes.items() if len(r.requests) < 2 and key not in asking.shunned
    ]
    assert (chosen is None) == (not free)
    if chosen is not None:
        assert chosen in free
        more = asking.work
        assert sum(o.load(more) >= chosen.load(more) for o in free) >= min(2, len(free))


@pytest.mark.parametrize("count", [4, 4 * FEW])
def test_candidates_are_drawn_in_proportion_to_their_capacity(count: int) -> None:
    """Of two draws, the winner is the one with less load; with equal loads per capacity, each
    instance wins as often as it is drawn."""
    capacities = [0.5 if i % 2 else 1.5 for i in range(count)]
    table = table_of(*((replica(i, capacity=c), 0, 0) for i, c in enumerate(capacities)))
    asking = request("new")
    asking.prompt, asking.max_tokens = (), 0
    draw, rounds = Random(0).random, 2000 * count
    chosen = Counter(choose(table, asking, 0.0, draw) for _ in range(rounds))
    drawn = {r.instance.capacity: 0 for r in table.routes.values()}
    for route_, times in chosen.items():
        assert route_ is not None
        drawn[route_.instance.capacity] += times
    assert set(chosen) == set(table.routes.values()), "each is drawn"
    # The first of two without replacement: exactly in proportion.
    assert drawn[1.5] / rounds == pytest.approx(0.75, abs=0.02)


def test_of_many_instances_a_few_are_looked_at() -> None:
    table = table_of(*((replica(i), 0, 0) for i in range(100 * FEW)))
    draws: list[float] = []
    random_ = Random(0)

    def draw() -> float:
        draws.append(random_.random())
        return draws[-1]

    assert choose(table, request("new"), 0.0, draw)
    assert len(draws) < 2 * PROBES


def test_load_is_counted_by_capacity() -> None:
    """A path of two nodes at half the capacity is twice as loaded by the same tokens."""
    table = table_of((path(1, 2), 60, 1), (replica(3), 100, 1))
    draw = Random(0).random
    for _ in range(50):
        assert choose(table, request("new"), 0.0, draw) is table.routes[replica(3).id]


def test_of_idle_instances_the_faster_ends_the_request_first() -> None:
    table = table_of((replica(1, capacity=0.5), 0, 0), (replica(2), 0, 0))
    draw = Random(0).random
    for _ in range(50):
        assert choose(table, request("new"), 0.0, draw) is table.routes[replica(2).id]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["begin", "end", "others", "drop"]))
    )
)
def test_which_instances_have_room_is_always_known(steps: list[tuple[int, str]]) -> None:
    table = table_of(*((replica(i, slots=2), 0, 0) for i in range(6)))
    names = count()
    for number, what in steps:
        route_ = table.routes.get(replica(number).id)
        if route_ is None:
            continue
        if what == "begin" and len(route_.requests) < 3:
            route_.begin(request(f"r{next(names)}"), 10, 2)
        elif what == "end" and route_.requests:
            route_.end(next(iter(route_.requests.values())), 10, 2)
        elif what == "others":
            route_.hear(Work(1 - route_.others.requests, 5))
        elif what == "drop":
            table.drop_node(route_.instance.leader)
            for running in list(route_.requests.values()):
                route_.end(running, 10, 2)
        assert {r.instance.id for r in table.open} == {
            key
            for key, r in table.routes.items()
            if len(r.requests) + r.others.requests < r.instance.slots
        }
        assert [r.place_in_open for r in table.open] == list(range(len(table.open)))


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.MOVING])
def test_only_serving_instances_take_requests(state: InstanceState) -> None:
    assert choose(table_of((replica(1, state=state), 0, 0)), request("a"), 0.0, draw_0) is None


def test_a_request_keeps_away_from_what_refused_it() -> None:
    table, asking = table_of((replica(1), 0, 0), (replica(2), 99, 1)), request("a")
    asking.shunned = {replica(1).id: 6.0}
    assert choose(table, asking, 5.0, draw_0) is table.routes[replica(2).id]
    assert choose(table, asking, 6.0, draw_0) is table.routes[replica(1).id]


def test_of_many_instances_one_with_kv_is_found() -> None:
    many = [replica(number) for number in range(4 * FEW)]
    busy = ((one, 0, min(1, number)) for number, one in enumerate(many))
    table, asking, draw = table_of(*busy), request("a"), Random(0).random
    for one in many[1:]:
        table.hear_kv(one.leader, asking.context - 1, now=0.0)
    for _ in range(20):
        assert choose(table, asking, 0.0, draw) is table.routes[many[0].id]


def test_the_refuge_is_the_emptiest_replica() -> None:
    routes = [
        route(path(1, 2), tokens=0),
        route(replica(1), tokens=30),
        route(replica(2), tokens=20),
        route(replica(3, state=InstanceState.DRAINING)),
    ]
    leaving = request("a")
    assert refuge(routes, leaving, 0.0) is routes[2]
    assert refuge(routes[:1], leaving, 0.0) is routes[0]
    full = route(replica(1, slots=1), requests=1)
    assert refuge([routes[0], full], leaving, 0.0) is None
    leaving.shunned = {replica(2).id: 6.0}
    assert refuge(routes, leaving, 5.0) is routes[1]
    assert refuge(routes, leaving, 6.0) is routes[2]
    routes[2].kv_free, routes[2].kv_told_at = leaving.context - 1, 6.0
    assert refuge(routes, leaving, 6.0) is routes[1]


SECONDS = st.floats(1e-5, 10)


def judged(
    *,
    remaining: int,
    context: int,
    token_s: float = 0.05,
    decode_s: float = 0.04,
    prefill_s: float = 0.001,
    others: int = 0,
    prompts: int = 0,
    behind: float = 0.0,
    kv_s: float = 0.0,
    bare: bool = True,
) -> Switch | None:
    """On a path where a token takes `token_s`, beside a replica with `others` and `prompts`."""
    table, moving, target = Table(), route(path(1, 2)), route(replica(2), requests=others)
    table.decode_s, table.prefill_s, table.kv_s = decode_s, prefill_s, kv_s
    moving.token_s, target.prompts = token_s, prompts
    return switch(
        table, moving, target, remaining=remaining, context=context, behind=behind, bare=bare
    )


@given(
    remaining=st.integers(1, 5000),
    context=st.integers(1, 100_000),
    token_s=SECONDS,
    decode_s=SECONDS,
    prefill_s=SECONDS,
    others=st.integers(0, 64),
    prompts=st.integers(0, 10_000),
    behind=st.integers(0, 1_000),
    kv_s=st.just(0.0) | SECONDS,
)
def test_staying_is_for_the_last_tokens_of_long_contexts(
    remaining: int,
    context: int,
    token_s: float,
    decode_s: float,
    prefill_s: float,
    others: int,
    prompts: int,
    behind: int,
    kv_s: float,
) -> None:
    """What says stay, says so for a smaller rest, a longer context, a busier target, more that
    wait; on a path that is no slower there is nothing to gain at all."""

    def stays(remaining: int, context: int, others: int, prompts: int, behind: int) -> bool:
        found = judged(
            remaining=remaining,
            context=context,
            token_s=token_s,
            decode_s=decode_s,
            prefill_s=prefill_s,
            others=others,
            prompts=prompts,
            behind=behind,
            kv_s=kv_s,
        )
        assert found is not None
        assert found.stay_s == remaining * token_s
        assert found.stays == (found.stay_s <= found.move_s)
        return found.stays

    if stays(remaining, context, others, prompts, behind):
        assert remaining == 1 or stays(remaining - 1, context, others, prompts, behind)
        assert stays(remaining, context + 1, others, prompts, behind)
        assert stays(remaining, context, others + 1, prompts, behind)
        assert stays(remaining, context, others, prompts + 1, behind)
        assert stays(remaining, context, others, prompts, behind + 1)
    else:
        assert token_s > decode_s + others * prefill_s


def test_a_long_rest_is_worth_a_prefill() -> None:
    """A token takes 10 ms less, and the prefill of 200 tokens 0.2 s."""
    short, long = judged(remaining=19, context=200), judged(remaining=21, context=200)
    assert short is not None
    assert short.stays
    assert long is not None
    assert not long.stays


def test_what_is_waited_for_on_the_target() -> None:
    """The prompts before it, its own context, and then passes with the others."""
    found = judged(remaining=10, context=200, others=3, prompts=50)
    assert found is not None
    assert found.stay_s == pytest.approx(0.5)
    assert found.move_s == pytest.approx(0.25 + 10 * 0.043)


def test_what_others_wait_longer_counts() -> None:
    """Each of those that wait for their first token on the target waits for the context, too."""
    alone, before_two = (judged(remaining=10, context=200, behind=n) for n in (0, 2))
    assert alone is not None
    assert before_two is not None
    assert before_two.stay_s == alone.stay_s
    assert before_two.move_s == pytest.approx(alone.move_s + 2 * 0.2)


def test_kv_that_moves_holds_up_nobody() -> None:
    """It takes 0.1 s, while two more tokens come on the path, which are computed once more."""
    found = judged(remaining=10, context=200, others=3, prompts=50, behind=2, kv_s=0.0005)
    assert found is not None
    assert found.with_kv
    assert found.stay_s == pytest.approx(0.5)
    assert found.move_s == pytest.approx(2 * 0.05 + 2 * 0.001 + 8 * 0.043)


def test_a_request_ends_on_its_path_if_its_kv_would_come_too_late() -> None:
    found = judged(remaining=10, context=2_000, kv_s=0.0005)
    assert found is not None
    assert found.stays


@pytest.mark.parametrize(("kv_s", "bare"), [(0.001, True), (0.002, True), (0.0005, False)])
def test_kv_is_computed_anew_where_it_moves_no_faster_or_not_at_all(
    kv_s: float, bare: bool
) -> None:
    expected = judged(remaining=10, context=200, others=3, prompts=50)
    found = judged(remaining=10, context=200, others=3, prompts=50, kv_s=kv_s, bare=bare)
    assert found == expected


def test_what_is_not_measured_is_not_judged() -> None:
    assert judged(remaining=1, context=10_000, token_s=0.0) is None
    assert judged(remaining=1, context=10_000, decode_s=0.0) is None
    assert judged(remaining=1, context=10_000, prefill_s=0.0) is not None


def test_the_time_of_a_token_follows_what_is_measured() -> None:
    one = route(path(1, 2))
    one.measure(0.1)
    assert one.token_s == 0.1
    one.measure(0.26)
    assert one.token_s == pytest.approx(0.11)


# --- the states of a request ---------------------------------------------------


@given(st.lists(st.sampled_from(State), max_size=8))
def test_an_end_is_an_end(states: list[State]) -> None:
    one, ledger = request("a"), Ledger(Others(), cause="an-event", now=7.0)
    for state in states:
        if state in NEXT[one.state]:
            ledger.step(one, state, "test")
            (*_, last) = ledger.story.of(one.id)
            assert (last.at, last.cause) == (7.0, "an-event")
            assert last.text.startswith(state.value)
        else:
            with pytest.raises(IllegalTransition, match=f"a: .* -> {state.value}"):
                ledger.step(one, state, "test")
        if one.state in (State.DONE, State.FAILED, State.CANCELLED):
            assert not NEXT[one.state]
