"""Memory without an owner is freed once it has stood still for long enough."""

from services.planner.core.strays import Strays
from shared.ids import ModelId, NodeId

COPY = (NodeId("a"), ModelId("m"))
OTHER = (NodeId("b"), ModelId("m"))


def held(*blocks: int) -> frozenset[int]:
    return frozenset(blocks)


def test_a_stray_that_stands_still_is_due_once() -> None:
    strays = Strays(10.0)
    assert strays.look({COPY: held(0)}, 0.0) == []
    assert strays.look({COPY: held(0), OTHER: held()}, 9.9) == []
    assert strays.look({COPY: held(0), OTHER: held()}, 10.0) == [COPY]
    assert strays.look({COPY: held(0), OTHER: held()}, 10.1) == []
    assert strays.look({COPY: held(0), OTHER: held()}, 20.1) == [COPY, OTHER]


def test_a_copy_that_grows_is_left_alone() -> None:
    strays = Strays(10.0)
    for at in range(0, 60, 6):
        assert strays.look({COPY: held(*range(at))}, float(at)) == []


def test_one_that_found_an_owner_in_between_begins_anew() -> None:
    strays = Strays(10.0)
    strays.look({COPY: held(0)}, 0.0)
    strays.look({}, 5.0)
    assert strays.look({COPY: held(0)}, 12.0) == []


def test_no_patience() -> None:
    assert Strays(0.0).look({COPY: held()}, 0.0) == [COPY]
