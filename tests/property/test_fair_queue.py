"""Tenants get their shares of a queue, whatever comes, goes and comes back."""

from collections import Counter, deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.core.fair_queue import SPARE, FairQueue, Share

TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5}
MOST = 100


def share(tenant: str, rank: int = 0) -> Share:
    return Share(tenant, TENANTS.get(tenant, 1.0), rank)


def begun(queue: FairQueue[int], count: int) -> list[int]:
    found = []
    for _ in range(count):
        item = queue.next()
        if item is None:
            break
        queue.start(item)
        found.append(item)
    return found


loads = st.fixed_dictionaries(
    {tenant: st.lists(st.integers(1, MOST), min_size=20, max_size=40) for tenant in TENANTS}
)


@given(loads=loads, before=st.lists(st.sampled_from("abc"), max_size=10))
def test_while_all_wait_each_gets_work_by_its_weight(
    loads: dict[str, list[int]], before: list[str]
) -> None:
    """SFQ, theorem 1: work per weight differs by one item of each at most, from any time on."""
    queue: FairQueue[int] = FairQueue()
    works: list[tuple[str, int]] = []
    for tenant in before:
        queue.add(len(works), share(tenant), MOST)
        works.append((tenant, MOST))
        begun(queue, 1)
    largest = {tenant: max(loads[tenant]) for tenant in loads}
    for tenant, sizes in loads.items():
        for work in sizes:
            queue.add(len(works), share(tenant), work)
            works.append((tenant, work))
    left = Counter({tenant: len(sizes) for tenant, sizes in loads.items()})
    history = [dict.fromkeys(TENANTS, 0.0)]
    while min(left.values()) > 0:
        (item,) = begun(queue, 1)
        tenant, work = works[item]
        left[tenant] -= 1
        history.append({**history[-1], tenant: history[-1][tenant] + work / TENANTS[tenant]})
    bound = {t: (MOST if t in before else largest[t]) / w for t, w in TENANTS.items()}
    for one in TENANTS:
        for other in TENANTS:
            leads = [now[one] - now[other] for now in history]
            lead = max(b - min(leads[: i + 1]) for i, b in enumerate(leads))
            assert lead <= bound[one] + bound[other] + 1e-6


@given(loads=loads, after=st.integers(0, 50), late=st.integers(1, MOST))
def test_who_comes_late_waits_for_one_item_of_each_other(
    loads: dict[str, list[int]], after: int, late: int
) -> None:
    queue: FairQueue[int] = FairQueue()
    owner: list[str] = []
    for tenant, sizes in loads.items():
        for work in sizes:
            queue.add(len(owner), share(tenant), work)
            owner.append(tenant)
    begun(queue, after)
    queue.add(-1, share("late"), late)
    before = []
    while (item := begun(queue, 1)) != [-1]:
        before.append(owner[item[0]])
    assert not [tenant for tenant, count in Counter(before).items() if count > 1]


@given(weights=st.lists(st.sampled_from([0.25, 1.0, 3.0]), min_size=2, max_size=8))
def test_a_flood_costs_the_others_nothing_but_its_share(weights: list[float]) -> None:
    """The first tenant floods; the others ask for less than their shares: each time one of theirs
    comes, at most one item of each other tenant begins before it."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for number in range(200):
        queue.add((0, number), Share("flood", weights[0]), 10)
    for number in range(10):
        for tenant, weight in enumerate(weights[1:], start=1):
            queue.add((tenant, number), Share(str(tenant), weight), 10)
        waiting = set(range(1, len(weights)))
        floods = 0
        while waiting:
            item = queue.next()
            assert item is not None
            queue.start(item)
            floods += item[0] == 0
            waiting.discard(item[0])
        allowed = 1 + max(weights[0] / weight for weight in weights[1:])
        assert floods <= allowed * 1 + 1


@given(unused=st.integers(0, MOST - 1), running=st.integers(1, 8), starts=st.integers(50, 150))
def test_what_was_not_used_is_given_back(unused: int, running: int, starts: int) -> None:
    """One tenant's items are counted for more than they do. In the end both do the same work."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for number in range(starts):
        queue.add(("says more", number), share("x"), MOST)
        queue.add(("says all", number), share("y"), MOST - unused)
    at_work: deque[tuple[str, int]] = deque()
    counts: Counter[str] = Counter()
    for _ in range(starts):
        item = queue.next()
        assert item is not None
        queue.start(item)
        counts[item[0]] += 1
        at_work.append(item)
        if len(at_work) > running:
            done = at_work.popleft()
            queue.end(done, unused if done[0] == "says more" else 0)
    work = MOST - unused
    apart = abs(counts["says more"] - counts["says all"]) * work
    assert apart <= (running + 2) * MOST + 2 * work


