"""Reports of blocks that the planner takes in together leave what each by itself would."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.fleet import PACE_S
from services.planner.core.stimuli import Together
from tests.unit.planner.driver import EVERY, Driver
from tests.unit.planner.scripted import MODEL
from tests.unit.planner.test_core import loading

TARGETS = ("b", "c")
reports = st.lists(
    st.tuples(
        st.sampled_from((*TARGETS, "elsewhere")),
        st.dictionaries(st.sampled_from(EVERY), st.sampled_from((0.0, 0.2)), min_size=1),
    ),
    min_size=1,
    max_size=8,
)


def after(said: list[tuple[str, dict[int, float]]], cuts: list[int]) -> object:
    """What is known after these reports. Those between two cuts come together."""
    driver = loading(*TARGETS)
    event = driver.event
    driver.wait(1.0)
    messages = [driver.report(node, blocks, event) for node, blocks in said]
    for start, stop in pairwise([0, *cuts, len(messages)]):
        if together := messages[start:stop]:
            driver.feed(Together(event.id, together))
    driver.think()
    driver.wait(4 * PACE_S)
    return known(driver)


def known(driver: Driver) -> object:
    record = driver.event
    cluster = driver.core._cluster
    return (
        record.state,
        record.bytes_moved,
        record.last,
        record.history,
        (record.actual.asked_s, record.actual.first_byte_s),
        (record.actual.last_block_s, record.actual.ready_s),
        # When the first was complete is taken from the report of its last block. Of several reports
        # that come together the latest block counts, in whatever order they name them.
        record.actual.first_complete_s is None,
        driver.core.event(record.id, 0).arrivals,
        {node: cluster.executable(node, MODEL) for node in cluster.nodes},
        driver.replicas(),
    )


@given(said=reports, data=st.data())
def test_reports_that_come_together_leave_what_each_by_itself_would(
    said: list[tuple[str, dict[int, float]]], data: st.DataObject
) -> None:
    every = list(range(1, len(said)))
    some = data.draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    assert after(said, sorted(some)) == after(said, every)
