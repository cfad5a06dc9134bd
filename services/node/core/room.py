"""What the sequences of one node take of it, slots and KV, and whether one more fits.

Every stage of a path counts by the same rule, so a path has the room of the stage that has least.
Its leader asks all stages before anything of a sequence is run (`Admit`), and each one answers at
once: it keeps the room, or it refuses. So no prefill is spent on a path that lacks room further
on, and no stage waits for another, which could not end if the other waited for the first.

KV is not taken for the most that a sequence may reach. A sequence has a claim to the pages of its
tokens and one page more, from when it is admitted until it ends.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from services.node.core.kv import PAGE, Kv, Need, whole_pages
from services.node.core.microbatches import Path
from services.node.core.rows import SequenceKey, request_of
from shared.errors import CapacityExceeded
from shared.ids import ModelId, NodeId
from shared.slots import Account, weight


class Claim(Protocol):
    """What one sequence takes of this node."""

    @property
    def key(self) -> SequenceKey: ...

    @property
    def path(self) -> Path: ...

    @property
    def stage(self) -> int:
        """This node's stage of the path."""

    @property
    def limit(self) -> int:
        """The most positions that it may reach."""

    @property
    def kv_soon(self) -> int:
        """Positions that it will soon have, in whole pages (`kv_soon`). 0: it keeps no KV here."""

    @property
    def kv_taken(self) -> int:
        """Positions that it has now, in whole pages."""

    @property
    def on_trial(self) -> bool:
        """Whether it may be what killed a node, and has not got past that: nothing else begins."""

    @property
    def waits(self) -> bool:
        """Whether it still waits for its KV, so that others run before it does."""


def kv_soon(tokens: int, limit: int) -> int:
    """The positions that a sequence of `tokens` known tokens will soon have."""
    return whole_pages(min(limit, tokens + PAGE))


def weight_of(claim: Claim) -> float:
    """What the sequence takes of the node's slots."""
    stages = claim.path.stages
    return weight(stages, stages[claim.stage], stages[-1].stop)


class Room:
    def __init__(
        self, node: NodeId, slots: int, kv: Kv, claims: Callable[[], Iterable[Claim]]
    ) -> None:
        """`claims`: of all sequences here, those that this node leads and those that it follows."""
        self._node = node
        self._slots = slots
        self._kv = kv
        self._claims = claims

    def free_kv(self, model_id: ModelId, new: Claim | None = None) -> int:
        """Positions of whole pages that the model can still take, less what the sequences here will
        soon take, and what `new` takes. Below 0: they will take more than there is. Sequences that
        wait are left out."""
        promised = self._promised(claim for claim in self._claims() if not claim.waits)
        if new is not None:
            promised[self._need(new)] += new.kv_soon
        return self._kv.kv_free(model_id, promised)

    def left(self, models: Iterable[ModelId]) -> dict[ModelId, int]:
        """What a new sequence of each model would find, when those that wait have theirs. Models
        that are not open, or keep no KV, are left out."""
        promised = self._promised(self._claims())
        return {
            each: self._kv.kv_free(each, promised) for each in models if self._kv.kv_share(each)
        }

    def _promised(self, claims: Iterable[Claim]) -> Counter[Need]:
        """What they will soon take and have not."""
        promised: Counter[Need] = Counter()
        for claim in claims:
            promised[self._need(claim)] += max(0, claim.kv_soon - claim.kv_taken)
        return promised

    def _need(self, claim: Claim) -> Need:
        model_id, stage = claim.path.model_id, claim.path.stages[claim.stage]
        return model_id, self._kv.kv_parts(model_id, stage.start, stage.stop)

    def check(self, claim: Claim, replaced: Collection[SequenceKey] = ()) -> None:
        """CapacityExceeded if there is no room for one more sequence. `replaced`: sequences that
        end if there is.

        A sequence that this node runs alone may wait for its KV, if none of its model waits
        already. On a path, or on trial, it has to have its KV at once.
        """
        model_id, stages = claim.path.model_id, len(claim.path.stages)
        share = self._kv.kv_share(model_id)
        if claim.kv_soon and claim.limit > share:
            raise CapacityExceeded(
                f"request {request_of(claim.key)} needs a KV cache of {claim.limit} positions, and "
                f"model {model_id} has a share of {share} of node {self._node}: raise node.kv_bytes"
            )
        account, waiting = Account(self._slots), 0
        for other in self._claims():
            if other.on_trial and request_of(other.key) != request_of(claim.key):
                raise CapacityExceeded(
                    f"node {self._node} begins nothing while it tries request "
                    f"{request_of(other.key)}, which may kill nodes: submit elsewhere"
                )
            if other.path.model_id != model_id:
                continue
            waiting += other.kv_soon if other.waits else 0
            if other.key not in replaced:
                account.add(len(other.path.stages), weight_of(other))
        if not account.has_room(stages, weight_of(claim)):
            raise CapacityExceeded(
                f"node {self._node} runs {account.alone} sequences alone, and others on paths that "
                f"take {account.on_paths:.1f} slots: that is all it takes, submit elsewhere"
            )
        at_once = stages > 1 or claim.on_trial
        if waiting > self.free_kv(model_id, claim if at_once else None):
            raise CapacityExceeded(
                f"node {self._node} has no KV cache left for request {request_of(claim.key)}: "
                f"submit elsewhere"
            )
