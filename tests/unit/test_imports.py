"""The pure cores import nothing that does I/O, waits, or draws numbers; services stay apart."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORES = sorted(ROOT.glob("services/*/core/**/*.py"))
SERVICES = sorted(
    path for path in ROOT.glob("services/*/**/*.py") if not {"cli", "local"} & set(path.parts)
)
PURE_STDLIB = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools",
    "heapq", "itertools", "math", "operator", "statistics", "typing",
}  # fmt: skip
PURE_SHARED = (
    "shared.messages", "shared.layout", "shared.ids", "shared.errors", "shared.slots",
    "shared.story",
)  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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
