"""The table of foreign suites: its commands can be filled in, and name files that are there."""

import shlex
from pathlib import Path

import pytest

import benchmarks.clients
from benchmarks.clients.suites import SUITES

HERE = Path(benchmarks.clients.__file__).parent
DOCS = HERE.parents[1] / "docs/clients.md"


@pytest.mark.parametrize("name", SUITES)
def test_commands_name_what_is_there(name: str) -> None:
    suite = SUITES[name]
    command = suite.command.format(
        bin="/bin", url="http://x", model="m", checkpoint="/c", here=HERE, out="/o"
    )
    for word in shlex.split(command.replace("'", " ")):
        if word.startswith(str(HERE)):
            assert Path(word).exists()
    assert not suite.lessons or (HERE / suite.lessons).is_file()


@pytest.mark.parametrize("name", SUITES)
def test_results_are_told(name: str) -> None:
    assert f"`{name}`" in DOCS.read_text()
