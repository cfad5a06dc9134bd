"""A network of schedulers under random submits, cancels, losses, interleavings and lack of KV.

Each node is a Batcher with an engine that only checks what it is told to do, block by block.
Messages wait in a queue for each pair of nodes; hypothesis chooses what happens next.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.node.core.batching import Batcher
from services.node.core.kv import PAGE, movable, whole_pages
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
    Yield,
    Yielded,
)
from services.node.core.rows import Row, SequenceKey, attempt_of, request_of
from services.node.core.sequences import limit_of, sequence_key
from shared.errors import CapacityExceeded, StaleEpoch, TransportTimeout
from shared.ids import NO_ADAPTER, GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import (
    AttemptFailed,
    Cancel,
    LogitRules,
    Logprobs,
    Pooling,
    Sampling,
    Scores,
    Submit,
    Token,
)

NODES = ("a", "b", "c")
MODELS = (ModelId("m"), ModelId("m"), ModelId("other"))
BLOCKS = 6
SLOTS = 3
STEP_TOKENS = 4
STOP_ID = 7


def stage(node: str, start: int, stop: int) -> Stage:
    return Stage(NodeId(node), f"mem://{node}", start, stop)


PATHS = (
    (stage("a", 0, 6),),
    (stage("b", 0, 6),),
    (stage("a", 0, 3), stage("b", 3, 6)),
    (stage("b", 0, 3), stage("a", 3, 6)),
    (stage("c", 0, 3), stage("b", 3, 6)),
    (stage("a", 0, 2), stage("b", 2, 4), stage("c", 4, 6)),
    (stage("c", 0, 2), stage("a", 2, 4), stage("b", 4, 6)),
)


SOME_PATHS = st.lists(st.sampled_from(PATHS), min_size=1, max_size=3, unique=True)


@dataclass
class CheckedEngine:
    """Knows only how far each sequence is; refuses when it has no pages left."""

    kv_capacity: int
    kv: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """key -> (positions that stay, positions run, limit)"""
    made: set[str] = field(default_factory=set)
    preempted: int = 0
    averaged: dict[str, int] = field(default_factory=dict)
    """How many positions of each sequence."""
    filled: dict[str, set[int]] = field(default_factory=dict)
    """Blocks for which a sequence's KV has come from other nodes."""
    moved: int = 0
    """How many sequences go on with KV from other nodes."""
    blocks: set[int] = field(default_factory=set)
    """The blocks that have arrived here."""
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The blocks in which each sequence that began here has KV."""
    ran_on: int = 0
    """How often a part went on where one before had left its sequences."""

    def held(self, model_id: ModelId) -> set[int]:
        return self.blocks

    @property
    def kv_used(self) -> int:
        return sum(whole_pages(run) for _, run, _ in self.kv.values())

    def kv_share(self, model_id: ModelId) -> int:
        return self.kv_capacity

    def kv_free(self, model_id: ModelId, promised: Mapping[ModelId, int]) -> int:
        return self.kv_capacity - self.kv_used - sum(promised.values())

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """Models do not differ."""

    def adopt(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        """Now and then something is cached."""
        assert key not in self.made, "KV made twice"
        found = max(len(tokens) - 1, 0) // PAGE * PAGE if (len(tokens) + len(self.made)) % 3 else 0
        if found:
            self.made.add(key)
            self.kv[key] = (found, found, limit)
        return found

    def position_bytes(self, model_id: ModelId) -> int:
        return 1

    def receive(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        assert key not in self.made, "KV made twice"
        end = movable(len(tokens))
        if self.kv_used + end > self.kv_capacity:
            raise CapacityExceeded("full")
        self.made.add(key)
        self.kv[key] = (end, end, limit)
        self.filled[key] = set()
        return 0

    def received(self, key: str, tokens: tuple[int, ...]) -> None:
        assert self.filled[key] == set(range(BLOCKS)), "blocks without KV"
        assert self.kv[key][1] == len(tokens)
        self.moved += 1

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        return True

    def run_on(self, part: Part) -> None:
        self.ran_on += 1
        for row in part.rows:
            start, stop = self.stages[row.sequence]
            assert (stop, row.tokens) == (part.start, ())
            assert self.kv[row.sequence] == (row.count, row.count, row.limit)
            self.stages[row.sequence] = start, part.stop

    def join(self, part: Part) -> None:
        if part.stage == 0:
            assert set(range(part.start, part.stop)) <= self.blocks
        if part.resumes_at:
            self.run_on(part)
            return
        rows = part.rows
        had = {row.sequence: self.kv.get(row.sequence, (0, 0, 0))[1] for row in rows}
        ends = {row.sequence: max(row.position + row.count, had[row.sequence]) for row in rows}
        new = sum(whole_pages(ends[key]) - whole_pages(had[key]) for key in had)
        if self.kv_used + new > self.kv_capacity:
            raise CapacityExceeded("full")
        for row in part.rows:
            if row.position == 0:
                assert row.sequence not in self.made, "KV made twice"
                self.made.add(row.sequence)
                self.kv[row.sequence] = (0, 0, row.limit)
                self.stages[row.sequence] = part.start, part.stop
            if row.sequence in self.stages:
                assert self.stages[row.sequence] == (part.start, part.stop), "cut elsewhere"
            stays, reached, limit = self.kv[row.sequence]
            assert stays <= row.position <= reached
            assert limit == row.limit >= row.position + row.count
            assert len(row.tokens) == (row.count if part.start == 0 else 0)
            end = row.position + row.count
            self.kv[row.sequence] = (end - row.proposed, end, limit)

    def finish(self, part: Part) -> tuple[Part, list[tuple[int, ...]]]:
        """What is left of the part, and what it drew."""
        part = part.without(set(part.keys) - set(self.kv))
        drawn = [_drawn(row) for row in part.rows]
        return part, drawn if part.stop == BLOCKS else [()] * len(part.rows)

    def vectors(self, part: Part) -> dict[SequenceKey, bytes]:
        """As if a vector said how many positions it is made of."""
        found = {}
        for row in part.rows if part.stop == BLOCKS else ():
            if row.pooling is Pooling.MEAN:
                assert row.position == self.averaged.get(row.sequence, 0)
                self.averaged[row.sequence] = row.position + row.count
            if row.gives_vector:
                found[row.sequence] = b"%d" % self.averaged.get(row.sequence, 1)
        return found


def scored(part: Part) -> dict[SequenceKey, tuple[Logprobs, ...]]:
    """As if the log probability of a prompt's token were the number of the position before it."""
    found = {}
    for row in part.rows if part.stop == BLOCKS else ():
        if row.score:
            first, count = row.position + row.score.first, len(row.score.tokens)
            assert row.score.tokens == tuple(range(first + 1, first + count + 1))
            assert first >= row.position
            assert first + count <= row.position + row.count
            found[row.sequence] = tuple(Logprobs(float(first + i), ()) for i in range(count))
    return found


