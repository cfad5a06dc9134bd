"""The engine threads over the real engine: paths of stages against transformers."""

import asyncio

import pytest

from services.node.engine.base import Engine
from services.node.engine.engine import TorchEngine
from shared.messages.instances import Stage
from tests.support.worker_cluster import (
    BLOCKS,
    THREE,
    TWO,
    WHOLE,
    Attempt,
    cluster,
    stages,
    submit,
)
from tests.unit.node.engine.models import Model, make_model

PATHS = (WHOLE, TWO, THREE)
LOADING = (
    WHOLE,
    stages(("b", 0, 1), ("a", 1, BLOCKS)),
    stages(("c", 0, 3), ("a", 3, BLOCKS)),
    stages(("b", 0, 2), ("a", 2, 4), ("c", 4, BLOCKS)),
)
"""Node a is a stage of each, with other blocks every time."""
PROMPTS = tuple(tuple(range(7 * i, 7 * i + 2 + 5 * i)) for i in range(4))


def torch_engine(kv_tokens: int) -> Engine:
    return TorchEngine("cpu", kv_tokens, threads=1)


async def generate(
    model: Model, temperature: float, paths: tuple[tuple[Stage, ...], ...] = PATHS
) -> list[list[int]]:
    """The tokens of each prompt on each path, all running at once."""
    async with cluster(
        "a",
        "b",
        "c",
        slots=12,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        attempts: list[Attempt] = []
        for number, path in enumerate(paths):
            for i, prompt in enumerate(PROMPTS):
                name = f"r{number}-{i}"
                message = submit(
                    name, path, prompt=prompt, max_tokens=12, seed=i, temperature=temperature
                )
                attempts.append(await nodes.submit(message))
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
        return [attempt.ids for attempt in attempts]


@pytest.mark.parametrize("paths", [PATHS, LOADING], ids=["stages", "loading"])
async def test_greedy_tokens_are_those_of_transformers(
    paths: tuple[tuple[Stage, ...], ...],
) -> None:
    model = make_model(dtype="float32")
    wanted = [model.expected_tokens(list(prompt), 12) for prompt in PROMPTS]
    assert await generate(model, 0.0, paths) == wanted * len(paths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_drawn_tokens_are_the_same_on_every_path(dtype: str) -> None:
    tokens = await generate(make_model(dtype=dtype), 0.8)
    one, two, three = tokens[:4], tokens[4:8], tokens[8:]
    assert one == two == three
    assert len({tuple(ids) for ids in one}) == len(one)


async def test_preempted_requests_get_the_tokens_of_transformers() -> None:
    """KV for one and a half of the four: they all end, and say what they would alone."""
    model = make_model(dtype="float32")
    prompts = [tuple(range(i, i + 14)) for i in range(4)]
    async with cluster(
        "a",
        kv_capacity={"a": 80},
        step_tokens=64,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        attempts = [
            await nodes.submit(submit(f"r{i}", WHOLE, prompt=prompt, max_tokens=40))
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        for attempt, prompt in zip(attempts, prompts, strict=True):
            assert attempt.failed is None
            assert attempt.ids == model.expected_tokens(list(prompt), 40)
        assert nodes.workers["a"].load().kv_used == 0


async def test_a_shared_prefix_gives_the_tokens_of_transformers() -> None:
    model = make_model(dtype="float32")
    shared = tuple(range(70))
    async with cluster(
        "a",
        step_tokens=64,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        for i in range(3):
            prompt = (*shared, i, 2 * i)
            attempt = await nodes.submit(submit(f"r{i}", WHOLE, prompt=prompt, max_tokens=20))
            assert (await attempt.end()).ids == model.expected_tokens(list(prompt), 20)
