"""What shells complete."""

import argparse
import shutil
import subprocess

import pytest

from services.cli.completion import words_of
from services.cli.main import main, make_parser

SHELLS = ("bash", "zsh", "fish")


def completed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What bash completes at the end of these words."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    typed = " ".join(f"'{word}'" for word in ("lambdascale", *words))
    script += f"\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _lambdascale\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


def test_commands_and_options_of_where_one_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"up", "status", "completion"} <= set(completed(capsys, ""))
    assert completed(capsys, "stat") == ["status"]
    assert "--json" in completed(capsys, "status", "--")
    assert {"add", "ls", "rm"} <= set(completed(capsys, "model", ""))
    assert "--node" in completed(capsys, "model", "add", "/some/path", "--no")
    assert completed(capsys, "completion", "f") == ["fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_takes(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "lambdascale" in script
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n", "-c", script], check=True)


def test_every_command_is_there() -> None:
    def commands(parser: argparse.ArgumentParser, path: str = "") -> list[str]:
        found = [path]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, each in action.choices.items():
                    found += commands(each, f"{path} {name}")
        return found

    assert [path for path, _ in words_of(make_parser())] == commands(make_parser())