@given(ranks=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=30))
def test_an_earlier_rank_goes_first(ranks: Sequence[tuple[str, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, rank) in enumerate(ranks):
        queue.add(number, share(tenant, rank), 5)
    order = [ranks[item][1] for item in begun(queue, len(ranks))]
    assert order == sorted(order)


@given(places=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=30))
def test_of_one_tenant_the_least_place_goes_first_and_then_who_came_first(
    places: Sequence[tuple[str, int]],
) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, place) in enumerate(places):
        queue.add(number, share(tenant), 5, place)
    order = begun(queue, len(places))
    for tenant in "ab":
        found = [(places[item][1], item) for item in order if places[item][0] == tenant]
        assert found == sorted(found)


def test_those_who_have_most_for_their_weight_make_room() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(6):
        queue.add(f"a{number}", Share("a", 1.0), 1)
        queue.add(f"b{number}", Share("b", 3.0), 1)
    queue.add("late flex", Share("a", 1.0, rank=2), 1)
    assert queue.make_room(Share("c", 1.0), 2, 2) == ["late flex", "a5"]
    assert queue.make_room(Share("c", 1.0), 8, 1) is None  # it would have more itself
    assert queue.make_room(Share("a", 1.0), 1, 1) is None
    of_a = ["late flex", "a5", "a4", "a3", "a2", "a1"]
    assert queue.make_room(Share("c", 100.0), 9, 9) == [*of_a, "b5", "b4", "b3"]


def test_tenants_who_ask_no_more_are_forgotten() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(50 * SPARE):
        queue.add(number, Share(f"t{number}"), 1)
        begun(queue, 1)
        queue.end(number, 0)
    assert len(queue._ranks[0].flows) <= 2 * SPARE
    assert not queue._weights
    assert not queue._begun


class Machine(RuleBasedStateMachine):
    """Against a plain list of what waits: nothing is lost, doubled or kept from its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.new: dict[int, tuple[str, int]] = {}
        self.places: list[int] = []
        self.again: list[int] = []
        self.running: list[int] = []
        self.passed: list[int] = []
        self.count = 0

    @rule(
        tenant=st.sampled_from("ab"),
        rank=st.integers(0, 1),
        work=st.integers(1, MOST),
        place=st.integers(0, 3),
    )
    def add(self, tenant: str, rank: int, work: int, place: int) -> None:
        self.restore()
        self.queue.add(self.count, share(tenant, rank), work, place)
        self.places.append(place)
        self.new[self.count] = tenant, rank
        self.count += 1

    @rule()
    def turn(self) -> None:
        item = self.queue.next()
        if item is None:
            assert len(self.passed) == len(self.new) + len(self.again)
            return
        again = [one for one in self.again if one not in self.passed]
        if again:
            assert item == again[0]
            self.again.remove(item)
        else:
            tenant, rank = self.new.pop(item)
            left = {k: v for k, v in self.new.items() if k not in self.passed}
            assert rank <= min((v[1] for v in left.values()), default=rank)
            others = (k for k, v in left.items() if v == (tenant, rank))
            assert all((self.places[item], item) < (self.places[k], k) for k in others)
        self.queue.start(item)
        self.running.append(item)

    @rule()
    def pass_over(self) -> None:
        item = self.queue.next()
        if item is not None:
            self.queue.pass_over(item)
            self.passed.append(item)

    @rule()
    def restore(self) -> None:
        self.queue.restore()
        self.passed.clear()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3))
    def come_back(self, data: st.DataObject, count: int) -> None:
        self.restore()
        back = data.draw(st.permutations(self.running))[:count]
        self.queue.put_back(back)
        self.again = [*back, *self.again]
        self.running = [item for item in self.running if item not in back]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), unused=st.integers(0, 2 * MOST))
    def end(self, data: st.DataObject, unused: int) -> None:
        item = data.draw(st.sampled_from(self.running))
        self.running.remove(item)
        self.queue.end(item, unused)

    @precondition(lambda self: self.new or self.again)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.restore()
        item = data.draw(st.sampled_from([*self.new, *self.again]))
        self.queue.remove(item)
        self.queue.end(item, 0)
        if item in self.new:
            del self.new[item]
        else:
            self.again.remove(item)

    @invariant()
    def all_are_there(self) -> None:
        if not self.passed:
            assert sorted(self.queue) == sorted([*self.new, *self.again])
            assert len(self.queue) == len(self.new) + len(self.again)
            assert set(self.queue._begun) == {*self.again, *self.running}


TestMachine = Machine.TestCase
