import time

import pytest
import torch

from services.node import activations
from services.node.core.microbatches import Failed, Forward, Free, Path
from services.node.core.rows import Row
from services.node.steps import Steps
from services.node.transport.base import Buffer
from shared.ids import GatewayId, NodeId
from shared.messages.instances import Stage
from shared.messages.serving import Tokens
from tests.support.hash_engine import HIDDEN, HashEngine, hash_manifest
from tests.support.worker_cluster import BLOCKS, MODEL, THREE, TWO, WHOLE, stages, submit

FROM_C = Path(MODEL, stages(("c", 0, 2), ("a", 2, BLOCKS)))
FROM_D = Path(MODEL, stages(("d", 0, 2), ("a", 2, BLOCKS)))


class Rig:
    """One node's steps, and what leaves it."""

    def __init__(self, *, step_floor_s: float = 0.0) -> None:
        self.engine = HashEngine(100)
        self.sent: list[tuple[str, bytes, list[Buffer]]] = []
        self.emitted: list[tuple[GatewayId, Tokens]] = []
        self.held_until: list[float] = []
        self.steps = Steps(
            node=NodeId("a"),
            engine=self.engine,
            slots=4,
            step_tokens=16,
            step_floor_s=step_floor_s,
            send=lambda address, header, payload: self.sent.append(
                (address, header, list(payload))
            ),
            emit=lambda gateway, tokens: self.emitted.append((gateway, tokens)),
        )
        self.steps.open_model(MODEL, hash_manifest(BLOCKS))
        for block in range(BLOCKS):
            self.steps.attach(MODEL, block, memoryview(b""))

    def step(self) -> bool:
        return self.steps.step(self.held_until.append)

    def receive(self, path: Path, rows: tuple[Row, ...], hidden: torch.Tensor) -> None:
        header, payload = activations.encode(Forward(path, 1, 1, rows), hidden)
        body = memoryview(bytearray(b"".join(payload)))
        self.steps.received("mem://x", memoryview(header), body)


def hidden_states(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1).repeat(1, HIDDEN)


@pytest.mark.parametrize(("path", "share"), [(WHOLE, 60.0), (TWO, 20.0), (THREE, 10.0)])
def test_a_step_takes_its_share_of_the_floor(
    path: tuple[Stage, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(step_floor_s=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    rig.steps.submit(submit("r", path))
    assert rig.step()
    assert rig.held_until == [1000.0 + share]


def test_nothing_to_run_is_no_step() -> None:
    rig = Rig()
    assert not rig.step()
    rig.steps.submit(submit("r", TWO))
    assert rig.step()
    assert not rig.step()


def test_merged_micro_batches_reach_the_engine_as_one_and_leave_as_two() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 2, 9),), hidden_states(1, 2))
    rig.receive(FROM_D, (Row("y#1", 0, 1, 9),), hidden_states(3))
    assert rig.step()
    (batch,) = rig.engine.batches
    assert batch.hidden is not None
    assert batch.hidden[:, 0].tolist() == [1, 2, 3]
    assert [address for address, _, _ in rig.sent] == ["mem://c", "mem://d"]


def test_hidden_states_follow_their_rows_when_others_go() -> None:
    rig = Rig()
    rows = (Row("big#1", 0, 1, 9), Row("x#1", 0, 2, 9), Row("bigger#1", 0, 1, 99))
    rig.receive(FROM_C, rows, hidden_states(1, 2, 3, 4))
    header, _ = activations.encode(Free(("big#1",)), None)
    rig.steps.received("mem://c", memoryview(header), memoryview(b""))
    assert rig.step()
    (batch,) = rig.engine.batches
    assert [row.sequence for row in batch.rows] == ["x#1"]
    assert batch.hidden is not None
    assert batch.hidden[:, 0].tolist() == [2, 3]


def test_hidden_states_of_another_width_are_a_violation() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), torch.zeros(1, HIDDEN + 1))
    assert not rig.step()
    assert rig.steps.load.violations == 1


def test_a_micro_batch_for_another_node_is_a_violation() -> None:
    rig = Rig()
    rig.receive(Path(MODEL, TWO), (Row("x#1", 0, 1, 9),), hidden_states(1))
    assert not rig.step()
    assert rig.steps.load.violations == 1


def test_tokens_of_a_step_go_out_together() -> None:
    rig = Rig()
    for name, gateway in (("x", "g"), ("y", "h"), ("z", "g")):
        rig.steps.submit(submit(name, WHOLE, gateway=GatewayId(gateway)))
    assert rig.step()
    assert rig.emitted == []
    rig.steps.flush()
    rig.steps.flush()
    assert [(g, [t.request for t in m.tokens]) for g, m in rig.emitted] == [
        ("g", ["x", "z"]),
        ("h", ["y"]),
    ]


def test_closing_a_model_ends_its_attempts_at_once() -> None:
    rig = Rig()
    rig.steps.submit(submit("led", WHOLE))
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.step()
    rig.steps.close_model(MODEL)
    rig.steps.flush()
    assert [failed.code for _, m in rig.emitted for failed in m.failed] == ["not_found"]
    address, header, _ = rig.sent[-1]
    told, _ = activations.decode(memoryview(header), memoryview(b""))
    assert address == "mem://c"
    assert isinstance(told, Failed)
    assert (told.sequences, told.code) == (("x#1",), "not_found")
    assert (rig.steps.load.running, rig.steps.load.kv_used) == (0, 0)