def token_after(position: int, limit: int) -> int:
    """What is drawn: it often repeats what was drawn before."""
    if position % 13 == 12:
        return STOP_ID
    return (position // 3 if limit % 2 else position) % 3


def _drawn(row: Row) -> tuple[int, ...]:
    if row.draw is None:
        return ()
    last = row.position + row.count - row.proposed - 1
    tokens = [token_after(last, row.limit)]
    for proposed in row.draw.proposed:
        if proposed != tokens[-1]:
            break
        tokens.append(token_after(last + len(tokens), row.limit))
    return tuple(tokens)


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
        if self.nodes[node].batcher.takes_kv(key):
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
        if right and command.sequence in node.engine.filled:
            node.engine.filled[command.sequence] |= set(range(*command.blocks))
        self.do(name, node.batcher.brought(command, right=right))

    def late(self, name: str, key: str) -> None:
        self.do(name, self.nodes[name].batcher.late(key))

    def attach(self, name: str) -> None:
        """The next block that the node lacks has come."""
        engine = self.nodes[name].engine
        engine.blocks.add(min(set(range(BLOCKS)) - engine.blocks))

    def begin(self, name: str) -> bool:
        """Begins a sweep; whether there was anything for it."""
        node = self.nodes[name]
        self.do(name, node.batcher.pull(()))
        parts = node.batcher.take()
        node.batcher.validate()
        if parts:
            node.sweep = Sweep(parts[0].model_id)
            self.join(name, node.sweep, parts)
        return bool(parts)

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
            elif isinstance(command, Return):
                assert command.region
            else:
                self.sent(name, command)

    def lend(self, name: str, command: Lend) -> None:
        ask = command.ask
        stays = self.nodes[name].engine.kv[ask.sequence][0]
        assert ask.end <= stays, "KV is lent that is not there"
        region = f"kv of {ask.sequence}"
        here = KvHere(ask.taker, ask.stage, region, start=ask.start, stop=ask.stop)
        self.sent(name, Send(ask.to, here, cause=command.cause))

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
            assert what.code in ("peer_lost", "capacity", "not_found", "bad_input")
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
            assert engine.kv_used + whole_pages(asked.tokens) <= engine.kv_capacity
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
            for row in part.rows if part.stop == BLOCKS else ():
                context = row.draw.context if row.draw else None
                assert context is None or row.sequence in node.ruled
            if part.stage > 0:
                continue
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


def a_submit(network: Network, draw: st.DataObject) -> Submit:
    """The next attempt of some request; now and then, the last one again."""
    request = draw.draw(st.sampled_from([f"r{i}" for i in range(8)]))
    last = network.last
    if request in last and draw.draw(st.integers(0, 5)) == 0:
        return last[request]
    prompt = draw.draw(st.one_of(st.integers(1, 9), st.integers(14, 18)))
    score_from = draw.draw(st.sampled_from([0, 0, 1, 1 + prompt // 2, prompt]))
    so_far = draw.draw(st.integers(0, 3)) if score_from in (0, prompt) else 0
    before = last[request].attempt if request in last else 0
    last[request] = Submit(
        request=RequestId(request),
        attempt=before + 1,
        takes_over=draw.draw(st.sampled_from([0, before])),
        gateway=GatewayId("g"),
        model_id=draw.draw(st.sampled_from(MODELS)),
        instance=InstanceId("i"),
        stages=draw.draw(st.sampled_from(network.paths)),
        tokens=tuple(range(prompt + so_far)),
        prompt_tokens=prompt,
        max_tokens=so_far + draw.draw(st.integers(1, 40)),
        stop_ids=draw.draw(st.sampled_from([(), (STOP_ID,)])),
        sampling=Sampling(logprobs=0 if score_from else None),
        rules=draw.draw(st.sampled_from([None, None, LogitRules(grammar="g")])),
        score_from=score_from,
    )
    if draw.draw(st.integers(0, 4)) == 0:
        last[request] = msgspec.structs.replace(
            last[request],
            tokens=tuple(range(prompt)),
            max_tokens=1,
            stop_ids=(),
            sampling=Sampling(),
            rules=None,
            score_from=0,
            pooling=draw.draw(st.sampled_from(Pooling)),
        )
    return last[request]


def a_move(network: Network, draw: st.DataObject) -> Submit:
    """An attempt that takes a running one over, with its KV."""
    key = draw.draw(st.sampled_from(sorted(network.movable())))
    before = network.open[key]
    known = network.generated[key]
    moved = msgspec.structs.replace(
        before,
        attempt=network.last[before.request].attempt + 1,
        takes_over=before.attempt,
        kv_from=before.stages,
        stages=draw.draw(st.sampled_from([*PATHS[:2], *network.paths])),
        tokens=(*before.tokens[: before.prompt_tokens], *known),
        score_from=before.prompt_tokens if before.score_from else 0,
    )
    network.last[before.request] = moved
    return moved


def happen(network: Network, draw: st.DataObject) -> None:
    """One thing, of those that can happen now."""
    live = network.live_nodes()
    choices: list[tuple[str, str | tuple[str, str]]] = [("submit", "")] * 2
    choices += [("deliver", link) for link in network.live_links()] * 2
    choices += [("begin", name) for name in live if network.nodes[name].sweep is None]
    choices += [("advance", name) for name in live if network.nodes[name].sweep is not None] * 2
    choices += [("prepare", name) for name in live if network.nodes[name].preparing]
    lacking = [name for name in live if len(network.nodes[name].engine.blocks) < BLOCKS]
    choices += [("attach", name) for name in lacking]
    choices += [("cancel", key) for key in network.open]
    choices += [("bring", name) for name in live if network.nodes[name].bringing] * 2
    if draw.draw(st.integers(0, 9)) == 0:
        choices += [("late", key) for name in live for key in network.nodes[name].unsettled]
    choices += [("move", "")] * 2 if network.movable() else []
    if len(live) > 1 and draw.draw(st.integers(0, 12)) == 0:
        choices += [("break", (live[0], live[-1])), ("kill", live[-1])] * 5
    match draw.draw(st.sampled_from(choices)):
        case ("submit", _):
            network.submit(a_submit(network, draw))
        case ("deliver", (str(sender), str(target))):
            network.deliver((sender, target))
        case ("begin", str(name)):
            network.begin(name)
        case ("advance", str(name)):
            network.advance(name)
        case ("attach", str(name)):
            network.attach(name)
        case ("prepare", str(name)):
            bad = draw.draw(st.sampled_from([None, None, None, Failure("bad_input", "no grammar")]))
            network.prepare(name, bad)
        case ("cancel", str(key)):
            network.cancel(key)
        case ("bring", str(name)):
            network.bring(name, right=draw.draw(st.integers(0, 4)) > 0)
        case ("late", str(key)):
            network.late(network.open[key].stages[0].node, key)
        case ("move", _):
            network.submit(a_move(network, draw))
        case ("break", (str(one), str(other))):
            network.break_link(one, other)
        case ("kill", str(name)):
            network.kill(name)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_attempt_ends_once_and_leaves_nothing(data: st.DataObject) -> None:
    capacity = st.sampled_from([1000, 32, 48])
    network = Network({name: data.draw(capacity) for name in NODES}, data.draw(SOME_PATHS))
    for _ in range(data.draw(st.integers(1, 120))):
        happen(network, data)
    network.settle()
    for dead in network.dead:  # the lease of a dead node ends later than its connections
        for name in network.live_nodes():
            network.links[dead, name] = deque([None])
    network.settle()
    assert not network.open
    for name in network.live_nodes():
        node = network.nodes[name]
        assert not node.engine.kv
        assert node.engine.made <= node.released
        assert (node.batcher.running, node.batcher.waiting) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_without_losses_every_attempt_ends_with_its_last_token(data: st.DataObject) -> None:
    network = Network(dict.fromkeys(NODES, 1000), data.draw(SOME_PATHS))
    for _ in range(data.draw(st.integers(1, 12))):
        network.submit(a_submit(network, data))
        for _ in range(data.draw(st.integers(0, 4))):
            for link in network.live_links():
                network.deliver(link)
            for name in NODES:
                if network.nodes[name].sweep is None:
                    network.begin(name)
                else:
                    network.advance(name)
    network.settle()
    assert not network.open
    assert not network.failed


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_runs_moves_with_its_kv_and_no_token_is_lost(data: st.DataObject) -> None:
    network = Network(dict.fromkeys(NODES, 1000), data.draw(SOME_PATHS))
    for index in range(data.draw(st.integers(1, 3))):
        first = Submit(
            request=RequestId(f"r{index}"),
            attempt=1,
            gateway=GatewayId("g"),
            model_id=MODELS[0],
            instance=InstanceId("i"),
            stages=data.draw(st.sampled_from(network.paths)),
            tokens=tuple(range(data.draw(st.integers(15, 40)))),
            prompt_tokens=15,
            max_tokens=60,
            stop_ids=(),
            sampling=Sampling(),
            rules=data.draw(st.sampled_from([None, LogitRules(grammar="g")])),
        )
        network.last[first.request] = first
        network.submit(first)
    for _ in range(data.draw(st.integers(20, 60))):
        for link in network.live_links():
            network.deliver(link)
        for name in NODES:
            while network.nodes[name].preparing:
                network.prepare(name)
            if network.nodes[name].sweep is None:
                network.begin(name)
            else:
                network.advance(name)
    for _ in range(data.draw(st.integers(10, 150))):
        if network.movable() and data.draw(st.integers(0, 9)) == 0:
            network.submit(a_move(network, data))
        choices = [("deliver", link) for link in network.live_links()]
        choices += [("step", (name, name)) for name in NODES]
        what, (sender, name) = data.draw(st.sampled_from(choices))
        node = network.nodes[name]
        if what == "deliver":
            network.deliver((sender, name))
        elif node.preparing:
            network.prepare(name)
        elif node.bringing:
            network.bring(name)
        elif node.sweep is None:
            network.begin(name)
        else:
            network.advance(name)
    network.settle()
    assert not network.open
    assert not network.failed
    for node in network.nodes.values():
        assert not node.engine.kv
        assert not node.unsettled
    whole = [key for key, tokens in network.generated.items() if len(tokens) == 60]
    assert {request_of(key) for key in whole} == set(network.last), "a last token never came"
