"""A running sequence moves to another node with its KV: real engines and data planes."""

from pathlib import Path
from typing import Any

import pytest

from services.node.core.handover import COPIED_BYTES_PER_S
from services.node.core.kv import PAGE, movable
from shared.messages.serving import Token
from tests.unit.node.cluster import ALL, Nodes, nodes
from tests.unit.node.service.builders import SLOW

MOVING = SLOW | {"kv_moves": "always"}
PROMPT = tuple(range(3, 3 + 2 * PAGE))
COUNT = 24


async def has_all(up: Nodes, *names: str) -> None:
    """The first node has the model, and the others have it from there."""
    await up.promoted(names[0])
    for name in names[1:]:
        await up.apply(name, dict.fromkeys(ALL, names[0]), event=f"ev-{name}")
        await up.until_arrived(name, ALL)


def of(up: Nodes, attempt: int) -> list[Token]:
    return [token for token in up.tokens_of("r") if token.attempt == attempt]


async def run(up: Nodes, request: str, *names: str, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    await up.submit(
        *names, request=request, tokens=prompt, prompt_tokens=len(prompt), max_tokens=COUNT
    )
    await up.tokens.until(lambda: up.over(request))
    return [token.token for token in up.tokens_of(request)]


async def move(
    up: Nodes, source: tuple[str, ...], target: str, prompt: tuple[int, ...] = PROMPT
) -> list[Token]:
    """A request runs over `source`, and moves after a few tokens. Returns all its tokens."""
    await up.submit(*source, tokens=prompt, prompt_tokens=len(prompt), max_tokens=COUNT)
    await up.tokens.until(lambda: len(of(up, 1)) >= 3)
    known = [token.token for token in of(up, 1)]
    await up.submit(
        target,
        attempt=2,
        takes_over=1,
        kv_from=up.stages(*source),
        tokens=(*prompt, *known),
        prompt_tokens=len(prompt),
        max_tokens=COUNT,
    )
    await up.tokens.until(lambda: bool(of(up, 2)) and bool(of(up, 2)[-1].finish))
    return up.tokens_of("r")


@pytest.mark.parametrize(
    ("source", "target"),
    [(("a",), "b"), (("a", "b"), "c"), (("b", "a"), "b"), (("a", "b", "c"), "b")],
    ids=["alone", "path", "own-stage", "three-stages"],
)
async def test_a_sequence_goes_on_elsewhere_with_its_kv(
    tmp_path: Path, checkpoint: Path, source: tuple[str, ...], target: str
) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", "c", settings=MOVING) as up:
        await has_all(up, "a", "b", "c")
        expected = await run(up, "oracle", "c")
        tokens = await move(up, source, target)
        found = {token.index: token.token for token in tokens}
        assert [found[index] for index in range(COUNT)] == expected
        new = of(up, 2)
        fresh = [token for token in new if token.cached]
        (cached,) = (token.cached for token in fresh)
        assert cached >= 2 * PAGE, "the KV was computed again"
        last = max(token.index for token in of(up, 1))
        assert last < COUNT - 1, "the attempt before went on to the end"
        assert fresh[0].index == last + 1
        assert up.failure("r") is None
        assert up.services[target]._worker.load().received_tokens == cached


@pytest.mark.parametrize("source", [("a",), ("a", "c")], ids=["alone", "path"])
async def test_kv_that_is_made_during_a_move_follows(
    tmp_path: Path, checkpoint: Path, source: tuple[str, ...]
) -> None:
    prompt = (*PROMPT, *PROMPT[: PAGE // 2])
    async with nodes(tmp_path, checkpoint, "a", "b", "c", settings=MOVING) as up:
        await has_all(up, "a", "b", "c")
        expected = await run(up, "oracle", "c", prompt=prompt)
        tokens = await move(up, source, "b", prompt=prompt)
        found = {token.index: token.token for token in tokens}
        assert [found[index] for index in range(COUNT)] == expected
        (fresh,) = (token for token in of(up, 2) if token.cached)
        assert fresh.cached >= len(prompt)
        sent = sum(up.services[name]._worker.load().kv_sent_bytes for name in source)
        assert up.services["b"]._worker.load().kv_received_bytes == sent


@pytest.mark.parametrize(("kv_moves", "rate"), [("auto", 1e8), ("auto", 1e6), ("never", 1e8)])
async def test_a_node_says_how_long_kv_takes_to_come(
    tmp_path: Path, checkpoint: Path, kv_moves: str, rate: float
) -> None:
    settings = MOVING | {"kv_moves": kv_moves, "link_bytes_per_s": int(rate)}
    async with nodes(tmp_path, checkpoint, "a", settings=settings) as up:
        await up.promoted("a")
        await run(up, "r", "a")
        (model,) = up.services["a"]._worker.load().kv_position_bytes.items()

        def told() -> list[float]:
            status = up.status("a")
            models = status.profile.models if status else ()
            return [each.kv_s_per_token for each in models if each.model_id == model[0]]

        await up.statuses.until(lambda: bool(told()))
        copied_s = model[1] * (2 / COPIED_BYTES_PER_S + 1 / rate)
        assert told() == [pytest.approx(copied_s if kv_moves == "auto" else 0.0, rel=0.06)]


async def test_kv_comes_while_the_prompt_still_runs(tmp_path: Path, checkpoint: Path) -> None:
    """The request is submitted to the other node before it has its first token."""
    prompt = tuple(3 + n % 50 for n in range(8 * PAGE))
    some: dict[str, Any] = {"tokens": prompt, "prompt_tokens": len(prompt), "max_tokens": COUNT}
    settings = MOVING | {"step_tokens": 3 * PAGE}
    async with nodes(tmp_path, checkpoint, "a", "b", settings=settings) as up:
        await has_all(up, "a", "b")
        await up.submit("a", **some)
        await up.submit("b", attempt=2, takes_over=1, kv_from=up.stages("a"), **some)
        await up.tokens.until(lambda: bool(of(up, 2)) and bool(of(up, 2)[-1].finish))
        there = up.services["b"]._worker.load()
        assert there.received_tokens >= movable(len(prompt))
        assert there.kv_received_bytes == up.services["a"]._worker.load().kv_sent_bytes > 0
        # It goes on while the new leader follows it, for a few steps.
        assert len(of(up, 1)) < COUNT // 2, "the attempt before went on"
        found = {token.index: token.token for token in up.tokens_of("r")}
        await up.submit("a", request="oracle", **some)
        await up.tokens.until(lambda: up.over("oracle"))
        oracle = [token.token for token in up.tokens_of("oracle")]
        assert [found[index] for index in range(COUNT)] == oracle


async def test_without_the_old_node_the_kv_is_computed(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", settings=MOVING) as up:
        await has_all(up, "a", "b")
        expected = await run(up, "oracle", "b")
        await up.submit(
            "b",
            attempt=2,
            takes_over=1,
            kv_from=up.stages("a"),
            tokens=(*PROMPT, *expected[:3]),
            prompt_tokens=len(PROMPT),
            max_tokens=COUNT,
        )
        await up.tokens.until(lambda: up.over("r"))
        assert [token.token for token in up.tokens_of("r")] == expected[3:]


async def test_who_does_not_know_the_prompt_gets_no_kv(tmp_path: Path, checkpoint: Path) -> None:
    async with nodes(tmp_path, checkpoint, "a", "b", settings=MOVING) as up:
        await has_all(up, "a", "b")
        expected = await run(up, "oracle", "a")
        await up.submit("a", tokens=PROMPT, prompt_tokens=len(PROMPT), max_tokens=COUNT)
        await up.tokens.until(lambda: len(of(up, 1)) >= 3)
        other = (*PROMPT[:-1], PROMPT[-1] + 1)
        await up.submit(
            "b",
            attempt=2,
            takes_over=1,
            kv_from=up.stages("a"),
            tokens=(*other, *expected[:3]),
            prompt_tokens=len(PROMPT),
            max_tokens=COUNT,
        )
        await up.tokens.until(lambda: bool(of(up, 1)[-1].finish))
        assert [token.token for token in of(up, 1)] == expected, "it was ended by a stranger"
        assert all(token.cached == 0 for token in of(up, 2))
