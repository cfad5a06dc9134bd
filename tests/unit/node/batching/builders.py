"""A scheduler by itself, and what the tests give it and take from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.node.core.batching import Batcher
from services.node.core.kv import Need, Restoration, movable
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Command,
    Failure,
    Forward,
    Part,
    Path,
    Send,
)
from services.node.core.rows import Row
from shared.errors import CapacityExceeded
from shared.ids import NO_ADAPTER, ModelId
from shared.messages.instances import Stage
from shared.messages.serving import Cancel, Submit
from tests.support.submits import BLOCKS, MODEL, stages, submit

FROM_C = Path(MODEL, stages(("c", 0, 2), ("a", 2, BLOCKS)))


@dataclass
class FakeKv:
    kv_capacity: int = 1000
    kv_used: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """Positions that sequences begin with, by their keys."""
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The tokens of each question to the prefix cache, by the sequence's key."""
    came: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The tokens whose KV came from another node, by the sequence's key."""
    without: set[ModelId] = field(default_factory=set)
    """Models that keep none."""
    in_host: dict[str, Restoration] = field(default_factory=dict)
    """What host memory has of sequences, by their keys."""
    restored: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    """What comes of it each time, by the sequence's key: see `Kv.restore`."""
    each: int = 100
    """Bytes of a position."""

    def kv_share(self, model_id: ModelId) -> int:
        return self.kv_capacity

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        return 1

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        return self.kv_capacity - self.kv_used - sum(promised.values())

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """Models do not differ."""

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        return model_id not in self.without

    def adopt(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        self.asked[key] = tokens
        return self.cached.get(key, 0)

    def restorable(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> Restoration | None:
        return self.in_host.get(key)

    def restore(self, key: str) -> tuple[int, bool]:
        return self.restored[key].pop(0)

    def position_bytes(self, model_id: ModelId) -> int:
        return self.each

    def receive(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        self.asked[key] = tokens
        if self.kv_used + movable(len(tokens)) > self.kv_capacity:
            raise CapacityExceeded("too few pages")
        return self.cached.get(key, 0)

    def receive_more(self, key: str, end: int) -> None:
        if self.kv_used + end > self.kv_capacity:
            raise CapacityExceeded("too few pages")

    def received(self, key: str, tokens: tuple[int, ...]) -> None:
        self.came[key] = tokens


class Named(str):
    """Hidden states, of which a name is enough."""

    shape = (0, 0)


def batcher(
    node: str = "a",
    *,
    slots: int = 8,
    step_tokens: int = 4,
    speculation: int = 0,
    kv: FakeKv | None = None,
) -> Batcher:
    return Batcher(
        stages((node, 0, 1))[0].node,
        slots=slots,
        step_tokens=step_tokens,
        speculation=speculation,
        kv=kv or FakeKv(),
    )


def queue(core: Batcher, *messages: Submit) -> None:
    """All stages of their paths have room."""
    for message in messages:
        for asked in ask(core, message):
            core.received(Admitted(asked.stage, asked.sequence))


def ask(core: Batcher, message: Submit) -> list[Admit]:
    """What the other stages are asked."""
    commands = core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS))
    sent = [command.message for command in commands if isinstance(command, Send)]
    return [each for each in sent if isinstance(each, Admit)]


def come(core: Batcher, message: Forward, hidden: Any = None) -> list[Command]:
    """A micro-batch comes, whose leader has asked for room where sequences begin."""
    for row in message.rows:
        if not row.position and row.sequence not in core._follower.sequences:
            first = Admit(message.path, message.stage, row.sequence, row.count, row.limit)
            core.received(first)
    return core.received(message, hidden)


Work = tuple[Part, ...]


def take(core: Batcher) -> Work:
    work = core.take()
    assert work
    return work


def run(core: Batcher, work: Work, token: int = 1) -> list[Command]:
    commands: list[Command] = []
    for part in work:
        sampled = [(token,) if row.draw else () for row in part.rows]
        commands += core.ran(part, sampled, Named(f"hidden {part.batch}"))
    return commands


def rows(work: Work) -> list[tuple[str, int, int]]:
    return [(row.sequence, row.position, row.count) for part in work for row in part.rows]


def one(name: str, path: tuple[Stage, ...], size: int = 1) -> Submit:
    return submit(name, path, prompt=tuple(range(size)))


def forward(path: Path, *given: Row, batch: int = 1) -> Forward:
    return Forward(path, 1, batch, given)


FULL = Failure("capacity", "full")


def _cancel_of(message: Submit) -> Cancel:
    return Cancel(request=message.request, attempt=message.attempt)
