"""A model that fits no node, with real processes: groups of nodes serve it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from shared.messages.instances import Instance, Stage
from shared.messages.scaling import EventState
from tests.support.cluster import Answer, Oracle, Running, prompts, running
from tests.support.models import TINY

LAYERS, BLOCKS, SHORT, LONG = 14, 16, 8, 60
HALF, QUARTER = 1_200_000, 620_000  # bytes of an arena; the model has 1.9 MB
SETTINGS = {
    "LAMBDASCALE_NODE_SPECULATION": "0",
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "400000",  # a part takes 2.4 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "large"
    make_checkpoint(path, replace(TINY, layers=LAYERS))
    return path


def settings(arena_bytes: int) -> dict[str, str]:
    return SETTINGS | {"LAMBDASCALE_NODE_ARENA_BYTES": str(arena_bytes)}


def parts(group: Instance) -> list[tuple[int, int]]:
    return [(stage.start, stage.stop) for stage in group.stages]


async def test_four_nodes_serve_what_fits_on_no_three(tmp_path: Path, large: Path) -> None:
    asked = prompts(4, TINY.vocab_size)
    async with running(tmp_path, large, nodes=4, blocks=BLOCKS, settings=settings(QUARTER)) as up:
        (group,) = up.watch.replicas
        assert parts(group) == [(0, 4), (4, 8), (8, 12), (12, 16)]
        got = await up.ask_all(asked, SHORT)
        check(got, Oracle(large).tokens(asked, SHORT))


async def test_one_group_becomes_two_and_outlives_its_nodes(tmp_path: Path, large: Path) -> None:
    asked = prompts(4, TINY.vocab_size)
    expected = Oracle(large).tokens(asked, LONG)
    async with running(tmp_path, large, nodes=5, blocks=BLOCKS, settings=settings(HALF)) as up:
        (first,) = up.watch.replicas
        assert parts(first) == [(0, 8), (8, 16)]

        answers = asyncio.create_task(up.ask_all(asked, LONG))
        event = (await up.scale(2)).event
        assert event is not None
        check(await answers, expected)
        await up.replicas(2)
        await up.until(lambda: up.watch.records[event].state is EventState.COMPLETE, "the end")
        assert up.watch.records[event].bytes_moved == up.record.nbytes, "each part came once"
        check_groups(up)

        streams = [Answer() for _ in asked]
        answers = asyncio.create_task(ask_into(up, asked, streams))
        await up.until(lambda: all(stream.tokens for stream in streams), "the first tokens")
        victim = first.stages[1].node
        up.kill(victim)
        check(await answers, expected)
        await up.until(lambda: all(victim != s.node for s in stages(up)), "its group's end")
        await up.replicas(2)
        check_groups(up)


async def ask_into(up: Running, asked: list[list[int]], into: list[Answer]) -> list[Answer]:
    tasks = (up.ask(p, LONG, into=a) for p, a in zip(asked, into, strict=True))
    return list(await asyncio.gather(*tasks))


def stages(up: Running) -> list[Stage]:
    return [stage for instance in up.watch.instances for stage in instance.stages]


def check_groups(up: Running) -> None:
    groups = up.watch.replicas
    assert [parts(group) for group in groups] == [[(0, 8), (8, 16)]] * 2
    assert len({stage.node for group in groups for stage in group.stages}) == 4


def check(got: list[Answer], expected: list[list[int]]) -> None:
    assert {answer.error for answer in got} == {""}
    assert [answer.tokens for answer in got] == expected
