"""docker-compose.yml: the schema, and that every command and variable in it exists."""

import re
import subprocess
from typing import Any

import pytest
from ruamel.yaml import YAML

from services.health import VARIABLE as VARIABLE_OF_HEALTH
from services.local.nats_server import find_server
from shared.config import Config, load
from shared.version import __version__
from tests.unit.deploy.support import DEPLOY, ROLES, ROOT, role_of, settings, tool, variables_in

FILE = ROOT / "docker-compose.yml"
EXAMPLE = variables_in(DEPLOY / "compose.env.example")
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
PASSWORD = "5ecret"


def interpolated(tree: Any, values: dict[str, str]) -> Any:
    """As Compose does it: in the strings of the parsed file, the forms that the file uses."""
    if isinstance(tree, dict):
        return {key: interpolated(value, values) for key, value in tree.items()}
    if isinstance(tree, list):
        return [interpolated(value, values) for value in tree]

    def value(found: re.Match[str]) -> str:
        given = values.get(found[1], "")
        return given if given or found[2] != "-" else found[3]

    return VARIABLE.sub(value, tree) if isinstance(tree, str) else tree


def cluster(**values: str) -> dict[str, Any]:
    filled = {"LAMBDASCALE_BUS_PASSWORD": PASSWORD, "MODELS_DIR": "/srv/models", **values}
    parsed: dict[str, Any] = interpolated(YAML(typ="safe", pure=True).load(FILE), filled)
    return parsed


SERVICES: dict[str, Any] = cluster()["services"]
IMAGE = f"lambdascale:{__version__}"
OURS = {name: service for name, service in SERVICES.items() if service["image"] == IMAGE}
NODES = {name: service for name, service in OURS.items() if service["command"] == ["node"]}


def config_of(service: dict[str, Any]) -> Config:
    return load(None, settings(service["environment"]))


def test_it_follows_the_compose_specification() -> None:
    checked = subprocess.run(
        [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(FILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_there_is_one_of_each_role_and_three_nodes() -> None:
    roles = [role_of(service["command"]) for service in OURS.values()]
    assert sorted(roles) == sorted([*ROLES, "node", "node"])


@pytest.mark.parametrize("name", OURS)
def test_settings_are_known_and_lead_to_the_bus(name: str) -> None:
    config = config_of(OURS[name])
    assert config.bus.url == "nats://nats:4222"
    assert config.bus.password == PASSWORD
    assert config.telemetry.otlp_endpoint == "http://jaeger:4318"


def test_a_nodes_host_is_a_name_that_it_and_the_others_resolve() -> None:
    for name, service in NODES.items():
        config = config_of(service).node
        assert (config.id, config.host, service["hostname"]) == (name, name, name)
        assert config.port != 0
        assert f"{name}:/var/lib/lambdascale" in service["volumes"]
        assert "/srv/models:/models:ro" in service["volumes"]
        assert service["deploy"]["resources"]["limits"]["memory"] == "4G"
        assert config.arena_bytes < 4 << 30
    assert len(NODES) == 3


def test_only_loopback_ports_of_the_machine_are_published() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    gateway = config_of(OURS["gateway"]).gateway
    assert f"127.0.0.1:8000:{gateway.port}" in OURS["gateway"]["ports"]
    assert not [name for name, service in SERVICES.items() if "network_mode" in service]


def test_api_keys_come_from_the_environment_file() -> None:
    digests = ("a" * 64, "b" * 64)
    services = cluster(LAMBDASCALE_GATEWAY_API_KEYS=",".join(digests))["services"]
    assert config_of(services["gateway"]).gateway.api_keys == digests
    assert config_of(OURS["gateway"]).gateway.api_keys == ()


def test_the_example_of_the_environment_file_names_every_variable_and_no_other() -> None:
    used = {found[1] for found in VARIABLE.finditer(FILE.read_text()) if found[1]}
    assert used == set(EXAMPLE)


@pytest.mark.parametrize("name", OURS)
def test_every_service_waits_for_nats_restarts_and_has_a_health_check(name: str) -> None:
    service = OURS[name]
    assert service["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"]
    assert {"cpus", "memory"} <= set(service["deploy"]["resources"]["limits"])


def test_one_service_makes_the_image_and_none_pulls_it() -> None:
    """If several built it, their images would race for the one tag, and a later `up` would make all
    anew."""
    assert [name for name, service in OURS.items() if "build" in service] == ["registry"]
    policies = {name: service["pull_policy"] for name, service in OURS.items()}
    assert policies == {**dict.fromkeys(OURS, "never"), "registry": "missing"}


@pytest.mark.parametrize("name", OURS)
def test_health_is_asked_of_the_service_itself(name: str) -> None:
    """The check is a command that imports little, because it runs every two seconds while services
    start."""
    kind, *command = OURS[name]["healthcheck"]["test"]
    assert (kind, command) == ("CMD", ["python", "-m", "services.health"])
    assert OURS[name]["environment"][VARIABLE_OF_HEALTH].startswith("/tmp/")
    assert "/tmp" in OURS[name]["tmpfs"]
    assert not OURS[name]["healthcheck"].keys() - set(SERVICES["nats"]["healthcheck"])


def test_nats_takes_its_configuration(tmp_path: Any) -> None:
    content = cluster()["configs"]["nats"]["content"]
    assert f'password: "{PASSWORD}"' in content
    path = tmp_path / "nats.conf"
    path.write_text(content.replace('"/data"', f'"{tmp_path}/data"'))
    checked = subprocess.run(
        [find_server(), "-t", "-c", str(path)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
