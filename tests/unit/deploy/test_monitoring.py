"""Alerts and the dashboard ask for metrics that exist, and each alert is explained."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.reference import families
from tests.unit.deploy.test_compose import OURS as SERVICES_OF_COMPOSE
from tests.unit.deploy.test_compose import metrics_port

read = YAML(typ="safe", pure=True).load
ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = read((PROMETHEUS / "rules.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
CASES = Path(__file__).with_name("rules_test.yml")
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/lambdascale.json").read_text())
FAMILIES = {family.name: family for found in families().values() for family in found}
OF_SCRAPES = {"instance", "job", "le"}
OURS = re.compile(r"\b(?:lambdascale|gen_ai|vllm|process)[a-z0-9_:]*")
MATCHERS = re.compile(r"([a-zA-Z0-9_:]+)\{([^}]*)\}")
BY = re.compile(r"\bby \(([^)]*)\)")


def panels() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["name"], variable["query"]


EXPRESSIONS = [*((name, rule["expr"]) for name, rule in ALERTS.items()), *panels()]


def family_of(name: str) -> Any:
    """The family of a name in an expression: of a histogram, one of its series."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    found = FAMILIES.get(name) or FAMILIES.get(base)
    assert found is not None, f"there is no metric {name}"
    assert (found.name == name) == (found.kind != "histogram"), f"{name} is a {found.kind}"
    return found


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_what_is_asked_for_exists(where: str, expression: str) -> None:
    labelless = re.sub(r"\{[^}]*\}|\b(?:by|label_values) \([^)]*\)", "", expression)
    asked = [family_of(name) for name in OURS.findall(BY.sub("", labelless))]
    labels = OF_SCRAPES.union(*(family.labels for family in asked))
    for name, matchers in MATCHERS.findall(expression):
        known = OF_SCRAPES.union(family_of(name).labels if name != "up" else ())
        assert set(re.findall(r"(\w+)(?:=|!)", matchers)) <= known, name
    for group in BY.findall(expression):
        assert {label.strip() for label in group.split(",")} <= labels, expression


def test_counters_are_asked_for_rates() -> None:
    for _, expression in EXPRESSIONS:
        for name in OURS.findall(expression):
            if name.endswith(("_total", "_bucket")):
                assert re.search(r"\b(rate|increase)\(", expression), expression


def test_each_alert_has_its_paragraph_in_the_runbook() -> None:
    titles = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert titles == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_each_alert_is_tested() -> None:
    tests = read(CASES.read_text())["tests"]
    fired = [case["alertname"] for test in tests for case in test["alert_rule_test"]]
    assert fired == list(ALERTS)


def test_prometheus_scrapes_every_process_of_the_compose_file() -> None:
    config = read((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "lambdascale"
    targets = {target for each in job["static_configs"] for target in each["targets"]}
    assert targets == {
        f"{name}:{metrics_port(service)}" for name, service in SERVICES_OF_COMPOSE.items()
    }
    assert config["rule_files"] == ["/etc/prometheus/rules.yml"]


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: the package prometheus)")
    done = subprocess.run(
        [promtool, "test", "rules", str(CASES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
