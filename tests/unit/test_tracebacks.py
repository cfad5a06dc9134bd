import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.support import tracebacks


def no_lines() -> None:
    raise ValueError("here")


no_lines.__code__ = no_lines.__code__.replace(co_linetable=b"")


def raise_several() -> None:
    try:
        no_lines()
    except ValueError as error:
        raise ExceptionGroup("several", [error]) from error


def test_an_entry_without_a_line_gets_its_functions_first() -> None:
    with pytest.raises(ValueError, match="here") as caught:
        no_lines()
    error = caught.value
    assert lines(error)[-1] is None
    tracebacks.give_lines(error)
    assert lines(error)[-1] == no_lines.__code__.co_firstlineno
    assert lines(error)[0] == lines(caught.value)[0]


def test_causes_and_members_of_groups_get_theirs_too() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        raise_several()
    tracebacks.give_lines(caught.value)
    for error in (caught.value.exceptions[0], caught.value.__cause__):
        assert error is not None
        assert None not in lines(error)


def test_a_test_that_fails_where_no_line_is_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_makereport\n")
    (tmp_path / "test_it.py").write_text(
        "from tests.unit.test_tracebacks import no_lines\n"
        "def test_fails(): no_lines()\n"
        "def test_passes(): pass\n"
    )
    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    pytest_here = [sys.executable, "-m", "pytest", *arguments, str(tmp_path)]
    done = subprocess.run(pytest_here, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr


def lines(error: BaseException) -> list[int | None]:
    return [line for _, line in traceback.walk_tb(error.__traceback__)]
