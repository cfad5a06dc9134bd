"""The Helm chart: that its parts find and reach each other."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from services.cli.main import main
from services.local.nats_server import find_server
from shared.config import Config, load
from tests.unit.deploy.support import DEPLOY
from tests.unit.deploy.test_helm import EVERYTHING, ROLES, environment, pods, rendered
from tests.unit.deploy.test_image import DATA_DIR

KEDA_MOST = 16
"""As many nodes as there may be with EVERYTHING."""
Documents = list[dict[str, Any]]
APP = "app.kubernetes.io"
of_each_role = pytest.mark.parametrize("role", ROLES)


@cache
def defaults() -> Documents:
    return rendered({})


@cache
def everything() -> Documents:
    return rendered(EVERYTHING)


@pytest.fixture(params=[defaults, everything], ids=["defaults", "everything"])
def documents(request: pytest.FixtureRequest) -> Documents:
    found: Documents = request.param()
    return found


def specs(documents: Documents, kind: str) -> dict[str, Any]:
    """By name."""
    found = [each for each in documents if each["kind"] == kind]
    return {each["metadata"]["name"]: each.get("spec", each) for each in found}


def container(documents: Documents, role: str) -> dict[str, Any]:
    found: dict[str, Any] = dict(pods(documents))[role]["containers"][0]
    return found


def config_of(documents: Documents, role: str) -> Config:
    return load(None, environment(container(documents, role)))


def opened(documents: Documents, role: str) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container(documents, role)["ports"]}


def test_services_lead_to_ports_that_are_open(documents: Documents) -> None:
    services = specs(documents, "Service")
    for spec in services.values():
        there = opened(documents, spec["selector"][f"{APP}/component"])
        for port in spec["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in (*there, *there.values())
    names = {"demo-nats": "nats", "demo-node": "node", "demo-scaler": "planner"}
    for name, role in names.items():
        if name in services:  # whoever asks finds the pods themselves
            assert services[name]["clusterIP"] == "None"
            assert services[name]["selector"][f"{APP}/component"] == role
    assert services["demo-nats"]["publishNotReadyAddresses"], "a server binds to its own name"
    for kind in ("nats", "node"):
        assert specs(documents, "StatefulSet")[f"demo-{kind}"]["serviceName"] == f"demo-{kind}"


@of_each_role
def test_processes_listen_where_they_are_looked_for(documents: Documents, role: str) -> None:
    config = config_of(documents, role)
    assert config.telemetry.metrics_host == "0.0.0.0"
    servers = specs(documents, "StatefulSet")["demo-nats"]["replicas"]
    urls = [f"nats://demo-nats-{n}.demo-nats:4222" for n in range(servers)]
    assert config.bus.url.split(",") == urls
    assert config.bus.replicas == servers
    if role == "gateway":
        assert config.gateway.host == "0.0.0.0"
    if role == "node":
        assert opened(documents, role)["data"] == config.node.port
    if role == "planner" and config.planner.scaler_port:
        assert opened(documents, role)["scaler"] == config.planner.scaler_port


def test_policies_let_through_what_is_needed_and_from_whom(documents: Documents) -> None:
    policies = specs(documents, "NetworkPolicy")
    assert set(policies) == {f"demo-{role}" for role in (*ROLES, "nats")}
    for role in (*ROLES, "nats"):
        rules = policies[f"demo-{role}"]["ingress"]
        let_in = {port["port"] for rule in rules for port in rule["ports"]}
        assert let_in == set(opened(documents, role).values())

    def who(role: str, port: int) -> Any:
        (rule,) = (
            rule
            for rule in policies[f"demo-{role}"]["ingress"]
            if port in [each["port"] for each in rule["ports"]]
        )
        return rule.get("from")

    own = {f"{APP}/name": "lambdascale", f"{APP}/instance": "demo"}
    (on_bus,), (to_nodes,) = who("nats", 4222), who("node", 7000)
    assert on_bus["podSelector"]["matchLabels"] == own
    assert to_nodes["podSelector"]["matchLabels"] == own | {f"{APP}/component": "node"}
    clients = EVERYTHING["networkPolicy"]["clients"] if documents is everything() else None
    assert who("gateway", 8000) == clients


def test_one_of_a_role_goes_at_a_time(documents: Documents) -> None:
    several = {"demo-registry", "demo-planner", "demo-gateway", "demo-node"}
    several |= {"demo-nats"} if documents is everything() else set()
    budgets = specs(documents, "PodDisruptionBudget")
    assert {name: spec["maxUnavailable"] for name, spec in budgets.items()} == dict.fromkeys(
        several, 1
    )


def test_pods_are_made_anew_when_settings_change() -> None:
    def stamps(documents: Documents) -> set[str]:
        made = (
            *specs(documents, "Deployment").values(),
            specs(documents, "StatefulSet")["demo-node"],
        )
        return {
            each["template"]["metadata"]["annotations"]["lambdascale/settings"] for each in made
        }

    (before,), (after,) = (
        stamps(defaults()),
        stamps(rendered({"settings": {"planner": {"idle_s": 1}}})),
    )
    assert before != after


def test_a_gateway_that_ends_is_told_of_first() -> None:
    hook = container(defaults(), "gateway")["lifecycle"]["preStop"]["exec"]["command"]
    grace = dict(pods(defaults()))["gateway"]["terminationGracePeriodSeconds"]
    assert hook == ["sleep", "5"]
    assert grace > 15, "that, and the five seconds in which it drains"


def test_nodes_have_what_their_values_say() -> None:
    values = {
        "nodes": {
            "gpus": 2,
            "graceSeconds": 77,
            "arenaBytes": 1 << 21,
            "models": {"hostPath": {"path": "/srv/models"}},
        }
    }
    documents = rendered(values)
    node, pod = container(documents, "node"), dict(pods(documents))["node"]
    config = config_of(documents, "node").node
    assert pod["terminationGracePeriodSeconds"] == 77
    assert (config.evacuate_s, config.arena_bytes, config.device) == (67.0, 1 << 21, "cuda:0")
    assert node["resources"]["limits"]["nvidia.com/gpu"] == 2
    mounts = {each["mountPath"]: each for each in node["volumeMounts"]}
    assert mounts["/models"]["readOnly"]
    assert mounts[DATA_DIR]["name"] == "data"
    apart = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart[0]["topologyKey"] == "kubernetes.io/hostname"
    assert config_of(defaults(), "node").node.device == "cpu"


def test_keda_scales_the_nodes_between_its_bounds() -> None:
    values = {"keda": {"enabled": True, "min": 2, "max": 9, "behavior": {"scaleUp": {}}}}
    spec = specs(rendered(values), "ScaledObject")["demo-node"]
    target = spec["scaleTargetRef"]
    assert target["name"] in specs(everything(), target["kind"])
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 9)
    scaler = spec["advanced"]["horizontalPodAutoscalerConfig"]
    assert scaler == {"behavior": {"scaleUp": {}}}


def test_prometheus_finds_every_process_as_the_alerts_know_it() -> None:
    spec = specs(everything(), "PodMonitor")["demo"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert all(endpoint["port"] in opened(everything(), role) for role in ROLES)
    jobs = [each for each in endpoint["relabelings"] if each["targetLabel"] == "job"]
    assert jobs == [{"targetLabel": "job", "replacement": "lambdascale"}]
    rules = YAML(typ="safe", pure=True).load(DEPLOY / "prometheus" / "rules.yml")
    assert specs(everything(), "PrometheusRule")["demo"] == rules


def test_a_picker_that_is_away_lets_any_gateway_answer() -> None:
    reference = specs(everything(), "InferencePool")["demo-gateway"]["endpointPickerRef"]
    assert reference["failureMode"] == "FailOpen"


def test_every_process_gets_the_files_that_its_settings_name(tmp_path: Path) -> None:
    """Copied so that only their owner may read them, which services insist on."""
    made = tmp_path / "made"
    nats = "demo-nats-0.demo-nats"
    assert main(["init", str(made), "--nats", nats, "--node", "demo-node-0"]) == 0
    directories = {role: made / role for role in ROLES} | {"node": made / "nodes/demo-node-0"}
    for role, pod in pods(everything()):
        directory = directories.get(role, made / "nats" / nats)
        volume = next(each for each in pod["volumes"] if each["name"] == "secret")
        there = {file.name for file in directory.iterdir()}
        if "projected" in volume:
            secrets = [each["secret"] for each in volume["projected"]["sources"]]
            first = [each for each in secrets if each["name"] == f"demo-{role}-0"]
            items = {item["key"] for each in first for item in each["items"]}
            assert items <= there
            there = items
            most = EVERYTHING["nats"]["replicas"] if role == "nats" else KEDA_MOST
            assert len({each["name"] for each in secrets}) == most
        if role != "nats":
            config = config_of(everything(), role)
            files = [
                *(config.bus.tls_authority, config.node.secret_file, config.node.signers_file),
                *(config.node.tls_certificate, config.node.tls_key, config.node.tls_authority),
                *(config.planner.signing_key_file, config.registry.signing_key_file),
            ]
            named = {Path(file).name for file in files if file}
            assert config.bus.credentials == "/credentials"
            assert {*named, "nats.seed"} <= there
            signs = config.planner.signing_key_file or config.registry.signing_key_file
            assert bool(signs) == (role in ("planner", "registry"))
            assert bool(config.node.secret_file) == (role == "node")
        assert pod["initContainers"][0]["command"][-1].startswith("umask 077 && cp ")


@pytest.mark.parametrize("replicas", [1, 3])
def test_nats_takes_its_configuration(replicas: int, tmp_path: Path) -> None:
    documents = rendered({"nats": {"replicas": replicas}})
    text = next(each["data"] for each in documents if each["kind"] == "ConfigMap")["nats.conf"]
    store = 'store_dir: "/var/lib/lambdascale/nats"'
    assert store in text
    mounts = [each["mountPath"] for each in container(documents, "nats")["volumeMounts"]]
    assert "/var/lib/lambdascale" in mounts
    assert "max_payload: 8388608" in text
    assert text.count("nats://demo-nats-") == (replicas if replicas > 1 else 0)
    file = tmp_path / "nats.conf"
    file.write_text(text.replace("/var/lib/lambdascale", str(tmp_path)))
    checked = subprocess.run(
        [find_server(), "-t", "--config", str(file)],
        env={"POD_NAME": "demo-nats-0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    ready = container(documents, "nats")["readinessProbe"]["exec"]["command"]
    assert ready[-1] == "http://127.0.0.1:8222/healthz?js-enabled-only=true"
