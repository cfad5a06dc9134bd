"""What the doctor finds on machines that are not well."""

import json
import resource
import socket
from pathlib import Path

import pytest

from services.cli.main import main
from services.local import checkup
from services.local.checkup import Finding, Machine, State
from shared.config import Config, GatewayConfig, NodeConfig, PlannerConfig
from shared.errors import NotFound

SMALL = NodeConfig(arena_bytes=1)


def machine(tmp_path: Path, node: NodeConfig = SMALL) -> Machine:
    return Machine(Config(node=node), tmp_path / "data", tmp_path / "root")


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def adapter(root: Path, name: str, state: str = "4: ACTIVE", gid: str = "fe80::1") -> None:
    device = root / "sys/class/infiniband" / name
    (device / "ports/1/gids").mkdir(parents=True)
    (device / "ports/1/state").write_text(state)
    (device / "ports/1/rate").write_text("100 Gb/sec (4X EDR)")
    (device / "ports/1/gids/0").write_text(gid)
    (device / "ports/1/gids/1").write_text("0000:0000:0000:0000:0000:0000:0000:0000")
    (device / "device").mkdir()
    (device / "device/numa_node").write_text("0")


def test_here_it_says_something_of_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", "--data", str(tmp_path), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"Python", "nats-server", "disk", "memory"} <= {each["what"] for each in findings}
    assert code == any(each["state"] == State.WRONG.value for each in findings)
    for each in findings:
        assert bool(each["advice"]) == (each["state"] != State.WELL.value), each
    assert not list(tmp_path.iterdir())


def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--data", str(tmp_path)])
    assert "nats-server" in capsys.readouterr().out


def test_a_nats_server_that_is_missing_or_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho 'nats-server: v2.9.1'")
    old.chmod(0o755)
    monkeypatch.setattr(checkup, "find_server", lambda: str(old))
    found = checkup.nats_server(machine(tmp_path))
    assert (found.state, found.found) == (State.WRONG, "v2.9.1")

    def missing() -> str:
        raise NotFound("no nats-server")

    monkeypatch.setattr(checkup, "find_server", missing)
    assert checkup.nats_server(machine(tmp_path)).state is State.WRONG


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = Machine(Config(gateway=GatewayConfig(port=port)), tmp_path)
        assert checkup.ports(where).state is State.LACKS
    assert checkup.ports(where).state is State.WELL


def test_the_port_of_the_cluster_that_runs_here_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "holder_of", {tmp_path: "its process"}.get)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(gateway=GatewayConfig(port=taken.getsockname()[1]))
        found = checkup.ports(Machine(config, tmp_path))
        assert found.state is State.WELL
        assert f"the cluster in {tmp_path} runs" in found.found
        assert checkup.ports(Machine(config, tmp_path / "other")).state is State.LACKS


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkup.compiler(machine(tmp_path)).state is State.LACKS


def test_few_files_and_little_locked_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert checkup.open_files(machine(tmp_path)).state is State.LACKS
    where = machine(tmp_path, NodeConfig(arena_bytes=1 << 30))
    adapter(where.root, "mlx5_0")
    *_, locked = checkup.rdma(where)
    assert (locked.what, locked.state) == ("locked memory", State.WRONG)


def states(found: list[Finding]) -> list[tuple[str, State]]:
    return [(each.what, each.state) for each in found]


def test_adapters(tmp_path: Path) -> None:
    where = machine(tmp_path, NodeConfig(arena_bytes=1, rdma_device="mlx5_9"))
    adapter(where.root, "mlx5_0")
    adapter(where.root, "mlx5_1", state="1: DOWN")
    adapter(where.root, "mlx5_2", gid="::")
    found = list(checkup.rdma(where))
    assert states(found) == [
        ("RDMA", State.WRONG),
        ("RDMA mlx5_0", State.WELL),
        ("RDMA mlx5_1", State.LACKS),
        ("RDMA mlx5_2", State.LACKS),
    ]
    assert "0 fe80::1" in found[1].found
    assert "100 Gb/sec, NUMA node 0" in found[1].found
    assert states(list(checkup.rdma(machine(tmp_path / "none")))) == [("RDMA", State.WELL)]


def test_links_that_are_slower_than_the_configuration_says(tmp_path: Path) -> None:
    where = machine(tmp_path)
    assert checkup.links(where).found == "no interface says how fast it is"
    interfaces = {"eth0": ("up", "10000"), "eth1": ("down", "100000"), "veth": ("up", "-1")}
    for name, (state, rate) in interfaces.items():
        write(where.root / "sys/class/net" / name, operstate=state, speed=rate)
    found = checkup.links(where)
    assert (found.state, found.found) == (State.WELL, "eth0 10000 Mbit/s")
    for config in (
        Config(node=NodeConfig(link_bytes_per_s=1_250_000_001)),
        Config(planner=PlannerConfig(link_bytes_per_s=1_250_000_001)),
    ):
        found = checkup.links(Machine(config, tmp_path, where.root))
        assert found.state is State.LACKS
        assert "1250000000 at most" in found.advice


def test_gpus_far_from_adapters_and_without_their_device_file(tmp_path: Path) -> None:
    where = machine(tmp_path)
    for bus, numa in (("0000:01:00.0", "0"), ("0000:81:00.0", "1")):
        (where.root / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
        write(where.root / "sys/bus/pci/devices" / bus, numa_node=numa)
    adapter(where.root, "mlx5_0")
    assert states(list(checkup.gpus(where))) == [
        ("GPU 0000:01:00.0", State.WELL),
        ("GPU 0000:81:00.0", State.LACKS),
        ("GPU driver", State.WRONG),
    ]
    wants = machine(tmp_path / "none", NodeConfig(arena_bytes=1, device="cuda:0"))
    assert states(list(checkup.gpus(wants))) == [("GPU", State.WRONG)]


def test_too_little_memory_and_no_large_pages(tmp_path: Path) -> None:
    where = machine(tmp_path, NodeConfig(arena_bytes=4 << 30))
    write(
        where.root,
        proc__meminfo="MemTotal: 9 kB\nMemAvailable: 2097152 kB\n",
        sys__kernel__mm__transparent_hugepage__shmem_enabled="always advise [never]",
    )
    assert states(list(checkup.memory(where))) == [
        ("memory", State.WRONG),
        ("large pages", State.LACKS),
    ]


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert checkup.disk(Machine(Config(), file)).state is State.WRONG
