"""How many processes run a model: never more than pay, by the costs that are given."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.node.core.degrees import MOST, Choice, choose, degrees_for
from shared.step_costs import GAIN, Shape, StepCosts, decode_s

seconds = st.floats(0, 0.01)
rates = st.floats(1e8, 1e12)
shapes = st.builds(
    Shape, layers=st.integers(1, 200), nbytes=st.integers(0, 1 << 38), heads=st.integers(1, 64)
)


@st.composite
def measurements(draw: st.DrawFn) -> list[StepCosts]:
    degrees = (1, *degrees_for(draw(st.integers(1, 64))))
    made = [StepCosts(degree, draw(rates), draw(seconds), draw(seconds)) for degree in degrees]
    return draw(st.permutations(made))


def chosen(shape: Shape, measured: list[StepCosts]) -> StepCosts:
    degree = choose(shape, measured).degree
    return next(costs for costs in measured if costs.degree == degree)


@given(shapes, measurements())
def test_the_choice_divides_the_heads_and_is_never_slower_than_one_process(
    shape: Shape, measured: list[StepCosts]
) -> None:
    costs = chosen(shape, measured)
    assert shape.heads % costs.degree == 0
    alone = next(each for each in measured if each.degree == 1)
    assert costs == alone or decode_s(shape, costs) * GAIN < decode_s(shape, alone)


@given(shapes, measurements())
def test_no_other_degree_is_clearly_faster(shape: Shape, measured: list[StepCosts]) -> None:
    costs = chosen(shape, measured)
    for other in measured:
        if shape.heads % other.degree == 0 and other.degree > costs.degree:
            assert decode_s(shape, other) * GAIN >= decode_s(shape, costs)


@given(shapes, measurements())
def test_the_order_of_what_was_measured_is_no_matter(
    shape: Shape, measured: list[StepCosts]
) -> None:
    assert choose(shape, measured) == choose(shape, measured[::-1])


@given(shapes, rates, seconds, seconds, st.floats(1, 100), seconds, seconds, st.integers(2, 1000))
def test_what_only_reads_faster_pays_for_larger_models(
    shape: Shape,
    rate: float,
    layer_s: float,
    step_s: float,
    times: float,
    more_layer_s: float,
    more_step_s: float,
    larger: int,
) -> None:
    alone = StepCosts(1, rate, layer_s, step_s)
    two = StepCosts(2, rate * times, layer_s + more_layer_s, step_s + more_step_s)
    if chosen(shape, [alone, two]) == two:
        assert chosen(replace(shape, nbytes=larger * shape.nbytes), [alone, two]) == two


@given(st.integers(1, 1024))
def test_each_process_has_a_thread(threads: int) -> None:
    degrees = degrees_for(threads)
    assert all(1 < degree <= min(threads, MOST) for degree in degrees)
    assert list(degrees) == sorted(set(degrees))
    assert not degrees if threads == 1 else degrees[0] == 2


def test_a_model_that_one_process_runs_says_why() -> None:
    fast = [StepCosts(1, 1e9, 0, 0), StepCosts(2, 2e9, 0, 0)]
    assert choose(Shape(2, 1 << 30, 2, "it is so"), fast) == Choice(1, "it is so")
    assert choose(Shape(2, 1 << 30, 1), fast).why.startswith("it has 1 KV head, ")
    divided = choose(Shape(2, 10**9, 2), fast)
    assert divided.degree == 2
    assert divided.why.endswith("1e+03 ms with 1, 500 ms with 2")


@given(shapes, measurements(), st.integers(1, 8))
def test_what_is_left_after_a_loss_is_chosen_by_the_same_costs(
    shape: Shape, measured: list[StepCosts], most: int
) -> None:
    left = [costs for costs in measured if costs.degree <= most]
    choice = choose(shape, left, "a rank ended")
    assert choice.degree == choose(shape, left).degree
    if len(left) == 1 and not shape.alone:
        assert choice == Choice(1, "no others are left, since a rank ended")
