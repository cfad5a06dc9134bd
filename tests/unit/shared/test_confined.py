"""Foreign code runs in processes that may die of it, and takes no more than its share."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from shared import grammar
from shared.confined import pool as module
from shared.confined.jobs import Check, Compile, Done, Job, Outcome, Refused, Render, Template
from shared.confined.pool import ConfinedPool, run_once
from shared.errors import CapacityExceeded, LambdaScaleError

MOST = 100
LONG = 5000
ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
GROWS = "{{ messages[0].content * 1000000000000 }}"
"""At once: to fill memory takes time, too, and more of it on a busy machine than a job may take."""
LIMIT_S = 60.0


def render(source: str, content: str = "hi", most: int = MOST) -> Render:
    message = {"role": "user", "content": content}
    return Render(Template(source, {"bos_token": "<s>"}), (message,), True, {"a": 1}, most)


SAYS = render("{{ bos_token }}{{ messages[0].content }}{{ a }}{{ add_generation_prompt }}")


@pytest.fixture
async def pool() -> AsyncIterator[ConfinedPool]:
    found = ConfinedPool()
    yield found
    await found.close()
    assert not found._idle


async def run(pool: ConfinedPool, job: Job, key: str = "a", most_waiting: int = 100) -> Outcome:
    async with asyncio.timeout(LIMIT_S):
        return await pool.run(job, key=key, most_waiting=most_waiting)


async def test_a_template_gets_all_that_it_is_given(pool: ConfinedPool) -> None:
    assert await run(pool, SAYS) == Done("<s>hi1True")


@pytest.mark.parametrize(
    ("job", "why", "by_template"),
    [
        (render("{% for %}"), "chat template cannot be read", True),
        (Compile(Template("{% for %}", {})), "chat template cannot be read", True),
        (Compile(Template("(" * 5000 + "{{ " + "(" * 5000, {})), "cannot be read", True),
        (render("{{ raise_exception('no') }}"), "refuses the messages: no", False),
        (render(ENDLESS), "takes too long", False),
        (render(GROWS), "takes too much memory", False),
        (render("{{ messages[0].content }}", "x" * 101), "a prompt of 101 characters", False),
        (Check(grammar.from_regex("a(b")), "invalid regex", False),
    ],
)
async def test_what_is_refused(pool: ConfinedPool, job: Job, why: str, by_template: bool) -> None:
    outcome = await run(pool, job)
    assert isinstance(outcome, Refused)
    assert why in outcome.why
    assert outcome.by_template == by_template
    assert await run(pool, SAYS) == Done("<s>hi1True")


def test_a_template_is_compiled_once_at_import_too() -> None:
    assert run_once(Compile(Template("fine", {}))) == Done("")
    outcome = run_once(Compile(Template("{% for %}", {})))
    assert isinstance(outcome, Refused)


def test_a_template_that_takes_long_to_read_can_be_imported() -> None:
    """Longer than a prompt may take, as any template does on a slow processor."""
    assert run_once(Compile(Template("{% if a %}{{ b }}{% endif %}" * LONG, {}))) == Done("")


async def test_who_takes_too_much_does_not_hold_others_up(pool: ConfinedPool) -> None:
    """A process is left for others, however many of one key's jobs wait."""
    slow = [asyncio.ensure_future(run(pool, render(ENDLESS), "slow")) for _ in range(6)]
    assert await run(pool, SAYS, "quick") == Done("<s>hi1True")
    assert not any(task.done() for task in slow[module.PER_KEY :])
    for outcome in await asyncio.gather(*slow):
        assert isinstance(outcome, Refused)


async def test_keys_take_turns(pool: ConfinedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROCESSES", 1)
    served: list[str] = []

    async def ask(key: str) -> None:
        await run(pool, SAYS, key)
        served.append(key)

    await asyncio.gather(*(ask(key) for key in "aaaabb"))
    assert served == ["a", "a", "b", "a", "b", "a"]


async def test_no_more_wait_than_may(pool: ConfinedPool) -> None:
    ends = await asyncio.gather(
        *(run(pool, SAYS, most_waiting=1) for _ in range(4)), return_exceptions=True
    )
    assert [type(end) for end in ends] == [Done, Done, Done, CapacityExceeded]


async def test_who_leaves_takes_no_answer_along(pool: ConfinedPool) -> None:
    """Nor leaves an answer behind that would be taken for the next."""
    leaving = [asyncio.ensure_future(run(pool, render("other"))) for _ in range(4)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    assert await run(pool, SAYS) == Done("<s>hi1True")


async def test_a_process_that_was_killed_is_replaced(pool: ConfinedPool) -> None:
    await run(pool, SAYS)
    (process,) = pool._idle
    running = asyncio.ensure_future(run(pool, render(ENDLESS)))
    await asyncio.sleep(0)
    process.child.kill()
    with pytest.raises(LambdaScaleError, match="try again"):
        await running
    assert await run(pool, SAYS) == Done("<s>hi1True")
    (process,) = pool._idle
    process.child.kill()
    process.child.wait()
    assert await run(pool, SAYS) == Done("<s>hi1True")


async def test_processes_end_with_their_pool() -> None:
    pool = ConfinedPool()
    await run(pool, SAYS)
    (process,) = pool._idle
    running = asyncio.ensure_future(run(pool, render(ENDLESS)))
    await asyncio.sleep(0)
    await pool.close()
    assert process.child.returncode is not None
    with pytest.raises(asyncio.CancelledError):
        await running


def test_a_process_imports_little() -> None:
    """Because it is started often."""
    program = "import sys, shared.confined.process; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"asyncio", "aiohttp", "structlog"} & set(found.stdout.split())
