"""Speculative decoding by prompt lookup: tokens that followed before are proposed to follow again.

Answers often repeat their prompt, or themselves. So the longest n-gram that ends a sequence's
tokens, and that occurred before, is looked up, and the tokens that followed it then are proposed
(Saxena 2023, "Prompt Lookup Decoding"; no draft model is needed). The next step runs them behind
the token that is due, draws after each position, and accepts the drawn tokens up to the first that
was not proposed (Leviathan et al. 2023, section 2). A draw depends on its logits, seed and index
alone. So the tokens are exactly those of decoding one by one; only their number in a step differs.

A decode step is bound by reading the weights, so a few more positions cost next to nothing. Under
load that no longer holds, so proposals only fill a step up to STEP_POSITIONS. The number proposed
for a sequence grows while all of it is accepted. When nothing was accepted, the sequence pauses,
twice as long each time.
"""

SIZES = (4, 3, 2)
"""Lengths of the n-grams that are looked up, the longest first."""
FIRST = 3
"""Tokens proposed at first: products have a multiple of four rows anyway (engine/attention.py)."""
LONGEST_PAUSE = 63
"""In steps."""
STEP_POSITIONS = 16
"""A step in which anything is proposed has at most this many positions."""
LEARNT_A_STEP = 1024
"""Tokens that a step learns, at 2 us each: a long prompt is learnt while it is prefilled, so it
holds up no step."""


class Lookup:
    """Where each n-gram of a sequence's tokens last occurred, before its end. O(1) for each
    token."""

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` belong to the caller, and grow at their end."""
        self._tokens = tokens
        self._learnt = 0
        self._after: dict[tuple[int, ...], int] = {}
        """The position after the last occurrence of an n-gram."""

    def learn(self) -> None:
        """Learns the next tokens, LEARNT_A_STEP at most."""
        stop = min(self._learnt + LEARNT_A_STEP, len(self._tokens))
        for at in range(self._learnt, stop):
            for size in SIZES:
                if size <= at:
                    self._after[tuple(self._tokens[at - size : at])] = at
        self._learnt = stop

    def propose(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens. None if no n-gram at the end occurred before, or if not all
        tokens are learnt. Where an occurrence reaches the end, the copy goes on from its own
        beginning, as in LZ77."""
        tokens = self._tokens
        if self._learnt < len(tokens):
            return ()
        for size in SIZES:
            at = self._after.get(tuple(tokens[-size:]))
            if at is not None:
                period = len(tokens) - at
                return tuple(tokens[at + i % period] for i in range(count))
        return ()


class Speculation:
    """How many tokens are proposed for one sequence, and which."""

    def __init__(self, tokens: list[int], most: int) -> None:
        """`tokens` belong to the caller, and grow at their end. At most `most` tokens are proposed
        in a step."""
        self._lookup = Lookup(tokens)
        self._most = most
        self._size = min(FIRST, most)
        self._failures = 0
        """Proposals in a row of which nothing was accepted."""
        self._pause = 0
        """Steps until the next proposal."""

    def learn(self) -> None:
        """To be called once in each step."""
        self._lookup.learn()

    def propose(self, most: int) -> tuple[int, ...]:
        """The tokens to propose. To be called once in each step, after `learn`."""
        if self._pause:
            self._pause -= 1
            return ()
        return self._lookup.propose(min(self._size, most))

    def settle(self, proposed: int, accepted: int) -> None:
        """Records that the first `accepted` of `proposed` tokens were drawn."""
        if accepted == 0:
            self._pause = min(2**self._failures - 1, LONGEST_PAUSE)
            self._failures += 1
            self._size = min(FIRST, self._most)
            return
        self._failures = 0
        grown = max(self._size, 2 * accepted + 1)
        self._size = min(grown if accepted == proposed else max(FIRST, accepted), self._most)
