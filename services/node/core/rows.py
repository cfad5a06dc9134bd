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

    @property
    def has_grammar(self) -> bool:
        """It takes a while to be made ready: see `Prepare`."""
        return bool(self.rules.grammar)


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample the token with this index of its request, after the row's last position; where tokens
    are proposed, after the last one before theirs, and go on as long as they are what is drawn."""

    index: int
    sampling: Sampling
    context: Context | None = None
    """With the draw that ends a prefill, if the request has rules. The stage with the head keeps
    it as long as the sequence's KV and adds what it draws itself: so a decode step carries none of
    it, and a request that is resumed elsewhere, or prefilled again, begins from the same state."""
    proposed: tuple[int, ...] = ()
    """Tokens of the row's last positions (services.node.core.speculation). Those behind the last
    accepted one are taken back by the sequence's next row, which begins there."""


@dataclass(frozen=True, slots=True)
class Score:
    """Give the log probabilities of known tokens, which come after positions of the row that follow
    each other."""

    first: int
    """The first of these positions, counted from the row's first."""
    tokens: tuple[int, ...]
    top: int
    """How many of the most probable tokens are named with each."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's share of a step: `count` positions from `position` on."""

    sequence: SequenceKey
    position: int
    """0 starts the sequence, unless it begins with cached KV; later rows go on where the last one
    ended, or where proposed tokens begin that were not accepted."""
    count: int
    limit: int
    """Most positions the sequence will ever have."""
    tokens: tuple[int, ...] = ()
    """`count` token ids where the batch starts at block 0, else empty."""
    draw: Draw | None = None
    """Set on the row that completes the known tokens; used by the stage with the head."""
    image: bytes = b""
    """What the positions stand for, where the batch starts at block 0: see `Submit.image`."""
    score: Score | None = None
    """Used by the stage with the head, as `draw` is."""

    @property
    def proposed(self) -> int:
        """How many of its positions, the last ones, have proposed tokens."""
        return len(self.draw.proposed) if self.draw else 0

    def kept(self, drawn: int) -> int:
        """How many of its positions, the first ones, stay once so many tokens were drawn."""
        return self.count - self.proposed + max(drawn - 1, 0)
