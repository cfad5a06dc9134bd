import pytest
import torch

from services.node.engine.rope import Rotations, rotations

FREQUENCIES = 1.0 / 10_000 ** (torch.arange(0, 24, 2) / 24)


@pytest.mark.parametrize("asked", [[1], [5, 1500], [1024, 1025, 5000, 3], [5000]])
def test_rotations_of_a_position_have_the_same_bits_whenever_they_were_asked_for(
    asked: list[int],
) -> None:
    kept = Rotations(FREQUENCIES)
    before = [kept.until(stop) for stop in asked]
    whole = Rotations(FREQUENCIES).until(5000)
    for stop, made in zip(asked, before, strict=True):
        for own, other in zip(made, whole, strict=True):
            both = min(len(own), len(other))
            assert stop <= both
            assert torch.equal(own[:both], other[:both])


def test_rotations_are_those_of_the_positions() -> None:
    positions = torch.tensor([0, 1, 2, 1023, 1024, 2999])
    made = Rotations(FREQUENCIES).until(3000)
    for own, expected in zip(made, rotations(positions, FREQUENCIES), strict=True):
        torch.testing.assert_close(own[positions], expected.squeeze(1))
