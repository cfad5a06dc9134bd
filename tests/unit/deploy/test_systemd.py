"""The systemd units: that systemd takes them, and that what they start exists."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from services.cli.main import main
from services.local.nats_server import find_server
from shared.bus.credentials import read_credentials
from shared.config import NodeConfig, load
from tests.unit.deploy.support import DEPLOY, MODULE, ROLES, role_of, settings, tool

UNITS = DEPLOY / "systemd"
COMMON = (UNITS / "lambdascale-.service.d" / "10-common.conf").read_text()
SERVICES = sorted(UNITS.glob("*.service"))
KEEPER = UNITS / "lambdascale-keeper@.service"
OURS = [path for path in SERVICES if path.stem != "lambdascale-nats" and path != KEEPER]
NODE = (UNITS / "lambdascale-node@.service").read_text()
NEWER = {"RestartSteps": 254, "RestartMaxDelaySec": 254}
"""Keys that an older systemd warns of and passes over."""
STUBS = ("basic", "multi-user", "network-online", "shutdown", "sysinit")
INSTALLED = "/etc/lambdascale"
MOST_EXPOSED = 2.5
"""The highest exposure, out of 10, that `systemd-analyze security` may find. systemd 252 says 1.8,
and its versions weigh a little differently."""


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", unit, re.MULTILINE)


def instance(path: Path) -> str:
    return path.name.replace("@.", "@gpu1-0.")


def systemd_analyze(*arguments: str) -> str:
    ran = subprocess.run(
        [tool("systemd-analyze"), *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a machine with the units installed, and empty commands where they start."""
    version = int(systemd_analyze("--version").split()[1])
    root = tmp_path_factory.mktemp("machine")
    units = root / "etc/systemd/system"
    shutil.copytree(UNITS, units)
    for name in STUBS:
        (units / f"{name}.target").write_text("[Unit]\nDescription=of the machine\n")
    for path in units.rglob("*.conf"):
        unknown = [key for key, since in NEWER.items() if version < since]
        lines = path.read_text().splitlines()
        path.write_text("\n".join(x for x in lines if x.split("=")[0] not in unknown) + "\n")
    for path in SERVICES:
        for command in values(path.read_text(), "Exec[A-Za-z]+"):
            executable = root / command.split()[0].lstrip("/")
            executable.parent.mkdir(parents=True, exist_ok=True)
            executable.write_text("#!/bin/sh\n")
            executable.chmod(0o755)
    return root


@pytest.mark.parametrize("unit", [*map(instance, SERVICES), "lambdascale.target"])
def test_systemd_takes_the_unit(machine: Path, unit: str) -> None:
    systemd_analyze("verify", "--recursive-errors=yes", "--man=no", f"--root={machine}", unit)


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_exposure_stays_low(machine: Path, path: Path) -> None:
    threshold = f"--threshold={int(MOST_EXPOSED * 10)}"
    systemd_analyze("security", "--offline=true", f"--root={machine}", threshold, instance(path))


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_it_starts_its_role_with_the_shared_configuration(path: Path) -> None:
    (command,) = values(path.read_text(), "ExecStart")
    python, *arguments = shlex.split(command)
    assert python == "/opt/lambdascale/.venv/bin/python"
    assert arguments[:2] == MODULE
    role = role_of(arguments[2:])
    assert role in ROLES
    assert role_in(path) == role
    assert arguments[3:] == ["--config", "/etc/lambdascale/lambdascale.toml"]


def test_every_role_has_a_unit() -> None:
    assert set(map(role_in, OURS)) == ROLES


def role_in(path: Path) -> str:
    """By the unit's name."""
    return path.stem.removeprefix("lambdascale-").removesuffix("@").removesuffix("-standby")


def test_the_second_process_of_a_node_is_like_the_first() -> None:
    standby = (UNITS / "lambdascale-node-standby@.service").read_text()

    def settings_of(unit: str) -> list[str]:
        lines = unit.splitlines()
        return [line for line in lines if line and line[0] != "#" and "Description=" not in line]

    assert settings_of(standby) == settings_of(NODE)


