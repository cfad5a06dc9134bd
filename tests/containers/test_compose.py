"""The image and docker-compose.yml under a real engine, from the build to `down`."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from shared.version import __version__
from tests.containers import images
from tests.containers.engine import Engine
from tests.containers.images import ROOT

IMAGE = f"lambdascale:{__version__}"
NEXT = "lambdascale:next"
"""What the cluster is upgraded to."""
LARGEST = 1_100_000_000
"""Bytes that the image may have beside those of its base, which is a stand-in here."""
OURS = ("gateway", "planner", "registry", "node-0", "node-1", "node-2")
NODES = {"node-0", "node-1", "node-2"}
LIMIT_S = 300.0
POLL_S = 0.5
ASK = """
import json, sys, urllib.request
body = {"model": "demo", "prompt": "Hello, ", "max_tokens": 24, "temperature": 0}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
    {"content-type": "application/json"},
)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"])
"""
SENDERS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:16686/api/services", timeout=10).read().decode())
"""
MODEL = """
from pathlib import Path
from services.local.demo_model import make_random_model
make_random_model(Path("/out/demo"))
for file in Path("/out/demo").iterdir():
    file.chmod(0o644)
"""
"""The services' user must be able to read it."""
pytestmark = pytest.mark.timeout(3600)


class Box:
    """The Compose project, on an engine that runs in a network of its own."""

    def __init__(self, engine: Engine, settings: Path) -> None:
        self.engine = engine
        self._prefix = ("compose", "--project-directory", str(ROOT), "--env-file", str(settings))

    def compose(self, *arguments: str, image: str = IMAGE) -> str:
        return self.engine.docker(*self._prefix, *arguments, LAMBDASCALE_IMAGE=image)

    def command(self, *words: str) -> str:
        """An operator's command, in a container of its own."""
        return self.compose("run", "--rm", "-T", "operator", *words)

    def ask(self) -> str:
        done = self.engine.fetch(ASK)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def healthy(self) -> set[str]:
        shown = [json.loads(line) for line in self.compose("ps", "--format", "json").splitlines()]
        return {found["Service"] for found in shown if found["Health"] == "healthy"}

    def serving(self) -> set[str]:
        status = json.loads(self.command("status", "--json"))
        return {node["id"] for node in status["nodes"] if node["state"] == "serving"}

    def state(self, service: str, field: str) -> str:
        return self.inspected(service, f"State.{field}")

    def inspected(self, service: str, field: str) -> str:
        (container,) = self.compose("ps", "-aq", service).split()
        return self.engine.docker("inspect", "--format", f"{{{{.{field}}}}}", container).strip()

    def metrics(self, service: str) -> str:
        """What the service shows of itself, asked for from another container."""
        port = 8000 if service == "gateway" else 9100
        url = f"http://{service}:{port}/metrics"
        return self.compose("exec", "-T", "node-1", "python", "-m", "services.health", url)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "30")


@pytest.fixture
def box(engine: Engine, tmp_path: Path) -> Iterator[Box]:
    """Built, with a model to serve; nothing has been started."""
    engine.start(connected=True)
    build(engine)
    models = tmp_path / "models"
    models.mkdir()
    run = ("run", "--rm", "--network", "none", "--user", "0", "--entrypoint", "python")
    engine.docker(*run, "--volume", f"{models}:/out", IMAGE, "-c", MODEL)
    engine.stop()

    engine.start(connected=False)
    example = (ROOT / "deploy" / "compose.env.example").read_text()
    filled = re.sub("(?m)^MODELS_DIR=.*$", f"MODELS_DIR={models}", example)
    settings = tmp_path / "compose.env"
    settings.write_text(filled)
    found = Box(engine, settings)
    everything = ("--profile", "operator", "down", "--volumes")
    found.compose(*everything)  # of a run that was cut off
    yield found
    found.compose(*everything, "--timeout", "5")
    engine.stop()


