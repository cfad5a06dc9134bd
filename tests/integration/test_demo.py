"""`lambdascale demo --json` with its defaults: the whole job, every token checked."""

import json
from pathlib import Path
from typing import Any

from services.cli.demo.scenario import NODES, REQUESTS
from services.local import processes
from tests.support import commands

PNG = b"\x89PNG\r\n\x1a\n"


async def test_demo(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = await commands.run("demo", "--json", "--out", out, cwd=tmp_path)
    report = ran.document
    assert ran.code == 0, ran.err
    assert report["requests"] == {
        "accepted": REQUESTS,
        "completed": REQUESTS,
        "lost": 0,
        "wrong": 0,
        "refused": 0,
    }
    assert report["errors"] == []

    event = report["event"]
    assert event["state"] == "complete"
    assert len(event["targets"]) == NODES - 1
    weights = (out / "model" / "model.safetensors").stat().st_size
    assert event["bytes_moved"] > 0.99 * (NODES - 1) * weights
    assert event["physical_limit_s"] <= event["t_all_s"]
    assert event["predicted_t_all_s"] > 0
    # Served over nodes that were still loading:
    assert event["decision_to_first_byte_s"] < event["first_partial_token_s"] < event["t_all_s"]
    assert report["scale_in"] == {"instances_before": NODES, "instances_after": 1}
    for latency in (report["ttft_ms"], report["tpot_ms"]):
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]

    check_files(report, out)
    assert processes.strays(out / "cluster") == []
    trace = await commands.run("trace", event["id"], "--data", out, "--json", cwd=tmp_path)
    names = [span["name"] for span in trace.document]
    assert {"path_formed", "first_token", "mode_switch"} <= set(names)


def check_files(report: dict[str, Any], out: Path) -> None:
    assert Path(report["figure"]).read_bytes().startswith(PNG)
    assert report["event"]["id"] in Path(report["page"]).read_text()
    assert json.loads((out / "report.json").read_text()) == report
    assert sorted(path.name for path in out.iterdir()) == [
        "event.html",
        "event.png",
        "logs",
        "model",
        "report.json",
        "traces",
    ]
