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


def told(directory: Path, nodes: int, config: str = "") -> list[str | None]:
    (directory / "cluster.toml").write_text(config)
    spec = ClusterSpec(directory=directory, nodes=nodes, config=directory / "cluster.toml")
    cluster = Told(spec)
    for name in cluster.node_names:
        cluster.start_node(name)
    return [settings.get(THREADS) for settings in cluster.settings]


def test_nodes_share_the_machine_s_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert told(tmp_path, nodes=3) == ["2"] * 3
    assert told(tmp_path, nodes=9) == ["1"] * 9
    assert told(tmp_path, nodes=2, config="[node]\nthreads = 3") == [None, None]
