from typing import Any

import pytest

from services.cli import status


def test_a_node_says_how_weights_reach_its_device(capsys: pytest.CaptureFixture[str]) -> None:
    def node(name: str, device: str, staging: str) -> dict[str, Any]:
        return {
            "id": name, "state": "idle", "host": "h", "device": device, "staging": staging,
            "address": "tcp://h:1", "arena_free": 0, "blocks": {}, "peers": {},
        }  # fmt: skip

    nodes = [node("node-0", "cpu", ""), node("node-1", "cuda:0", "pinned host arena")]
    empty = dict.fromkeys(("processes", "models", "instances", "events", "errors"), ())
    status._print({"gateway_url": "", "nodes": nodes, **empty})
    lines = capsys.readouterr().out.splitlines()
    (on_cpu,) = [line for line in lines if "node-0" in line]
    (on_gpu,) = [line for line in lines if "node-1" in line]
    assert on_cpu.split()[2:] == ["cpu", "0"]
    assert "cuda:0, from pinned host arena" in on_gpu
