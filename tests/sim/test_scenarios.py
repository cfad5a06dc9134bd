"""Seeds of faults: whatever goes wrong, what must hold holds (`simulation/invariants.py`).

`python -m simulation.seeds` plays more; one that fails is replayed by `python -m simulation.chaos`.
"""

import pytest

from simulation import seeds
from simulation.chaos import play
from simulation.scenario import scenario
from tests.support.amounts import cases


@pytest.mark.parametrize("seed", cases([1, 2, 4, 5, 7], thorough=range(100)))
def test_invariants_hold(seed: int) -> None:
    played = scenario(seed)
    violations = play(played).violations
    assert not violations, "\n".join((*played.in_words(), *violations))


def test_a_seed_is_a_scenario() -> None:
    assert scenario(5) == scenario(5) != scenario(6)


def test_many_seeds_and_those_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {8: ("2.0 s: this is wrong", "3.0 s: this, too")}
    monkeypatch.setattr(seeds, "played", lambda all_, _: ((s, found.get(s, ())) for s in all_))
    assert seeds.main(["3", "--first", "7"]) == 1
    said = capsys.readouterr().out
    assert (
        "seed 8: 2.0 s: this is wrong\n  and 1 more; to replay: python -m simulation.chaos 8"
        in said
    )
    assert "3 seeds from 7 on" in said
    assert "1 bad" in said
    assert seeds.main(["3"]) == 0


def test_seeds_are_played_by_processes() -> None:
    assert list(seeds.played([5], 1)) == [(5, ())]
