"""Nodes with schedulers and checked engines. Messages wait in a queue for each pair of nodes."""

from collections import deque
from dataclasses import dataclass, field

from services.node.core.batching import Batcher
from services.node.core.kv import whole_pages
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Bring,
    Command,
    Emit,
    Failed,
    Failure,
    KvAsk,
    KvDone,
    KvHere,
    Lend,
    Part,
    Prepare,
    Release,
    Return,
    Send,
    Settled,
    StageMessage,
    Stop,
    Weighed,
    Yield,
    Yielded,
)
from services.node.core.rows import attempt_of
from services.node.core.sequences import limit_of, sequence_key
from shared.errors import CapacityExceeded, StaleEpoch, TransportTimeout
from shared.ids import ModelId, NodeId
from shared.messages.instances import Stage
from shared.messages.serving import (
    AttemptFailed,
    Cancel,
    Pooling,
    Scores,
    Submit,
    Token,
)
from tests.support.schedulers.engine import (
    BLOCKS,
    NODES,
    SLOTS,
    STEP_TOKENS,
    CheckedEngine,
    parts_of,
    scored,
    token_after,
)


@dataclass
class Sweep:
    model_id: ModelId
    parts: list[Part] = field(default_factory=list)
    at: int = 0


@dataclass
class Node:
    batcher: Batcher
    engine: CheckedEngine
    sweep: Sweep | None = None
    released: set[str] = field(default_factory=set)
    preparing: list[Prepare] = field(default_factory=list)
    bringing: list[Bring] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    """Sequences that go on without the KV that is still to be brought."""
    unsettled: set[str] = field(default_factory=set)
    """Sequences that wait for KV."""
    ruled: set[str] = field(default_factory=set)
    """Sequences whose grammars are made."""


