"""What a model's files say about its vectors."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from services.gateway.api_error import invalid
from shared.errors import LambdaScaleError
from shared.messages.serving import Pooling
from shared.vectors import is_encoder, vector_rule


@dataclass(frozen=True, slots=True)
class Embeds:
    pooling: Pooling | None
    """None: the model has another than those that nodes know."""
    normalized: bool
    """Whether its vectors have the length 1, unless a request says otherwise."""
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


def embeds_of(config: Mapping[str, Any], files: Mapping[str, bytes]) -> Embeds:
    """From config.json and sentence-transformers' files. What cannot be understood is as if it were
    not there: the model may be for text alone."""
    size = config.get("hidden_size")
    size = size if isinstance(size, int) else 0
    pooling: Pooling | None = None
    normalized = True
    with suppress(LambdaScaleError):
        rule = vector_rule(files, encoder=is_encoder(config))
        pooling, normalized = rule.pooling, rule.normalized
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list):
        sizes = frozenset(one for one in given if isinstance(one, int) and 0 < one <= size)
    else:
        sizes = frozenset(range(1, size + 1) if config.get("is_matryoshka") is True else ())
    return Embeds(pooling, normalized, size, sizes)
