"""Newcomers are appended to any multicast that runs, without disturbing what flows."""

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.core.append import DELAY, append
from services.planner.core.costs import arrival_times
from services.planner.core.multicast.fabric import Fabric, Port, Task, uniform
from services.planner.core.multicast.schedule import Move, by_step, check_moves
from services.planner.core.multicast.strategies import strategy
from tests.support.amounts import examples

NAMES = ("binomial", "head", "chain", "taps", "tree")


@dataclass(frozen=True)
class Case:
    task: Task
    held: tuple[frozenset[int], ...]
    """What each node holds when newcomers are appended."""
    running: tuple[Move, ...]
    newcomers: tuple[int, ...]
    lost: tuple[Move, ...] = ()
    """Moves that will not be made."""

    @property
    def wanted(self) -> dict[int, frozenset[int]]:
        """Everything, for newcomers."""
        return dict.fromkeys(self.newcomers, frozenset(range(self.task.blocks)))


def begun(name: str, task: Task, newcomers: int, step: int, late: int = 0) -> Case:
    """The strategy's multicast to all but the last nodes after a step; in node `late`, if there is
    one, after the step before."""
    old = task.nodes - newcomers
    ports = task.fabric.ports[:old]
    schedule = strategy(name)(replace(task, fabric=replace(task.fabric, ports=ports)))
    held = [set(have) for have in schedule.held(step)]
    running = [move for move in schedule.moves if move.step > step]
    for move in schedule.moves:
        if move.step == step and move.dst == late:
            held[late].discard(move.block)
            running.insert(0, move)
    empty = frozenset[int]()
    return Case(
        task,
        (*map(frozenset, held), *(empty for _ in range(newcomers))),
        tuple(running),
        tuple(range(old, task.nodes)),
    )


@st.composite
def cases(draw: st.DrawFn, *, equal: bool = False) -> Case:
    old, newcomers = draw(st.integers(2, 9)), draw(st.integers(1, 7))
    sources = draw(st.integers(1, min(3, old - 1)))
    blocks = draw(st.integers(1, 8))
    nodes = old + newcomers
    if equal:
        fabric = uniform(nodes)
    else:
        rates = st.sampled_from((50.0, 100.0, 200.0))
        racks = st.sampled_from(("", "left", "right"))
        hosts = st.sampled_from(("", "", "one"))
        ports = [Port(draw(rates), draw(rates), draw(racks), draw(hosts)) for _ in range(old)]
        sends = st.sampled_from((0.0, 100.0, 100.0))
        ports += [Port(draw(sends), draw(rates), draw(racks)) for _ in range(newcomers)]
        trunks = {"left": draw(rates)} if draw(st.booleans()) else {}
        fabric = Fabric(tuple(ports), draw(st.sampled_from((0.0, 0.01))), trunks, 400.0)
    chunk = 0 if equal else draw(st.sampled_from((0, 25)))
    task = Task(fabric, (100,) * blocks, tuple(range(sources)), chunk)
    late = draw(st.integers(0, old - 1))
    name, step = draw(st.sampled_from(NAMES)), draw(st.integers(0, blocks + old))
    return begun(name, task, newcomers, step, late if late >= sources else 0)


def checked(case: Case) -> tuple[Move, ...]:
    """The appended moves. Together with the running ones they keep the rules, which is also what
    keeps ports from being used twice, and complete everybody."""
    moves = append(case.held, case.running, case.wanted, case.task)
    assert all(move.dst in case.newcomers for move in moves)
    together = by_step((*case.running, *moves))
    everybody = range(case.task.nodes)
    check_moves(case.held, case.task.blocks, together, everybody, case.task.fabric)
    return moves


@given(cases())
@settings(max_examples=examples(150), deadline=None)
def test_newcomers_complete_and_nobody_else_is_late(case: Case) -> None:
    moves = checked(case)
    alone = arrival_times(case.running, case.task)
    together = arrival_times(by_step((*case.running, *moves)), case.task)
    for key, at in alone.items():
        assert together[key] <= at * (1 + DELAY)


@given(cases(equal=True))
@settings(max_examples=examples(150), deadline=None)
def test_on_equal_links_the_steps_are_bounded(case: Case) -> None:
    moves = checked(case)
    steps = [move.step for move in case.running]
    begin, left = min(steps, default=1), max(steps, default=0) - min(steps, default=1) + 1
    last = max(move.step for move in moves)
    assert last - begin + 1 <= left + case.task.blocks + len(case.newcomers) - 1


@st.composite
def broken(draw: st.DrawFn) -> Case:
    """A multicast over one connection of which nothing more comes. What was to come is wanted."""
    case = draw(cases())
    failed = draw(st.sampled_from(sorted({(m.src, m.dst) for m in case.running}) or [(0, 0)]))
    lost = [move for move in case.running if (move.src, move.dst) == failed]
    return replace(case, running=tuple(m for m in case.running if m not in lost), lost=tuple(lost))


@given(broken())
@settings(max_examples=examples(150), deadline=None)
def test_what_a_broken_connection_was_to_bring_comes_otherwise_and_nobody_waits_in_a_circle(
    case: Case,
) -> None:
    """Every move is made once its sender has the block. So all of them can be made."""
    if not case.lost:
        return
    node = case.lost[0].dst
    wanted = {node: frozenset(move.block for move in case.lost)}
    appended = append(case.held, case.running, wanted, case.task)
    assert sorted(move.block for move in appended) == sorted(wanted[node])
    assert {move.dst for move in appended} == {node}
    have = [set(blocks) for blocks in case.held]
    left = by_step((*case.running, *appended))
    while left:
        made = [move for move in left if move.block in have[move.src]]
        assert made, f"{left} wait for each other"
        for move in made:
            have[move.dst].add(move.block)
        left = [move for move in left if move not in made]
