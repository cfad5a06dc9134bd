"""The Dockerfile: lint, what it copies, and what it runs."""

import json
import re
import subprocess

from services.cli.main import make_parser
from shared.config import load
from tests.unit.deploy.support import MODULE, ROOT, settings, tool

DOCKERFILE = (ROOT / "Dockerfile").read_text()
LINES = DOCKERFILE.replace("\\\n", " ").splitlines()


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(f"{name} ")]


def test_hadolint_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_what_is_copied_into_the_build_exists_and_is_let_through() -> None:
    sources = [line.split()[0] for line in instructions("COPY") if "--from" not in line]
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert set(sources) == let_through
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_entry_point_is_the_operators_command() -> None:
    (entry,) = (json.loads(text) for text in instructions("ENTRYPOINT"))
    assert entry == ["python", *MODULE]
    assert make_parser().parse_args(["node"]).role == "node"


def test_the_final_stage_is_not_root_and_its_settings_are_known() -> None:
    assert instructions("USER") == ["10001:10001"]
    variables = dict(
        pair.split("=", 1) for line in instructions("ENV") for pair in re.findall(r"\S+=\S+", line)
    )
    config = load(None, settings(variables))
    assert config.node.data_dir == "/var/lib/lambdascale"


def test_stages_share_one_pinned_base() -> None:
    bases = {line.split()[0] for line in instructions("FROM")}
    assert bases == {"python:3.11-slim-bookworm"}
