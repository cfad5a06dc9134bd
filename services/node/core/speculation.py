"""Speculative decoding by prompt lookup: what may follow is what followed before.

Answers often repeat their prompt, or themselves. So the longest n-gram that ends a sequence's
tokens, and was there before, is looked up, and the tokens that followed it then are proposed to
follow again (Saxena 2023, "Prompt Lookup Decoding"; no draft model is needed). The next step runs
them behind the token that is due, draws after each position, and accepts what was drawn up to the
first that was not proposed (Leviathan et al. 2023, section 2). A draw depends on its logits, seed
and index alone: so the tokens are exactly those of decoding one by one, and only their number in a
step differs.

A decode step is bound by reading the weights, so a few positions more cost next to nothing. That
ends with the load: proposals only fill a step up to STEP_POSITIONS. What is proposed for a sequence
grows while all of it is accepted; when nothing was, the sequence pauses, twice as long each time.
"""

SIZES = (4, 3, 2)
"""Of the n-grams that are looked up; the longest first."""
FIRST = 3
"""Proposed to begin with: products have a multiple of four rows anyway (engine/attention.py)."""
LONGEST_PAUSE = 63
"""Steps."""
STEP_POSITIONS = 16
"""Most positions of a step in which anything is proposed."""
LEARNT_A_STEP = 1024
"""Tokens, at 2 us each: a long prompt is learnt while it is prefilled, and holds up no step."""


class Lookup:
    """Where each n-gram of a sequence's tokens came last, short of its end. O(1) a token."""

    def __init__(self, tokens: list[int]) -> None:
        """`tokens` are the caller's, and grow at their end."""
        self._tokens = tokens
        self._learnt = 0
        self._after: dict[tuple[int, ...], int] = {}
        """The position after the last occurrence of an n-gram."""

    def learn(self) -> None:
        """Takes in the next tokens that there are, LEARNT_A_STEP at most."""
        stop = min(self._learnt + LEARNT_A_STEP, len(self._tokens))
        for at in range(self._learnt, stop):
            for size in SIZES:
                if size <= at:
                    self._after[tuple(self._tokens[at - size : at])] = at
        self._learnt = stop

    def propose(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens; none if no n-gram at the end was there before, or not all tokens
        are learnt. What followed an n-gram up to the end goes on from its beginning, as in a copy
        of LZ77."""
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
    """What is proposed for one sequence, and how much."""

    def __init__(self, tokens: list[int], most: int) -> None:
        """`tokens` are the caller's, and grow at their end; `most` proposed a step."""
        self._lookup = Lookup(tokens)
        self._most = most
        self._size = min(FIRST, most)
        self._failures = 0
        """Proposals in a row of which nothing was accepted."""
        self._pause = 0
        """Steps until the next proposal."""

    def learn(self) -> None:
        """To be called once a step."""
        self._lookup.learn()

    def propose(self, most: int) -> tuple[int, ...]:
        """To be called once a step, after `learn`."""
        if self._pause:
            self._pause -= 1
            return ()
        return self._lookup.propose(min(self._size, most))

    def settle(self, proposed: int, accepted: int) -> None:
        """Of so many proposed tokens the first `accepted` ones were drawn."""
        if accepted == 0:
            self._pause = min(2**self._failures - 1, LONGEST_PAUSE)
            self._failures += 1
            self._size = min(FIRST, self._most)
            return
        self._failures = 0
        grown = max(self._size, 2 * accepted + 1)
        self._size = min(grown if accepted == proposed else max(FIRST, accepted), self._most)
