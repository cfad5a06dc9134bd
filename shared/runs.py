"""Numbers in words."""

from collections.abc import Sequence


def runs(numbers: Sequence[int]) -> str:
    """Runs of numbers, such as `0-3,7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in found)
