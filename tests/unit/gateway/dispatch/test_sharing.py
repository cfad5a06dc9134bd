"""A node that loads beside a replica begins prompts that wait there."""

import pytest

from services.gateway.core.routes import PROMPTS_AHEAD
from tests.unit.gateway.dispatch.builders import Driver, emitted, sent, withdrawn
from tests.unit.gateway.support import path, replica

HALF = PROMPTS_AHEAD // 2


def test_what_waits_for_a_replica_begins_where_the_model_is_being_loaded() -> None:
    driver = Driver(replica(1))
    assert len(sent(driver.admit("a", "b", "c", prompt=HALF))) == 2
    commands = driver.publish(replica(1), path(2, 1))
    assert sent(commands) == [("b", "path-2-1", 2), ("c", "path-2-1", 1)]
    assert withdrawn(driver.take("b", 2)) == [("node-1", 1)]
    assert emitted(driver.give("a", 1, 0))
    assert emitted(driver.give("b", 2, 0))


@pytest.mark.parametrize("prompt", [HALF // 2, HALF - 1])
def test_what_the_replica_runs_or_soon_will_stays(prompt: int) -> None:
    driver = Driver(replica(1))
    driver.admit("a", "b", prompt=prompt)
    assert sent(driver.publish(replica(1), path(2, 1))) == []


def test_other_paths_share_nothing() -> None:
    driver = Driver(replica(1))
    driver.admit("a", "b", prompt=HALF)
    assert sent(driver.publish(replica(1), path(2, 3), path(1, 2), path(2, 3, 1))) == []


def test_what_has_its_first_token_stays() -> None:
    driver = Driver(replica(1))
    driver.admit("a", "b", prompt=HALF)
    driver.give("b", 1, 0)
    assert sent(driver.publish(replica(1), path(2, 1))) == []
