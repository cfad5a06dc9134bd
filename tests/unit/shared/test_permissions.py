"""The table of who says and hears what is what the code does: no more, and no less."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from shared import subjects
from shared.ids import NodeId
from shared.permissions import (
    ASSETS_READ,
    BUCKETS,
    LOGS,
    TOPICS,
    Role,
    inbox_of,
    permissions,
)

ROOT = Path(__file__).parents[3]
CODE = {
    Role.REGISTRY: ["services/registry"],
    Role.PLANNER: ["services/planner"],
    Role.GATEWAY: ["services/gateway"],
    Role.NODE: ["services/node"],
    Role.OPERATOR: ["services/cli", "services/local"],
}
ELECTION = {"KV_ACTIVE", "KV_COUNTERS", "candidate"}
SHARED = {
    "read_pool": {"REGISTRY_POOL", "REGISTRY_MODELS"},
    "read_nodes": {"REGISTRY_NODES"},
    "read_event": {"PLANNER_EVENT"},
    "become_active": ELECTION,
}
"""What `shared/` says for whoever calls these."""
NO_SUBJECTS = {"ROOT", "node_counter", "of_node"}
"""Parts of names in shared/subjects.py, and keys."""


def named(name: str) -> str:
    """What a name in shared/subjects.py stands for, with `*` for every id."""
    value = getattr(subjects, name)
    return str(value("*")) if callable(value) else str(value)


NAMES = {
    name
    for name, value in vars(subjects).items()
    if (isinstance(value, str) and not name.startswith("__"))
    or (inspect.isfunction(value) and value.__module__ == subjects.__name__)
} - NO_SUBJECTS
BUCKET_NAMES = {name for name in NAMES if name.startswith("KV_")}
LOG_NAMES = {name for name in NAMES if name.startswith("LOG_")}
TOPIC_NAMES = NAMES - BUCKET_NAMES - LOG_NAMES - {"OBJECTS"}


@cache
def sites(role: Role) -> tuple[tuple[str, bool], ...]:
    """Every mention of a subject in the code of a role, and whether it is to hear it."""
    paths = (path for folder in CODE[role] for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(site for path in paths for site in sites_in(ast.parse(path.read_text())))


def sites_in(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    heard = {id(node) for part in heard_in(tree) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "subjects":
            yield node.attr, id(node) in heard
        elif isinstance(node, ast.Name) and node.id in BUCKET_NAMES:  # imported by its name
            yield node.id, False
        elif isinstance(node, ast.Name | ast.Attribute):
            called = node.id if isinstance(node, ast.Name) else node.attr
            for name in SHARED.get(called, ()):
                yield name, False
                if name == "candidate":
                    yield name, True


def heard_in(tree: ast.AST) -> Iterator[ast.AST]:
    """The expressions of which a subscription or a server's subject is made."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        variables = set[str]()
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
                "subscribe",
                "serve",
            ):
                yield node.args[0]
                variables |= {n.id for n in ast.walk(node.args[0]) if isinstance(n, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in variables:
                yield node.value
            elif isinstance(node, ast.For) and getattr(node.target, "id", "") in variables:
                yield node.iter


def users(name: str, *, hears: bool) -> set[Role]:
    return {role for role in Role if (name, hears) in sites(role)}


def test_every_subject_and_bucket_is_in_the_table_once() -> None:
    topics = [topic.subject for topic in TOPICS]
    buckets = [bucket.name for bucket in BUCKETS]
    assert sorted(topics) == sorted(named(name) for name in TOPIC_NAMES)
    assert sorted(buckets) == sorted(named(name) for name in BUCKET_NAMES)


@pytest.mark.parametrize("name", sorted(TOPIC_NAMES))
def test_a_subject_is_granted_to_exactly_the_roles_that_use_it(name: str) -> None:
    (topic,) = (topic for topic in TOPICS if topic.subject == named(name))
    assert topic.says == users(name, hears=False)
    assert topic.hears == users(name, hears=True)


@pytest.mark.parametrize("name", sorted(BUCKET_NAMES))
def test_a_bucket_is_granted_to_exactly_the_roles_that_use_it(name: str) -> None:
    (bucket,) = (bucket for bucket in BUCKETS if bucket.name == named(name))
    assert bucket.lists | bucket.gets | bucket.writes.keys() == users(name, hears=False)


@pytest.mark.parametrize("name", sorted(LOG_NAMES))
def test_a_log_is_granted_to_exactly_the_roles_that_use_it(name: str) -> None:
    (log,) = (log for log in LOGS if log.name == named(name))
    assert log.appends | log.reads == users(name, hears=False)
    assert not log.appends & log.reads


def test_assets_are_granted_to_exactly_the_roles_that_use_them() -> None:
    def uses(role: Role) -> bool:
        paths = (path for folder in CODE[role] for path in (ROOT / folder).rglob("*.py"))
        return any(".objects()" in path.read_text() for path in paths)

    assert {role for role in Role if uses(role)} == ASSETS_READ


def test_what_shared_code_says_for_others_is_known_here() -> None:
    apart = {"subjects.py", "permissions.py"}
    mentioned = {
        name
        for path in (ROOT / "shared").rglob("*.py")
        if path.name not in apart and path.parent.name != "bus"
        for name, _ in sites_in(ast.parse(path.read_text()))
    }
    assert mentioned == set().union(*SHARED.values())


def test_no_role_is_granted_more_than_its_subjects() -> None:
    """Nothing with `>` but its inbox and its own keys, and no changes of streams."""
    for role in Role:
        node = NodeId("n1") if role is Role.NODE else None
        may = permissions(role, node, inbox_of("KEY"))
        wide = [s for s in (*may.publish, *may.subscribe) if s.endswith(">")]
        assert all(s.startswith(("_INBOX.", "$KV.ls_", "$O.ls_")) for s in wide), role
        api = [s for s in may.publish if s.startswith("$JS.API.STREAM.")]
        assert {s.split(".")[3] for s in api} <= {"INFO", "CREATE", "MSG"}
        assert [s for s in may.subscribe if s.startswith("_INBOX.")] == ["_INBOX.KEY.>"]


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.NODE])
def test_who_may_be_broken_into_cannot_have_nats_send_its_bytes_elsewhere(role: Role) -> None:
    """A consumer, or a direct request, has NATS deliver what is stored to any subject."""
    may = permissions(role, NodeId("n1") if role is Role.NODE else None, inbox_of("KEY"))
    assert not [s for s in may.publish if ".CONSUMER." in s or ".DIRECT." in s]
    assert may.answers
    assert not [s for s in may.publish if s.startswith("_INBOX")]


def test_a_node_has_nothing_of_another_nodes() -> None:
    may = permissions(Role.NODE, NodeId("n1"), inbox_of("KEY"))
    of_nodes = [s for s in may.subscribe if s.startswith("ls.node.")]
    assert of_nodes
    assert all(s.startswith("ls.node.n1.") for s in of_nodes)
    written = {s for s in may.publish if s.startswith("$KV.")}
    assert written == {"$KV.ls_leases.n1", "$KV.ls_counters.node.n1"}
