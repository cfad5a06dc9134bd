"""`lambdascale logs` on the directory of a cluster."""

from pathlib import Path

import msgspec
import pytest

from services.cli import logs
from services.cli.main import main
from services.local.processes import STATE_FILE, ClusterState, ProcessRecord, log_of


@pytest.fixture
def data(tmp_path: Path) -> Path:
    names = ("planner", "node-0")
    records = tuple(ProcessRecord(name, name, 1, "") for name in names)
    state = ClusterState(processes=records)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    for name in names:
        log_of(tmp_path, name).parent.mkdir(exist_ok=True)
        log_of(tmp_path, name).write_text("".join(f"{name} line {n}\n" for n in range(30)))
    return tmp_path


def test_the_last_lines_of_each(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--data", str(data), "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "planner | planner line 28",
        "planner | planner line 29",
        "node-0  | node-0 line 28",
        "node-0  | node-0 line 29",
    ]


def test_lines_with_an_id_of_one_process(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "node-0", "--data", str(data), "--grep", "line 7"]) == 0
    assert capsys.readouterr().out == "node-0 | node-0 line 7\n"


def test_a_process_that_is_not_there(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "gateway", "--data", str(data)]) == 1
    assert "no log of gateway" in capsys.readouterr().err


def test_what_comes_is_followed_line_by_line_and_over_a_new_beginning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"old\n")
    assert logs._new(log, 4) == ([], 4)
    with log.open("ab") as file:
        file.write(b"new\nhalf")
    assert logs._new(log, 4) == (["new"], 8)
    with log.open("ab") as file:
        file.write(b" a line\n")
    assert logs._new(log, 8) == (["half a line"], 20)
    log.write_bytes(b"anew\n")
    assert logs._new(log, 20) == (["anew"], 5)
