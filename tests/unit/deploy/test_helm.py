"""The Helm chart: rendered, linted, checked against Kubernetes' schemas, and its settings known."""

import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from services.local.credentials import all_users
from shared.config import load
from shared.ids import NodeId
from shared.version import __version__
from tests.unit.deploy.support import DEPLOY

CHART = DEPLOY / "helm" / "lambdascale"
KUBERNETES = ("1.27", "1.34")
OURS = ("apps/v1", "v1", "policy/v1", "networking.k8s.io/v1")
ROLES = ("registry", "planner", "gateway", "node")
EVERYTHING: dict[str, Any] = {
    "credentials": {"enabled": True},
    "nats": {"replicas": 3},
    "nodes": {"gpus": 1, "models": {"hostPath": {"path": "/srv/models"}}},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "keda": {"enabled": True, "behavior": {"scaleUp": {"stabilizationWindowSeconds": 0}}},
    "inferencePool": {"enabled": True, "picker": {"name": "chooser"}},
    "settings": {"planner": {"idle_s": 30.0}},
    "imagePullSecrets": [{"name": "registry"}],
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
}
VALUES = {"defaults": {}, "everything": EVERYTHING}


def helm() -> Any:
    """The library. It is written in Go, starts threads when it is imported, and waits for ever in a
    fork, which has none of them: the process that imports it must be the one that runs the test."""
    return importlib.import_module("helm_python")


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm().Chart.load(CHART) as chart:
        files = chart.render(values, name="demo")
    yaml = YAML(typ="safe", pure=True)
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.load_all(text)
        if document
    ]


@pytest.fixture(scope="module", params=VALUES)
def documents(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(VALUES[request.param])


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods that are made, by role."""
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet"):
            template = document["spec"]["template"]
            yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    """The variables, with stand-ins for what Kubernetes fills in."""
    filled = {"LAMBDASCALE_NODE_HOST": "10.0.0.1"}
    return {
        each["name"]: each.get("value", filled.get(each["name"], "demo-node-0"))
        for each in container.get("env", ())
        if each["name"].startswith("LAMBDASCALE_")
    }


def test_it_lints() -> None:
    for values in VALUES.values():
        found = helm().lint(CHART, values, strict=True, quiet=True)
        assert not found.get("errors"), found


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_it(documents: list[dict[str, Any]], version: str) -> None:
    checked = [document for document in documents if document["apiVersion"] in OURS]
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    assert len(checked) > 15


def test_names_are_one_of_each(documents: list[dict[str, Any]]) -> None:
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))


def test_every_role_has_pods_that_may_do_little(documents: list[dict[str, Any]]) -> None:
    found = dict(pods(documents))
    assert set(found) == {*ROLES, "nats"}
    for pod in found.values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["image"] == f"lambdascale:{__version__}"
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"]
            assert not own["allowPrivilegeEscalation"]
            assert own["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("role", ROLES)
def test_settings_are_known_and_probes_reach_the_process(
    documents: list[dict[str, Any]], role: str, tmp_path: Path
) -> None:
    (container,) = dict(pods(documents))[role]["containers"]
    assert container["args"] == [role, "--config", "/etc/lambdascale/lambdascale.toml"]
    settings = next(d for d in documents if d["metadata"]["name"] == "demo-settings")
    file = tmp_path / "lambdascale.toml"
    file.write_text(settings["data"]["lambdascale.toml"])
    config = load(file, environment(container))
    own = getattr(config, role)
    port = own.port if role == "gateway" else own.metrics_port
    assert {"name": "http", "containerPort": port} in container["ports"]
    for probe, path in (("startup", "live"), ("liveness", "live"), ("readiness", "ready")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": f"/{path}", "port": "http"}
    if role == "node":
        grace = dict(pods(documents))[role]["terminationGracePeriodSeconds"]
        assert config.node.evacuate_s < grace


def test_settings_of_values_are_the_configuration() -> None:
    settings = next(d for d in rendered(EVERYTHING) if d["metadata"]["name"] == "demo-settings")
    assert tomllib.loads(settings["data"]["lambdascale.toml"]) == EVERYTHING["settings"]


def test_keda_asks_the_planner_how_many_nodes(tmp_path: Path) -> None:
    documents = rendered(EVERYTHING)
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    spec = by_name["ScaledObject", "demo-node"]["spec"]
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
    host, port = trigger["metadata"]["scalerAddress"].split(":")
    service = by_name["Service", host.split(".")[0]]["spec"]
    assert service["selector"].items() <= labels_of(documents, "planner").items()
    (container,) = dict(pods(documents))["planner"]["containers"]
    planner = load(None, environment(container)).planner
    assert [planner.scaler_port, planner.scaler_host] == [int(port), "0.0.0.0"]
    opened = by_name["NetworkPolicy", "demo-planner"]["spec"]["ingress"]
    assert int(port) in [each["port"] for rule in opened for each in rule["ports"]]
    assert "replicas" not in by_name["StatefulSet", "demo-node"]["spec"]


def test_a_picker_finds_the_gateways() -> None:
    documents = rendered(EVERYTHING)
    spec = next(each["spec"] for each in documents if each["kind"] == "InferencePool")
    assert spec["selector"]["matchLabels"].items() <= labels_of(documents, "gateway").items()
    (container,) = dict(pods(documents))["gateway"]["containers"]
    assert spec["targetPorts"] == [{"number": load(None, environment(container)).gateway.port}]
    assert spec["endpointPickerRef"]["name"] == "chooser"
    assert spec["endpointPickerRef"]["port"] == {"number": 9002}
    with pytest.raises(helm().HelmError, match="picker"):
        rendered({"inferencePool": {"enabled": True}})


def labels_of(documents: list[dict[str, Any]], role: str) -> dict[str, str]:
    made = (
        d["spec"]["template"]["metadata"]["labels"] for d in documents if "replicas" in d["spec"]
    )
    return next(dict(each) for each in made if each["app.kubernetes.io/component"] == role)


def test_secrets_are_those_that_init_makes() -> None:
    """Each process is given the files of its own user, and nothing else."""
    for role, pod in pods(rendered(EVERYTHING)):
        secret = next(volume for volume in pod["volumes"] if volume["name"] == "secret")
        if role in ("node", "nats"):
            names = {each["secret"]["name"] for each in secret["projected"]["sources"]}
            assert f"demo-{role}-0" in names
            mount = pod["initContainers"][0]["command"][-1]
            assert "/secret/$POD_NAME/*" in mount
        else:
            assert secret["secret"] == {"secretName": f"demo-{role}"}
    known = {user.directory for user in all_users([NodeId("demo-node-0")])}
    assert {"gateway", "planner", "registry", "nodes/demo-node-0"} <= set(map(str, known))


def test_policies_choose_pods_that_are_there(documents: list[dict[str, Any]]) -> None:
    there = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in documents
        if document["kind"] in ("Deployment", "StatefulSet")
    ]
    for document in documents:
        spec = document.get("spec", {})
        chosen = spec.get("podSelector", spec.get("selector"))
        if document["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget", "InferencePool"):
            labels = chosen.get("matchLabels", chosen)
            assert any(labels.items() <= pod.items() for pod in there), document["metadata"]


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": {"replicas": 0}},
        {"nats": {"replicas": 2}},
        {"gateways": {}},
        {"settings": {"gatway": {}}},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm().HelmError), helm().Chart.load(CHART) as chart:
        chart.validate_schema(values)
