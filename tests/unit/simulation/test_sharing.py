"""Shares against a slow oracle, and what every sharing keeps to."""

from collections.abc import Iterable
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from simulation.sharing import Lane, Port, reshare

ENOUGH = 1e-9


@st.composite
def fabrics(draw: st.DrawFn) -> tuple[list[Port], list[Lane]]:
    """Ports of a few nodes and trunks; lanes over two to four of them."""
    rates = draw(st.lists(st.integers(0, 20), min_size=2, max_size=8))
    ports = [Port(f"p{index}", float(rate)) for index, rate in enumerate(rates)]
    lane = st.builds(
        Lane,
        st.lists(st.sampled_from(ports), min_size=1, max_size=4, unique_by=id).map(tuple),
        st.integers(-1, 2),
    )
    return ports, draw(st.lists(lane, max_size=12))


def by_the_book(ports: Iterable[Port], lanes: Iterable[Lane]) -> dict[Lane, Fraction]:
    """Every lane of the class grows at once until a port of it is full."""
    rates: dict[Lane, Fraction] = {}
    left = {port: Fraction(port.rate) for port in ports}
    for priority in sorted({lane.priority for lane in lanes}):
        growing = [lane for lane in lanes if lane.priority == priority]
        rates |= dict.fromkeys(growing, Fraction(0))
        while growing:
            users = {port: sum(port in lane.ports for lane in growing) for port in left}
            step = min(left[port] / count for port, count in users.items() if count)
            for port, count in users.items():
                left[port] -= step * count
            for lane in growing:
                rates[lane] += step
            growing = [lane for lane in growing if all(left[port] for port in lane.ports)]
    return rates


def opened(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.open()
        settle(dict.fromkeys(lane.ports, lane.priority))


def settle(changed: dict[Port, float]) -> None:
    for lane, rate in reshare(changed).items():
        lane.set_rate(rate)


@given(fabrics(), st.data())
def test_rates_are_the_oracles_after_every_change(
    fabric: tuple[list[Port], list[Lane]], data: st.DataObject
) -> None:
    """Though only what a change touches is computed: lanes come and go, ports change."""
    ports, lanes = fabric
    up: list[Lane] = []
    for _ in range(12):
        changed: dict[Port, float] = {}
        for lane in data.draw(st.lists(st.sampled_from(lanes), max_size=3)) if lanes else []:
            if lane in up:
                lane.close()
                up.remove(lane)
            else:
                lane.open()
                up.append(lane)
            for port in lane.ports:
                changed[port] = min(changed.get(port, lane.priority), lane.priority)
        if data.draw(st.booleans()):
            port = data.draw(st.sampled_from(ports))
            port.rate = float(data.draw(st.integers(0, 20)))
            changed[port] = float("-inf")
        settle(changed)
        expected = by_the_book(ports, up)
        assert all(abs(lane.rate - expected[lane]) < ENOUGH for lane in up)


@given(fabrics())
def test_no_port_gives_more_than_it_has_and_none_idles_in_vain(
    fabric: tuple[list[Port], list[Lane]],
) -> None:
    ports, lanes = fabric
    opened(lanes)
    used = {port: sum(lane.rate for lane in port.lanes) for port in ports}
    assert all(used[port] <= port.rate + ENOUGH for port in ports)
    for lane in lanes:
        full = [port for port in lane.ports if used[port] >= port.rate - ENOUGH]
        assert full
        # At one of them nobody has more than this lane, unless at a better priority.
        assert any(
            all(
                other.priority < lane.priority or other.rate <= lane.rate + ENOUGH
                for other in port.lanes
            )
            for port in full
        )


@given(fabrics())
def test_worse_priorities_are_never_noticed(fabric: tuple[list[Port], list[Lane]]) -> None:
    _, lanes = fabric
    best = [lane for lane in lanes if lane.priority <= 0]
    opened(best)
    alone = [lane.rate for lane in best]
    opened(lane for lane in lanes if lane.priority > 0)
    assert [lane.rate for lane in best] == alone


def test_only_what_a_change_touches_is_computed() -> None:
    ports = [Port(f"p{index}", 1.0) for index in range(4)]
    near, urgent, far = Lane((ports[0], ports[1]), 1), Lane((ports[0],), 0), Lane((ports[3],), 1)
    opened([near, urgent, far])
    assert set(reshare({ports[1]: 1})) == {near}
    assert set(reshare({ports[1]: 0})) == {near, urgent}
    assert set(reshare({ports[2]: 0})) == set()


def test_a_share_that_has_grown_waits_for_its_turn() -> None:
    """The lane that is held up at the first port leaves the second more than the third has."""
    ports = [Port("p0", 2.0), Port("p1", 10.0), Port("p2", 12.0)]
    lanes = [Lane((ports[0], ports[1]), 0), Lane((ports[1], ports[2]), 0), Lane((ports[2],), 0)]
    opened(lanes)
    assert [lane.rate for lane in lanes] == [2, 6, 6]
