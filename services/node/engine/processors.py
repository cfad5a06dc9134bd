"""Applies a request's rules to logits before a draw: penalties, bias, and grammars.

Rules depend on the tokens so far. The stage with the head is told these once, with the first draw
of an attempt (`Context`), and draws the following tokens itself. So it keeps the state, beside the
sequence's KV. The state is a function of the tokens alone, however they were divided into steps: a
request that is resumed elsewhere goes on as if it had stayed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from services.node.engine.base import Context, Row, RowsRefused, SequenceKey
from shared import grammar
from shared.errors import BadInput, LambdaScaleError, NotReady
from shared.grammar import Vocabulary

Logits = npt.NDArray[np.float64]


class Processor:
    """The rules of one sequence, and the tokens they have seen."""

    def __init__(self, context: Context, vocabulary: Vocabulary | None) -> None:
        """`vocabulary` is needed if the rules name a grammar (NotReady without it). BadInput if the
        tokens so far do not fit the grammar, or if it allows no token."""
        self._rules = rules = context.rules
        self._stop_ids = np.array(context.stop_ids, dtype=np.intp)
        self._seen = _Seen(context.tokens[: context.prompt_tokens])
        self._biased = np.array([token for token, _ in rules.logit_bias], dtype=np.intp)
        self._bias = np.array([bias for _, bias in rules.logit_bias])
        self._refused = np.ones(0, dtype=bool)
        """For each token, whether it is none of the allowed ones; empty: all are."""
        if rules.allowed:
            self._refused = np.ones(rules.allowed[-1] + 1, dtype=bool)
            self._refused[list(rules.allowed)] = False
        longest = max(map(len, rules.bad_words), default=1)
        self._recent: deque[int] = deque(maxlen=longest - 1)
        """The last tokens drawn, as many as a bad word has before its end."""
        self._drawn = 0
        self._matcher, self._ends = None, []
        if rules.grammar:
            if vocabulary is None:
                raise NotReady("the request's grammar was not made before its tokens")
            self._matcher = grammar.matcher(rules.grammar, vocabulary)
            self._ends = vocabulary.tokens.eos_tokens
        for token in context.tokens[context.prompt_tokens :]:
            self.accept(token)
        if self._matcher is not None:
            _mask(self._matcher)

    def accept(self, token: int) -> None:
        """Records that `token` was drawn."""
        self._drawn += 1
        self._recent.append(token)
        self._seen.add(token)
        if self._matcher is not None and token not in self._stop_ids:
            self._matcher.consume_token(token)

    def apply(self, logits: Logits) -> None:
        """Changes one row of logits [vocab] in place: penalties, then bias, then the mask of tokens
        that are not allowed."""
        rules, seen = self._rules, self._seen
        if rules.repetition_penalty != 1:
            found = logits[seen.ids]
            penalty = rules.repetition_penalty
            logits[seen.ids] = np.where(found < 0, found * penalty, found / penalty)
        if rules.frequency_penalty or rules.presence_penalty:
            counts = seen.counts
            logits[seen.ids] -= rules.frequency_penalty * counts
            logits[seen.ids] -= rules.presence_penalty * (counts > 0)
        logits[self._biased] += self._bias
        if self._drawn < rules.min_tokens:
            logits[self._stop_ids[self._stop_ids < len(logits)]] = -np.inf
        if len(self._refused):
            logits[: len(self._refused)][self._refused] = -np.inf
            logits[len(self._refused) :] = -np.inf
        for word in rules.bad_words:
            if self._would_end(word):
                logits[word[-1]] = -np.inf
        if self._matcher is not None:
            logits[~self._allowed(self._matcher, len(logits))] = -np.inf

    def _would_end(self, word: tuple[int, ...]) -> bool:
        """Whether all tokens of a bad word but the last one were just drawn."""
        before = len(word) - 1
        recent = tuple(self._recent)
        return len(recent) >= before and recent[len(recent) - before :] == word[:-1]

    def _allowed(self, matcher: LLMatcher, vocab_size: int) -> npt.NDArray[np.bool_]:
        """A mask of the allowed tokens, [vocab]. The request's stop ids stand for the grammar's
        end."""
        packed = np.frombuffer(_mask(matcher), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little")[:vocab_size].astype(bool)
        may_end = bool(matcher.is_accepting())
        allowed[self._ends] = False
        allowed[self._stop_ids[self._stop_ids < vocab_size]] |= may_end
        return allowed


def _mask(matcher: LLMatcher) -> bytes:
    """One bit for each token that may follow. BadInput if that cannot be told, because a token did
    not fit or the grammar reached one of llguidance's limits."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise BadInput(f"the grammar cannot be followed: {grammar.brief(matcher.get_error())}")
    return mask


