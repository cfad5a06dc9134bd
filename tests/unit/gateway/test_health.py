"""What /health says, by what is there."""

from math import inf

import pytest

from services.gateway.health import FRESH_S, Health

LATE = FRESH_S + 1


@pytest.mark.parametrize(
    ("health", "status", "serves", "missing"),
    [
        (Health(True, 0.0, 0.0, 1, 1, False), "ok", True, None),
        (Health(True, 0.0, 0.0, 1, 0, False), "ok", True, None),
        (Health(True, 0.0, LATE, 0, 0, False), "ok", True, None),
        (Health(True, 0.0, 0.0, 1, 1, True), "draining", True, None),
        (Health(True, LATE, 0.0, 1, 1, False), "degraded", True, "registry"),
        (Health(True, 0.0, LATE, 1, 1, False), "degraded", True, "planner"),
        (Health(True, 0.0, LATE, 1, 0, False), "unavailable", False, "planner"),
        (Health(True, 0.0, inf, 0, 0, False), "unavailable", False, "planner"),
        (Health(True, inf, 0.0, 1, 1, False), "unavailable", False, "registry"),
        (Health(False, 0.0, 0.0, 1, 1, False), "unavailable", False, "bus"),
        (Health(False, LATE, LATE, 1, 1, True), "unavailable", False, "bus, registry, planner"),
    ],
)
def test_health(health: Health, status: str, serves: bool, missing: str | None) -> None:
    page = health.page
    assert (page.status, health.serves) == (status, serves)
    assert page.error == (missing and f"not there: {missing}")
