"""An answer with an idempotency key, as one gateway sees it: who generates it, and what is known.

Its record in the durable store (`keyed_record.py`) has the tokens so far and the gateway that
generates it, the owner.

    looking --> following <--> generating        any of the three -> over, failed, left

Rules. The record is only ever replaced, never overwritten: each write names the revision that it
replaces. So of several gateways that take an answer over, one becomes its owner, and an owner whose
write is refused no longer is. It then follows: it reads the record as it grows. A follower takes
over from an owner that gave the answer up, that is not connected any more, or whose record did not
change for `SILENT_S`. It goes on behind the tokens that the record has. Tokens that the owner gave
to its client and did not write are drawn again, and are the same, since a token is a function of
the seed and of its index. A token that turns out otherwise ends the answer with an error.

An answer that is refused for good says so in its record (`Record.refused`), for whoever comes
later, whichever gateway it asks.

An answer whose tokens do not all fit into the record is never over in the store. Whoever comes for
it later generates the rest again.
"""

import enum
from collections.abc import Collection

import msgspec

from services.gateway.core.keyed_record import (
    Ask,
    Effect,
    Fail,
    Generate,
    Kept,
    Look,
    Record,
    Stop,
    Tell,
    Work,
    Write,
)
from shared.errors import BadInput, Conflict, LambdaScaleError, RequestKillsNodes
from shared.ids import GatewayId
from shared.story import Story

FLUSH_S = 0.2
"""Seconds between writes of new tokens, of a short record."""
BYTES_PER_S = 1 << 20
"""A long record is written less often, so that this rate is not exceeded."""
RENEW_S = 0.5
"""Seconds between writes while there are no new tokens."""
FOLLOW_S = 0.1
"""Seconds between looks at the record of another gateway's answer."""
SILENT_S = 2.0
"""A record that did not change for so long is taken over."""
LINGER_S = 10.0
"""Seconds for which an answer is generated on while nobody reads it."""
RETRY_S = 0.2
"""Seconds until the store is tried again."""
PATIENCE_S = 15.0
"""The longest time that a client waits for a store that does not answer. A store of three servers
was seen to take no writes for 7.3 s, while it elected a leader."""
MAX_BYTES = 256 << 10
"""Room for tokens in a record."""


class KeyReused(BadInput):
    """The key came with another request before."""

    code = "idempotency_key_reused"


class State(enum.Enum):
    LOOKING = "looking"
    """The record was not read yet."""
    FOLLOWING = "following"
    """Another gateway generates it."""
    GENERATING = "generating"
    OVER = "over"
    FAILED = "failed"
    LEFT = "left"
    """Given up, because nobody reads it here."""


_ENDS = frozenset({State.OVER, State.FAILED, State.LEFT})
NEXT: dict[State, Collection[State]] = {
    State.LOOKING: _ENDS | {State.FOLLOWING, State.GENERATING},
    State.FOLLOWING: _ENDS | {State.GENERATING},
    State.GENERATING: _ENDS | {State.FOLLOWING},
    State.OVER: (),
    State.FAILED: (),
    State.LEFT: (),
}


