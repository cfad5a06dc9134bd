"""What a batch is made of: one row a sequence, the same from the leader's plan to the engine."""

from dataclasses import dataclass

from shared.messages.serving import Sampling

SequenceKey = str
"""Names a sequence on every stage of its path: `<request>#<attempt>`, and `~<n>` after it was
preempted n times: what is under way for it from before is told apart."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token with this index of its request, after the row's last position."""

    index: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's share of a step: `count` positions from `position` on."""

    sequence: SequenceKey
    position: int
    """0 starts the sequence, unless it begins with cached KV; later rows go on where the last one
    ended."""
    count: int
    limit: int
    """Most positions the sequence will ever have."""
    tokens: tuple[int, ...] = ()
    """`count` token ids where the batch starts at block 0, else empty."""
    draw: Draw | None = None
    """Set on the row that completes the known tokens; used by the stage with the head."""
