"""Answers with idempotency keys, at three gateways over one store: whatever dies, pauses, comes
twice or goes unanswered, every client gets the same answer, or an error that says why not."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gateway.core.keyed import FLUSH_S, LINGER_S, SILENT_S, State
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
from shared.errors import BusTimeout, Conflict
from shared.ids import GatewayId, ModelId
from shared.story import Story
from simulation.checked import CheckedAnswer
from tests.support.amounts import examples

CHOICES = 2
LENGTHS = (9, 5)
GATEWAYS = 3


def true_token(choice: int, index: int) -> int:
    """A token is a function of the seed and of its index."""
    return 1000 * choice + index * index


@dataclass
class Store:
    record: bytes = b""
    revision: int = 0
    """Of the record. 0: there is none."""
    writes: int = 0
    owners: list[GatewayId | None] = field(default_factory=list)

    def write(self, work: Write) -> bool:
        if work.revision != self.revision:
            return False
        self.writes += 1
        self.revision = self.writes
        self.record = msgspec.msgpack.encode(work.record)
        self.owners.append(work.record.owner)
        return True

    def read(self) -> Record | None:
        return msgspec.msgpack.decode(self.record, type=Record) if self.revision else None


class Gateway:
    """One gateway's process, with the instances that generate for it."""

    def __init__(self, name: str, now: float, max_bytes: int) -> None:
        self.id = GatewayId(name)
        self.paused = False
        self.readers = 1
        record = Record(digest="d", model_id=ModelId("m"), created=int(now), owner=self.id)
        self.core = CheckedAnswer("key", record, Story(), now, max_bytes=max_bytes)
        self.core.readers(1, now)
        self.work: Work | None = None
        """What it has begun at the store."""
        self.generating = False
        self.told: dict[int, list[int]] = {choice: [] for choice in range(CHOICES)}
        """What its clients have."""
        self.error: Exception | None = None

    @property
    def whole(self) -> bool:
        return all(len(self.told[choice]) == LENGTHS[choice] for choice in range(CHOICES))

    def do(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Tell(kept):
                    for one in kept:
                        self.told[one.choice].append(one.token)
                case Generate():
                    assert not self.generating
                    self.generating = not self.whole
                    if self.whole:
                        self.core.ended(now)
                case Stop():
                    self.generating = False
                case Fail(error):
                    self.error = error

    def generate(self, choice: int, now: float, wrong: int = 0) -> None:
        index = len(self.told[choice])
        if not self.generating or index == LENGTHS[choice]:
            return
        token = true_token(choice, index) + wrong
        self.told[choice].append(token)
        self.core.generated(Kept(choice, token))
        if self.whole:
            self.generating = False
            self.core.ended(now)


class Keyed(RuleBasedStateMachine):
    max_bytes = 1 << 20

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = Store()
        self.gateways: dict[int, Gateway] = {}
        self.names = 0
        self.away = False
        """Whether the store answers nobody."""

    # --- what happens --------------------------------------------------------

    @rule(number=st.integers(0, GATEWAYS - 1))
    def come(self, number: int) -> None:
        """A client comes with the key, for the first time or again."""
        found = self.gateways.get(number)
        if found is not None and found.paused:
            return
        if found is None or found.core.state in (State.FAILED, State.LEFT) or found.error:
            self.names += 1
            self.gateways[number] = Gateway(f"g{self.names}", self.now, self.max_bytes)
        else:
            found.readers += 1
            found.core.readers(found.readers, self.now)

    @rule(number=st.integers(0, GATEWAYS - 1))
    def go(self, number: int) -> None:
        """A client leaves."""
        if (found := self.awake(number)) and found.readers:
            found.readers -= 1
            found.core.readers(found.readers, self.now)

    @rule(number=st.integers(0, GATEWAYS - 1))
    def die(self, number: int) -> None:
        self.gateways.pop(number, None)

    @rule(number=st.integers(0, GATEWAYS - 1))
    def stop(self, number: int) -> None:
        """In good order."""
        if found := self.awake(number):
            found.do(found.core.leave("the gateway stops", self.now), self.now)

    @rule(number=st.integers(0, GATEWAYS - 1), paused=st.booleans())
    def pause(self, number: int, paused: bool) -> None:
        if found := self.gateways.get(number):
            found.paused = paused

    @rule(away=st.booleans())
    def lose_the_store(self, away: bool) -> None:
        self.away = away

    @rule(number=st.integers(0, GATEWAYS - 1), choices=st.lists(st.integers(0, 1), max_size=6))
    def generate(self, number: int, choices: list[int]) -> None:
        if found := self.awake(number):
            for choice in choices:
                found.generate(choice, self.now)

    @rule(number=st.integers(0, GATEWAYS - 1))
    def fail(self, number: int) -> None:
        """The instances fail it too often."""
        if (found := self.awake(number)) and found.generating:
            found.do(found.core.failed(Conflict("failed"), self.now), self.now)

    @rule(seconds=st.sampled_from([0.05, FLUSH_S, 0.6, SILENT_S + 0.1, LINGER_S + 0.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, GATEWAYS - 1))
    def begin(self, number: int) -> None:
        """A gateway looks what is due, and begins it."""
        if (found := self.awake(number)) and found.work is None:
            found.do(found.core.tick(self.now), self.now)
            found.work = found.core.due(self.now)

    @rule(number=st.integers(0, GATEWAYS - 1), acknowledged=st.sampled_from([True, True, False]))
    def end(self, number: int, acknowledged: bool) -> None:
        """The store does what a gateway began."""
        if (found := self.awake(number)) and found.work is not None:
            self.carry_out(found, acknowledged)

    @rule(number=st.integers(0, GATEWAYS - 1), rounds=st.integers(1, 8))
    def go_on(self, number: int, rounds: int) -> None:
        """Nothing happens but what should."""
        for _ in range(rounds if self.awake(number) else 0):
            self.now += 0.1
            self.begin(number)
            self.end(number, True)
            self.generate(number, [0, 1])

    @rule(number=st.integers(0, GATEWAYS - 1), by=st.integers(0, GATEWAYS - 1))
    def freeze(self, number: int, by: int) -> None:
        """One stands still for so long that another takes over."""
        self.pause(number, True)
        self.come(by)
        self.go_on(by, 3)
        self.now += SILENT_S
        self.go_on(by, 4)
        self.pause(number, False)

    def carry_out(self, gateway: Gateway, acknowledged: bool = True) -> None:
        work, gateway.work = gateway.work, None
        core = gateway.core
        match work:
            case Ask(other):
                there = any(other == g.id for g in self.gateways.values())
                gateway.do(core.asked(there, self.now), self.now)
            case Look() if acknowledged and not self.away:
                record = self.store.read()
                gateway.do(core.looked(record, self.store.revision, self.now), self.now)
            case Write() if not self.away:
                happened = self.store.write(work)
                if not acknowledged:
                    gateway.do(core.unanswered(BusTimeout("lost"), self.now), self.now)
                elif happened:
                    gateway.do(core.written(self.store.revision, self.now), self.now)
                else:
                    gateway.do(core.refused(self.now), self.now)
            case _:
                gateway.do(core.unanswered(BusTimeout("away"), self.now), self.now)

    def awake(self, number: int) -> Gateway | None:
        found = self.gateways.get(number)
        return None if found is None or found.paused else found

    # --- what holds ----------------------------------------------------------

    @invariant()
    def clients_have_the_beginning_of_the_one_answer(self) -> None:
        for gateway in self.gateways.values():
            for choice, tokens in gateway.told.items():
                assert tokens == [true_token(choice, index) for index in range(len(tokens))]

    @invariant()
    def only_an_owner_generates(self) -> None:
        for gateway in self.gateways.values():
            assert not gateway.generating or gateway.core.state is State.GENERATING
            # Whoever generates has been the owner, and nobody took over whom it has heard of.
            assert not gateway.generating or gateway.id in self.store.owners

    @invariant()
    def the_record_has_the_beginning_of_the_answer(self) -> None:
        if (record := self.store.read()) is None:
            return
        counts: Counter[int] = Counter()
        for kept in record.kept:
            assert kept.token == true_token(kept.choice, counts[kept.choice])
            counts[kept.choice] += 1
        assert not record.over or counts == dict(enumerate(LENGTHS))

    def teardown(self) -> None:
        """Nothing goes wrong any more: every client that waits gets all of it, and need not wait
        for a gateway that stands still."""
        self.away = False
        self.all_ends([found for found in self.gateways.values() if not found.paused])
        self.all_ends(list(self.gateways.values()))

    def all_ends(self, gateways: list[Gateway]) -> None:
        for _ in range(300):
            self.now += 0.06
            for gateway in gateways:
                gateway.do(gateway.core.tick(self.now), self.now)
                gateway.work = gateway.work or gateway.core.due(self.now)
                if gateway.work is not None:
                    self.carry_out(gateway)
                for choice in range(CHOICES):
                    gateway.generate(choice, self.now)
                self.only_an_owner_generates()
        for gateway in gateways:
            left = gateway.core.state is State.LEFT
            assert gateway.whole or gateway.error or left, gateway.core._story.of("key")
            assert gateway.core.done, gateway.core._story.of("key")
            assert not left or not gateway.generating


class KeyedLong(Keyed):
    """The record has no room for all tokens."""

    max_bytes = 100


TestKeyed = Keyed.TestCase
TestKeyed.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestKeyedLong = KeyedLong.TestCase
TestKeyedLong.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)