class _Tokenizer:
    """A model's tokenizer. Its vocabulary is made for the first request that needs it, on the
    thread that makes grammars. For 128,000 tokens that takes 0.7 s, in which llguidance lets no
    other thread run Python."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos: int | None) -> None:
        self._given = tokenizer_json, vocab_size, eos
        self._made: Vocabulary | BadInput | None = None

    def vocabulary(self) -> Vocabulary:
        """The vocabulary. BadInput if grammars cannot be followed with this tokenizer."""
        if self._made is None:
            try:
                self._made = Vocabulary(*self._given)
            except BadInput as error:
                self._made = error
        if isinstance(self._made, BadInput):
            raise BadInput(str(self._made))
        return self._made


class Processors:
    """The processors of a model's sequences, on the stage with its head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the model's config.json."""
        self._config = config
        self._tokenizer: _Tokenizer | None = None
        self._of: dict[SequenceKey, Processor] = {}

    def use_tokenizer(self, tokenizer_json: bytes) -> None:
        vocab_size, eos = self._config["vocab_size"], grammar.eos_of(self._config)
        self._tokenizer = _Tokenizer(tokenizer_json, vocab_size, eos)

    def maker(self, context: Context) -> Callable[[], Processor]:
        """A function that makes the processor of a context with a grammar (see
        `Engine.make_rules`). Its result goes to `keep`."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise NotReady("the model's tokenizer is not on this node yet")
        return lambda: Processor(context, tokenizer.vocabulary())

    def made(self, rows: Iterable[Row]) -> dict[SequenceKey, Processor]:
        """Processors for rows whose draws bring a context without a grammar. RowsRefused names rows
        whose processor cannot be made."""
        made: dict[SequenceKey, Processor] = {}
        for row in rows:
            context = row.draw.context if row.draw else None
            if context is None or (context.has_grammar and row.sequence in self._of):
                continue
            try:
                made[row.sequence] = Processor(context, None)
            except LambdaScaleError as error:
                raise RowsRefused((row.sequence,), error) from error
            except Exception as error:  # a fault must end this row alone, as in drawing
                why = LambdaScaleError(f"the request's rules can't be followed: {error!r}")
                raise RowsRefused((row.sequence,), why) from error
        return made

    def keep(self, made: Mapping[SequenceKey, Processor]) -> None:
        self._of.update(made)

    def of(self, sequence: SequenceKey) -> Processor | None:
        return self._of.get(sequence)

    def free(self, sequences: Iterable[SequenceKey]) -> None:
        for sequence in sequences:
            self._of.pop(sequence, None)


class _Seen:
    """The distinct tokens seen, and how often each was generated."""

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = sorted(set(prompt))
        self._slots = {token: slot for slot, token in enumerate(distinct)}
        self.ids = np.array(distinct, dtype=np.intp)
        self.counts = np.zeros(len(distinct))

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self.ids):
            self.ids = np.append(self.ids, token)
            self.counts = np.append(self.counts, 0.0)
        self.counts[slot] += 1
