"""What a batch is made of: one row a sequence, the same from the leader's plan to the engine."""

from dataclasses import dataclass

from shared.messages.serving import LogitRules, Sampling

SequenceKey = str
"""Names a sequence on every stage of its path: `<request>#<attempt>`, and `~<n>` after it was
preempted n times: what is under way for it from before is told apart."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a request's rules need to know: its tokens up to a draw, and the rules themselves."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    """How many of `tokens` are the prompt."""
    stop_ids: tuple[int, ...]
    rules: LogitRules


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token with this index of its request, after the row's last position."""

    index: int
    sampling: Sampling
    context: Context | None = None
    """With the draw that ends a prefill, if the request has rules. The stage with the head keeps
    it as long as the sequence's KV and adds what it draws itself: so a decode step carries none of
    it, and a request that is resumed elsewhere, or prefilled again, begins from the same state."""


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
    image: bytes = b""
    """What the positions stand for, where the batch starts at block 0: see `Submit.image`."""
