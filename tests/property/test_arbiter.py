"""Who gives way to whom, over any pool of devices and models."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.arbiter import (
    TURN_S,
    Claim,
    Device,
    Grade,
    Replica,
    Room,
    make_room,
    shares,
)
from shared.ids import ModelId, ModelName, NodeId

NOW = 1000.0


@st.composite
def pools(draw: st.DrawFn, alike: bool = False) -> tuple[list[Claim], list[Device]]:
    """`alike`: every model fits on every device, and no device has room for two."""
    sizes = draw(
        st.lists(st.integers(2, 3) if alike else st.integers(1, 12), min_size=1, max_size=6)
    )
    nodes = [NodeId(f"n{i}") for i in range(len(sizes))]
    left = dict(zip(nodes, sizes, strict=True))
    claims = []
    for number in range(draw(st.integers(1, 6))):
        nbytes = 2 if alike else draw(st.integers(1, 6))
        replicas: dict[NodeId, Replica] = {}
        asleep: set[NodeId] = set()
        draining: set[NodeId] = set()
        for node in nodes:
            if left[node] < nbytes:
                continue
            match draw(st.sampled_from(("", "", "serves", "loads", "sleeps", "drains"))):
                case "serves" | "loads" as state:
                    left[node] -= nbytes
                    age = draw(st.sampled_from((1.0, 2 * TURN_S)))
                    replicas[node] = Replica(
                        draw(st.integers(0, 9)), NOW - age, loading=state == "loads"
                    )
                case "sleeps":
                    left[node] -= nbytes
                    asleep.add(node)
                case "drains":
                    left[node] -= nbytes
                    draining.add(node)
        floor, group = draw(st.integers(0, 2)), 1 if alike else draw(st.sampled_from((1, 1, 2, 3)))
        claim = Claim(
            model=ModelId(f"m{number}"),
            name=ModelName(f"m{number}"),
            nbytes=nbytes,
            priority=draw(st.integers(0, 2)),
            floor=floor * group,
            wants=max(floor, draw(st.integers(0, 6))) * group,
            asked=draw(st.booleans()),
            replicas=replicas,
            asleep=frozenset(asleep),
            space=frozenset(asleep),
            leaving=frozenset(draining),
            draining=frozenset(draining),
            frees=frozenset(draining),
            in_memory=bool(replicas or asleep),
            on_disk=frozenset(draw(st.lists(st.sampled_from(nodes), max_size=2))),
            attained=draw(st.sampled_from((0.0, 1.0, 2.0))),
            cost=draw(st.sampled_from((0.0, 0.5, 1.0))),
            cost_beside=draw(st.sampled_from((0.0, 0.25))),
            cached=draw(st.booleans()),
            group=group,
            starved=not alike and draw(st.booleans()),
        )
        claims.append(claim)
    taken = draw(st.lists(st.booleans(), min_size=len(nodes), max_size=len(nodes)))
    devices = [
        Device(
            node,
            size,
            left[node],
            coming=sum(c.nbytes for c in claims if node in c.draining),
            taken=other,
        )
        for node, size, other in zip(nodes, sizes, taken, strict=True)
    ]
    return claims, devices


NEEDS = st.lists(st.integers(1, 3), min_size=1, max_size=3)
"""How many devices each further replica lacks."""


@given(pools(), NEEDS)
def test_room_that_is_made_is_room_and_nothing_goes_that_should_stay(
    pool: tuple[list[Claim], list[Device]], needs: list[int]
) -> None:
    claims, devices = pool
    count = sum(needs)
    claimant, by_model = claims[0], {c.model: c for c in claims}
    by_node = {d.node: d for d in devices}
    room = make_room(claimant, needs, claims, devices, NOW)
    share = shares(claims, devices)
    gone: Counter[ModelId] = Counter()
    for node, ways in room.made.items():
        assert not by_node[node].taken
        made = sum(way.nbytes for way in ways if node not in by_model[way.model].draining)
        assert by_node[node].free + by_node[node].coming + made >= claimant.nbytes
        for way in ways:
            claim = by_model[way.model]
            assert way.node == node
            assert way.model != claimant.model
            gone[way.model] += node not in claim.draining
            if way.grade is Grade.ASLEEP:
                assert node in claim.asleep
                continue
            assert way.at_once == (claim.priority < claimant.priority)
            if node in claim.draining:
                assert way.at_once
                continue
            replica = claim.replicas[node]
            assert way.at_once or not replica.loading
            assert node not in share[way.model]
            assert claim.priority <= claimant.priority or claimant.starved
            if way.grade is Grade.TURN and not claimant.starved:
                assert NOW - replica.since >= TURN_S
                assert claimant.asked
    for model, count_gone in gone.items():
        claim = by_model[model]
        left = len(claim.replicas) + len(claim.asleep) - count_gone
        assert claim.on_disk or left >= claim.group, "the last copy"
    assert not set(room.free) & set(room.made)
    assert len(room.free) + len(room.made) <= count
    there = len(room.free) + len(room.made) + room.busy
    assert there >= count or room.why_not
    whole = set(accumulate(needs, initial=0))
    assert there in whole, "no part of a replica"
    if room.free or room.made:
        assert claimant.in_memory or claimant.on_disk


@given(pools(), NEEDS)
def test_nothing_gives_way_needlessly(
    pool: tuple[list[Claim], list[Device]], needs: list[int]
) -> None:
    claims, devices = pool
    room = make_room(claims[0], needs, claims, devices, NOW)
    by_node = {d.node: d for d in devices}
    for node, ways in room.made.items():
        for way in ways:
            rest = sum(other.nbytes for other in ways if other is not way)
            free = by_node[node].free + by_node[node].coming
            hurried = any(node in c.draining and c.model == way.model for c in claims)
            assert hurried or free + rest < claims[0].nbytes


@given(pools())
def test_shares_have_room(pool: tuple[list[Claim], list[Device]]) -> None:
    claims, devices = pool
    share = shares(claims, devices)
    used: Counter[NodeId] = Counter()
    for claim in claims:
        assert len(share[claim.model]) <= claim.wants
        assert len(share[claim.model]) % claim.group == 0, "whole replicas"
        for node in share[claim.model]:
            used[node] += claim.nbytes
    assert all(used[d.node] <= d.size for d in devices)


@given(pools(alike=True))
def test_shares_are_max_min_fair_where_every_device_has_one_place(
    pool: tuple[list[Claim], list[Device]],
) -> None:
    """Models of different sizes, and devices with several places, are packed only about as
    fairly."""
    claims, devices = pool
    share = shares(claims, devices)
    for poor in claims:
        for rich in claims:
            has, other = len(share[poor.model]), len(share[rich.model])
            short = has < poor.wants and share[rich.model] - share[poor.model]
            # What a model keeps even when it is idle is not shared with its peers.
            if not short or rich is poor or poor.priority < rich.priority:
                continue
            assert poor.priority == rich.priority
            assert other <= max(rich.floor, has + 1)


@given(pools())
def test_what_serves_stays_while_all_have_room(pool: tuple[list[Claim], list[Device]]) -> None:
    claims, devices = pool
    whole = [len(c.replicas) // c.group * c.group for c in claims]
    claims = [replace(c, wants=min(c.wants, has)) for c, has in zip(claims, whole, strict=True)]
    share = shares(claims, devices)
    for claim in claims:
        assert share[claim.model] <= claim.replicas.keys()


def claim(name: str, *serving: str, wants: int = 1, since: float = 0.0, **more: float) -> Claim:
    return Claim(
        model=ModelId(name),
        name=ModelName(name),
        nbytes=6,
        priority=int(more.get("priority", 0)),
        floor=0,
        wants=wants,
        asked=bool(more.get("asked", True)),
        replicas={NodeId(node): Replica(1, since) for node in serving},
        asleep=frozenset(),
        space=frozenset(),
        leaving=frozenset(),
        draining=frozenset(),
        frees=frozenset(),
        in_memory=True,
        on_disk=frozenset({NodeId("n")}),
        attained=more.get("attained", 0.0),
        cost=0.0,
        cost_beside=0.0,
        cached=False,
    )


def test_a_starved_model_has_a_replica_whatever_the_priorities() -> None:
    devices = [Device(NodeId("n"), 10, 4)]
    high = replace(claim("high", "n", since=NOW), priority=1)
    low = claim("low")
    assert not make_room(low, [1], [high, low], devices, NOW).made
    low = replace(low, starved=True)
    (way,) = make_room(low, [1], [high, low], devices, NOW).made[NodeId("n")]
    assert (way.model, way.at_once) == (high.model, False), "its requests end first"
    low, high = replace(claim("low", "n", since=NOW), starved=True), replace(high, replicas={})
    assert not make_room(high, [1], [high, low], devices, NOW).made, "it has its turn"
    low = replace(low, starved=False)
    (way,) = make_room(high, [1], [high, low], devices, NOW).made[NodeId("n")]
    assert way.at_once


def test_models_that_are_starved_do_not_take_all_devices_together() -> None:
    nodes = [f"n{i}" for i in range(8)]
    devices = [Device(NodeId(node), 6, 0) for node in nodes]
    high = replace(claim("high", *nodes, wants=8), priority=1)
    low = [replace(claim(f"low{i}"), starved=True) for i in range(20)]
    share = shares([high, *low], devices)
    assert len(share[high.model]) == 7
    assert sum(len(share[c.model]) for c in low) == 1


def test_what_a_higher_priority_keeps_alive_is_not_spare_for_a_lower_one() -> None:
    devices = [Device(NodeId("n"), 10, 4)]
    idle = claim("idle", "n", wants=0)
    for priority, gives_way in ((0, True), (1, False)):
        claims = [replace(idle, priority=priority), asks := claim("asks")]
        assert bool(make_room(asks, [1], claims, devices, NOW).made) == gives_way


def test_models_that_all_wait_for_one_device_take_turns() -> None:
    """Time passes in steps of one second; whoever has the device gives it up when it is told."""
    devices = [Device(NodeId("n"), 10, 4)]
    attained = dict.fromkeys("abc", 0.0)
    holder, since = "a", 0.0
    for second in range(200):
        attained = {name: 0.98 * had + (name == holder) for name, had in attained.items()}
        claims = [
            claim(name, *(("n",) if name == holder else ()), since=since, attained=had)
            for name, had in attained.items()
        ]
        for waiting in (c for c in claims if not c.replicas):
            if make_room(waiting, [1], claims, devices, float(second)).made:
                holder, since = waiting.name, float(second)
                break
    assert min(attained.values()) > 0.5 * max(attained.values())


def test_groups_that_have_no_room_beside_each_other_take_turns() -> None:
    """Each is three of four devices. Dealt by the device, each would have two for ever."""
    nodes = [NodeId(f"n{i}") for i in range(4)]
    attained, holder, since = {"a": 0.0, "b": 0.0}, "a", 0.0
    places = {"a": nodes[:3], "b": list[NodeId]()}
    for second in range(200):
        attained = {name: 0.98 * had + 3 * (name == holder) for name, had in attained.items()}
        claims = [
            replace(claim(name, *places[name], wants=3, since=since, attained=had), group=3)
            for name, had in attained.items()
        ]
        used = Counter(node for places_ in places.values() for node in places_)
        devices = [Device(node, 10, 10 - 6 * used[node]) for node in nodes]
        waiting = next(c for c in claims if c.name != holder)
        lacks = 3 - len(waiting.replicas)
        room = make_room(waiting, [lacks], claims, devices, float(second))
        if not room.made:
            assert not room.free, "nothing is promised to a part of a group"
            continue
        assert len(room.free) + len(room.made) == lacks
        places[holder] = [node for node in places[holder] if node not in room.made]
        holder, since = waiting.name, float(second)
        places[holder] += (*room.free, *room.made)
    assert min(attained.values()) > 0.5 * max(attained.values())


def test_a_higher_priority_takes_a_replica_at_once_and_a_lower_one_never() -> None:
    devices = [Device(NodeId("n"), 10, 4)]
    low, high = claim("low", "n", since=NOW), claim("high", priority=1)
    room = make_room(high, [1], [low, high], devices, NOW)
    assert [way.grade for way in room.made[NodeId("n")]] == [Grade.LOWER]
    low, high = claim("low", attained=0.0), claim("high", "n", priority=1, attained=9.0)
    assert make_room(low, [1], [low, high], devices, NOW + 1e6).made == {}


def test_a_device_that_is_empty_comes_before_any_that_is_not() -> None:
    devices = [Device(NodeId("n"), 10, 4), Device(NodeId("o"), 10, 10)]
    low, high = claim("low", "n"), claim("high", priority=1)
    assert make_room(high, [1], [low, high], devices, NOW) == Room(free=(NodeId("o"),))


def asleep(name: str, *nodes: str, cost: float, cost_beside: float) -> Claim:
    """A model that sleeps on these nodes, and is used so often."""
    where = frozenset(map(NodeId, nodes))
    return replace(
        claim(name, wants=0), asleep=where, space=where, cost=cost, cost_beside=cost_beside
    )


def givers(needs: list[int], *claims: Claim, asks: Claim) -> list[tuple[str, float]]:
    """What gives way, and what its going is thought to cost, the cheapest first."""
    nodes = sorted({node for c in claims for node in c.asleep})
    room = make_room(asks, needs, [*claims, asks], [Device(n, 10, 4) for n in nodes], NOW)
    return sorted((way.model, way.cost) for ways in room.made.values() for way in ways)


def test_a_copy_beside_others_goes_before_the_last_one_of_a_model_that_is_used_less() -> None:
    often = asleep("often", "n", "o", cost=9.0, cost_beside=1.0)
    seldom = asleep("seldom", "p", cost=2.0, cost_beside=0.2)
    asks = claim("asks", wants=2)
    assert givers([1], often, seldom, asks=asks) == [("often", 1.0)]
    both = [("often", 1.0), ("seldom", 2.0)]
    assert givers([1, 1], often, seldom, asks=asks) == both, "then often has only one left"


def test_a_copy_in_a_host_cache_or_a_replica_is_another_copy_too() -> None:
    often = asleep("often", "n", cost=9.0, cost_beside=1.0)
    seldom = asleep("seldom", "p", cost=2.0, cost_beside=0.2)
    assert givers([1], often, seldom, asks=claim("asks")) == [("seldom", 2.0)]
    cached = replace(often, cached=True)
    assert givers([1], cached, seldom, asks=claim("asks")) == [("often", 1.0)]
    serves = replace(often, wants=1, replicas={NodeId("x"): Replica(1, NOW)})
    assert givers([1], serves, seldom, asks=claim("asks")) == [("often", 1.0)]


def test_the_devices_of_one_group_hold_one_copy() -> None:
    often = replace(asleep("often", "n", "o", cost=9.0, cost_beside=1.0), group=2)
    seldom = asleep("seldom", "p", cost=2.0, cost_beside=0.2)
    assert givers([1], often, seldom, asks=claim("asks")) == [("seldom", 2.0)]
    unsaved = replace(often, on_disk=frozenset())
    assert not givers([1], unsaved, asks=claim("asks")), "without one of them the other is useless"
