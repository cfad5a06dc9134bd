"""The sequences that this node leads, and the lanes (one for each path) in which they advance.

A lane of S stages keeps at most S micro-batches in flight (2-D pipelining: lambdaScale, section
4.3). A micro-batch takes at most an S-th of the lane's sequences, from those that are not in
flight. So the lane stays evenly split while sequences come and go. Prompts are prefilled first
come, first served, because sharing the budget among all would make all of them late. Among
sequences that decode, those that have waited longest go first.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from services.node.core.kv import whole_pages
from services.node.core.microbatches import Finish, Part, Path, Yield
from services.node.core.room import kv_soon
from services.node.core.rows import Context, Draw, Row, Score, SequenceKey
from services.node.core.speculation import Speculation
from shared.errors import IllegalTransition
from shared.ids import RequestId
from shared.messages.serving import Pooling, Submit

SCORED_POSITIONS = 1024
"""The most positions of a micro-batch whose sequences are scored. With 20 log probabilities each,
the answer of the last stage then has 0.3 MiB, of the 1 MiB that a message may have."""
ENOUGH = 512
"""Number of prompt tokens from which on a micro-batch takes in no further prompt of a model that
generates. A further prompt would only delay the first ones: a larger pass takes longer by as
much as it has more tokens."""
VECTORS = 16
"""The most vectors that a micro-batch on a path gives. Of 8,192 numbers each they have 0.5 MiB."""


class State(enum.Enum):
    NEW = "new"
    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


STEPS: Mapping[State, frozenset[State]] = {
    State.NEW: frozenset({State.PREPARING, State.WAITING}),
    State.PREPARING: frozenset({State.WAITING, State.RUNNING, State.OVER}),
    State.WAITING: frozenset({State.RUNNING, State.OVER}),
    State.RUNNING: frozenset({State.OVER}),
    State.OVER: frozenset({State.NEW}),  # it was preempted, and begins again
}
"""From the state of a sequence that this node leads to those that may follow. `leading` says what
they mean."""


def sequence_key(request: RequestId, attempt: int) -> SequenceKey:
    return f"{request}#{attempt}"


def limit_of(submit: Submit) -> int:
    """The positions that the request may reach. Its last token is never run."""
    return submit.prompt_tokens + submit.max_tokens - 1


@dataclass(slots=True)
class Sequence:
    """One attempt: its known tokens, and how many of them have been run."""

    submit: Submit
    key: SequenceKey
    path: Path
    tokens: list[int]
    limit: int
    """The positions that it may reach."""
    prompt: int
    """Number of tokens that it begins with: the prompt, and what was generated before."""
    speculation: Speculation | None
    """None: nothing is proposed."""
    scored: int
    """The prompt's tokens before this one were scored, or need not be."""
    keeps_kv: bool
    """False: its attention goes both ways, so it runs whole, in one row."""
    admitted: int = 0
    """When it first began to run, in the scheduler's ticks; 0 if it has not."""
    preempted: int = 0
    """How often it was preempted."""
    begun: int = 0
    """How often it began anew, under another key."""
    ready: int = 0
    """When it last became ready."""
    position: int = 0
    cached: int = 0
    """Tokens whose KV was cached, here or in host memory, or came from another node, when it first
    began to run."""
    restoring: bool = False
    """Whether more of its KV comes from host memory, so that it cannot run yet."""
    yields_to: Yield | None = None
    """It ends when the step that it is in is over, because another node has its KV."""
    received: int = 0
    """Positions whose KV came from another node. It has not begun to run yet."""
    flight: int | None = None
    """The micro-batch that it is in."""
    row: Row | None = None
    """Its row in that micro-batch."""
    takes_cuts: bool = False
    """Whether all other stages of its path do: see `Admitted`."""
    in_line: bool = False
    """Whether the micro-batch waits for the next stage (`services.node.core.live_scaling`), or for
    a block that is not here yet."""
    asked_in: int | None = None
    """The micro-batch that it was in when its gateway last asked whether it goes on."""
    unanswered: set[int] = field(default_factory=set)
    """Stages of its path that have not said yet whether they have room for it."""
    state: State = State.NEW
    stage: int = 0

    @property
    def on_trial(self) -> bool:
        return len(self.tokens) < self.submit.alone_until

    @property
    def asks_on_trial(self) -> bool:
        """Whether stages of its path have not said yet that they have room, and it may kill its
        nodes: none may be blamed on it that died before."""
        return self.on_trial and bool(self.unanswered)

    @classmethod
    def of(cls, submit: Submit, speculation: int, *, keeps_kv: bool) -> "Sequence":
        """`speculation`: the most tokens that are proposed in a step. `keeps_kv`: whether
        sequences of its model keep KV."""
        key = sequence_key(submit.request, submit.attempt)
        path = Path(submit.model_id, submit.stages)
        tokens = list(submit.tokens)
        return cls(
            submit,
            key,
            path,
            tokens,
            limit_of(submit),
            len(tokens),
            Speculation(tokens, speculation) if speculation else None,
            submit.score_from or submit.prompt_tokens,
            keeps_kv,
        )

    @property
    def kv_soon(self) -> int:
        """Positions that it will soon have: those of its known tokens, and a page more."""
        return kv_soon(len(self.tokens), self.limit) if self.keeps_kv else 0

    @property
    def kv_taken(self) -> int:
        return whole_pages(self.position + (self.row.count if self.row else 0))

    @property
    def waits(self) -> bool:
        """Whether it has no KV yet, and no claim to any. On a path it has its claim from the
        start."""
        return self.state is not State.RUNNING and not self.path.followers

    @property
    def alone(self) -> bool:
        """Whether it began on a path, and this node runs it alone by now."""
        return len(self.path.stages) < len(self.submit.stages)

    def to(self, state: State) -> None:
        """IllegalTransition if its table has no such step."""
        if state not in STEPS[self.state]:
            step = f"{self.state.value} -> {state.value}"
            raise IllegalTransition(f"sequence {self.key}: {step} is not a step")
        self.state = state

    @property
    def started(self) -> bool:
        """Whether some stage may hold KV of it."""
        return self.position > 0 or self.restoring or self.flight is not None

    @property
    def may_depart(self) -> bool:
        return self.flight is None and not self.restoring

    @property
    def scoring(self) -> bool:
        return self.scored < self.submit.prompt_tokens

    @property
    def reusable(self) -> tuple[int, ...]:
        """The tokens whose KV may be cached. The last one is left out, and so is everything to be
        scored or to be averaged, because these have to be run."""
        if self.submit.pooling is Pooling.MEAN or not self.keeps_kv:
            return ()
        return tuple(self.tokens[: self.scored] if self.scoring else self.tokens)

    @property
    def decodes(self) -> bool:
        return self.position >= self.prompt

    @property
    def turn(self) -> int:
        """Its place in the lane; lower goes first."""
        return self.ready if self.position >= self.prompt else self.admitted

    def depart(self, batch: int, count: int) -> Row:
        """Puts its next `count` positions into a micro-batch."""
        start, stop = self.position, self.position + count
        draw = None
        if self.speculation:
            self.speculation.learn()
        pooling = self._pooling(stop)
        if stop == len(self.tokens) and self.submit.pooling is None:
            context = None if self.decodes else self._context()
            draw = Draw(stop - self.submit.prompt_tokens, self.submit.sampling, context)
        self.flight = batch
        tokens, image = tuple(self.tokens[start:stop]), self.submit.image
        score = self._score(start, stop)
        self.row = Row(
            self.key,
            start,
            count,
            self.limit,
            tokens,
            draw,
            image,
            score,
            pooling,
            self.submit.adapter,
        )
        return self.row

    def _pooling(self, stop: int) -> Pooling | None:
        """How positions up to `stop` take part in the sequence's vector; None: they don't."""
        pooling = self.submit.pooling
        return None if pooling is Pooling.LAST and stop < self.limit else pooling

    def _score(self, start: int, stop: int) -> Score | None:
        """The score for the prompt's tokens after these positions that were not scored yet."""
        end = min(stop + 1, self.submit.prompt_tokens)
        if self.scored >= end:
            return None
        tokens, top = tuple(self.tokens[self.scored : end]), self.submit.sampling.logprobs
        return Score(self.scored - 1 - start, tokens, top or 0)

    def propose(self, most: int) -> Row:
        """The row in which it departed, with up to `most` proposed tokens behind it if it decodes.
        None of them is past its limit, and none ends the request (the tokens after that could not
        be used)."""
        row = self.row
        assert row is not None
        if self.speculation is None or not self.decodes or row.draw is None:
            return row
        proposed = self.speculation.propose(min(most, self.limit - row.position - row.count))
        stops = self.submit.stop_ids
        end = next((i for i, token in enumerate(proposed) if token in stops), len(proposed))
        if proposed := proposed[:end]:
            self.row = row = msgspec.structs.replace(
                row,
                count=row.count + len(proposed),
                tokens=row.tokens + proposed,
                draw=msgspec.structs.replace(row.draw, proposed=proposed),
            )
        return row

    @property
    def grammar(self) -> Context | None:
        """What it takes to make the grammar that this node follows, if there is one."""
        return self._context() if self.has_grammar and len(self.path.stages) == 1 else None

    @property
    def has_grammar(self) -> bool:
        """Whether its tokens follow a grammar."""
        context = self._context()
        return context is not None and context.has_grammar

    def _context(self) -> Context | None:
        submit = self.submit
        if submit.rules is None:
            return None
        return Context(tuple(self.tokens), submit.prompt_tokens, submit.stop_ids, submit.rules)

    def land(self, drawn: tuple[int, ...], tick: int) -> None:
        """Its micro-batch is back, with these tokens."""
        row = self.row
        assert row is not None
        self.position += row.kept(len(drawn))
        self.flight, self.row, self.ready, self.in_line = None, None, tick, False
        if self.speculation and row.proposed:
            self.speculation.settle(row.proposed, len(drawn) - 1)

    def restart(self) -> None:
        """All its KV is gone: it begins anew with the tokens so far, under another key."""
        self.to(State.NEW)
        self.preempted += 1
        self.rename()
        self.prompt, self.position, self.received = len(self.tokens), 0, 0
        self.flight, self.row, self.in_line, self.restoring = None, None, False, False

    def rename(self) -> None:
        """What was said about it so far is not meant for it any more."""
        self.begun += 1
        self.key = f"{sequence_key(self.submit.request, self.submit.attempt)}~{self.begun}"

    def learn(self, generated: tuple[int, ...]) -> range:
        """Takes over what its request has generated elsewhere. Returns the indices of the tokens
        that are new here. Tokens that do not continue those known here, or that end the request,
        change nothing."""
        known = len(self.tokens) - self.submit.prompt_tokens
        fits = known <= len(generated) < self.submit.max_tokens
        fits &= not set(generated).intersection(self.submit.stop_ids)
        if not fits or list(generated[:known]) != self.tokens[self.submit.prompt_tokens :]:
            return range(0)
        self.tokens += generated[known:]
        self.prompt = len(self.tokens)
        return range(known, len(generated))

    def append(self, token: int) -> tuple[int, Finish]:
        """Takes the drawn token, and returns (its index, how the request ended)."""
        index = len(self.tokens) - self.submit.prompt_tokens
        self.tokens.append(token)
        if token in self.submit.stop_ids:
            return index, Finish.STOP
        return index, Finish.LENGTH if index + 1 == self.submit.max_tokens else Finish.NOT_YET


