"""Grammars are checked in a process that may die of them, and once each."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway import grammars
from services.gateway.grammars import GrammarChecker
from shared import grammar
from shared.confined.pool import ConfinedPool
from shared.errors import BadInput, CapacityExceeded


def chain(links: int) -> str:
    """Each rule is the next."""
    rules = [f"x{i}: x{i + 1}" for i in range(links)]
    return grammar.from_lark("\n".join(["start: x0", *rules, f'x{links}: "a"']))


SOUND = grammar.from_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
OVERFLOWS = chain(8000)
"""Any stack."""
ENDLESS = grammar.from_lark(
    "start: X\nX: "
    + " & ".join(
        f"/(.*{c}.{{{20 + i}}}{d}.*)/"
        for i, (c, d) in enumerate(zip("abcdefghijk", "bcdefghijkl", strict=True))
    )
)
"""Takes minutes."""


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    pool = ConfinedPool()
    yield GrammarChecker(pool)
    await pool.close()


async def test_what_can_be_followed(checker: GrammarChecker) -> None:
    for sound in (SOUND, chain(500), grammar.from_choice([f"text {i}" for i in range(4000)])):
        await checker.check(sound)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (grammar.from_regex("a(b"), "invalid regex"),
        (grammar.from_schema({"type": "objec"}), "Invalid type"),
        (grammar.from_lark("start: nothing"), "nothing"),
        ("no grammar", "no grammar"),
        ("x" * (grammar.MAX_CHARS + 1), "characters"),
        (OVERFLOWS, "chains of rules"),
        (ENDLESS, "takes too long"),
    ],
)
async def test_what_cannot(checker: GrammarChecker, wrong: str, said: str) -> None:
    for _ in range(2):
        with pytest.raises(BadInput, match=said):
            await checker.check(wrong)
    await checker.check(SOUND)


async def test_a_grammar_is_checked_once(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = checker._ask

    async def watched(text: str) -> str | None:
        asked.append(text)
        return await ask(text)

    monkeypatch.setattr(checker, "_ask", watched)
    wrong = grammar.from_lark("start: nothing")
    ends = await asyncio.gather(
        *(checker.check(text) for text in [SOUND, wrong] * 5), return_exceptions=True
    )
    assert [type(end) for end in ends] == [type(None), BadInput] * 5
    assert asked == [SOUND, wrong]


async def test_the_oldest_is_forgotten(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KNOWN", 2)
    for text in ("a", "b", "c"):
        await checker.check(grammar.from_regex(text))
    assert len(checker._known) == 2
    await checker.check(grammar.from_regex("a"))


async def test_no_more_wait_than_may(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 1)
    texts = [grammar.from_regex(text) for text in "abcd"]  # two are checked, and one waits
    ends = await asyncio.gather(*map(checker.check, texts), return_exceptions=True)
    assert [type(end) for end in ends] == [type(None)] * 3 + [CapacityExceeded]
    await checker.check(texts[3])
