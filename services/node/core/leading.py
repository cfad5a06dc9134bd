"""A node as leader: takes attempts in, keeps their paths busy, turns drawn tokens into messages.

    state      to         when
    new        preparing  its grammar is made, or other stages are asked for room
               waiting    this node runs it alone, and nothing has to be prepared
    preparing  waiting    its grammar is made
               running    all other stages have room
    waiting    running    there is KV for it
    any        over       its last token, a failure, a cancellation, or a newer attempt
    over       new        it was preempted, and this node runs it alone

An attempt is prepared (its grammar is made, if that is followed here; on a path, the other stages
are asked for room), may wait for KV, runs, and ends exactly once: with its last token, with a
failure, or forgotten (cancelled, or replaced by a newer attempt of its request). In each case its
KV is freed here and on every other stage of its path at that moment. What is still in flight for it
is ignored when it comes back.

An attempt that does not fit into the node's room (`services.node.core.room`), or into that of
another stage of its path, is refused before anything of it is run, so that its gateway can bring it
to an instance that begins it. At most one attempt waits here for KV, one that this node runs alone:
so a long prompt has its turn even if short ones keep coming.

KV is not reserved for what an attempt may come to. When pages run out later, attempts are
preempted: their KV is freed everywhere. Those that this node runs alone go back to the head of the
queue. When they begin again, pages that are still cached are used as they are, those that went to
host memory are copied, and the rest of their tokens so far is prefilled. Those on paths go back to
their gateway, since other instances may have room.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import replace

import msgspec

from services.node.core.answers import scores_of, tokens_of, vector_of
from services.node.core.handover import Takings, Worth, secret_of
from services.node.core.kv import Kv
from services.node.core.led import Led
from services.node.core.lending import Lendings
from services.node.core.live_scaling import Line
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Command,
    Emit,
    Failure,
    Finish,
    Forward,
    Free,
    Handled,
    Hidden,
    Part,
    Prepare,
    Pull,
    Release,
    Sampled,
    Send,
    Settled,
    Stop,
    Weighed,
    Yield,
    Yielded,
    frees,
    offsets_of,
)
from services.node.core.recent import Recent
from services.node.core.room import Room
from services.node.core.rows import SequenceKey
from services.node.core.sequences import Sequence
from services.node.core.submits import check_submit
from shared.errors import NotFound, SourceLost, StaleEpoch, TransportTimeout
from shared.ids import ModelId, NodeId, RequestId
from shared.messages.serving import AttemptFailed, Submit, Token

WRONG_TOKENS = Failure(
    "protocol",
    "the last stage of the path returned no token where one was due, accepted what was not "
    "proposed, or did not score the prompt or give its vector",
)
ASKING = -1
"""In place of a micro-batch: the other stages are being asked for room."""


class Leader:
    def __init__(
        self,
        node: NodeId,
        *,
        speculation: int,
        kv: Kv,
        room: Room,
        handled: Handled,
        worth: Worth,
        line: Line,
        lendings: Lendings,
        together: Container[ModelId],
    ) -> None:
        """`together`: see `Led`."""
        self._node = node
        self._handled = handled
        self._speculation = speculation
        self._kv = kv
        self._room = room
        self.led = Led(together)
        self.takings = Takings(kv, room, handled, worth)
        """What `preparing` sequences take over."""
        self.line = line
        self._lendings = lendings
        self._weighed: list[Command] = []
        """What was weighed since the last step."""
        self._short = False
        """Whether some waited for KV at the last step."""
        self._attempts: Recent[RequestId, int] = Recent()
        """The newest attempt seen of each request. Older attempts come too late."""
        self.prompt_tokens = 0
        """Prompt tokens of sequences that have begun. Each sequence counts once, even if it was
        preempted."""
        self.cached_tokens = 0
        """How many of `prompt_tokens` had cached KV."""
        self.received_tokens = 0
        """Tokens whose KV came from another node, and in `restored_tokens` from host memory."""
        self.restored_tokens = 0
        self.proposed = 0
        """Tokens that were proposed and run."""
        self.accepted = 0
        """How many of `proposed` were drawn."""

    def submit(self, submit: Submit, *, n_blocks: int, held: Collection[int]) -> list[Command]:
        """Queues an attempt, and ends earlier ones of its request but for the one that it is to
        take over from. BadInput, NotFound, StaleEpoch or CapacityExceeded: nothing was queued.

        If it is the newest attempt again, it goes on (no error), is over (StaleEpoch), or is stuck
        on its path (TransportTimeout).
        """
        check_submit(submit, self._node, n_blocks)
        first = submit.stages[0]
        missing = sorted(set(range(first.start, first.stop)) - set(held))
        if missing and not _opens(submit, held):
            raise NotFound(
                f"node {self._node} does not hold blocks {missing} of model {submit.model_id}: "
                f"submit to an instance of the newest revision"
            )
        older = [s for s in self.led if s.submit.request == submit.request]
        newest = self._attempts.get(submit.request)
        for sequence in older:
            known = sequence.submit
            same_path = known.stages == submit.stages or sequence.alone
            if known.attempt == submit.attempt and same_path:
                _check_goes_on(sequence)
                return []
        if newest is not None and submit.attempt <= newest:
            raise StaleEpoch(
                f"attempt {submit.attempt} of request {submit.request} comes after {newest}"
            )
        keeps_kv = self._kv.keeps(submit.model_id, 0, n_blocks)
        sequence = Sequence.of(submit, self._speculation, keeps_kv=keeps_kv)
        over = [s for s in older if s.submit.attempt != submit.takes_over]
        self._room.check(sequence, [s.key for s in over])
        self._attempts[submit.request] = submit.attempt
        return self.end(over, None) + self._take_in(sequence)

    def _take_in(self, sequence: Sequence) -> list[Command]:
        commands = self.takings.begin(sequence)
        if commands is None:
            return self._prepare(sequence)
        self.led.prepare(sequence)
        return commands

    def cancel(self, request: RequestId, attempt: int) -> list[Command]:
        newest = self._attempts.get(request)
        self._attempts[request] = attempt if newest is None else max(newest, attempt)
        return self.end(
            [s for s in self.led if (s.submit.request, s.submit.attempt) == (request, attempt)],
            None,
        )

    def _prepare(self, sequence: Sequence) -> list[Command]:
        if sequence.path.followers:
            return self._ask(sequence)
        if context := sequence.grammar:
            self.led.prepare(sequence)
            return [
                Prepare(sequence.submit.model_id, sequence.key, context, cause=self._handled.cause)
            ]
        self.led.wait(sequence)
        return []

    def _ask(self, sequence: Sequence) -> list[Command]:
        """Asks the other stages for room."""
        self.led.prepare(sequence)
        others = list(enumerate(sequence.path.stages))[1:]
        sequence.unanswered, sequence.takes_cuts = {stage for stage, _ in others}, True
        path, key, tokens, limit = sequence.path, sequence.key, sequence.prompt, sequence.limit
        submit, cause = sequence.submit, self._handled.cause
        alone_until, secret, trace = submit.alone_until, secret_of(submit), submit.trace
        return [
            Send(
                each.address,
                Admit(
                    path, stage, key, tokens, limit, alone_until, secret, pulls=True, trace=trace
                ),
                cause=cause,
            )
            for stage, each in others
        ]

    def admitted(self, message: Admitted, tick: int) -> list[Command]:
        """A stage has room. The sequence begins when all have said so."""
        sequence = self.led.preparing.get(message.sequence)
        if sequence is None or message.stage not in sequence.unanswered:
            return []
        sequence.unanswered.remove(message.stage)
        sequence.takes_cuts &= message.takes_cuts
        if sequence.unanswered:
            return []
        del self.led.preparing[sequence.key]
        self._begin(sequence, tick)
        return [Settled(sequence.key, cause=self._handled.cause)] if sequence.on_trial else []

    def asks_on_trial(self, key: SequenceKey) -> bool:
        sequence = self.led.preparing.get(key)
        return sequence is not None and sequence.asks_on_trial

    def prepared(self, key: SequenceKey, failure: Failure | None) -> list[Command]:
        """The grammar of a preparing sequence is made, or cannot be made."""
        if failure:
            return self.end([self.led.preparing[key]], failure)
        self.led.wait(self.led.preparing.pop(key))
        return []

    def admit(self, tick: int) -> None:
        """Starts waiting sequences, those of each model in order, as KV allows. The beginning of
        each may be cached."""
        short: dict[ModelId, int] = {}
        for sequence in tuple(self.led.waiting):
            model_id = sequence.submit.model_id
            if sequence.received:
                self.led.waiting.remove(sequence)
                sequence.position, sequence.received = sequence.received, 0
                self._begin(sequence, tick)
                continue
            if model_id in short or sequence.kv_soon > self._room.free_kv(model_id):
                short[model_id] = short.get(model_id, 0) + sequence.kv_soon
                continue
            self.led.waiting.remove(sequence)
            sequence.position = self._kv.adopt(
                model_id,
                sequence.key,
                sequence.reusable,
                sequence.limit,
                sequence.submit.adapter,
            )
            self._weigh(sequence)
            self._begin(sequence, tick)
        if short or self._short:
            self._kv.make_room(short)
        self._short = bool(short)

    def _weigh(self, sequence: Sequence) -> None:
        """More of its KV may come from host memory, if that takes less time than to compute it."""
        submit = sequence.submit
        found = self._kv.restorable(
            submit.model_id, sequence.key, sequence.reusable, sequence.limit, submit.adapter
        )
        if found is not None:
            sequence.restoring = found.worth
            cause = submit.cause or submit.request
            self._weighed.append(Weighed(sequence.key, found, submit.trace, cause=cause))

    def restore(self) -> list[Command]:
        """Brings a portion of the KV of the sequence that has waited longest for its KV to come
        from host memory."""
        for sequence in [*self.led.restoring.values()][:1]:
            position, sequence.restoring = self._kv.restore(sequence.key)
            came = position - sequence.position
            sequence.position = position
            self.restored_tokens += came
            if not sequence.preempted:
                sequence.cached += came
                self.cached_tokens += came
            if not sequence.restoring:
                del self.led.restoring[sequence.key]
        told, self._weighed = self._weighed, []
        return told

    def _begin(self, sequence: Sequence, tick: int) -> None:
        """The cache was asked only for sequences that this node runs alone: on a path all stages
        would need the pages, and paths are short-lived."""
        sequence.admitted = sequence.admitted or tick
        sequence.ready = tick
        if not sequence.preempted:
            self.prompt_tokens += len(sequence.tokens)
            sequence.cached = sequence.position
            self.cached_tokens += sequence.cached
        self.led.run(sequence)

    # --- KV that comes from other nodes, and goes there: see `handover` ------

    def yielded(self, message: Yielded) -> list[Command]:
        return self.take_over(message.taker, message.generated)

    def take_over(self, key: SequenceKey, generated: tuple[int, ...] = ()) -> list[Command]:
        """Goes on with what has come of the sequence's KV. `generated`: what its request has
        generated. The gateway gets the new tokens from here too, because what comes next could
        overtake those of the old leader."""
        if not self.takings.has(key):
            return []
        cause = self._handled.cause
        sequence = self.led.preparing.pop(key)
        fresh = sequence.learn(generated)
        commands: list[Command] = []
        if self.takings.is_coming(key):
            commands.append(Stop(key, cause=cause))
        sequence.received = self.takings.end(key) or 0
        self.received_tokens += sequence.received
        if not sequence.received:
            commands += [Release((key,), cause=cause), *self._lendings.over(key)]
            sequence.rename()
        submit = sequence.submit
        for index in fresh:
            token = sequence.tokens[submit.prompt_tokens + index]
            known = Token(submit.request, submit.attempt, index, token)
            commands.append(Emit(submit.gateway, known, cause=cause))
        return [*commands, *self._prepare(sequence), Settled(key, cause=cause)]

    def yield_up(self, message: Yield) -> list[Command]:
        """Another node has the sequence's KV: it ends here, with the step that it is in."""
        sequence = self.led.attempt(message.sequence)
        known = sequence is not None and message.secret == secret_of(sequence.submit)
        if sequence is None or not known or sequence.yields_to:
            return [Send(message.to, Yielded(message.taker, ()), cause=self._handled.cause)]
        sequence.yields_to = message
        return [] if sequence.flight is not None else self.end([sequence], None)

    def stuck(self, keys: Iterable[SequenceKey], *, over: bool) -> None:
        for key in keys:
            if sequence := self.led.running.get(key):
                sequence.in_line = not over

    @property
    def backlog(self) -> int:
        """Positions of prompts that are to be run here, and are in no micro-batch. Attempts that
        wait to begin do not count: they may wait for the KV of prompts that are not here yet."""
        ready = (s for s in self.led.running.values() if s.flight is None and not s.decodes)
        return sum(s.prompt - s.position for s in ready)

    def propose(self, part: Part, spare: int) -> Part:
        """A part that was just formed, with proposed tokens: at most `spare` more positions, shared
        evenly among the sequences that have proposals."""
        rows = []
        for left, row in zip(range(len(part.rows), 0, -1), part.rows, strict=True):
            row = self.led.running[row.sequence].propose(-(-spare // left))
            spare -= row.proposed
            rows.append(row)
        return replace(part, rows=tuple(rows))

    def preempt(self, sequence: Sequence, why: Failure) -> list[Command]:
        """Takes the sequence's KV. If it is on a path, it does not wait here until all stages have
        room again: that could be for each other."""
        if sequence.path.followers:
            return self.end([sequence], why)
        commands = self.end([sequence], None)
        sequence.restart()
        return commands + self._prepare(sequence)

    def sampled(self, message: Sampled, tick: int) -> list[Command]:
        """A micro-batch is back: sends its tokens out; its sequences are ready again or over."""
        commands: list[Command] = []
        over: list[Sequence] = []
        cut: list[Sequence] = []
        for key, drawn in message.tokens:
            sequence = self.led.running.get(key)
            if sequence is None or sequence.row is None or sequence.flight != message.batch:
                continue
            row, draw, score = sequence.row, sequence.row.draw, sequence.row.score
            logprobs = message.logprobs.get(key, ())
            sequence.land(drawn, tick)
            if row.gives_vector:
                if vector := message.vectors.get(key):
                    commands.append(vector_of(sequence, vector, self._handled.cause))
                    over.append(sequence)
                else:
                    cut.append(sequence)
                continue
            if score is not None:
                count = len(score.tokens)
                if len(logprobs) < count:
                    cut.append(sequence)
                    continue
                commands.append(scores_of(sequence, logprobs[:count], self._handled.cause))
                logprobs = logprobs[count:]
            if draw is None:
                if sequence.yields_to:
                    over.append(sequence)
                continue
            if not drawn or drawn[:-1] != draw.proposed[: len(drawn) - 1]:
                cut.append(sequence)
                continue
            self.proposed += len(draw.proposed)
            self.accepted += len(drawn) - 1
            on_trial = sequence.on_trial
            said, finish = tokens_of(sequence, drawn, logprobs, self._handled.cause)
            if on_trial and not sequence.on_trial:
                commands += _tried(sequence, self._handled.cause)
            commands += said
            if finish is not Finish.NOT_YET or sequence.yields_to:
                over.append(sequence)
        return commands + self.end(over, None) + self.end(cut, WRONG_TOKENS)

    def passed(self, part: Part, hidden: Hidden | None) -> list[Command]:
        """A part is through the first stage of a path. First micro-batches of prompts wait in line
        for the next stage."""
        rows = tuple(msgspec.structs.replace(row, tokens=(), image=b"") for row in part.rows)
        part = replace(part, rows=rows, hidden=hidden, offsets=offsets_of(rows))
        running = self.led.running
        part = part.without([key for key in part.keys if key not in running])
        first = {row.sequence for row in part.rows if row.position == 0}
        first = {key for key in first if running[key].takes_cuts}
        later, waits = part.without(first), part.without(set(part.keys) - first)
        for key in first:
            running[key].in_line = True
        if first:
            sequences = [running[key] for key in first]
            # A grammar is made where tokens are drawn, which was to be the last stage.
            may_end = not any(sequence.has_grammar for sequence in sequences)
            self.line.add(waits, min(s.admitted for s in sequences), may_end=may_end)
        forwards = [self._forward(later)] if later.rows else []
        return forwards + self._pass_on()

    def pulled(self, message: Pull) -> list[Command]:
        self.line.pull(message.by, message.positions)
        return self._pass_on()

    def ended(self, part: Part) -> list[Command]:
        """A part that waited in line has run to the end of the model: its sequences go on here
        alone, and the other stages forget them."""
        self.line.drop(part.keys)
        elsewhere: list[tuple[str, SequenceKey]] = []
        for key in part.keys:
            if sequence := self.led.running.get(key):
                elsewhere += [(address, key) for address in sequence.path.followers]
                sequence.in_line = False
                self.led.cut(sequence, part.path)
        return frees(elsewhere, self._handled.cause)

    def _pass_on(self) -> list[Command]:
        """Passes on what has waited longest in line, as far as next stages take it."""
        commands: list[Command] = []
        while part := self.line.next():
            for key in part.keys:
                sequence = self.led.running[key]
                sequence.in_line = False
                self.led.cut(sequence, part.path)
            commands.append(self._forward(part))
        return commands

    def _forward(self, part: Part) -> Command:
        message = Forward(part.path, part.stage + 1, part.batch, part.rows)
        to = part.path.followers[part.stage]
        return Send(to, message, part.hidden, part.offsets, cause=self._handled.cause)

    def failed(self, keys: Iterable[SequenceKey], failure: Failure) -> list[Command]:
        found = (self.led.running.get(key) or self.led.preparing.get(key) for key in keys)
        return self.end([sequence for sequence in found if sequence], failure)

    def give_up(self, keys: Collection[SequenceKey], failure: Failure) -> list[Command]:
        return self.end([s for s in self.led if s.key in keys], failure)

    def peer_lost(self, address: str, failure: Failure) -> list[Command]:
        """What was to come from the peer ends, too: the peer may have died of it, and then this
        node would. If the peer lives, the attempt before goes on there."""
        ended = self.end([s for s in self.led if s.path.goes_through(address)], failure)
        lost = Failure(SourceLost.code, failure.message)
        return ended + self.end(self.takings.through(address), lost)

    def model_closed(self, model_id: ModelId, failure: Failure) -> list[Command]:
        return self.end([s for s in self.led if s.submit.model_id == model_id], failure)

    def close(self, failure: Failure) -> list[Command]:
        return self.end(list(self.led), failure)

    def end(self, sequences: Iterable[Sequence], failure: Failure | None) -> list[Command]:
        """Forgets sequences, and frees what stages keep of them. Lost peers are told too, since
        they may be back."""
        cause = self._handled.cause
        released: list[SequenceKey] = []
        elsewhere: list[tuple[str, SequenceKey]] = []
        told: list[Command] = []
        for sequence in sequences:
            self.led.end(sequence)
            self.line.drop([sequence.key])
            told += self._lendings.over(sequence.key)
            takes = self.takings.end(sequence.key) is not None
            if sequence.started or sequence.grammar or sequence.received or takes:
                released.append(sequence.key)
            if takes or sequence.asks_on_trial:
                told.append(Settled(sequence.key, over=True, cause=cause))
            if to := sequence.yields_to:
                generated = tuple(sequence.tokens[sequence.submit.prompt_tokens :])
                told.append(Send(to.to, Yielded(to.taker, generated), cause=cause))
            elsewhere += [(address, sequence.key) for address in sequence.path.followers]
            if failure:
                submit = sequence.submit
                reason = AttemptFailed(
                    submit.request, submit.attempt, failure.code, failure.message
                )
                told.append(Emit(submit.gateway, reason, cause=cause))
        local: list[Command] = [Release(tuple(released), cause=cause)] if released else []
        return local + frees(elsewhere, cause) + told


def _opens(submit: Submit, held: Collection[int]) -> bool:
    """Whether the attempt may run as blocks come."""
    return submit.opening and len(submit.stages) == 1 and 0 in held


def _tried(sequence: Sequence, cause: str) -> list[Command]:
    """Tells the other stages, ahead of the gateway, which has the next suspect begin there."""
    tried = Free((), tried=(sequence.key,))
    return [Send(address, tried, cause=cause) for address in sequence.path.followers]


def _check_goes_on(sequence: Sequence) -> None:
    """TransportTimeout if other nodes have the same micro-batch, or the same question, as when this
    was last asked. A micro-batch that waits its turn here is no concern, since this node answers.
    """
    now = ASKING if sequence.unanswered else None if sequence.in_line else sequence.flight
    before, sequence.asked_in = sequence.asked_in, now
    if now is not None and now == before and sequence.path.followers:
        nodes = ", ".join(stage.node for stage in sequence.path.stages)
        request = sequence.submit.request
        raise TransportTimeout(f"request {request} is stuck on its path over {nodes}")
