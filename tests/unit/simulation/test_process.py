"""The process that runs one system: what it reads, writes and says."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from shared.errors import ConfigError
from simulation import process
from simulation.results import SystemRun
from simulation.setting import Setting
from tests.unit.simulation.runs import made_up, setting


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    asked, result = tmp_path / "setting", tmp_path / "result"
    asked.write_bytes(msgspec.msgpack.encode(setting()))
    return asked, result


def test_setting_in_result_out(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_system(system: str, given: Setting, progress: Callable[[float], None]) -> SystemRun:
        assert given == setting()
        progress(1.5)
        structlog.get_logger().info("the services' logs")
        monkeypatch.setattr(process, "TELL_EVERY_S", 1000.0)
        progress(2.5)
        return made_up(system)

    monkeypatch.setattr(process, "run_system", run_system)
    monkeypatch.setattr(process, "TELL_EVERY_S", 0.0)
    assert process.main("ideal", *files) == 0
    assert msgspec.msgpack.decode(files[1].read_bytes(), type=SystemRun) == made_up("ideal")
    assert capsys.readouterr().out == "1.5\n"


def test_what_cannot_be_run(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_system(system: str, given: Setting, progress: object) -> SystemRun:
        raise ConfigError(f"{system} needs more nodes")

    monkeypatch.setattr(process, "run_system", run_system)
    assert process.main("nccl", *files) == 2
    assert capsys.readouterr().err == "nccl needs more nodes\n"
    assert not files[1].exists()
