"""How many nodes are wanted."""

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.census import Census, wanted_nodes
from shared.ids import ModelName

ROOM = 100
ROOMS = (10, ROOM, ROOM)


def model(name: str, wanted: int, nbytes: int) -> Census:
    return Census(
        model=ModelName(name),
        wanted=wanted,
        complete=0,
        loading=0,
        scaling=False,
        waits=False,
        nbytes=nbytes,
    )


def test_replicas_of_a_model_have_nodes_of_their_own_and_models_share_nodes() -> None:
    assert wanted_nodes([], ROOMS) == 0
    assert wanted_nodes([model("a", 3, 10)], ROOMS) == 3
    assert wanted_nodes([model("a", 2, 60), model("b", 2, 40), model("c", 1, 1)], ROOMS) == 3
    assert wanted_nodes([model("a", 2, 60), model("b", 2, 50)], ROOMS) == 4
    assert wanted_nodes([model("idle", 0, 10)], ROOMS) == 0


def test_large_models_come_first_and_small_models_fill_what_is_left() -> None:
    models = [model("a", 1, 40), model("b", 1, 60), model("c", 1, 40), model("d", 1, 60)]
    assert wanted_nodes(models, ROOMS) == 2


def test_a_model_that_fits_no_node_takes_several_for_each_replica() -> None:
    assert wanted_nodes([model("large", 2, 101)], ROOMS) == 4
    assert wanted_nodes([model("large", 1, 101), model("small", 2, 40)], ROOMS) == 2


def test_without_nodes_the_first_is_wanted_if_anything_is() -> None:
    assert wanted_nodes([], ()) == 0
    assert wanted_nodes([model("idle", 0, 10)], ()) == 0
    assert wanted_nodes([model("a", 3, 10), model("b", 1, 10)], ()) == 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, ROOM)), max_size=12))
def test_it_lies_between_what_must_be_and_a_node_for_each(drawn: list[tuple[int, int]]) -> None:
    models = [model(f"m{n}", wanted, nbytes) for n, (wanted, nbytes) in enumerate(drawn)]
    found = wanted_nodes(models, ROOMS)
    most_of_one = max((wanted for wanted, _ in drawn), default=0)
    by_bytes = -(-sum(wanted * nbytes for wanted, nbytes in drawn) // ROOM)
    assert max(most_of_one, by_bytes) <= found <= sum(wanted for wanted, _ in drawn)
    # First fit leaves no two nodes that are half empty, but for a model that needs both.
    assert found <= max(most_of_one, 2 * by_bytes + most_of_one)
