"""What the docs name exists: files, links and their headings, code, settings, commands, modules."""

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from services.cli.main import make_parser
from shared.config import Config

ROOT = Path(__file__).parents[2]
DOCS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]
PACKAGES = ("services", "shared", "simulation", "benchmarks", "tests", "training")
FOLDERS = (*PACKAGES, "docs", "deploy")
SUFFIXES = (".py", ".md", ".c", ".h", ".png", ".svg", ".example")
SECTIONS = msgspec.structs.fields(Config)

every_document = pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)


def prose(path: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def quoted(path: Path) -> list[str]:
    """Everything in backticks."""
    return re.findall(r"`([^`\n]+)`", prose(path))


@cache
def files() -> frozenset[str]:
    return frozenset(
        f"/{path.relative_to(ROOT)}"
        for path in chain(ROOT.glob("*"), *(ROOT.glob(f"{folder}/**/*") for folder in FOLDERS))
    )


def exists(name: str) -> bool:
    """A path from the root, or the last parts of exactly such paths (`multicast/taps.py`)."""
    return any(known.endswith(f"/{name.rstrip('/')}") for known in files())


@cache
def definitions() -> frozenset[str]:
    """Functions, classes and names of modules; `Class.name` for what is in a class."""
    found: set[str] = set()
    for path in chain(*(ROOT.glob(f"{package}/**/*.py") for package in PACKAGES)):
        for node in ast.parse(path.read_text()).body:
            found.update(names(node))
            if isinstance(node, ast.ClassDef):
                found.update(f"{node.name}.{name}" for child in node.body for name in names(child))
    return frozenset(found)


def names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def headings(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_document
def test_named_files_exist(path: Path) -> None:
    named = [
        text
        for text in quoted(path)
        if re.fullmatch(r"[\w./-]+", text)
        and (text.endswith(SUFFIXES) or (text.startswith(FOLDERS) and "/" in text))
    ]
    assert not [text for text in named if not exists(text)]


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        leads_to = (path.parent / target).resolve() if target else path
        assert leads_to.exists(), link
        assert not anchor or anchor in headings(leads_to), link


@every_document
def test_named_code_exists(path: Path) -> None:
    """`Class.name`, `function()`, and what follows a module's path (`shared.errors.BadInput`)."""
    for text in quoted(path):
        if match := re.fullmatch(r"([A-Z]\w+\.\w+|\w+(?=\(\)))(\(\))?", text):
            assert match[1] in definitions() or exists(text), text
        if match := re.fullmatch(rf"((?:{'|'.join(PACKAGES)})(?:\.[a-z_]\w*)+)(\.[A-Z]\w*)?", text):
            module = match[1].replace(".", "/")
            found = exists(module) or exists(f"{module}.py")
            if not found:  # a function of the module
                module, _, name = module.rpartition("/")
                found = exists(f"{module}.py") and name in definitions()
            assert found, text
            assert not match[2] or match[2][1:] in definitions(), text


@every_document
def test_named_settings_exist(path: Path) -> None:
    sections = {field.name: field.type for field in SECTIONS}
    for text in quoted(path):
        if match := re.fullmatch(r"([a-z]+)\.([a-z_]+)( = .+)?", text):
            section, key = match[1], match[2]
            if section in sections and key not in ("env", "py"):  # files: planner.env, bus.py
                keys = {field.name for field in msgspec.structs.fields(sections[section])}
                assert key in keys, text


def test_every_section_of_the_results_can_be_reproduced() -> None:
    results = ROOT / "benchmarks" / "RESULTS.md"
    reproduced = (ROOT / "docs" / "reproduce.md").read_text()
    sections = re.findall(r"^## (.+)$", results.read_text(), flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in sections]
    assert [name for name in anchors if f"RESULTS.md#{name})" not in reproduced] == []


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each `lambdascale ...`, in code blocks and in backticks, without comments; in
    backticks also of `COMMAND --option`."""
    for line in re.sub(r"\\\n\s*", " ", path.read_text()).splitlines():
        for code in re.findall(r"`([^`]+)`", line):
            if found := re.match(r"(?:.*\./)?lambdascale ([^=#;][^#;]*)|([a-z]+ .*--.*)", code):
                words = (found[1] or found[2]).split()
                if found[1] or words[0] in below(make_parser()):
                    yield words
        if found := re.match(r"(?:sudo |\w+=\w+ )*(?:\./)?lambdascale ([^=#;][^#;]*)", line):
            yield found[1].split()


@every_document
def test_named_commands_exist(path: Path) -> None:
    for words in commands(path):
        parser, rest = make_parser(), words
        while (actions := below(parser)) and rest and rest[0].islower() and rest[0][0] != "-":
            assert rest[0] in actions, words
            parser, rest = actions[rest[0]], rest[1:]
        if not parser.prog.endswith(" test"):  # which hands what it does not know to pytest
            known = set(re.findall(r"--[a-z-]+", parser.format_help()))
            assert {word.split("=")[0] for word in rest if word.startswith("--")} <= known, words


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a command, by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(action.choices)
    return found


@every_document
def test_named_modules_exist(path: Path) -> None:
    for module in re.findall(r"python3? -m ([a-z_.]+\w)", path.read_text()):
        if module.split(".")[0] in PACKAGES:
            name = module.replace(".", "/")
            assert exists(f"{name}.py") or exists(f"{name}/__main__.py"), module
