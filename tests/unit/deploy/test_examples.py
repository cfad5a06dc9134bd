"""The example configuration is valid as it stands, and its parts agree."""

import tomllib
from pathlib import Path
from urllib.parse import urlsplit

from services.cli.main import main
from shared.config import Config, load
from tests.unit.deploy.support import DEPLOY, settings, variables_in

TOML = DEPLOY / "lambdascale.toml.example"


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


def test_init_makes_a_nats_server_where_the_services_look_for_it(tmp_path: Path) -> None:
    (host,) = [urlsplit(url).hostname for url in load(TOML, {}).bus.url.split(",")]
    assert main(["init", str(tmp_path), "--nats", str(host)]) == 0
    own = tmp_path / "nats" / str(host)
    text = (own / "nats.conf").read_text()
    assert f'listen: "{load(TOML, {}).bus.url.removeprefix("nats://")}"' in text
