"""Seeds of faults: whatever goes wrong, what must hold holds (`simulation/invariants.py`).

`LS_SIM_SEEDS=0-999` runs those seeds instead; one that fails is replayed by
`python -m simulation.chaos SEED`.
"""

import os

import pytest

from simulation.chaos import play
from simulation.scenario import scenario

FEW = "0-39"


def seeds(given: str) -> range:
    first, _, last = given.partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.parametrize("seed", seeds(os.environ.get("LS_SIM_SEEDS", FEW)))
def test_invariants_hold(seed: int) -> None:
    played = scenario(seed)
    violations = play(played).violations
    assert not violations, "\n".join((*played.in_words(), *violations))


def test_a_seed_is_a_scenario() -> None:
    assert scenario(5) == scenario(5) != scenario(6)
