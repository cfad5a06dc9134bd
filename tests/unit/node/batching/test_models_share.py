"""Models that share a node's memory for KV: one model's lack of it is no other's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import pytest

from services.node.core.kv import Need
from services.node.core.microbatches import Emit, Release
from shared.errors import CapacityExceeded
from shared.ids import ModelId
from shared.messages.serving import Cancel, Submit
from tests.support.submits import MODEL, WHOLE, submit
from tests.unit.node.batching.builders import FULL, FakeKv, batcher, one, queue, rows, run, take

OTHER = ModelId("other")


@dataclass
class SharedKv(FakeKv):
    """Every model has its own room."""

    free: dict[ModelId, int] = field(default_factory=dict)
    wanted: list[Mapping[ModelId, int]] = field(default_factory=list)
    promised: Mapping[Need, int] = field(default_factory=dict)

    def kv_share(self, model_id: ModelId) -> int:
        return 64

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        others = dict(promised)
        own = others.pop((model_id, 1), 0)
        self.promised = others
        return self.free[model_id] - own

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        self.wanted.append(dict(wanted))


def of_other(message: Submit) -> Submit:
    return msgspec.structs.replace(message, model_id=OTHER)


def test_who_waits_for_kv_holds_up_only_its_own_model() -> None:
    kv = SharedKv(free={MODEL: 0, OTHER: 64})
    core = batcher(kv=kv, step_tokens=100)
    queue(core, one("ours", WHOLE))
    with pytest.raises(CapacityExceeded, match="no KV cache left"):
        queue(core, one("more", WHOLE))
    queue(core, of_other(one("theirs", WHOLE)))
    assert rows(take(core)) == [("theirs#1", 0, 1)]
    assert core.waiting == 1
    kv.free[MODEL] = 16
    assert rows(take(core)) == [("ours#1", 0, 1)]


def test_what_models_wait_for_is_said_until_nobody_waits() -> None:
    kv = SharedKv(free={MODEL: 64, OTHER: 64})
    core = batcher(kv=kv, step_tokens=100)
    queue(core, submit("waits", WHOLE, prompt=(1,) * 20, max_tokens=20))
    kv.free[MODEL] = 16
    assert not core.take()
    assert kv.wanted == [{MODEL: 48}]
    kv.free[MODEL] = 48
    take(core)
    core.take()
    assert kv.wanted == [{MODEL: 48}, {}]


def test_what_sequences_of_others_will_soon_take_is_told() -> None:
    kv = SharedKv(free={MODEL: 64, OTHER: 64})
    core = batcher(kv=kv, step_tokens=100)
    queue(core, submit("ours", WHOLE, prompt=(1,) * 20, max_tokens=20))
    take(core)
    queue(core, of_other(one("theirs", WHOLE)))
    assert kv.promised == {(MODEL, 1): 16}  # the page after those of its prompt


def test_the_model_that_lacks_pages_gives_its_own_back() -> None:
    core = batcher(kv=SharedKv(free={MODEL: 64, OTHER: 64}), step_tokens=100)
    for name in ("old", "young"):
        queue(core, one(name, WHOLE))
        run(core, take(core))
    queue(core, of_other(one("youngest", WHOLE)))
    run(core, take(core))
    run(core, take(core))
    ours = next(part for part in take(core) if part.model_id == MODEL)
    assert core.no_room(ours, FULL) == [Release(("young#1",))]


def test_the_only_sequence_of_a_model_waits_for_others_if_its_share_takes_it() -> None:
    core = batcher(kv=SharedKv(free={MODEL: 64, OTHER: 64}), step_tokens=100)
    queue(core, of_other(one("theirs", WHOLE)))
    take(core)
    queue(core, one("ours", WHOLE))
    (part,) = take(core)
    assert core.no_room(part, FULL) == [Release(("ours#1",))]
    assert core.waiting == 1
    core.cancel(Cancel(request=one("theirs", WHOLE).request, attempt=1))
    (part,) = take(core)
    failed = core.no_room(part, FULL)[-1]
    assert isinstance(failed, Emit)  # nobody else has any
