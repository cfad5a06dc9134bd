"""What a model's files say about its vectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.api_error import invalid
from shared.messages.serving import Pooling

POOLING_CONFIG = "pooling.json"
"""What sentence-transformers have as 1_Pooling/config.json."""
_POOLINGS = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
}
_MODE = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class Embeds:
    pooling: Pooling | None
    """None: the model has another than those that nodes know."""
    size: int
    """Numbers in a vector."""
    sizes: frozenset[int]
    """To how many of its first numbers a vector may be cut (Matryoshka; Kusupati et al. 2022)."""

    def cut(self, dimensions: int | None) -> int:
        """How many numbers of a vector a client gets. ApiError 400."""
        if dimensions is None or dimensions == self.size:
            return self.size
        if not self.sizes:
            invalid("dimensions", f"the model's vectors have {self.size} numbers, and no parts")
        if dimensions not in self.sizes:
            least, most = min(self.sizes), max(self.sizes)
            which = (
                f"{least} to {most}"
                if len(self.sizes) == most - least + 1
                else f"one of {', '.join(map(str, sorted(self.sizes)))}"
            )
            invalid("dimensions", f"must be {which}")
        return dimensions


def embeds_of(config: Mapping[str, Any], pooling: Mapping[str, Any]) -> Embeds:
    """From config.json, and sentence-transformers' file about pooling, which may be empty. What
    cannot be understood is as if it were not there: the model may be for text alone."""
    size = config.get("hidden_size")
    size = size if isinstance(size, int) else 0
    modes = [name for name, on in pooling.items() if name.startswith(_MODE) and on is True]
    match modes:
        case []:
            found: Pooling | None = Pooling.LAST
        case [mode]:
            found = _POOLINGS.get(mode)
        case _:
            found = None
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list):
        sizes = frozenset(one for one in given if isinstance(one, int) and 0 < one <= size)
    else:
        sizes = frozenset(range(1, size + 1) if config.get("is_matryoshka") is True else ())
    return Embeds(found, size, sizes)
