"""Logs do not grow for ever."""

from pathlib import Path

import pytest

from services.local.rotation import put_aside


def test_a_process_goes_on_in_the_same_file(tmp_path: Path) -> None:
    log, aside = tmp_path / "log", tmp_path / "log.1"
    with log.open("ab", buffering=0) as process:
        process.write(b"first\n")
        assert not put_aside(log, largest=6)
        process.write(b"second\n")
        assert put_aside(log, largest=6)
        process.write(b"third\n")
        assert (aside.read_bytes(), log.read_bytes()) == (b"first\nsecond\n", b"third\n")
        process.write(b"fourth\n")
        assert put_aside(log, largest=6)
    assert (aside.read_bytes(), log.read_bytes()) == (b"third\nfourth\n", b"")


def test_without_room_nothing_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"text\n")
    (tmp_path / "log.1").mkdir()
    with pytest.raises(OSError, match="directory"):
        put_aside(log, largest=0)
    assert log.read_bytes() == b"text\n"


def test_a_log_that_is_not_there_yet(tmp_path: Path) -> None:
    assert not put_aside(tmp_path / "log", largest=0)
