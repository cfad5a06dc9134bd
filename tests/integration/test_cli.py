"""The commands on a real cluster, from `up` to `down`, as an operator and a script use them."""

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.local import processes
from services.local.demo_model import make_checkpoint
from tests.support import commands
from tests.support.commands import Ran
from tests.support.hub import serving
from tests.support.models import TINY

KEY = "sk-of-the-test"
CONFIG = f"""
[gateway]
api_keys = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]
port = 0

[node]
arena_bytes = 67108864
kv_bytes = 67108864
threads = 1
"""
LIMIT_S = 200.0


@pytest.fixture
async def directory(tmp_path: Path) -> AsyncIterator[Path]:
    """Where the commands run; whatever a test leaves running there is ended."""
    make_checkpoint(tmp_path / "tiny", TINY)
    (tmp_path / "cluster.toml").write_text(CONFIG)
    yield tmp_path
    await asyncio.to_thread(processes.end_all, tmp_path / "lambdascale-data")


async def test_from_up_to_down(directory: Path) -> None:
    async def run(*words: str | Path) -> Ran:
        return await commands.run(*words, cwd=directory)

    up = await run(
        "up", "--nodes", "3", "--model", "tiny", "--config", "cluster.toml", "--detach", "--json"
    )
    assert up.code == 0, up.err
    assert "published tiny" in up.err
    assert "tiny has 1 of 2 durable copies: there is no other machine\n" in up.err
    url = up.document["gateway_url"]
    assert {p["state"] for p in up.document["processes"]} == {"running"}

    asleep = await run("status", "--json")
    assert asleep.document["instances"] == []
    kept = await run("model", "set", "tiny", "--min-instances", "1")
    assert kept.err == "tiny: instances 1 to all nodes\n"
    await until_served(run)

    again = await run("up", "--detach")
    assert again.code == 1
    assert again.err.startswith("lambdascale: a cluster runs in lambdascale-data already")

    status = await run("status", "--json")  # the user of the bus is found where `up` found it
    assert status.code == 0, status.err
    check_status(status.document, url)
    assert "open sesame" not in (directory / "lambdascale-data" / "cluster.json").read_text()

    await check_what_is_watched(run)
    await check_pool(run)
    await check_keys(url)
    await check_models(run, url)
    await check_scaling_by_hand(run, url)
    await check_scaling(run)
    await check_hub(run, directory)
    await check_end(run, directory)


async def check_what_is_watched(run: Callable[..., Any]) -> None:
    top = await run("top")
    assert top.code == 0, top.err
    (row,) = [line.split() for line in top.out.splitlines() if line.startswith("tiny ")]
    assert row[3] == "1"  # replica
    logs = await run("logs", "planner", "--lines", "50")
    assert logs.code == 0, logs.err
    assert "planner | " in logs.out
    assert "ready" in logs.out


