"""The engine threads over the real engine: paths of stages against transformers."""

import asyncio

import pytest

from services.node.engine.base import Engine
from services.node.engine.engine import TorchEngine
from tests.support.worker_cluster import THREE, TWO, WHOLE, Attempt, cluster, submit
from tests.unit.node.engine.models import Model, make_model

PROMPTS = tuple(tuple(range(7 * i, 7 * i + 2 + 5 * i)) for i in range(4))


def torch_engine(kv_tokens: int) -> Engine:
    return TorchEngine("cpu", kv_tokens, threads=1)


async def generate(model: Model, temperature: float) -> list[list[int]]:
    """The tokens of each prompt on paths of one, two and three stages, all running at once."""
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
        for number, path in enumerate((WHOLE, TWO, THREE)):
            for i, prompt in enumerate(PROMPTS):
                name = f"r{number}-{i}"
                message = submit(
                    name, path, prompt=prompt, max_tokens=12, seed=i, temperature=temperature
                )
                attempts.append(await nodes.submit(message))
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
        return [attempt.ids for attempt in attempts]


async def test_greedy_tokens_are_those_of_transformers() -> None:
    model = make_model(dtype="float32")
    wanted = [model.expected_tokens(list(prompt), 12) for prompt in PROMPTS]
    assert await generate(model, 0.0) == wanted * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_drawn_tokens_are_the_same_on_every_path(dtype: str) -> None:
    tokens = await generate(make_model(dtype=dtype), 0.8)
    one, two, three = tokens[:4], tokens[4:8], tokens[8:]
    assert one == two == three
    assert len({tuple(ids) for ids in one}) == len(one)
