"""The example configuration is valid as it stands, and its parts agree."""

import subprocess
import tomllib
from pathlib import Path

from services.local.nats_server import find_server
from shared.config import Config, load
from tests.unit.deploy.support import DEPLOY, settings, variables_in

TOML = DEPLOY / "lambdascale.toml.example"
NATS = DEPLOY / "nats.conf.example"


def test_the_configuration_loads_and_is_what_it_says() -> None:
    config = load(TOML, {})
    given = tomllib.loads(TOML.read_text())
    assert set(given) <= set(Config.__struct_fields__)
    assert config.planner.idle_s == given["planner"]["idle_s"]
    assert config.node.arena_bytes == given["node"]["arena_bytes"]


def test_a_nodes_variables_are_known_and_win_over_the_file() -> None:
    variables = settings(variables_in(DEPLOY / "node.env.example"))
    config = load(TOML, variables)
    assert config.node.host == variables["LAMBDASCALE_NODE_HOST"]
    assert config.node.device == "cuda:0"
    assert config.node.host not in ("0.0.0.0", "127.0.0.1")


def test_the_services_know_where_nats_is_and_as_whom() -> None:
    bus = load(TOML, {}).bus
    text = NATS.read_text()
    assert f'listen: "{bus.url.removeprefix("nats://").split(",")[0]}"' in text
    assert f'user: "{bus.user}"' in text
    assert f'password: "{bus.password}"' in text


def test_nats_takes_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "nats.conf"
    path.write_text(NATS.read_text().replace("/var/lib/lambdascale/nats", str(tmp_path / "store")))
    checked = subprocess.run(
        [find_server(), "-t", "-c", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