@dataclass(slots=True)
class Lane:
    """The running sequences of one path."""

    path: Path
    together: bool = False
    """Whether the same devices run all stages together, one stage at a time."""
    sequences: dict[SequenceKey, Sequence] = field(default_factory=dict)
    formed: int = 0
    """The lane's age counts from the tick of its last micro-batch, so sequences left out don't age
    it. The exception is a micro-batch without prompt budget: the lane then keeps its age, so that
    it cannot starve."""

    @property
    def depth(self) -> int:
        """The most micro-batches in flight."""
        return 1 if self.together else len(self.path.stages)

    @property
    def flights(self) -> set[int]:
        """Micro-batches that are out. A micro-batch whose sequences have all ended is not waited
        for, nor is what is in line."""
        sequences = self.sequences.values()
        return {s.flight for s in sequences if s.flight is not None and not s.in_line}

    @property
    def waiting_since(self) -> int | None:
        """The tick since which a micro-batch could have been formed. None if there is none to
        form."""
        if len(self.flights) >= self.depth:
            return None
        since = min((s.ready for s in self.sequences.values() if s.may_depart), default=None)
        return None if since is None else max(since, self.formed)

    def form(self, batch: int, prompt_budget: int, tick: int) -> Part:
        """The next micro-batch: decode rows, and `prompt_budget` prompt tokens in chunks. A
        sequence that keeps no KV is not cut, so the last one of them may exceed the budget."""
        score_budget = SCORED_POSITIONS
        vectors = VECTORS if self.path.followers else len(self.sequences)
        share = -(-len(self.sequences) // self.depth)
        ready = sorted((s for s in self.sequences.values() if s.may_depart), key=lambda s: s.turn)
        if prompt_budget or all(sequence.decodes for sequence in ready):
            self.formed = tick
        rows: list[Row] = []
        prompts = 0
        for sequence in ready:
            if len(rows) == share:
                break
            count = 1
            if not sequence.decodes and prompts >= ENOUGH:
                continue
            if not sequence.decodes:
                count = sequence.prompt - sequence.position
                if sequence.keeps_kv or not prompt_budget:
                    count = min(count, prompt_budget)
                if sequence.scoring:
                    count = min(count, score_budget)
                    score_budget -= count
                if sequence.submit.pooling and sequence.position + count == sequence.limit:
                    if not vectors:
                        continue
                    vectors -= 1
                prompt_budget = max(0, prompt_budget - count)
                prompts += count if sequence.keeps_kv else 0
            if count:
                rows.append(sequence.depart(batch, count))
        return Part(self.path, 0, batch, tuple(rows))
