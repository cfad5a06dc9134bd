"""The moving picture of an event: what the record says, in a form that browsers play."""

from itertools import pairwise
from xml.etree import ElementTree

import msgspec
import pytest

from shared.ids import InstanceId, NodeId
from shared.messages.chronicle import Arrival, Served
from shared.messages.scaling import EventRecord
from tests.support.event_animation import ROW, Event, draw, title
from tests.support.samples import recorded

SVG = "{http://www.w3.org/2000/svg}"
A, B, C = NodeId("node-0"), NodeId("node-1"), NodeId("node-2")
S = 10**9


@pytest.fixture(scope="module")
def event() -> Event:
    """A gives two blocks to B, which passes them on to C."""
    record = msgspec.msgpack.decode(recorded()["stored event"], type=EventRecord)
    actual = msgspec.structs.replace(record.actual, first_partial_token_s=1.25)
    return Event(
        msgspec.structs.replace(
            record, sources=(A,), n_blocks=2, decided_ns=100 * S, actual=actual
        ),
        [
            Arrival(B, 0, A, "tcp", 100 * S, 100 * S, 101 * S, 101 * S),
            Arrival(B, 1, A, "tcp", 101 * S, 101 * S, 102 * S, 102 * S),
            Arrival(C, 0, B, "tcp", 101 * S, 101 * S, 102 * S, 102 * S),
            Arrival(C, 1, B, "tcp", 102 * S, 102 * S, 103 * S, 104 * S),
        ],
        [Served(instance=InstanceId("path-1"), stages=((B, 0, 1), (A, 1, 2)), began_ns=101 * S)],
    )


def test_blocks_fly_from_who_sent_them_when_they_did(event: Event) -> None:
    root = ElementTree.fromstring(draw(event))
    flights = root.findall(f".//{SVG}animateTransform")
    assert len(flights) == len(event.arrivals)
    begun = [float(str(flight.get("keyTimes")).split(";")[1]) for flight in flights]
    assert begun == [event.share(s) for s in (0, 1, 1, 2)]
    assert {str(flight.get("values")).split(";")[0] for flight in flights} == {f"0 {-ROW}"}


def test_every_movement_is_one_that_browsers_play(event: Event) -> None:
    """They ignore one whose times are not as many as its values, or do not rise from 0 to 1."""
    root = ElementTree.fromstring(draw(event))
    moving = [*root.iter(f"{SVG}animate"), *root.iter(f"{SVG}animateTransform")]
    assert moving
    for found in moving:
        times = [float(time) for time in str(found.get("keyTimes")).split(";")]
        assert len(times) == len(str(found.get("values")).split(";"))
        assert times[0] == 0
        assert times[-1] <= 1
        assert all(one <= other for one, other in pairwise(times))
        assert found.get("calcMode") == "discrete" or times[-1] == 1


def test_what_stands_still_is_the_end(event: Event) -> None:
    root = ElementTree.fromstring(draw(event))
    shown = [group for group in root.iter(f"{SVG}g") if group.get("opacity") != "0"]
    words = [text.text for group in shown for text in group.iter(f"{SVG}text")]
    assert words.count("serves alone") == 2
    assert words.count("1") == 3
    hidden = [group for group in root.iter(f"{SVG}g") if group.get("opacity") == "0"]
    assert [text.text for group in hidden for text in group.iter(f"{SVG}text")] == [
        "loads",
        "serves while it loads",
        "loads",
    ]


def test_the_title_has_the_numbers(event: Event) -> None:
    assert title(event) == "1 node scales to 3 in 4.0 s; nodes that still load answer after 1.2 s"
