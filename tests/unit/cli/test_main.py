"""The command line as a whole: help, exit codes, and one clear line for every failure."""

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import structlog

from services.cli import run_service, self_test
from services.cli.main import main, make_parser
from shared.errors import ConfigError, NotFound

COMMANDS = [
    ["demo"],
    ["up"],
    ["down"],
    ["status"],
    ["model", "add"],
    ["model", "set"],
    ["model", "ls"],
    ["model", "rm"],
    ["model", "demo"],
    ["scale"],
    ["simulate"],
    ["events"],
    ["trace"],
    ["plan"],
    ["key"],
    ["key", "static"],
    ["test"],
    ["gateway"],
    ["planner"],
    ["registry"],
    ["node"],
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: lambdascale {' '.join(command)}" in capsys.readouterr().out


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n    {command[0]} " in out
    assert "Exit codes: 0 done, 1 failed, 2 wrong" in out


def test_the_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.count(".") == 2


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["status", "surplus"],
        ["status", "--frobnicate"],
        ["up", "--nodes", "many"],
        ["model"],
        ["model", "add"],
        ["scale", "m"],
        ["scale", "m", "--instances", "-1"],
        ["trace"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error:" in captured.err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["up", "--nodes", "0"], "--nodes 0"),
        (["up", "--port", "70000"], "--port 70000"),
        (["up", "--name", "n"], "--model PATH, which is missing"),
        (["up", "--model", "nowhere"], "not a checkpoint directory"),
        (["up", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["demo", "--requests", "0"], "--requests 0"),
        (["events", "--limit", "0"], "--limit 0"),
        (["model", "add", "x", "--blocks", "-1"], "must not be negative"),
        (["model", "add", "x", "--min-instances", "3", "--max-instances", "2"], "is less than"),
        (["node", "--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_used_exits_with_2_before_anything_starts(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lambdascale: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["status"], ["status", "--json"], ["model", "ls"], ["events"], ["trace", "last"],
     ["scale", "m", "--instances", "1"], ["model", "rm", "m"], ["model", "list"],
     ["model", "remove", "m"]],
    ids=" ".join,
)  # fmt: skip
def test_no_cluster_is_one_clear_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no cluster runs in lambdascale-data" in captured.err
    assert captured.err.count("\n") == 1


def test_down_without_a_cluster_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 0
    assert "nothing was running" in capsys.readouterr().err
    assert main(["down", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ended": 0}
    Path("file").touch()
    assert main(["down", "--data", "file"]) == 0


def test_a_small_model_is_made_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["model", "demo", "small"]) == 0
    assert (tmp_path / "small" / "model.safetensors").is_file()
    assert f"lambdascale model add {tmp_path / 'small'}" in capsys.readouterr().err
    assert main(["model", "demo", "small"]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_key_and_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "static", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["key"].startswith("sk-")
    assert len(document["sha256"]) == 64
    assert main(["key", "static"]) == 0
    assert "sha256: " in capsys.readouterr().out


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(nbytes: int) -> str:
        raise error

    monkeypatch.setattr(secrets, "token_urlsafe", fail)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NotFound("no such thing"), 1, "no such thing"),
        (ConfigError("bad key"), 2, "bad key"),
        (ExceptionGroup("g", [ExceptionGroup("h", [NotFound("deep")])]), 1, "deep"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied"),
    ],
)
def test_an_expected_error_is_one_line(
    error: Exception,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_with(monkeypatch, error)
    assert main(["key", "static"]) == code
    assert capsys.readouterr().err == f"lambdascale: {line}\n"


def test_an_unexpected_error_is_one_line_that_names_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fail_with(monkeypatch, ZeroDivisionError("of all things"))
    assert main(["key", "static"]) == 1
    err = capsys.readouterr().err
    (log,) = tmp_path.iterdir()
    assert err == (
        f"lambdascale: unexpected ZeroDivisionError: of all things; the traceback is in {log}\n"
    )
    assert "Traceback" in log.read_text()


def test_an_unexpected_error_of_a_service_is_in_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(run_service, "load", fail)
    assert main(["planner"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].endswith("of all things; the traceback is above")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interruption_is_quiet(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, error)
    assert main(["key", "static"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = ["plan", "--nodes", "32", "--blocks", "32", "--json"]
    process = subprocess.run(
        [sys.executable, "-m", "services.cli", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=self_test.ROOT,
        check=False,
    )
    os.close(writing)
    assert process.returncode == 1
    assert process.stderr == b""


@pytest.mark.parametrize(
    ("wish", "error"),
    [
        ((), "nothing to change: name one of --min-instances, --max-instances"),
        (("--ttft-ms", "fast"), "'fast' is neither milliseconds above 0 nor 'none'"),
        (("--ttft-ms", "0"), "'0' is neither milliseconds above 0 nor 'none'"),
        (("--schedule", "mon-fri 8-18 min=2"), "'8-18' are no times: HH:MM-HH:MM, as in 'mon-fri"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_before_anybody_is_asked(
    wish: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["model", "set", "llama", *wish])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code != 0
    assert error in " ".join(capsys.readouterr().err.split())


def test_a_service_imports_nothing_of_other_commands() -> None:
    """A cluster starts many processes, and each spends a processor on what it imports."""
    code = (
        "import sys\n"
        "from services.cli.main import main\n"
        "assert main(['planner', '--config', 'nowhere.toml']) == 2\n"
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(ran.stdout.split())
    assert "shared.telemetry" in imported
    assert imported.isdisjoint(
        {"opentelemetry.exporter", "services.cli.bench", "services.cli.simulate", "simulation"}
    )
    assert imported.isdisjoint({"numpy", "torch"})


def test_every_command_is_the_same_with_and_without_the_others() -> None:
    for command, parser in commands().items():
        assert commands([command, "--help"])[command].format_help() == parser.format_help()


def test_a_command_imports_nothing_of_others() -> None:
    script = "import sys, services.cli.main as m; m.make_parser(['status']); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    imported = set(run.stdout.split())
    assert "services.cli.status" in imported
    assert not imported & {"services.cli.bench", "services.cli.simulate", "services.cli.plan"}


def commands(argv: Sequence[str] = ()) -> Mapping[str, argparse.ArgumentParser]:
    (group,) = (a for a in make_parser(argv)._actions if isinstance(a, argparse._SubParsersAction))
    return group.choices
