"""Who runs a model that fits no device: never slower than the cut into stages, by what was
measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.cut import Room, cut, cuts
from services.planner.core.ways import (
    LOCAL_HOP_S,
    REMOTE_HOP_S,
    Decoded,
    Device,
    _sound,
    choose,
    choose_for,
)
from shared.ids import NodeId
from shared.layout import PAGE
from shared.messages.pool import DecodeShape
from shared.parts import Part
from shared.step_costs import GAIN, Shape, StepCosts, decode_s

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=9).map(
    lambda sizes: tuple(size * 100 * PAGE for size in sizes)
)
SHAPES = st.builds(
    DecodeShape,
    layers=st.integers(1, 80),
    heads=st.sampled_from((1, 2, 3, 8)),
    itemsize=st.sampled_from((2, 4)),
    looked_up=st.just(0),
)
SECONDS = st.floats(0, 0.001)
RATES = st.floats(1e7, 1e10)
COSTS = st.lists(
    st.builds(
        StepCosts,
        degree=st.sampled_from((1, 2, 4)),
        bytes_per_s=RATES,
        layer_s=SECONDS,
        step_s=SECONDS,
        devices=st.integers(1, 4),
        int8=st.just(False),
    ),
    max_size=8,
    unique_by=lambda costs: (costs.degree, costs.devices),
).map(tuple)
DEVICES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(1, 30), COSTS), min_size=1, max_size=5
).map(
    lambda found: [
        Device(Room(NodeId(f"n{i}"), host, size * 101 * PAGE), costs)
        for i, (host, size, costs) in enumerate(found)
    ]
)


@given(SIZES, SHAPES, DEVICES)
def test_the_way_has_room_and_is_never_slower_than_stages(
    blocks: tuple[int, ...], shape: DecodeShape, devices: list[Device]
) -> None:
    rooms = [device.room for device in devices]
    found = choose(Decoded(blocks, shape), devices)
    plain = cut(blocks, rooms)
    if found is None:
        assert plain is None
        return
    way = found.way
    assert any((way.parts, way.machine) == (each.parts, each.host) for each in cuts(blocks, rooms))
    if not found.why or way.token_s is None:
        assert (way.parts, way.together) == (plain, False)
        return
    first = cuts(blocks, rooms)[0]
    if first.host and (way.parts, way.machine, way.together) != (first.parts, first.host, False):
        there = [device for device in devices if device.room.host == first.host]
        bare = [
            replace(d, costs=tuple(c for c in _sound(d.costs) if c.devices == 1)) for d in there
        ]
        stages_s = choose_for(Decoded(blocks, shape), bare, first.parts).way.token_s
        assert stages_s is not None
        assert way.token_s * GAIN < stages_s


@given(SIZES, SHAPES, DEVICES)
def test_nothing_is_run_together_that_was_not_measured(
    blocks: tuple[int, ...], shape: DecodeShape, devices: list[Device]
) -> None:
    found = choose(Decoded(blocks, shape), devices)
    if found is None or not found.way.together:
        return
    there = [device for device in devices if device.room.host == found.way.machine]
    count = len(found.way.parts)
    assert count > 1
    assert found.way.machine
    for device in there:
        assert any(
            costs.devices == count and shape.heads % costs.degree == 0 for costs in device.costs
        )


@given(SIZES, SHAPES, DEVICES)
def test_without_a_shape_or_measurements_it_is_the_cut(
    blocks: tuple[int, ...], shape: DecodeShape, devices: list[Device]
) -> None:
    bare = [replace(device, costs=()) for device in devices]
    for model, given_ in ((Decoded(blocks, None), devices), (Decoded(blocks, shape), bare)):
        found = choose(model, given_)
        parts = cut(blocks, [device.room for device in devices])
        assert (found and found.way.parts) == parts
        if found is not None:
            assert not found.way.together
            assert not found.why


@given(st.integers(2, 4), st.integers(2, 80), RATES, RATES, SECONDS, SECONDS, SECONDS, SECONDS)
def test_devices_that_are_alike_take_what_the_formulas_say(
    count: int,
    layers: int,
    rate: float,
    rate_together: float,
    layer_s: float,
    layer_together_s: float,
    step_s: float,
    step_together_s: float,
) -> None:
    """W / r + L m + g c + (g - 1) h, and W / R + L M + g C + (g - 1) h."""
    blocks = (1000 * PAGE,) * (6 * count)
    nbytes = sum(blocks)
    rate = max(rate, rate_together / count)
    costs = (
        StepCosts(1, rate, layer_s, step_s),
        StepCosts(2, rate_together, layer_together_s, step_together_s, count),
        StepCosts(1, rate_together / 10, 1.0, 1.0, count),
    )
    room = 6 * 1001 * PAGE
    devices = [Device(Room(NodeId(f"n{i}"), "m", room), costs) for i in range(count)]
    model = Decoded(blocks, DecodeShape(layers=layers, heads=2, itemsize=4, looked_up=0))
    found = choose(model, devices)
    assert found is not None
    assert [part.size for part in found.way.parts] == [6] * count
    hops_s = (count - 1) * LOCAL_HOP_S
    stages = nbytes / rate + layers * layer_s + count * step_s + hops_s
    together = nbytes / rate_together + layers * layer_together_s + count * step_together_s + hops_s
    assert found.way.token_s is not None
    assert found.way.together == (together * GAIN < stages)
    assert found.way.token_s == pytest.approx(together if found.way.together else stages)
    assert f"{1e3 * found.way.token_s:.3g} ms by {found.way.name}" in found.why


def test_fewer_stages_over_machines_are_taken_only_if_they_are_faster() -> None:
    """One machine has four small devices, of which each reads slowly; two others have a large one
    each."""
    blocks = (1000 * PAGE,) * 8
    small, large = 2 * 1001 * PAGE, 4 * 1001 * PAGE
    shape = DecodeShape(layers=8, heads=4, itemsize=4, looked_up=0)

    def chosen(slow: float, fast: float) -> tuple[str, int]:
        def device(name: str, host: str, room: int, rate: float) -> Device:
            return Device(Room(NodeId(name), host, room), (StepCosts(1, rate, 0.0, 0.0),))

        devices = [device(f"s{i}", "one", small, slow) for i in range(4)]
        devices += [device(f"l{i}", f"other {i}", large, fast) for i in range(2)]
        found = choose(Decoded(blocks, shape), devices)
        assert found is not None
        return found.way.machine, len(found.way.parts)

    read = sum(blocks)
    assert chosen(read / 0.1, read / 0.1) == ("one", 4)
    assert chosen(read / 0.1, read / 0.01) == ("one", 4)  # the slowest of all may be one of the two
    assert REMOTE_HOP_S < 3 * LOCAL_HOP_S
    assert chosen(read / 1e-6, read / 1e-6) == ("", 2)  # hops are all that takes time


@given(COSTS)
def test_devices_together_read_no_faster_than_each_at_once(costs: tuple[StepCosts, ...]) -> None:
    sound = _sound(costs)
    alone = [each.bytes_per_s for each in sound if each.devices == 1]
    for each in sound:
        assert all(each.bytes_per_s <= rate * each.devices * 1.000001 for rate in alone)
    assert [(c.degree, c.devices) for c in sound] == [(c.degree, c.devices) for c in costs]


def test_of_many_machines_few_are_named() -> None:
    costs = (StepCosts(1, 1e6, 0.0, 0.0), StepCosts(1, 2e6, 0.0, 0.0, 2))
    blocks = (1000 * PAGE,) * 4
    devices = [
        Device(Room(NodeId(f"n{i}"), f"m{i // 2}", 2 * 1001 * PAGE), costs) for i in range(40)
    ]
    shape = DecodeShape(layers=2, heads=2, itemsize=4, looked_up=0)
    found = choose(Decoded(blocks, shape), devices)
    assert found is not None
    assert found.way.together
    assert found.why.count(" ms by ") == 2


def test_weights_of_8_bits_are_read_as_such() -> None:
    model = Decoded((1000, 1000), DecodeShape(layers=3, heads=2, itemsize=2, looked_up=400))
    parts = (Part(0, 1), Part(1, 2))
    assert model.shapes(parts, int8=False) == [Shape(1, 600, 2), Shape(2, 1000, 2)]
    assert model.shapes(parts, int8=True) == [Shape(1, 300, 2), Shape(2, 500, 2)]
    assert decode_s(Shape(1, 300, 2), StepCosts(1, 300.0, 0.5, 0.25)) == 1.75
