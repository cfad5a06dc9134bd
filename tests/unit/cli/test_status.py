from typing import Any

import msgspec
import pytest

from services.cli import status
from services.cli.status_text import print_status
from services.local.processes import ClusterState, ProcessRecord
from shared.election.lease import LeaseRecord
from shared.ids import GatewayId, Generation, NodeId
from shared.messages.pool import Holding, ModelRecord, NodeInfo, NodeView, PoolState, Tier
from shared.messages.scaling import PlannerState
from tests.unit.cli.records import BLOCKS, MODEL, MODEL_ID, SOURCE, instances, path, replica


def test_a_node_says_how_weights_reach_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    def node(name: str, device: str, staging: str) -> dict[str, Any]:
        return {
            "id": name, "state": "idle", "duty": "all", "unfit": "", "host": "h", "device": device,
            "staging": staging, "address": "tcp://h:1", "arena_free": 0, "blocks": {},
            "peers": {}, "kv_used": 0, "kv_capacity": 0, "prompt_tokens": 0, "cached_tokens": 0,
            "preemptions": 0,
        }  # fmt: skip

    nodes = [node("node-0", "cpu", ""), node("node-1", "cuda:0", "pinned host arena")]
    empty = dict.fromkeys(("processes", "models", "instances", "events", "shortfall", "errors"), ())
    print_status({"gateway_urls": (), "active": {}, "nodes": nodes, **empty})
    lines = capsys.readouterr().out.splitlines()
    (on_cpu,) = [line for line in lines if "node-0" in line]
    (on_gpu,) = [line for line in lines if "node-1" in line]
    assert on_cpu.split()[2:] == ["cpu", "0", "0"]
    assert "cuda:0, from pinned host arena" in on_gpu


def test_a_node_says_what_its_kv_cache_is_good_for(capsys: pytest.CaptureFixture[str]) -> None:
    info = NodeInfo(
        node=NodeId("node-0"), generation=Generation(1), address="tcp://h:1", host="h",
        device="cpu", arena_bytes=1, link_bytes_per_s=0, slots=8,
    )  # fmt: skip
    view = NodeView(
        info=info, holdings=(), arena_free=7_000_000, reserved_by=None, kv_used=160,
        kv_capacity=640, prompt_tokens=300, cached_tokens=126, preemptions=3,
    )  # fmt: skip
    pool, planner = PoolState(nodes=(view,), models=()), PlannerState(sets=(), events=())
    document = status.describe(ClusterState(), pool, planner, {MODEL: "1 of 2 durable copies"})
    (node,) = document["nodes"]
    assert (node["kv_used"], node["kv_capacity"], node["preemptions"]) == (160, 640, 3)
    assert (node["prompt_tokens"], node["cached_tokens"]) == (300, 126)
    print_status(document)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "node-0" in line]
    assert line.split() == ["node-0", "idle", "cpu", "7", "25%", "42%", "3"]
    assert f"{MODEL} has 1 of 2 durable copies (`lambdascale pool`)" in lines


RECORD = ModelRecord(
    name=MODEL, model_id=MODEL_ID, manifest="", files={}, nbytes=3_000_000, n_blocks=BLOCKS,
    block_bytes=(), context_length=8, created_ns=0, min_instances=1,
)  # fmt: skip


def shown(
    capsys: pytest.CaptureFixture[str], device: str, fixed: int | None, **rules: Any
) -> dict[str, str]:
    """The lines of a cluster of one node with one model, by what they begin with."""
    info = NodeInfo(
        node=SOURCE, generation=Generation(1), address="tcp://h:1", host="h", device=device,
        arena_bytes=1, link_bytes_per_s=0, slots=8,
    )  # fmt: skip
    held = Holding(model_id=MODEL_ID, tier=Tier.GPU, blocks=(0, 1))
    view = NodeView(info=info, holdings=(held,), arena_free=0, reserved_by=None)
    sets = (msgspec.structs.replace(instances(replica(SOURCE), path()), fixed=fixed),)
    pool = PoolState(nodes=(view,), models=(msgspec.structs.replace(RECORD, **rules),))
    planner = PlannerState(sets=sets, events=())
    print_status(status.describe(ClusterState(), pool, planner, {}))
    lines = capsys.readouterr().out.splitlines()
    return {line.split()[0]: line for line in lines if line}


def test_blocks_lie_in_a_cpus_memory_or_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{MODEL}: memory 2/{BLOCKS}" in shown(capsys, "cpu", None)[SOURCE]
    assert f"{MODEL}: gpu 2/{BLOCKS}" in shown(capsys, "cuda:0", None)[SOURCE]


@pytest.mark.parametrize(("fixed", "words"), [(None, "1 to all nodes"), (0, "0, by hand")])
def test_models_have_a_table(
    fixed: int | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = shown(capsys, "cpu", fixed)[MODEL]
    assert line.split()[1:5] == ["3.0", str(BLOCKS), "1", "1"]
    assert line.endswith(words)


def test_a_models_objectives_and_schedule_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    line = shown(capsys, "cpu", None, ttft_s=0.5, warm=1, schedule="daily 08:00-09:00 min=2")[MODEL]
    assert line.endswith("TTFT 500 ms, 1 warm, daily 08:00-09:00 min=2")


def test_the_active_process_of_a_role_and_those_that_stand_by(
    capsys: pytest.CaptureFixture[str],
) -> None:
    processes = tuple(
        ProcessRecord(name=name, role=role, pid=pid, started="")
        for name, role, pid in (
            ("planner", "planner", 1),
            ("planner-2", "planner", 2),
            ("node-0", "node", 3),
        )
    )
    leases = {"planner": LeaseRecord("planner-a", 7, "host-a", 2)}
    document = status.describe(
        ClusterState(processes=processes), PoolState(nodes=(), models=()),
        PlannerState(sets=(), events=()), {}, (), leases,
    )  # fmt: skip
    assert [row["part"] for row in document["processes"]] == ["stands by", "active", ""]
    assert document["active"] == {"planner": {"host": "host-a", "pid": 2, "term": 7}}
    print_status(document)
    assert "active planner: process 2 on host-a, term 7" in capsys.readouterr().out


def test_what_gateways_leave_alone_is_shown_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = replica(SOURCE)
    said = {one.id: {GatewayId("gateway-1"): "failed: cut off"}}
    pool, planner = PoolState(nodes=(), models=()), PlannerState(sets=(instances(one),), events=())
    document = status.describe(ClusterState(), pool, planner, {}, (), None, said)
    assert document["instances"][0]["kept_out"] == {"gateway-1": "failed: cut off"}
    print_status(document)
    assert "gateway-1 (failed: cut off)" in capsys.readouterr().out
    print_status(status.describe(ClusterState(), pool, planner, {}))
    assert "left alone" not in capsys.readouterr().out
