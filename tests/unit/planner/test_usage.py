"""What one model has had of the devices, and whether it waits in vain."""

from services.planner.core.arbiter import TURN_S
from services.planner.core.usage import PATIENCE_S, Usage


def test_a_model_is_starved_from_a_long_wait_until_its_replica_has_served_a_turn() -> None:
    usage = Usage()
    usage.note(0.0, 0, asked=True, serves=False)
    usage.note(PATIENCE_S - 1, 0, asked=True, serves=False)
    assert not usage.starved(PATIENCE_S - 1)
    assert usage.starved(PATIENCE_S)
    served_at = PATIENCE_S + 5
    usage.note(served_at, 1, asked=True, serves=True)
    assert usage.starved(served_at + TURN_S - 1)
    usage.note(served_at + TURN_S, 1, asked=True, serves=True)
    assert not usage.starved(served_at + TURN_S)


def test_a_wait_begins_anew_when_a_replica_serves_or_nothing_is_asked_for() -> None:
    for asked, serves in ((True, True), (False, False)):
        usage = Usage()
        usage.note(0.0, 0, asked=True, serves=False)
        usage.note(PATIENCE_S - 1, 1, asked=asked, serves=serves)
        usage.note(PATIENCE_S, 0, asked=True, serves=False)
        assert not usage.starved(PATIENCE_S + 1)
