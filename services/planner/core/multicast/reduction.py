"""Reduces a task to the part that a strategy plans itself, and adds the rest to the strategy's
moves.

A strategy spreads the blocks from nodes that send, to nodes that receive and send. Two kinds of
nodes are added afterwards:

- Of a host whose nodes share a local link (NVLink), one node is planned. The others copy every
  block from it a step later, or from a source on their host, and take no port for it.
- Nodes that only receive (`Port.out` 0: prefill nodes, whose out-link carries KV) relay nothing.
  They take blocks from ports that the strategy leaves idle: its taps, and nodes that are complete.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.planner.core.multicast.fabric import Fabric, Task
from services.planner.core.multicast.schedule import Move, by_step, check_inputs
from shared.errors import BadInput, PlanError


@dataclass(frozen=True, slots=True)
class Core:
    task: Task
    sources: tuple[int, ...]
    """Nodes that hold every block and send."""
    relays: tuple[int, ...]
    """Destinations that receive and send."""
    leaves: tuple[int, ...]
    """Destinations that only receive."""
    copies: Mapping[int, tuple[int, ...]]
    """Sources, relays or leaves -> destinations on the same host that copy from them."""


def core_of(task: Task) -> Core:
    """The part of the task for a strategy. BadInput for a task that makes no sense; PlanError if no
    source may send although some destination needs it."""
    check_task(task)
    ports = task.fabric.ports
    copies = _copies(task)
    copying = {node for mates in copies.values() for node in mates}
    planned = [node for node in task.destinations if node not in copying]
    for node in planned:
        if ports[node].into <= 0:
            raise BadInput(f"node {node} takes nothing in: leave it out, or make it a source")
    sources = tuple(node for node in task.sources if ports[node].out > 0)
    if planned and not sources:
        raise PlanError(
            f"none of the sources {list(task.sources)} may send (their ports' out is 0), and nodes "
            f"{planned} are on no host of theirs: name a source that may"
        )
    return Core(
        task,
        sources,
        tuple(node for node in planned if ports[node].out > 0),
        tuple(node for node in planned if ports[node].out <= 0),
        copies,
    )


def check_task(task: Task) -> None:
    """BadInput if the task's nodes, sources, blocks or rates cannot be planned for."""
    check_inputs(task.nodes, task.blocks, task.sources)
    if min(task.block_bytes) <= 0:
        raise BadInput(f"block sizes {list(task.block_bytes)}: each must be more than 0")
    for rack, rate in task.fabric.trunks.items():
        if rate <= 0:
            raise BadInput(
                f"the trunk of rack {rack!r} carries {rate} bytes/s: more than 0, please"
            )


def _copies(task: Task) -> dict[int, tuple[int, ...]]:
    """Who copies from whom within a host: from the best source there, or else from the node that
    sends fastest."""
    fabric = task.fabric
    hosts: dict[str, list[int]] = {}
    if fabric.local_bytes_per_s > 0:
        for node in task.destinations:
            if fabric.ports[node].host:
                hosts.setdefault(fabric.ports[node].host, []).append(node)
    feeders = {fabric.ports[node].host: node for node in reversed(task.sources)}
    copies: dict[int, tuple[int, ...]] = {}
    for host, members in hosts.items():
        feeder = feeders.get(host, max(members, key=lambda node: fabric.ports[node].out))
        if others := tuple(node for node in members if node != feeder):
            copies[feeder] = others
    return copies


def complete(core: Core, moves: Sequence[Move]) -> tuple[Move, ...]:
    """The strategy's moves and those of the added nodes, in order of steps."""
    copies = [
        Move(block + 1, source, mate, block)
        for source in core.task.sources
        for mate in core.copies.get(source, ())
        for block in range(core.task.blocks)
    ]
    copies += _local_copies(core, moves)
    if not core.leaves:
        return tuple(by_step([*moves, *copies])) if copies else tuple(moves)
    spread = by_step([*moves, *copies])
    fed = _Feeding(core, spread).run()
    return tuple(by_step([*spread, *fed, *_local_copies(core, fed)]))


