from services.registry.core.holdings import Holdings
from services.registry.core.replication import Copies, copies
from shared.ids import NodeId
from shared.messages.pool import NodeStatus, Tier
from tests.unit.registry.builders import holding, info, record, status


def among(*reports: NodeStatus) -> Copies:
    holdings = Holdings()
    for report in reports:
        holdings.report(report, 0.0)
    return copies(record(), [info(report.node) for report in reports], holdings)


def test_gpu_and_host_together_make_a_copy_in_memory() -> None:
    found = among(status("a", holding(Tier.GPU, 0, 1), holding(Tier.HOST, 1, 2, 3)))
    assert found == Copies(memory=(NodeId("a"),), disk=(NodeId("a"),), missing=())
    assert found.safe


def test_a_copy_on_disk_does_not_make_a_model_safe() -> None:
    found = among(status("a", holding(Tier.DISK, 0, 1, 2, 3)))
    assert found == Copies(memory=(), disk=(NodeId("a"),), missing=())
    assert not found.safe


def test_blocks_that_nobody_holds_are_missing() -> None:
    found = among(status("a", holding(Tier.GPU, 0)), status("b", holding(Tier.DISK, 2)))
    assert found == Copies(memory=(), disk=(), missing=(1, 3))
