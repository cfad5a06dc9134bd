"""What scripts rely on: JSON on standard output and nothing else, exit codes, no process left."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.demo_model import make_checkpoint
from services.cli.processes import strays
from tests.support.models import TINY

ROOT = Path(__file__).parents[2]
LIMIT_S = 100


async def cli(*arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `lambdascale ARGUMENTS`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli",
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def document(*arguments: str) -> Any:
    code, out, err = await cli(*arguments)
    assert code == 0, err
    return json.loads(out)


async def test_a_cluster_from_up_to_down(tmp_path: Path) -> None:
    checkpoint, data = tmp_path / "tiny", ("--data", str(tmp_path / "data"))
    make_checkpoint(checkpoint, TINY)
    model = ("--model", str(checkpoint))
    code, _, err = await cli("up", "--nodes", "2", "--port", "0", "--detach", *model, *data)
    try:
        assert code == 0, err
        await document("scale", "tiny", "--instances", "2", "--json", *data)
        async with asyncio.timeout(30):
            status = await document("status", "--json", *data)
            while len(status["instances"]) < 2:
                status = await document("status", "--json", *data)
        assert status["gateway_url"].startswith("http://127.0.0.1:")
        roles = sorted(process["role"] for process in status["processes"])
        assert roles == ["gateway", "nats", "node", "node", "planner", "registry"]
        assert {process["state"] for process in status["processes"]} == {"running"}
        blocks = {node["id"]: node["blocks"]["tiny"]["gpu"] for node in status["nodes"]}
        assert blocks == {"node-0": list(range(6)), "node-1": list(range(6))}
        assert status["events"][0]["state"] == "complete"
        _, tree, _ = await cli("trace", "last", *data)
        for span in ("scale_event", "detect", "decide", "plan", "apply_plan", "block_arrival"):
            assert span in tree
        # A crash: nothing of it may outlive `down`.
        victim = next(p for p in status["processes"] if p["role"] == "registry")
        os.kill(victim["pid"], signal.SIGKILL)
    finally:
        code, _, err = await cli("down", *data)
    assert code == 0, err
    assert strays(tmp_path / "data") == []
    code, out, err = await cli("status", "--json", *data)
    assert (code, out) == (1, "")
    assert "lambdascale up" in err


@pytest.mark.timeout(150)
async def test_the_demo(tmp_path: Path) -> None:
    report = await document("demo", "--json", "--out", str(tmp_path))
    requests, event = report["requests"], report["event"]
    assert requests["accepted"] == requests["completed"] == 120
    assert requests["lost"] == requests["wrong"] == 0
    assert event["bytes_moved"] > 4 * 40_000_000
    assert 0 < event["decision_to_first_byte_s"] < event["first_partial_token_s"]
    assert event["first_partial_token_s"] < event["t_all_s"]
    assert event["physical_limit_s"] > 0
    assert event["predicted_t_all_s"] > 0
    for key in ("ttft_ms", "tpot_ms"):
        assert 0 < report[key]["p50"] <= report[key]["p90"] <= report[key]["p99"]
    assert report["scale_in"] == {"instances_before": 5, "instances_after": 1}
    assert (tmp_path / "event.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--nodes", "0"), "--nodes 0"),
        (("plan", "--nodes", "3", "--blocks", "4", "--sources", "9"), "--sources 9"),
        (("nonsense",), "nonsense"),
        (("demo", "--requests", "0"), "--requests 0"),
        (("node", "--config", "/nowhere.toml"), "/nowhere.toml"),
    ],
)
async def test_wrong_usage_is_told_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = await cli(*arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
