"""The parts of a batch: one row for each sequence, the same from the leader's plan to the
engine. They are structures of msgspec, which are made several times as fast as dataclasses."""

import msgspec

from shared.ids import NO_ADAPTER, ModelId
from shared.messages.serving import LogitRules, Pooling, Sampling

SequenceKey = str
"""The name of a sequence on every stage of its path: `<request>#<attempt>`, with `~<n>` once it
began anew n times. So messages that were under way before are told apart."""


def request_of(key: SequenceKey) -> str:
    return key.partition("#")[0]


def attempt_of(key: SequenceKey) -> str:
    """The key that the sequence had first."""
    return key.partition("~")[0]


class Context(msgspec.Struct, frozen=True):
    """What a request's rules need to know: its tokens up to a draw, and the rules themselves."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    """How many of `tokens` are the prompt."""
    stop_ids: tuple[int, ...]
    rules: LogitRules

    @property
    def has_grammar(self) -> bool:
        """Whether the rules have a grammar, which takes a while to make: see `Prepare`."""
        return bool(self.rules.grammar)


class Draw(msgspec.Struct, frozen=True):
    """Draw the token with this index of its request, after the row's last position. If tokens are
    proposed, draw first after the position before theirs, and go on as long as the proposed tokens
    are the ones drawn."""

    index: int
    sampling: Sampling
    context: Context | None = None
    """Set on the draw that ends a prefill, if the request has rules. The stage with the head keeps
    it as long as the sequence's KV, and adds the tokens it draws itself. So a decode step carries
    none of it, and a request that is resumed elsewhere, or prefilled again, begins from the same
    state."""
    proposed: tuple[int, ...] = ()
    """Proposed tokens at the row's last positions (services.node.core.speculation). The sequence's
    next row takes back the tokens behind the last accepted one, since it begins there."""


class Score(msgspec.Struct, frozen=True):
    """Give the log probabilities of known tokens, which come after consecutive positions of the
    row."""

    first: int
    """The first of these positions, counted from the row's first position."""
    tokens: tuple[int, ...]
    top: int
    """How many of the most probable tokens are reported with each."""


class Row(msgspec.Struct, frozen=True):
    """The part of a sequence in one step: `count` positions from `position` on."""

    sequence: SequenceKey
    position: int
    """0 starts the sequence, unless it begins with cached KV. Later rows continue where the last
    row ended, or at the first proposed token that was not accepted."""
    count: int
    limit: int
    """The most positions that the sequence will ever have."""
    tokens: tuple[int, ...] = ()
    """`count` token ids if the batch starts at block 0, else empty."""
    draw: Draw | None = None
    """Set on the row that completes the known tokens; used by the stage with the head."""
    image: bytes = b""
    """The image at these positions, if the batch starts at block 0: see `Submit.image`."""
    score: Score | None = None
    """Used by the stage with the head, like `draw`."""
    pooling: Pooling | None = None
    """Set on the rows whose positions the sequence's vector is made of; used by the stage with the
    head. The row that ends at `limit` completes the vector."""

    adapter: ModelId = NO_ADAPTER
    """The adapter with which the sequence is computed; empty: none."""

    @property
    def gives_vector(self) -> bool:
        return self.pooling is not None and self.position + self.count == self.limit

    @property
    def proposed(self) -> int:
        """The number of its last positions that hold proposed tokens."""
        return len(self.draw.proposed) if self.draw else 0

    def kept(self, drawn: int) -> int:
        """The number of its first positions that stay, once `drawn` tokens were drawn."""
        return self.count - self.proposed + max(drawn - 1, 0)
