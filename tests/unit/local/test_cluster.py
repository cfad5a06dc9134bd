"""What a cluster on one machine tells its nodes."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.local.cluster import THREADS, Cluster, ClusterSpec
from services.local.credentials import User


class Told(Cluster):
    """Starts nothing, and keeps the settings."""

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        self.settings: list[Mapping[str, str]] = []

    def _spawn(self, name: str, role: str, user: User, settings: Mapping[str, str]) -> None:
        self.settings.append(settings)


def told(
    directory: Path, nodes: int, config: str = "", setting: str = THREADS, standbys: bool = False
) -> list[str | None]:
    (directory / "cluster.toml").write_text(config)
    file = directory / "cluster.toml"
    spec = ClusterSpec(directory=directory, nodes=nodes, config=file, node_standbys=standbys)
    cluster = Told(spec)
    for name in cluster.node_names:
        cluster.start_node(name)
    return [settings.get(setting) for settings in cluster.settings]


def test_nodes_share_the_machine_s_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert told(tmp_path, nodes=3) == ["2"] * 3
    assert told(tmp_path, nodes=9) == ["1"] * 9
    assert told(tmp_path, nodes=2, config="[node]\nthreads = 3") == [None, None]


def test_each_node_has_a_metrics_port_of_its_own_and_its_standby_the_same(tmp_path: Path) -> None:
    port = "LAMBDASCALE_NODE_METRICS_PORT"
    config = "[node]\nmetrics_port = 9110"
    assert told(tmp_path, 2, config, port) == ["9110", "9111"]
    assert sorted(filter(None, told(tmp_path, 2, config, port, standbys=True))) == [
        "9110",
        "9110",
        "9111",
        "9111",
    ]
    assert told(tmp_path, 2, "", port) == [None, None]
