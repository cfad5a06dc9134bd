"""What a run has tried, and what it has found."""

import traceback
from collections import Counter
from dataclasses import dataclass, field

FEW = 5
"""So many findings of a kind are shown."""


@dataclass(slots=True)
class Report:
    tried: Counter[str] = field(default_factory=Counter)
    """Inputs, by part."""
    answers: dict[str, Counter[str]] = field(default_factory=dict)
    """What came of them, by part."""
    found: dict[str, list[str]] = field(default_factory=dict)
    """What should not be, by its kind."""

    def ended(self, part: str, how: str) -> None:
        """One input was tried."""
        self.tried[part] += 1
        self.answers.setdefault(part, Counter())[how] += 1

    def find(self, what: str, example: str) -> None:
        self.found.setdefault(what, []).append(example)

    def caught(self, part: str, error: BaseException, example: bytes) -> None:
        """A parser raised what it may not raise."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{part}: {type(error).__name__} at {where.filename}:{where.lineno}"
        self.find(what, f"{error!s:.150} from {example[:150]!r}")

    def lines(self) -> list[str]:
        lines = []
        for part, count in self.tried.items():
            answers = ", ".join(f"{how} {n}" for how, n in self.answers[part].most_common(8))
            lines.append(f"{part:24} {count:>8,} inputs   {answers}")
        for what, examples in self.found.items():
            lines.append(f"FOUND {len(examples)} times: {what}")
            lines += [f"    {example}" for example in examples[:FEW]]
        lines.append(f"{sum(self.tried.values()):,} inputs, {len(self.found)} kinds of findings")
        return lines