def build(engine: Engine) -> None:
    services = YAML(typ="safe", pure=True).load(ROOT / "docker-compose.yml")["services"]
    images.python(engine, images.base())
    engine.docker("build", "--quiet", "--network", "host", "--tag", IMAGE, str(ROOT))
    version = engine.docker("run", "--rm", "--network", "none", IMAGE, "--version")
    assert version.strip() == __version__
    own = size_of(engine, IMAGE) - size_of(engine, images.base())
    print(f"the image has {own / 1e6:.0f} MB beside its base's")
    assert own < LARGEST
    next_release = engine.directory / "contexts" / "next"
    next_release.mkdir(parents=True, exist_ok=True)
    (next_release / "Dockerfile").write_text(f"FROM {IMAGE}\nLABEL release=next\n")
    engine.docker("build", "--quiet", "--network", "none", "--tag", NEXT, str(next_release))
    images.collector(engine, services["jaeger"]["image"], IMAGE)


def size_of(engine: Engine, image: str) -> int:
    return int(engine.docker("image", "inspect", "--format", "{{.Size}}", image))


def until(what: str, condition: Callable[[], Any], box: Box) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:.0f} s\n{box.logs()}"
        time.sleep(POLL_S)


def test_a_cluster_in_a_box(box: Box) -> None:
    check_gpus(box)
    box.compose("up", "--detach", "--no-build")
    until("all healthy", lambda: {*OURS, "nats"} <= box.healthy(), box)
    for service in OURS:
        assert f'name="{service}"' in box.metrics(service)
    box.command("model", "add", "/models/demo")
    expected = box.ask()

    box.command("scale", "demo", "--instances", "3")
    until("three replicas", lambda: box.serving() == NODES, box)
    assert [box.ask() for _ in range(6)] == [expected] * 6
    until("spans", lambda: {"gateway", "planner", *NODES} <= senders(box), box)

    check_a_death(box, "node-1", lambda: "node-1" in box.serving(), expected)
    check_a_death(box, "nats", lambda: {*OURS, "nats"} <= box.healthy(), expected)

    created = box.compose("ps", "-aq")
    box.compose("up", "--detach", "--no-build")
    assert box.compose("ps", "-aq") == created  # nothing was made anew

    box.compose("down")
    box.compose("up", "--detach", "--no-build")
    until("all healthy again", lambda: {*OURS, "nats"} <= box.healthy(), box)
    until("three replicas again", lambda: box.serving() == NODES, box)
    assert box.ask() == expected

    check_an_upgrade(box, expected)
    box.compose("stop", *OURS)
    assert {service: box.state(service, "ExitCode") for service in OURS} == dict.fromkeys(OURS, "0")


def senders(box: Box) -> set[str]:
    done = box.engine.fetch(SENDERS)
    return set(json.loads(done.stdout)["data"]) if done.returncode == 0 else set()


def check_gpus(box: Box) -> None:
    """Compose takes the file for GPUs, and each node would get one."""
    files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(ROOT / "docker-compose.gpu.yml"))
    found = json.loads(box.compose(*files, "config", "--format", "json"))["services"]
    for number, node in enumerate(sorted(NODES)):
        (device,) = found[node]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(number)]
        assert found[node]["environment"]["LAMBDASCALE_NODE_DEVICE"] == "cuda:0"
        assert found[node]["environment"]["LAMBDASCALE_NODE_ID"] == node


def check_a_death(box: Box, service: str, is_back: Callable[[], bool], expected: str) -> None:
    """A process is killed: no request fails, and it comes back."""
    started = box.state(service, "StartedAt")
    os.kill(main_process(int(box.state(service, "Pid"))), signal.SIGKILL)
    assert [box.ask() for _ in range(6)] == [expected] * 6
    until("another start", lambda: box.state(service, "StartedAt") != started, box)
    until(f"{service} is back", is_back, box)
    assert box.ask() == expected


def main_process(init: int) -> int:
    """What the container's init started. Others were left to it, as a node's keeper is."""
    children = map(int, Path(f"/proc/{init}/task/{init}/children").read_text().split())
    return min(children, key=lambda pid: int(stat_of(pid)[19]))  # it began first


def stat_of(pid: int) -> list[str]:
    """The fields of its /proc/PID/stat that follow the name, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def check_an_upgrade(box: Box, expected: str) -> None:
    """Each service is given the next image, one after the other, while others serve."""
    for service in OURS:
        box.compose("up", "--detach", "--no-build", "--no-deps", service, image=NEXT)
        assert box.inspected(service, "Config.Image") == NEXT
        until(f"{service} is well", lambda: set(OURS) <= box.healthy(), box)
        until("all serve", lambda: box.serving() == NODES, box)
        assert box.ask() == expected