def _local_copies(core: Core, moves: Iterable[Move]) -> list[Move]:
    return [
        Move(step + 1, dst, mate, block)
        for step, _, dst, block in moves
        for mate in core.copies.get(dst, ())
    ]


class _Feeding:
    """Step by step, gives the ports that rest to the leaves. Leaves that hold least come first.

    A leaf is fed from its own rack if any node there sends, and otherwise through the trunks. A
    tight trunk carries one block a step in each direction, including the strategy's own.
    """

    def __init__(self, core: Core, spread: Sequence[Move]) -> None:
        self.fabric: Fabric = core.task.fabric
        tight = self.fabric.tight_racks()
        self.zone = [port.rack if port.rack in tight else "" for port in self.fabric.ports]
        """For each node its rack, if that has a tight trunk; else an empty string."""
        self.blocks = core.task.blocks
        self.leaves = core.leaves
        self.by_step: dict[int, list[Move]] = {}
        for move in spread:
            self.by_step.setdefault(move.step, []).append(move)
        full = (1 << self.blocks) - 1
        self.have = [0] * core.task.nodes
        for source in core.task.sources:
            self.have[source] = full
        able = {*core.sources, *(move.dst for move in spread)}
        self.senders = sorted(node for node in able if self.fabric.ports[node].out > 0)
        self.zones = {self.zone[node] for node in self.senders}
        self.first = {
            leaf: self.blocks * i // len(self.leaves) for i, leaf in enumerate(self.leaves)
        }
        """The block at which each leaf begins, so that leaves together soon hold every block."""

    def run(self) -> list[Move]:
        full = (1 << self.blocks) - 1
        hungry = list(self.leaves)
        fed: list[Move] = []
        step = 0
        while hungry:
            step += 1
            spread = self.by_step.get(step, [])
            batch = self._feed(step, hungry, spread)
            for move in (*spread, *batch):
                self.have[move.dst] |= 1 << move.block
            fed += batch
            hungry = [leaf for leaf in hungry if self.have[leaf] != full]
        return fed

    def _feed(self, step: int, hungry: Iterable[int], spread: Sequence[Move]) -> list[Move]:
        taken = [move for move in spread if not self.fabric.is_local(move.src, move.dst)]
        busy = {move.src for move in taken}
        trunks = {end for move in taken for end in self._trunks(move.src, move.dst)}
        held = [have.bit_count() for have in self.have]
        # A sender that holds little can help few leaves, so it is asked first.
        resting = sorted((n for n in self.senders if n not in busy), key=held.__getitem__)
        idle = dict.fromkeys(resting)
        batch: list[Move] = []
        for leaf in sorted(hungry, key=held.__getitem__):
            src = next((src for src in idle if self._may_feed(src, leaf, trunks)), None)
            if src is not None:
                offer = self.have[src] & ~self.have[leaf]
                batch.append(Move(step, src, leaf, _first_from(offer, self.first[leaf])))
                trunks |= self._trunks(src, leaf)
                del idle[src]
            if not idle:
                break
        return batch

    def _may_feed(self, src: int, leaf: int, trunks: AbstractSet[tuple[str, bool]]) -> bool:
        if not self.have[src] & ~self.have[leaf]:
            return False
        if self.zone[src] == self.zone[leaf]:
            return True
        return self.zone[leaf] not in self.zones and not trunks & self._trunks(src, leaf)

    def _trunks(self, src: int, dst: int) -> set[tuple[str, bool]]:
        """The tight trunks that a move takes, as (rack, inwards)."""
        out, into = self.zone[src], self.zone[dst]
        if out == into:
            return set()
        return {end for end in ((out, False), (into, True)) if end[0]}


def _first_from(blocks: int, first: int) -> int:
    """The first block of a set (a bit mask), counting from `first` and round."""
    ahead = blocks >> first
    if ahead:
        return first + (ahead & -ahead).bit_length() - 1
    return (blocks & -blocks).bit_length() - 1
