"""The pure cores import nothing that does I/O, waits, or draws numbers; services stay apart."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORES = sorted(ROOT.glob("services/*/core/**/*.py"))
SERVICES = sorted(
    path for path in ROOT.glob("services/*/**/*.py") if not {"cli", "local"} & set(path.parts)
)
PURE_STDLIB = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools",
    "hashlib", "heapq", "itertools", "math", "operator", "statistics", "typing",
}  # fmt: skip
PURE_SHARED = (
    "shared.errors", "shared.ids", "shared.known_tokens", "shared.layout", "shared.messages",
    "shared.parts", "shared.port_shares", "shared.schedule", "shared.slots", "shared.step_costs",
    "shared.story", "shared.usage", "shared.wording",
)  # fmt: skip


@cache
def imports(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Its statements of this kind, wherever in it."""
    statements: list[ast.Import | ast.ImportFrom] = []
    blocks: list[ast.AST] = [ast.parse(path.read_text())]
    for block in blocks:
        for node in ast.iter_child_nodes(block):
            if isinstance(node, ast.Import | ast.ImportFrom):
                statements.append(node)
            elif not isinstance(node, ast.expr):  # which holds no statement
                blocks.append(node)
    return tuple(statements)


def imported(path: Path) -> Iterator[str]:
    for node in imports(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", CORES, ids=lambda p: str(p.relative_to(ROOT)))
def test_core_is_pure(path: Path) -> None:
    service = path.relative_to(ROOT).parts[1]
    for name in imported(path):
        allowed = (
            name.split(".")[0] in PURE_STDLIB
            or name == "msgspec"
            or name.startswith(PURE_SHARED)
            or name.startswith(f"services.{service}.core")
        )
        assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", SERVICES, ids=lambda p: str(p.relative_to(ROOT)))
def test_services_do_not_import_each_other(path: Path) -> None:
    service = path.relative_to(ROOT).parts[1]
    for name in imported(path):
        if name.startswith("services."):
            assert name.startswith(f"services.{service}"), f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("shared/**/*.py")), ids=lambda p: p.stem)
def test_shared_imports_no_service(path: Path) -> None:
    assert not [name for name in imported(path) if name.startswith("services")]


@pytest.mark.parametrize(
    "path",
    [*SERVICES, *sorted(ROOT.glob("shared/**/*.py"))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_what_runs_for_real_knows_no_simulation(path: Path) -> None:
    assert not [name for name in imported(path) if name.startswith("simulation")]


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob("services/local/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_what_the_commands_stand_on_imports_no_command(path: Path) -> None:
    """Arrows go services.cli -> benchmarks -> services.local."""
    below = {"services.cli", "benchmarks"} if "services" in path.parts else {"services.cli"}
    assert not [name for name in imported(path) if name.startswith(tuple(below))]


# --- cycles, and who may import whom -------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path): path
    for folder in ("services", "shared", "simulation", "benchmarks")
    for path in ROOT.glob(f"{folder}/**/*.py")
}


@cache
def dependencies(module: str) -> frozenset[str]:
    """The modules that it imports, wherever in it: what is imported late, or for types only, is a
    dependency too."""
    names: set[str] = set()
    for node in imports(MODULES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {part if part in MODULES else node.module or "" for part in parts}
    return frozenset((names & MODULES.keys()) - {module})


def room_of(module: str) -> str:
    """The folder below a service's (or below another top folder) that a module lies in, with
    all folders in it; a module that lies in none is a room by itself."""
    parts = module.split(".")
    depth = 3 if parts[0] == "services" else 2
    return ".".join(parts[:depth])


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The names along a cycle; empty if there is none."""
    done: set[str] = set()

    def search(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := search(other, [*trail, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := search(name, []))), [])


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not cycle_in({module: set(dependencies(module)) for module in MODULES})


def test_no_room_imports_itself_by_way_of_others() -> None:
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        needs = rooms.setdefault(room_of(module), set())
        needs |= {room_of(other) for other in dependencies(module)} - {room_of(module)}
    assert not cycle_in(rooms)


def node_rooms() -> dict[str, set[str]]:
    """Each room of a node, and those that it may import, from the table in docs/design.md."""
    text = (ROOT / "docs/design.md").read_text()
    _, _, section = text.partition("\n## A node's rooms\n")
    rooms: dict[str, set[str]] = {}
    for line in section.partition("\n## ")[0].splitlines():
        cells = line.split("|")
        if len(cells) == 5 and (names := re.findall("`([a-z_]+)`", cells[1])):
            (room,) = names
            rooms[room] = set(re.findall("`([a-z_]+)`", cells[3]))
    return rooms


def test_the_table_of_a_nodes_rooms_is_in_order() -> None:
    """Every room has a row, and imports only rooms of later rows."""
    rooms = node_rooms()
    there = {module.split(".")[2] for module in MODULES if module.startswith("services.node.")}
    assert rooms.keys() == there
    order = list(rooms)
    for number, room in enumerate(order):
        assert rooms[room] <= set(order[number + 1 :]), room


def test_a_nodes_rooms_import_what_the_table_says() -> None:
    rooms = node_rooms()
    for module in MODULES:
        if not module.startswith("services.node."):
            continue
        room = module.split(".")[2]
        needs = {other.split(".")[2] for other in dependencies(module) if ".node." in other}
        assert needs - {room} <= rooms[room], module