async def until_served(run: Callable[..., Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not (await run("status", "--json")).document["instances"]:
            pass


async def check_pool(run: Callable[..., Any]) -> None:
    """All nodes are on this machine, so there is nowhere to make a second durable copy."""
    pool = await run("pool", "--json")
    assert pool.code == 0, pool.err
    (model,) = pool.document["models"]
    assert (model["name"], model["device"], model["host"]) == ("tiny", ["node-0"], [])
    assert [copy["node"] for copy in model["durable"]] == ["node-0"]
    assert model["shortfall"].startswith("1 of 2 durable copies: ")
    assert [node["node"] for node in pool.document["nodes"]] == ["node-0", "node-1", "node-2"]
    assert all(0 < node["disk_free"] < node["disk_bytes"] for node in pool.document["nodes"])
    shown = await run("pool")
    assert "tiny" in shown.out
    assert "1 of 2 durable copies" in shown.out
    assert "1 of 2 durable copies" in (await run("status")).out


def check_status(document: dict[str, Any], url: str) -> None:
    assert document["gateway_url"] == url
    assert document["errors"] == []
    roles = [process["role"] for process in document["processes"]]
    assert sorted(roles) == ["gateway", "nats", "node", "node", "node", "planner", "registry"]
    for process in document["processes"]:
        assert process["state"] == "running"
        os.kill(process["pid"], 0)
    nodes = {node["id"]: node for node in document["nodes"]}
    assert sorted(nodes) == ["node-0", "node-1", "node-2"]
    blocks = list(range(document["models"][0]["n_blocks"]))
    assert nodes["node-0"]["blocks"]["tiny"] == {"gpu": blocks, "disk": blocks}
    assert [node["state"] for node in nodes.values()] == ["serving", "idle", "idle"]
    (instance,) = document["instances"]
    assert instance["stages"] == [{"node": "node-0", "blocks": [0, len(blocks)]}]
    (event,) = document["events"]
    assert event["state"] == "complete"


BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}


async def check_keys(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for key, expected in ((None, 401), ("sk-other", 401), (KEY, 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with session.post(f"{url}/v1/completions", json=BODY, headers=headers) as answer:
                assert answer.status == expected
                document = await answer.json()
        assert document["usage"]["completion_tokens"] == 4


async def check_models(run: Callable[..., Any], url: str) -> None:
    listed = await run("model", "list", "--json")
    assert [record["name"] for record in listed.document] == ["tiny"]

    for words, complaint in (
        (("model", "add", "nowhere"), "there is no checkpoint directory"),
        (("model", "add", "tiny", "--name", "second"), "is published as 'tiny' already"),
        (("model", "add", "tiny", "--node", "node-9"), "nodes are node-0, node-1, node-2"),
        (("model", "rm", "second"), "no model is named 'second'"),
    ):
        refused = await run(*words)
        assert refused.code == 1
        assert refused.out == ""
        assert complaint in refused.err
    assert (await run("model", "add", "tiny", "--min-instances", "1", "--json")).document[
        "name"
    ] == "tiny"  # once more


async def until_answered(session: aiohttp.ClientSession, url: str, status: int) -> str:
    """Asks until the answer has this status: the gateway hears what the planner has agreed to a
    little later than the operator."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            async with session.post(f"{url}/v1/completions", json=BODY) as answer:
                if answer.status == status:
                    return await answer.text()
                assert answer.status in (200, 429)
            await asyncio.sleep(0.05)


async def check_scaling_by_hand(run: Callable[..., Any], url: str) -> None:
    """A model at 0 instances refuses requests at once, and says whose wish that is."""
    none = await run("scale", "tiny", "--instances", "0")
    assert none.code == 0, none.err
    assert "kept at 0 instances, and its requests are refused, until" in none.err
    await until(run, lambda shown: not shown["instances"])
    assert (await run("status", "--json")).document["models"][0]["fixed"] == 0
    assert "0, by hand" in (await run("model", "ls")).out
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        refusal = await until_answered(session, url, 429)
        assert "kept at 0 instances by its operator" in refusal
        back = await run("scale", "tiny", "--instances", "auto")
        assert "the autoscaler decides again" in back.err
        await until_answered(session, url, 200)
    await until(run, lambda shown: shown["models"][0]["fixed"] is None)


async def check_scaling(run: Callable[..., Any]) -> None:
    too_many = await run("scale", "tiny", "--instances", "4")
    assert too_many.code == 2
    scaled = await run("scale", "tiny", "--instances", "3", "--json")
    event = scaled.document["event"]
    status = await until(
        run,
        lambda shown: shown["events"][0]["state"] == "complete" and len(shown["instances"]) == 3,
    )
    assert [len(instance["stages"]) for instance in status["instances"]] == [1, 1, 1]
    assert [node["state"] for node in status["nodes"]] == ["serving"] * 3

    listed = await run("events", "--json")
    found = next(record for record in listed.document if record["id"] == event)
    assert found["state"] == "complete"
    assert sorted(found["targets"]) == ["node-1", "node-2"]
    lines = (await run("events", "--limit", "1")).out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(event)
    await check_trace(run, event, found["n_blocks"])

    removed = await run("model", "rm", "tiny", "--json")
    assert removed.document == {"removed": "tiny"}
    assert (await run("model", "ls", "--json")).document == []


async def until(run: Callable[..., Any], condition: Callable[[Any], bool]) -> Any:
    """Asks for the status, which takes its time, until it is as wanted; returns it."""
    async with asyncio.timeout(LIMIT_S):
        while not condition(shown := (await run("status", "--json")).document):
            continue
    return shown


async def check_trace(run: Callable[..., Any], event: str, n_blocks: int) -> None:
    trace = await run("trace", event, "--json")
    names = [span["name"] for span in trace.document]
    assert {"scale_event", "detect", "decide", "plan"} <= set(names)
    assert names.count("block_arrival") == 2 * n_blocks
    tree = (await run("trace", "last")).out.splitlines()
    assert tree[0].startswith("scale_event")
    assert len(tree) >= len(names)


async def check_hub(run: Callable[..., Any], directory: Path) -> None:
    checkpoint = {path.name: path.read_bytes() for path in (directory / "tiny").iterdir()}
    with pytest.MonkeyPatch.context() as environment, serving(checkpoint) as hub:
        environment.setenv("HF_ENDPOINT", hub.url)
        cache = directory / "cache"
        added = await run("model", "add", "hf:owner/tiny", "--name", "fetched", "--cache", cache)
    assert added.code == 0, added.err
    assert "fetching owner/tiny" in added.err
    assert "published fetched" in added.err
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == sorted(checkpoint)
    assert (await run("model", "rm", "fetched")).code == 0


async def check_end(run: Callable[..., Any], directory: Path) -> None:
    """`down` finds everything, what would start the others again included."""
    data = directory / "lambdascale-data"
    (data / "cluster.json").write_text("damaged")
    down = await run("down")
    assert down.code == 0
    assert "11 processes ended" in down.err  # with the fork server and three nodes' keepers
    assert processes.strays(data) == []
    assert processes.holder_of(data) is None
    assert (await run("status")).code == 1
    assert (await run("trace", "last")).code == 0  # after the end of the cluster, too


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL, None])
async def test_a_cluster_ends_with_its_up(directory: Path, number: signal.Signals | None) -> None:
    """`up` is ended by a signal, or (None) by `down` in another terminal."""
    data = directory / "lambdascale-data"
    words = ("up", "--nodes", "1", "--port", "0", "--no-model")
    up = await commands.start(*words, cwd=directory)
    assert up.stderr
    async with asyncio.timeout(LIMIT_S):
        while b"Ctrl-C" not in (line := await up.stderr.readline()):
            assert line
    assert len(processes.strays(data)) == 7  # with the fork server and the node's keeper
    if number is None:
        down = await commands.run("down", "--json", cwd=directory)
        assert down.document == {"ended": 7}
    else:
        up.send_signal(number)
    async with asyncio.timeout(LIMIT_S):
        await up.communicate()
        while processes.strays(data):  # noqa: ASYNC110 - they are no children of ours
            await asyncio.sleep(0.01)
    assert up.returncode == (-signal.SIGKILL if number is signal.SIGKILL else 0)


async def test_up_that_is_interrupted_while_it_starts_leaves_nothing(directory: Path) -> None:
    up = await commands.start("up", "--port", "0", cwd=directory)
    assert up.stderr
    async with asyncio.timeout(LIMIT_S):
        while b"starting registry" not in (line := await up.stderr.readline()):
            assert line
        up.send_signal(signal.SIGINT)
        await up.communicate()
    assert up.returncode == 130
    assert processes.strays(directory / "lambdascale-data") == []


async def test_a_port_in_use_is_one_clear_line(directory: Path) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = str(taken.sockets[0].getsockname()[1])
    async with taken:
        up = await commands.run("up", "--nodes", "1", "--port", port, cwd=directory)
    assert up.code == 1
    assert up.err == (
        f"lambdascale: the gateway cannot listen at 127.0.0.1:{port} (Address already in use): "
        "choose another port with --port N (0: any free one)\n"
    )
    assert not (directory / "lambdascale-data").exists()


async def test_up_in_the_background_that_is_interrupted_leaves_nothing(directory: Path) -> None:
    up = await commands.start("up", "--port", "0", "--detach", cwd=directory)
    assert up.stderr
    async with asyncio.timeout(LIMIT_S):
        while b"starting registry" not in (line := await up.stderr.readline()):
            assert line
        up.send_signal(signal.SIGTERM)
        await up.communicate()
    assert up.returncode == 130
    assert processes.strays(directory / "lambdascale-data") == []
