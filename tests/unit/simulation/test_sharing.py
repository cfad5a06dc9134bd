"""Shares against a slow oracle, and what every sharing keeps to."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.transport.pacing import SERVING_FLOW, parts
from simulation.sharing import Lane, Port, reshare

ENOUGH = 1e-9


@st.composite
def fabrics(draw: st.DrawFn, flows: Sequence[str] = "f") -> tuple[list[Port], list[Lane]]:
    """Ports of a few nodes and trunks; lanes over up to four of them. `flows`: their names."""
    rates = draw(st.lists(st.integers(0, 20), min_size=2, max_size=8))
    ports = [Port(f"p{index}", float(rate)) for index, rate in enumerate(rates)]
    lane = st.builds(
        Lane,
        st.lists(st.sampled_from(ports), min_size=1, max_size=4, unique_by=id).map(tuple),
        st.integers(-1, 2),
        st.sampled_from(flows),
    )
    return ports, draw(st.lists(lane, max_size=12))


def by_the_book(ports: Iterable[Port], lanes: Iterable[Lane]) -> dict[Lane, Fraction]:
    """Messages first. Where flows meet, directly or not, they grow evenly; a flow alone grows by
    priorities."""
    left = {port: Fraction(port.rate) for port in ports}
    rates: dict[Lane, Fraction] = {}
    by_priority([lane for lane in lanes if lane.priority < 0], left, rates)
    rest = [lane for lane in lanes if lane.priority >= 0]
    while rest:
        met = [rest[0]]
        while more := [
            lane
            for lane in rest
            if lane not in met and any({*lane.ports} & {*other.ports} for other in met)
        ]:
            met += more
        rest = [lane for lane in rest if lane not in met]
        several = len({lane.flow for lane in met}) > 1
        (by_flow if several else by_priority)(met, left, rates)
    return rates


def by_priority(
    lanes: Collection[Lane], left: dict[Port, Fraction], rates: dict[Lane, Fraction]
) -> None:
    """Every lane of the class grows at once until a port of it is full."""
    for priority in sorted({lane.priority for lane in lanes}):
        growing = [lane for lane in lanes if lane.priority == priority]
        rates |= dict.fromkeys(growing, Fraction(0))
        while growing:
            grow(dict.fromkeys(growing, Fraction(1)), left, rates)
            growing = [lane for lane in growing if all(left[port] for port in lane.ports)]


def by_flow(
    lanes: Collection[Lane], left: dict[Port, Fraction], rates: dict[Lane, Fraction]
) -> None:
    """Lanes grow whose flow has no better one at any of their ports that still grows."""
    rates |= dict.fromkeys(lanes, Fraction(0))
    waiting = [lane for lane in lanes if all(left[port] for port in lane.ports)]
    while waiting:
        best = [
            lane
            for lane in waiting
            if not any(
                other.flow == lane.flow
                and other.priority < lane.priority
                and {*other.ports} & {*lane.ports}
                for other in waiting
            )
        ]
        speeds = {
            lane: parts(lane.flow)
            * min(
                Fraction(1, sum(o.flow == lane.flow and port in o.ports for o in best))
                for port in lane.ports
            )
            for lane in best
        }
        grow(speeds, left, rates)
        waiting = [lane for lane in waiting if all(left[port] for port in lane.ports)]


def grow(
    speeds: Mapping[Lane, Fraction], left: dict[Port, Fraction], rates: dict[Lane, Fraction]
) -> None:
    """Until the first port is full."""
    taken = {port: sum(s for lane, s in speeds.items() if port in lane.ports) for port in left}
    step = min(left[port] / speed for port, speed in taken.items() if speed)
    for port, speed in taken.items():
        left[port] -= step * speed
    for lane, speed in speeds.items():
        rates[lane] += step * speed


def opened(lanes: Iterable[Lane]) -> None:
    for lane in lanes:
        lane.open()
        settle(dict.fromkeys(lane.ports, min(lane.priority, 0)))


def settle(changed: dict[Port, float]) -> None:
    for lane, rate in reshare(changed).items():
        lane.set_rate(rate)


@given(fabrics("f") | fabrics(("f", "g", SERVING_FLOW)), st.data())
def test_rates_are_the_oracles_after_every_change(
    fabric: tuple[list[Port], list[Lane]], data: st.DataObject
) -> None:
    """Though only what a change touches is computed: lanes come and go, ports change."""
    ports, lanes = fabric
    up: list[Lane] = []
    for _ in range(12):
        changed: dict[Port, float] = {}
        for lane in data.draw(st.lists(st.sampled_from(lanes), max_size=3)) if lanes else []:
            several = len({each.flow for each in [*up, lane] if each.priority >= 0}) > 1
            concerns = min(lane.priority, 0) if several else lane.priority
            if lane in up:
                lane.close()
                up.remove(lane)
            else:
                lane.open()
                up.append(lane)
            for port in lane.ports:
                changed[port] = min(changed.get(port, concerns), concerns)
        if data.draw(st.booleans()):
            port = data.draw(st.sampled_from(ports))
            port.rate = float(data.draw(st.integers(0, 20)))
            changed[port] = float("-inf")
        settle(changed)
        expected = by_the_book(ports, up)
        assert all(abs(lane.rate - expected[lane]) < ENOUGH for lane in up)


def test_a_lane_that_does_not_grow_is_before_worse_ones_of_its_flow() -> None:
    """At every port, also behind the first at which it is held up itself."""
    one, two = Port("one", 1.0), Port("two", 1.0)
    best, worst = Lane((one,), 0, "g"), Lane((two,), 2, "g")
    between, other = Lane((one, two), 1, "g"), Lane((two,), 0, "f")
    opened([best, worst, between, other])
    settle({one: float("-inf"), two: float("-inf")})
    assert [lane.rate for lane in (best, worst, between, other)] == [1.0, 0.0, 0.0, 1.0]


@given(fabrics("fgh"))
def test_no_flow_has_less_of_a_port_than_its_share(
    fabric: tuple[list[Port], list[Lane]],
) -> None:
    """A lane is the best of its flow everywhere and alone in it: at one of its ports nobody else
    can give way, because every other flow has no more than it has."""
    ports, lanes = fabric
    opened(lanes)
    used = {port: sum(lane.rate for lane in port.lanes) for port in ports}
    assert all(used[port] <= port.rate + ENOUGH for port in ports)
    for lane in lanes:
        full = [port for port in lane.ports if used[port] >= port.rate - ENOUGH]
        assert full
        alone = all(
            other is lane or other.flow != lane.flow for p in lane.ports for other in p.lanes
        )
        if lane.priority >= 0 and alone:
            assert any(
                sum(o.rate for o in port.lanes if o.flow == flow and o.priority >= 0)
                <= lane.rate + ENOUGH
                for port in full
                for flow in [busiest(port)]
            )


def busiest(port: Port) -> str:
    """The flow that has most of it, messages aside."""
    rates: dict[str, float] = {}
    for lane in port.lanes:
        if lane.priority >= 0:
            rates[lane.flow] = rates.get(lane.flow, 0.0) + lane.rate
    return max(rates, key=rates.__getitem__)


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


def test_flows_share_a_port_evenly_whatever_their_priorities_and_lanes() -> None:
    out, one, other = Port("out", 12.0), Port("one", 12.0), Port("other", 12.0)
    far = Lane((out, one), 7, "model")
    near = [Lane((out, one), 0, "second"), Lane((out, other), 0, "second")]
    opened([far, *near])
    assert [lane.rate for lane in (far, *near)] == [6, 3, 3]


def test_kv_gets_nine_tenths_beside_the_weights_of_a_model() -> None:
    out, one = Port("out", 20.0), Port("one", 20.0)
    lanes = [Lane((out, one), 0, SERVING_FLOW), Lane((out,), 1, "model")]
    opened(lanes)
    assert [lane.rate for lane in lanes] == pytest.approx([18, 2])


def test_what_one_flow_cannot_use_another_does() -> None:
    out, slow, fast = Port("out", 12.0), Port("slow", 2.0), Port("fast", 12.0)
    lanes = [
        Lane((out, slow), 0, "kv"),
        Lane((out, fast), 3, "model"),
        Lane((out, fast), 4, "model"),
    ]
    opened(lanes)
    assert [lane.rate for lane in lanes] == [2, 10, 0]
