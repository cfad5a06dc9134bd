"""docker-compose.yml: the schema, and that every command and variable in it exists."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from services.cli.main import main
from services.local.nats_server import find_server
from shared.bus.credentials import read_credentials
from shared.config import Config, load
from shared.version import __version__
from tests.unit.deploy.support import DEPLOY, ROLES, ROOT, role_of, settings, tool, variables_in

FILE = ROOT / "docker-compose.yml"
GPU_FILE = ROOT / "docker-compose.gpu.yml"
EXAMPLE = variables_in(DEPLOY / "compose.env.example")
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


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
    filled = {"MODELS_DIR": "/srv/models", **values}
    parsed: dict[str, Any] = interpolated(YAML(typ="safe", pure=True).load(FILE), filled)
    return parsed


SERVICES: dict[str, Any] = cluster()["services"]
CREDENTIALS = "/credentials"
IMAGE = f"lambdascale:{__version__}"
FROM_IMAGE = {name: service for name, service in SERVICES.items() if service["image"] == IMAGE}
OURS = {name: s for name, s in FROM_IMAGE.items() if set(s.get("command", ())) & ROLES}
NODES = {name: service for name, service in OURS.items() if service["command"] == ["node"]}


def config_of(service: dict[str, Any]) -> Config:
    return load(None, settings(service["environment"]))


@pytest.mark.parametrize("file", [FILE, GPU_FILE], ids=lambda file: file.name)
def test_it_follows_the_compose_specification(file: Path) -> None:
    checked = subprocess.run(
        [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(file)],
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
    assert config.bus.credentials == CREDENTIALS
    assert config.bus.tls_authority == f"{CREDENTIALS}/servers.pem"
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
    text = FILE.read_text() + GPU_FILE.read_text()
    used = {found[1] for found in VARIABLE.finditer(text) if found[1]}
    assert used == set(EXAMPLE)


def test_with_gpus_each_node_has_one_of_its_own_and_the_other_image() -> None:
    over = interpolated(YAML(typ="safe", pure=True).load(GPU_FILE), {})["services"]
    assert set(over) == set(FROM_IMAGE)
    assert {service["image"] for service in over.values()} == {f"{IMAGE}-cuda"}
    devices = []
    for name, service in NODES.items():
        environment = {**service["environment"], **over[name]["environment"]}
        assert load(None, settings(environment)).node.device == "cuda:0"
        (device,) = over[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        devices += device["device_ids"]
    assert len(set(devices)) == len(NODES)
    arguments = over["init"]["build"]["args"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert all(f"\nARG {name}=" in dockerfile for name in arguments)
    assert arguments["TORCH"] == "system"  # the base has it


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
    assert [name for name, service in FROM_IMAGE.items() if "build" in service] == ["init"]
    policies = {name: service["pull_policy"] for name, service in FROM_IMAGE.items()}
    assert policies == {**dict.fromkeys(FROM_IMAGE, "never"), "init": "missing"}


def metrics_port(service: dict[str, Any]) -> int:
    """Where the service says how it is."""
    config, role = config_of(service), service["command"][0]
    of_role = getattr(config, role)
    return int(of_role.port if role == "gateway" else of_role.metrics_port)


@pytest.mark.parametrize("name", OURS)
def test_health_is_asked_of_the_service_itself(name: str) -> None:
    """The check is a command that imports little, because it runs every two seconds while services
    start."""
    kind, *command = OURS[name]["healthcheck"]["test"]
    url = f"http://127.0.0.1:{metrics_port(OURS[name])}/ready"
    assert (kind, command) == ("CMD", ["python", "-m", "services.health", url])
    assert not OURS[name]["healthcheck"].keys() - set(SERVICES["nats"]["healthcheck"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `init` makes, as it does in the box."""
    directory = tmp_path_factory.mktemp("credentials")
    command, volume, *rest = SERVICES["init"]["command"]
    assert (command, volume) == ("init", CREDENTIALS)
    assert SERVICES["init"]["volumes"] == [f"credentials:{CREDENTIALS}"]
    assert main([command, str(directory), *rest]) == 0
    return directory


def part_of(name: str) -> str:
    """The part of the credentials that the service sees."""
    (mount,) = [volume for volume in FROM_IMAGE[name]["volumes"] if isinstance(volume, dict)]
    assert (mount["source"], mount["target"]) == ("credentials", CREDENTIALS)
    assert mount["read_only"]
    return str(mount["volume"]["subpath"])


@pytest.mark.parametrize("name", OURS)
def test_each_service_has_its_own_credentials_and_no_others(name: str, made: Path) -> None:
    own = f"nodes/{name}" if name in NODES else name
    assert part_of(name) == own
    config = config_of(OURS[name])
    node = config.node
    files = [config.bus.tls_authority]
    if name in NODES:
        files += [node.secret_file, node.tls_certificate, node.tls_key, node.tls_authority]
        files += [node.signers_file]
    if name == "planner":
        files += [config.planner.signing_key_file]
    if name == "registry":
        files += [config.registry.signing_key_file]
    seen = [made / own / Path(file).relative_to(CREDENTIALS) for file in files]
    assert all(file.is_file() for file in seen)
    assert read_credentials(made / own).key


def test_the_operators_commands_have_credentials_too(made: Path) -> None:
    assert config_of(SERVICES["operator"]).bus.credentials == CREDENTIALS
    assert read_credentials(made / part_of("operator")).key
    assert SERVICES["operator"]["profiles"]  # it does not start with the others


def test_nats_takes_its_configuration(made: Path, tmp_path: Path) -> None:
    own = made / part_of("nats")
    assert SERVICES["nats"]["working_dir"] == CREDENTIALS
    program, *arguments = SERVICES["nats"]["entrypoint"]
    assert (program, arguments) == ("nats-server", ["--config", "nats.conf"])
    assert "nats:/var/lib/lambdascale" in SERVICES["nats"]["volumes"]
    path = own / "nats.conf"
    path.write_text(path.read_text().replace("/var/lib/lambdascale", str(tmp_path)))
    checked = subprocess.run(
        [find_server(), "-t", *arguments], cwd=own, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