class Network:
    def __init__(self, capacities: dict[str, int], paths: list[tuple[Stage, ...]]) -> None:
        self.paths = paths
        """Few, so that sequences share them."""
        self.last: dict[str, Submit] = {}
        """The last attempt of each request."""
        engines = {name: CheckedEngine(capacities[name]) for name in NODES}
        for engine in engines.values():
            engine.blocks = {0, 1, 2}
        self.nodes = {
            name: Node(
                Batcher(
                    NodeId(name),
                    slots=SLOTS,
                    step_tokens=STEP_TOKENS,
                    speculation=3,
                    kv=engine,
                    worth=lambda *_: True,
                    held=engine.held,
                ),
                engine,
            )
            for name, engine in engines.items()
        }
        self.links: dict[tuple[str, str], deque[StageMessage | None]] = {}
        """(from, to) -> messages under way; None: word that the connection broke."""
        self.dead: set[str] = set()
        self.generated: dict[str, list[int]] = {}
        """What each attempt has generated, with the tokens that it began with."""
        self.yields: dict[str, str] = {}
        """The attempt that each one takes over from, once it asks it to yield."""
        self.free: set[str] = set()
        """Attempts that may run although they take over from others: these have ended for them, or
        they wait for them no longer."""
        self.open: dict[str, Submit] = {}
        """Accepted attempts that have not ended, by sequence key."""
        self.next_index: dict[str, int] = {}
        self.failed: list[AttemptFailed] = []
        self.admitted: set[tuple[str, str]] = set()
        """(node, sequence): the node, a later stage, has room for it."""

    # --- what may happen ---

    def submit(self, message: Submit) -> None:
        node = message.stages[0].node
        if node in self.dead:
            return
        for each in message.stages:
            self.nodes[each.node].engine.blocks |= set(range(each.start, each.stop))
        key = sequence_key(message.request, message.attempt)
        try:
            commands = self.nodes[node].batcher.submit(message, n_blocks=BLOCKS, held=range(BLOCKS))
        except (CapacityExceeded, StaleEpoch):
            return
        except TransportTimeout:  # asked twice without a step between
            self.cancel(key)
            return
        if key in self.open:
            assert not commands
            return
        self.open = {
            key: s
            for key, s in self.open.items()
            if s.request != message.request
            or s.stages[0].node != node
            or s.attempt == message.takes_over
        }
        self.open[key] = message
        self.generated[key] = list(message.tokens[message.prompt_tokens :])
        if self.nodes[node].batcher.unsettled(key):
            self.nodes[node].unsettled.add(key)
        unscored = message.prompt_tokens - message.score_from if message.score_from else 0
        self.next_index[key] = len(message.tokens) - message.prompt_tokens - unscored
        self.do(node, commands)

    def cancel(self, key: str) -> None:
        message = self.open.pop(key)
        node = message.stages[0].node
        cancel = Cancel(request=message.request, attempt=message.attempt)
        self.do(node, self.nodes[node].batcher.cancel(cancel))

    def deliver(self, link: tuple[str, str]) -> None:
        sender, target = link
        message = self.links[link].popleft()
        batcher = self.nodes[target].batcher
        if message is None:
            self.do(target, batcher.peer_lost(f"mem://{sender}", Failure("peer_lost", sender)))
        else:
            if isinstance(message, Yield):
                self.yields[message.taker] = message.sequence
            if isinstance(message, Yielded):
                self.free.add(attempt_of(message.taker))
            commands = batcher.received(message)
            if isinstance(message, Admit):
                self.check_answer(target, message, commands)
            self.do(target, commands)

    def prepare(self, name: str, failure: Failure | None = None) -> None:
        """A grammar is made, or cannot be."""
        node = self.nodes[name]
        key = node.preparing.pop(0).sequence
        if key not in node.released:
            if not failure:
                node.ruled.add(key)
            self.do(name, node.batcher.prepared(key, failure))

    def leads(self, name: str, key: str) -> bool:
        return any(attempt_of(s.key) == key for s in self.nodes[name].batcher._leader.led)

    def bring(self, name: str, *, right: bool = True) -> None:
        """KV has come, or cannot be had."""
        node = self.nodes[name]
        command = node.bringing.pop(0)
        right = right and command.sequence not in node.stopped
        if right and command.sequence in node.engine.filled:
            node.engine.fill(command.sequence, command.blocks, command.positions)
        self.do(name, node.batcher.brought(command, right=right))

    def late(self, name: str, key: str) -> None:
        self.free.add(key)
        self.do(name, self.nodes[name].batcher.late(key))

    def attach(self, name: str) -> None:
        """The next block that the node lacks has come."""
        engine = self.nodes[name].engine
        engine.blocks.add(min(set(range(BLOCKS)) - engine.blocks))

    def begin(self, name: str) -> bool:
        """Begins a sweep; whether there was anything for it."""
        node = self.nodes[name]
        self.do(name, node.batcher.pull(()))
        self.do(name, node.batcher.restore())
        parts = node.batcher.take()
        node.batcher.validate()
        if parts:
            node.sweep = Sweep(parts[0].model_id)
            self.join(name, node.sweep, parts)
        return bool(parts) or node.batcher.restoring

    def advance(self, name: str) -> None:
        """Runs one block."""
        node = self.nodes[name]
        assert node.sweep is not None
        sweep = node.sweep
        self.do(name, node.batcher.pull(sweep.parts))
        self.join(name, sweep, node.batcher.join(sweep.model_id, sweep.at, sweep.parts))
        sweep.at = max(sweep.at, min((part.start for part in sweep.parts), default=sweep.at)) + 1
        left = [part for part in sweep.parts if part.stop == sweep.at]
        sweep.parts = [part for part in sweep.parts if part.stop > sweep.at]
        for part in left:
            part, drawn = node.engine.finish(part)
            if part.rows:
                vectors = node.engine.vectors(part)
                self.do(name, node.batcher.ran(part, drawn, None, scored(part), vectors))
        if not sweep.parts:
            self.join(name, sweep, node.batcher.join(sweep.model_id, sweep.at, ()))
        if not sweep.parts:
            node.sweep = None

    def join(self, name: str, sweep: Sweep, parts: tuple[Part, ...]) -> None:
        node = self.nodes[name]
        self.check_parts(node, sweep, parts)
        for part in parts:
            while (part := node.batcher.live(part)).rows:
                try:
                    node.engine.join(part)
                except CapacityExceeded:
                    if newest := node.batcher._leader.takings.newest_of(part.model_id):
                        self.free.add(newest)
                    self.do(name, node.batcher.no_room(part, Failure("capacity", "full")))
                else:
                    sweep.parts.append(part)
                    break

    def break_link(self, one: str, other: str) -> None:
        for link in ((one, other), (other, one)):
            self.links[link] = deque([None])

    def kill(self, name: str) -> None:
        self.dead.add(name)
        for other in NODES:
            self.links.pop((other, name), None)
            if other not in self.dead:
                self.links[name, other] = deque([None])
        self.open = {k: s for k, s in self.open.items() if s.stages[0].node != name}

    # --- what follows, and what must hold ---

    def do(self, name: str, commands: list[Command]) -> None:
        node = self.nodes[name]
        node.batcher.validate()
        for command in commands:
            assert command.cause, f"nothing caused {command}"
            if isinstance(command, Release):
                for key in command.sequences:
                    assert key not in node.released, "freed twice"
                    node.released.add(key)
                    node.engine.kv.pop(key, None)
                    node.engine.restoring.pop(key, None)
            elif isinstance(command, Prepare):
                assert command.context.has_grammar
                node.preparing.append(command)
            elif isinstance(command, Emit):
                self.emitted(command.what)
            elif isinstance(command, Lend):
                self.lend(name, command)
            elif isinstance(command, Bring):
                node.bringing.append(command)
            elif isinstance(command, Settled):
                node.unsettled.remove(command.sequence)
            elif isinstance(command, Stop):
                assert any(each.sequence == command.sequence for each in node.bringing)
                node.stopped.add(command.sequence)
            elif isinstance(command, Return):
                assert command.region
            elif isinstance(command, Weighed):
                assert command.restoration.positions
            else:
                self.sent(name, command)

    def lend(self, name: str, command: Lend) -> None:
        ask = command.ask
        stays, run, _ = self.nodes[name].engine.kv[ask.sequence]
        led = self.nodes[name].batcher._leader.led.running.get(ask.sequence)
        final = max(stays, led.position if led else 0)  # of what was proposed some was accepted
        assert ask.end <= min(final, run), "KV is lent that is not there"
        region = f"kv of {ask.sequence}"
        where = ask.start, ask.stop, ask.first, ask.end
        here = KvHere(ask.taker, ask.stage, region, "", b"", *where)
        self.do(name, self.nodes[name].batcher.lent(command, here))

    def sent(self, name: str, command: Send) -> None:
        target = command.address.removeprefix("mem://")
        if isinstance(command.message, Yielded):
            old = self.yields[command.message.taker]
            if not self.leads(name, old):
                self.open.pop(old, None)
        moves = isinstance(command.message, KvAsk | KvHere | KvDone | Yield | Yielded)
        assert moves or target != name
        if target in self.dead:
            self.links.setdefault((target, name), deque()).append(None)
        else:
            self.links.setdefault((name, target), deque()).append(command.message)

    def emitted(self, what: Token | AttemptFailed | Scores) -> None:
        key = sequence_key(what.request, what.attempt)
        assert key in self.open, "an end or a token of an attempt that is over"
        message = self.open[key]
        if isinstance(what, AttemptFailed):
            assert what.code in ("peer_lost", "source_lost", "capacity", "not_found", "bad_input")
            del self.open[key]
            self.failed.append(what)
            return
        assert what.index == self.next_index[key]
        if isinstance(what, Scores):
            first, count = message.prompt_tokens + what.index, len(what.logprobs)
            assert [one.drawn for one in what.logprobs] == [first - 1 + i for i in range(count)]
            assert 0 < count <= -what.index
            self.next_index[key] += count
            return
        if message.pooling:
            count = message.prompt_tokens if message.pooling is Pooling.MEAN else 1
            assert (what.vector, what.finish) == (b"%d" % count, "length")
            del self.open[key]
            return
        assert what.token == token_after(message.prompt_tokens + what.index - 1, limit_of(message))
        self.next_index[key] += 1
        self.generated[key].append(what.token)
        stopped = what.token in message.stop_ids
        length = what.index + 1 == message.max_tokens
        assert what.finish == ("stop" if stopped else "length" if length else "")
        if what.finish:
            del self.open[key]

    def check_answer(self, name: str, asked: Admit, commands: list[Command]) -> None:
        """A stage answers at once: it has the KV for what the sequence begins with, or nothing of
        the sequence was run anywhere."""
        key, engine = asked.sequence, self.nodes[name].engine
        (answer,) = [command.message for command in commands if isinstance(command, Send)]
        if isinstance(answer, Admitted):
            stage = asked.path.stages[answer.stage]
            needs = {parts_of(stage.start, stage.stop): whole_pages(asked.tokens)}
            assert engine.room_with(needs) >= 0
            self.admitted.add((name, key))
        else:
            assert isinstance(answer, Failed)
            assert not any(key in node.engine.made for node in self.nodes.values())

    def check_parts(self, node: Node, sweep: Sweep, parts: tuple[Part, ...]) -> None:
        keys = [key for part in (*sweep.parts, *parts) for key in part.keys]
        assert len(set(keys)) == len(keys)
        prompts = 0
        for part in parts:
            assert part.rows
            assert part.model_id == sweep.model_id
            assert part.start >= sweep.at
            for row in part.rows:
                comes = any(each.sequence == row.sequence for each in node.bringing)
                assert not comes or row.sequence in node.stopped, "its pages are written to"
            for row in part.rows if part.stop == BLOCKS else ():
                context = row.draw.context if row.draw else None
                assert context is None or row.sequence in node.ruled
            if part.stage > 0:
                continue
            for key in map(attempt_of, part.keys):
                assert key in self.free or not waits(self.open[key]), "both nodes may die of it"
            later = [stage.node for stage in part.path.stages[1:]]
            assert all((other, key) in self.admitted for other in later for key in part.keys)
            assert node.batcher.flights(part.path) <= len(part.path.stages)
            prompts += sum(row.count for row in part.rows if row.count > 1)
        assert prompts <= STEP_TOKENS
        if sweep.parts and parts:
            assert sum(part.positions for part in (*sweep.parts, *parts)) <= STEP_TOKENS

    def movable(self) -> list[str]:
        """Attempts that have generated something here, and still may."""
        return [
            key
            for key, submit in self.open.items()
            if not submit.pooling
            and submit.prompt_tokens + len(self.generated[key]) > len(submit.tokens)
        ]

    def live_links(self) -> list[tuple[str, str]]:
        return [link for link, queue in self.links.items() if queue and link[1] not in self.dead]

    def live_nodes(self) -> list[str]:
        return [name for name in NODES if name not in self.dead]

    def settle(self) -> None:
        """Lets everything run to its end."""
        for _ in range(20_000):
            links = self.live_links()
            for link in links:
                self.deliver(link)
            moved = bool(links)
            for name in self.live_nodes():
                while self.nodes[name].preparing:
                    self.prepare(name)
                    moved = True
                while self.nodes[name].bringing:
                    self.bring(name)
                    moved = True
                while self.nodes[name].sweep is not None:
                    self.advance(name)
                    moved = True
                moved = self.begin(name) or moved
            if not moved:
                return
        raise AssertionError("never settles")


def waits(submit: Submit) -> bool:
    """Whether the attempt waits until the one before has ended."""
    scored = submit.score_from and submit.score_from < submit.prompt_tokens
    plain = not (scored or submit.pooling) and submit.sampling.logprobs is None
    return bool(submit.kv_from) and plain and len(submit.stages) == 1
