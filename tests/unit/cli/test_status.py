from typing import Any

import pytest

from services.cli import status
from services.local.processes import ClusterState
from shared.ids import Generation, NodeId
from shared.messages.pool import NodeInfo, NodeView, PoolState
from shared.messages.scaling import PlannerState


def test_a_node_says_how_weights_reach_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    def node(name: str, device: str, staging: str) -> dict[str, Any]:
        return {
            "id": name, "state": "idle", "host": "h", "device": device, "staging": staging,
            "address": "tcp://h:1", "arena_free": 0, "blocks": {}, "peers": {}, "kv_used": 0,
            "kv_capacity": 0, "prompt_tokens": 0, "cached_tokens": 0, "preemptions": 0,
        }  # fmt: skip

    nodes = [node("node-0", "cpu", ""), node("node-1", "cuda:0", "pinned host arena")]
    empty = dict.fromkeys(("processes", "models", "instances", "events", "errors"), ())
    status._print({"gateway_url": "", "nodes": nodes, **empty})
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
    document = status.describe(ClusterState(), pool, planner)
    (node,) = document["nodes"]
    assert (node["kv_used"], node["kv_capacity"], node["preemptions"]) == (160, 640, 3)
    assert (node["prompt_tokens"], node["cached_tokens"]) == (300, 126)
    status._print(document)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "node-0" in line]
    assert line.split() == ["node-0", "idle", "cpu", "7", "25%", "42%", "3"]
