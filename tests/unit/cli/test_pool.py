import pytest

from services.cli.pool import print_pool
from services.local.copies import shortfalls
from shared.ids import NodeId
from shared.messages.copies import Durable, ModelCopies, NodeTiers, PoolCopies
from tests.unit.cli.records import MODEL, MODEL_ID

SHORT = "1 of 2 durable copies: there is no other machine"
FOUND = PoolCopies(
    models=(
        ModelCopies(
            name=MODEL,
            model_id=MODEL_ID,
            nbytes=3_000_000,
            device=(NodeId("n1"),),
            host=(NodeId("n2"),),
            durable=(Durable(NodeId("n1"), "n1"), Durable(NodeId("n3"), "big")),
            under_way=(),
            wanted=2,
            shortfall=SHORT,
        ),
    ),
    nodes=(
        NodeTiers(
            node=NodeId("n1"),
            machine="m1",
            rack="r",
            arena_bytes=10_000_000,
            arena_free=7_000_000,
            host_bytes=20_000_000,
            host_free=14_000_000,
            disk_bytes=5_000_000_000,
            disk_free=1_000_000_000,
        ),
    ),
    memory_bytes=3_000_000,
    per_host_bytes=12_000_000,
)


def test_models_and_nodes_have_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_pool(FOUND)
    lines = capsys.readouterr().out.splitlines()
    (model,) = [line for line in lines if line.startswith(f"{MODEL} ")]
    assert model.split("  ")[0] == MODEL
    for part in ("3.0", "n1", "n2", "n1, n3 (big)", SHORT):
        assert part in model
    (node,) = [line for line in lines if line.startswith("n1")]
    assert "3.0 MB; every model in the memory of every machine would take 12.0 MB" in lines[-1]
    assert node.split() == ["n1", "m1", "r", "3", "of", "10", "6", "of", "20", "4", "of", "5"]


def test_only_models_that_lack_copies_fall_short() -> None:
    assert shortfalls(FOUND) == {MODEL: SHORT}
