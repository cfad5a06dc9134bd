"""What is imported stays out of the garbage collector's way, and the collector works on."""

import gc

import pytest

from shared.lasting import lasting


def test_what_is_made_meanwhile_is_never_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with lasting():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]  # type: list[list[int]]
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), lasting():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