def test_a_keeper_is_that_of_the_node_of_its_id() -> None:
    (command,) = values(KEEPER.read_text(), "ExecStart")
    python, *arguments = shlex.split(command)
    assert python == "/opt/lambdascale/.venv/bin/python"
    assert arguments[:3] == ["-m", "services.node.keeper", "--foreground"]
    (environment,) = [e for e in values(NODE, "Environment") if "DATA_DIR" in e]
    assert f"LAMBDASCALE_NODE_DATA_DIR={arguments[3]}" in environment
    assert f"LAMBDASCALE_NODE_ID={arguments[4]} " in environment
    assert float(arguments[5]) == NodeConfig().keep_weights_s
    assert any("lambdascale-keeper@%i.service" in unit for unit in values(NODE, "Wants"))


@pytest.mark.parametrize(
    "path", [path for path in SERVICES if path != KEEPER], ids=lambda p: p.stem
)
def test_it_belongs_to_the_target_and_starts_with_it(path: Path) -> None:
    assert values(path.read_text(), "WantedBy") == ["lambdascale.target"]
    assert values(COMMON, "PartOf") == ["lambdascale.target"]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_no_unit_sets_what_the_common_part_would_override(path: Path) -> None:
    def keys(unit: str) -> set[str]:
        return set(re.findall(r"^(\w+)=", unit, re.MULTILINE))

    assert keys(path.read_text()) & keys(COMMON) == set()


def variables(unit: str) -> dict[str, str]:
    """What a unit sets in the environment of its service."""
    lines = [line.replace("%i", "gpu1-0") for line in values(unit, "Environment")]
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def test_a_nodes_settings_are_known_and_follow_its_name() -> None:
    assert variables(NODE)["XDG_CACHE_HOME"] == "%C"
    assert values(NODE, "CacheDirectory") == ["lambdascale"]
    config = load(None, settings(variables(NODE))).node
    assert config.id == "gpu1-0"
    (state,) = values(NODE, "StateDirectory")
    assert config.data_dir.removeprefix("/var/lib/") in state.replace("%i", "gpu1-0").split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `init` makes, as docs/deploy.md has it copied to the machine."""
    directory = tmp_path_factory.mktemp("credentials")
    assert main(["init", str(directory), "--node", "gpu1-0"]) == 0
    (directory / "nats" / "127.0.0.1").rename(directory / "nats-here")
    shutil.rmtree(directory / "nats")
    (directory / "nats-here").rename(directory / "nats")
    return directory


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_it_finds_the_credentials_of_its_role(path: Path, made: Path) -> None:
    config = load(None, settings(variables(path.read_text())))
    bus, node = config.bus, config.node
    own = "nodes/gpu1-0" if role_in(path) == "node" else role_in(path)
    assert bus.credentials == f"{INSTALLED}/{own}"
    assert read_credentials(made / own).key
    files = [bus.tls_authority, node.secret_file, node.signers_file]
    files += [node.tls_certificate, node.tls_key, node.tls_authority]
    signing = {"planner": config.planner.signing_key_file,
               "registry": config.registry.signing_key_file}  # fmt: skip
    for file in filter(None, (*files, *signing.values())):
        assert (made / Path(file).relative_to(INSTALLED)).is_file()
    assert all(files) is (role_in(path) == "node")
    assert [role for role, file in signing.items() if file] == [
        role for role in signing if role == role_in(path)
    ]


def test_nats_starts_with_what_init_has_made_and_stores_where_its_unit_lets_it(made: Path) -> None:
    nats = (UNITS / "lambdascale-nats.service").read_text()
    (directory,) = values(nats, "WorkingDirectory")
    (command,) = values(nats, "ExecStart")
    (state,) = values(nats, "StateDirectory")
    own = made / Path(directory).relative_to(INSTALLED)
    configuration = made / Path(command.split()[-1]).relative_to(INSTALLED)
    assert configuration.parent == own
    assert f'store_dir: "/var/lib/{state}"' in configuration.read_text()
    text = configuration.read_text().replace("/var/lib", str(made))
    configuration.write_text(text)
    checked = subprocess.run(
        [find_server(), "-t", "-c", str(configuration)],
        cwd=own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