class KeyedAnswer:
    def __init__(
        self,
        name: str,
        record: Record,
        story: Story,
        now: float,
        *,
        call: str = "",
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`record` is what the store should have: with this gateway as its owner, and no tokens.
        `call`: the id of the API call that asked for it here first. `max_bytes`: 0 if tokens alone
        do not make the answer."""
        self.name = name
        self.call = call
        self.state = State.LOOKING
        self.kept: list[Kept] = []
        """All tokens that are known."""
        self.record = record
        """As last read or written."""
        assert record.owner is not None
        self._own = record.owner
        self._story = story
        self._max_bytes = max_bytes
        self._tokens: dict[int, list[int]] = {}
        """Of each choice."""
        self._nbytes = 0
        self._fit = 0
        """How many of `kept` the record has room for."""
        self._revision: int | None = None
        """Of the record. 0: there is none; None: not known."""
        self._writing: Record | None = None
        self._free = False
        """Whether this gateway may become the owner."""
        self._asks = False
        self._asked_at = self._began = self._heard_at = now
        self._seen = 0
        self._changed_at = now
        """When the record was first seen in revision `_seen`."""
        self._due_at = now
        """When to look or to write next."""
        self._wrote_at = now
        self._complete = False
        self._readers = 0
        self._alone_since = now
        self._closing = False
        """Whether the record is still to be given up."""
        self._refusal = ""
        """See `Record.refused`."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to do here."""
        return self.state in _ENDS and not self._closing and self._writing is None

    @property
    def reused(self) -> KeyReused:
        return KeyReused(
            "this Idempotency-Key came with another request before: use a new key for each request"
        )

    # --- work ----------------------------------------------------------------

    def due(self, now: float) -> Work | None:
        """What to do at the store now. Its end is told to `looked`, `written`, `refused`,
        `unanswered` or `asked`."""
        match self.state:
            case State.LOOKING | State.FOLLOWING:
                if self._free and self._revision is not None:
                    return self._write(self._own)
                if self._asks and self.record.owner is not None:
                    return Ask(self.record.owner)
                return Look() if now >= self._due_at else None
            case State.GENERATING:
                return self._due_of_owner(now)
        if not self._closing:
            return None
        if self._revision is None:
            return Look() if now >= self._due_at else None
        self._closing = False
        return self._write(None, over=bool(self._refusal))

    def _due_of_owner(self, now: float) -> Work | None:
        if self._revision is None:
            return Look() if now >= self._due_at else None
        if self._complete:
            fits = self._fit == len(self.kept) and self._max_bytes > 0
            return self._write(None, over=fits) if now >= self._due_at else None
        pause = max(FLUSH_S, self._nbytes / BYTES_PER_S)
        if len(self.record.kept) == self._fit:
            pause = max(pause, RENEW_S)
        return self._write(self._own) if now >= max(self._due_at, self._wrote_at + pause) else None

    def _write(self, owner: GatewayId | None, *, over: bool = False) -> Write:
        assert self._revision is not None
        self._free = False
        kept = tuple(self.kept[: self._fit])
        record = msgspec.structs.replace(
            self.record, owner=owner, kept=kept, over=over, refused=self._refusal
        )
        self._writing = record
        return Write(record, self._revision)

    def written(self, revision: int, now: float) -> list[Effect]:
        record, self._writing = self._writing, None
        assert record is not None
        self.record, self._revision = record, revision
        self._wrote_at = self._heard_at = now
        if self.state in (State.LOOKING, State.FOLLOWING):
            self._step(State.GENERATING, "took it", now)
            return [Generate()]
        if self.state is State.GENERATING and record.owner is None:
            self._step(State.OVER, f"{len(record.kept)} tokens are kept", now)
        elif self.state in _ENDS:
            self._closing = record.owner is not None
        return []

    def refused(self, now: float) -> list[Effect]:
        """The record that the write was to replace was not there any more."""
        self._writing = None
        self._revision, self._due_at = None, now
        self._closing = bool(self._refusal)
        return []

    def unanswered(self, error: LambdaScaleError, now: float) -> list[Effect]:
        """The store did not answer. A write may have happened or not."""
        self._writing = None
        self._revision, self._due_at = None, now + RETRY_S
        self._closing = bool(self._refusal)
        waits = self.state in (State.LOOKING, State.FOLLOWING)
        return self._fail(error, now) if waits and now - self._heard_at > PATIENCE_S else []

    def looked(self, record: Record | None, revision: int, now: float) -> list[Effect]:
        """The record as it is now. None: there is none, and `revision` is 0."""
        self._revision, self._heard_at = revision, now
        self._due_at = now + FOLLOW_S
        if self.state in _ENDS:
            self.record = record or self.record
            self._closing = self._closing and not self.record.over
            return []
        if record is None:
            self._free = self.state is not State.GENERATING
            return []
        fault, self.record = self._fault(record), record
        if fault is not None:
            return self._fail(fault, now)
        new = self._merge(record.kept)
        if new is None:
            return self._fail(Conflict(_DIVERGED), now)
        told: list[Effect] = [Tell(tuple(new))] if new else []
        return [*told, *self._follow(record, now)]

    def _fault(self, record: Record) -> LambdaScaleError | None:
        if record.digest != self.record.digest:
            return self.reused
        if record.refused:
            return RequestKillsNodes(record.refused)
        if record.model_id != self.record.model_id:
            return Conflict(
                "the model was replaced since the request with this Idempotency-Key began: send "
                "it again with a new key"
            )
        return None

    def _merge(self, kept: Collection[Kept]) -> list[Kept] | None:
        """Takes in the tokens that are not known yet, and returns them. None: a known token is
        otherwise in the record."""
        new: list[Kept] = []
        counts: dict[int, int] = {}
        for one in kept:
            index = counts.get(one.choice, 0)
            counts[one.choice] = index + 1
            known = self._tokens.setdefault(one.choice, [])
            if index == len(known):
                self._keep(one)
                new.append(one)
            elif known[index] != one.token:
                return None
        return new

    def _follow(self, record: Record, now: float) -> list[Effect]:
        """What follows from whose it is."""
        ours = record.owner == self._own
        if record.over:
            self._step(State.OVER, f"{len(record.kept)} tokens were kept", now)
            return [Stop()]
        if self.state is State.GENERATING:
            if ours:  # a write that was not acknowledged has happened
                return []
            self._step(State.FOLLOWING, f"{record.owner} has taken it", now)
            self._notice(record, now)
            return [Stop()]
        if ours:
            self._step(State.GENERATING, "had taken it", now)
            return [Generate()]
        if self.state is State.LOOKING:
            self._step(State.FOLLOWING, f"{record.owner} generates it", now)
            self._asks = record.owner is not None
        self._notice(record, now)
        return []

    def _notice(self, record: Record, now: float) -> None:
        assert self._revision is not None
        if self._revision != self._seen:
            self._seen, self._changed_at = self._revision, now
        silent = now - self._changed_at
        self._free = record.owner is None or silent >= SILENT_S
        self._asks = self._asks or (silent > RENEW_S < now - self._asked_at)

    def asked(self, there: bool, now: float) -> list[Effect]:
        """Whether the owner is connected."""
        self._asks, self._asked_at = False, now
        self._free = self._free or not there
        return []

    # --- what happens --------------------------------------------------------

    def generated(self, kept: Kept) -> None:
        """A token came from an instance. It counts while this gateway generates."""
        if self.state is State.GENERATING:
            self._keep(kept)

    def ended(self, now: float) -> None:
        """All choices have ended."""
        self._complete = self.state is State.GENERATING
        self._due_at = now

    def failed(self, error: LambdaScaleError, now: float) -> list[Effect]:
        """The answer cannot be generated now. The client may come again with the same key, unless
        it is refused for good."""
        if self.state in _ENDS:
            return []
        if isinstance(error, RequestKillsNodes) and self.state is State.GENERATING:
            self._refusal = str(error)
        return self._fail(error, now)

    def readers(self, count: int, now: float) -> None:
        """How many clients read it here."""
        if self._readers and not count:
            self._alone_since = now
        self._readers = count

    def tick(self, now: float) -> list[Effect]:
        """Gives the answer up if nobody has read it for a while, even if its end could not be
        written down yet."""
        patience = LINGER_S if self.state is State.GENERATING else 0.0
        alone = not self._readers and now - self._alone_since >= patience
        return self.leave("nobody reads it", now) if alone else []

    def leave(self, why: str, now: float) -> list[Effect]:
        """Gives the answer up, so that another gateway can go on with it at once."""
        return [] if self.state in _ENDS else self._close(State.LEFT, why, now)

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        tokens: dict[int, list[int]] = {}
        for kept in self.kept:
            tokens.setdefault(kept.choice, []).append(kept.token)
        assert tokens == {choice: known for choice, known in self._tokens.items() if known}
        assert self._fit <= len(self.kept), "more is to be written than is known"
        assert self._readers >= 0
        assert self._writing is None or self._revision is not None, "a write that replaces nothing"
        assert not self._closing or self.state in _ENDS, "given up, and not ended"
        assert not self._refusal or self.state is State.FAILED, "refused, and not failed"

    def _fail(self, error: LambdaScaleError, now: float) -> list[Effect]:
        return [Fail(error), *self._close(State.FAILED, str(error), now)]

    def _close(self, state: State, why: str, now: float) -> list[Effect]:
        generating = self.state is State.GENERATING
        ours = generating and self._revision is not None and self.record.owner == self._own
        self._closing = (ours and self._writing is None) or bool(self._refusal)
        self._step(state, why, now)
        return [Stop()] if generating else []

    def _keep(self, kept: Kept) -> None:
        self._tokens.setdefault(kept.choice, []).append(kept.token)
        self.kept.append(kept)
        if self._fit == len(self.kept) - 1:
            nbytes = self._nbytes + _nbytes(kept)
            if nbytes <= self._max_bytes:
                self._nbytes, self._fit = nbytes, len(self.kept)

    def _step(self, state: State, why: str, now: float) -> None:
        self._story.check_step(self.name, NEXT, self.state, state)
        self.state = state
        self._story.tell(now, self.call, f"answer by key: {state.value}: {why}", self.name)


_DIVERGED = (
    "the answer could not be continued as it began, because an instance gave another token: send "
    "the request again with a new Idempotency-Key"
)


def _nbytes(kept: Kept) -> int:
    """About what it takes in the record, at most."""
    return 16 + (0 if kept.logprobs is None else 16 + 16 * len(kept.logprobs.top))
