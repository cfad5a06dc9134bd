"""Finds senders that are much slower than their links should be, while a plan is carried out.

A transfer is due as soon as its sender has the block and both nodes are done with their earlier
transfers. From then on it should take alpha + s / beta. If it takes far longer, the sender is at
fault, unless the same receiver is late from another sender too. A sender whose disk is read for
other events as well sends when the disk comes to it: the time until then does not count.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf

from shared.ids import NodeId
from shared.messages.scaling import Transfer

FACTOR = 3.0
SLACK_S = 0.5
"""A transfer is late after more than FACTOR times the expected time, and SLACK_S more than that
time."""

Arrived = Mapping[NodeId, Mapping[int, float]]
"""When blocks arrived at each node. Blocks held when the plan began are not in it."""
_NOTHING: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class Late:
    transfer: Transfer
    took_s: float
    """Seconds from when it was due until its end, or until now."""
    expected_s: float

    def __str__(self) -> str:
        t = self.transfer
        times = f"{self.took_s:.2f} s, not {self.expected_s:.2f} s"
        return f"block {t.block} from {t.src} to {t.dst} took {times}"


def late_transfers(
    transfers: Iterable[Transfer],
    arrived: Arrived,
    *,
    began: float,
    now: float,
    expected_s: Callable[[Transfer], float],
    untold_s: float = 0.0,
    vague: Mapping[NodeId, AbstractSet[int]] | None = None,
    held: Mapping[NodeId, AbstractSet[int]] | None = None,
    shared: Mapping[NodeId, float] | None = None,
) -> Iterator[Late]:
    """A plan's late transfers, in order of steps. `began`: when the plan was sent. `untold_s`: for
    how long a node may have a block before it says when it came. `vague`: blocks that each node
    has, but has not said that of. `held`: what each target holds. Transfers of blocks that targets
    held when the plan began are left out, and those whose senders do not have the block yet. None:
    all transfers count. `shared`: until when the disks of senders were read for other events, too.

    A transfer is considered once its sender has the block. A transfer that waits for another at
    either end is not late; only the other may be.
    """
    out_free: dict[NodeId, float] = {}
    in_free: dict[NodeId, float] = {}
    vague, shared = vague or {}, shared or {}
    for transfer in transfers:
        src, dst, block = transfer.src, transfer.dst, transfer.block
        over = arrived.get(dst, _NOTHING).get(block)
        if held is not None:
            there = held.get(dst)
            if there is None or (over is None and block in there):
                continue
            sends = held.get(src)
            if sends is not None and block not in sends:
                continue
        due, until = in_free.get(dst, began), now if over is None else over
        if until - due > SLACK_S:  # nearly all are in time, whatever else they waited for
            came = arrived.get(src, _NOTHING).get(block, began)
            due = max(began, came, out_free.get(src, began), shared.get(src, began), due)
        out_free[src] = in_free[dst] = inf if over is None else over
        took = until - due
        if took <= SLACK_S:
            continue
        if over is None or block in vague.get(dst, ()):
            took -= untold_s
            if took <= SLACK_S:
                continue
        expected = expected_s(transfer)
        if took > FACTOR * expected and took > expected + SLACK_S:
            yield Late(transfer, took, expected)


class Pace:
    """How an event's transfers keep up with expectations, revision by revision."""

    def __init__(self) -> None:
        self.slow: set[NodeId] = set()
        self._began = 0.0
        self._landed: dict[NodeId, dict[int, float]] = {}
        self._vague: dict[NodeId, set[int]] = {}
        self._sources: dict[NodeId, set[NodeId]] = {}
        """For each receiver, the senders from which it was late."""
        self._shared: dict[NodeId, float] = {}
        """When the disk of a sender was last seen to be read for other events, too."""

    def begin(self, now: float) -> None:
        """Starts a revision, when it is sent to the nodes."""
        self._began, self._landed = now, {}
        self._vague.clear()

    def land(self, node: NodeId, blocks: Mapping[int, float], *, vague: bool = False) -> None:
        """Blocks are there, and since when; `vague`: or for longer."""
        landed = self._landed.setdefault(node, {})
        for block, at in blocks.items():
            known = landed.get(block)
            if known is None or at < known:
                landed[block] = at
                if vague:
                    self._vague.setdefault(node, set()).add(block)
        if not vague and node in self._vague:
            self._vague[node].difference_update(blocks)

    def share(self, nodes: Iterable[NodeId], now: float) -> None:
        """The disks of these nodes are read for other events, too."""
        self._shared.update(dict.fromkeys(nodes, now))

    def look(
        self,
        transfers: Iterable[Transfer],
        held: Mapping[NodeId, AbstractSet[int]],
        now: float,
        expected_s: Callable[[Transfer], float],
        untold_s: float = 0.0,
    ) -> dict[NodeId, Late]:
        """The nodes that are now found to be slow, with the transfer that shows it. Each is named
        once.

        `held`: what each target holds. A transfer that waits for its block is not late; only the
        transfer of that block may be. `untold_s`: see `late_transfers`.
        """
        found: dict[NodeId, Late] = {}
        for late in late_transfers(
            transfers,
            self._landed,
            began=self._began,
            now=now,
            expected_s=expected_s,
            untold_s=untold_s,
            vague=self._vague,
            held=held,
            shared=self._shared,
        ):
            src, dst = late.transfer.src, late.transfer.dst
            sources = self._sources.setdefault(dst, set())
            sources.add(src)
            culprit = src if len(sources) == 1 else dst
            if dst not in self.slow and culprit not in self.slow:
                self.slow.add(culprit)
                found[culprit] = late
        return found
