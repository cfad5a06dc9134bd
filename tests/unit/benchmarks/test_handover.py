"""What `benchmarks.handover` says of moves."""

import pytest

from benchmarks.handover import Move, report

COPIED = Move(prefill_s=1.0, step_s=0.01, moved_s=0.5, pause_s=0.01, left=8, copied=True)
COMPUTED = Move(prefill_s=1.0, step_s=0.01, moved_s=0.9, pause_s=0.01, left=2049, copied=False)
LATE = Move(prefill_s=1.0, step_s=0.01, moved_s=1.1, pause_s=0.01, left=8, copied=True)


def test_moves_without_kv_are_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    found = {("early", 2048): [COPIED, COMPUTED, COMPUTED], ("never", 2048): [COMPUTED]}
    assert report(found, 1000.0) == 0
    out = capsys.readouterr().out
    assert "KV was used in 1 of 3 moves, and computed anew in the others: not judged" in out
    assert "bar:" not in out


@pytest.mark.parametrize(("move", "code", "said"), [(COPIED, 0, ": met"), (LATE, 1, ": NOT met")])
def test_moves_with_kv_are(
    move: Move, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report({("always", 2048): [move, move]}, 1000.0) == code
    assert said in capsys.readouterr().out
