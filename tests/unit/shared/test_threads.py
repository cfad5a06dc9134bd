import asyncio
import threading

import pytest

from shared.threads import to_its_end


async def test_it_ends_when_the_thread_has_however_often_it_is_cancelled() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done = False

    def work() -> None:
        nonlocal done
        begun.set()
        assert go_on.wait(10)
        done = True

    waiting = asyncio.ensure_future(to_its_end(work))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done


async def test_its_error_is_the_threads() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await to_its_end(fail)
