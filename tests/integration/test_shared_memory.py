"""More models than the nodes' memory holds, on real processes: all are served, each with its own
tokens."""

import asyncio
import dataclasses
from pathlib import Path

from services.local.cluster import node_id
from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from shared import subjects
from shared.ids import ModelName
from shared.messages.scaling import ImportModel
from shared.messages.story import StoryQuery, Told
from tests.support.cluster import Oracle, Running, prompts, running
from tests.support.models import TINY

MODELS, NODES = 8, 3
TOKENS = 16
TIGHT = {
    "LAMBDASCALE_NODE_ARENA_BYTES": "1400000",  # two models of 0.6 MB
    "LAMBDASCALE_NODE_KV_BYTES": str(4 << 20),
    "LAMBDASCALE_PLANNER_IDLE_S": "0.5",
}


async def publish(up: Running, directory: Path, number: int) -> tuple[ModelName, Oracle]:
    name, path = ModelName(f"model-{number}"), directory / f"model-{number}"
    make_checkpoint(path, dataclasses.replace(TINY, seed=100 + number))
    request = ImportModel(path=str(path), name=name, min_instances=0)
    node = node_id(number % NODES)
    await import_model(up.bus, request, node=node, say=lambda _: None)
    return name, Oracle(path)


async def gave_way(up: Running, model: str) -> bool:
    """Whether a copy of the model has made room for another."""
    query = StoryQuery(subject=model)
    told = await up.bus.request(subjects.PLANNER_STORY, query, Told, timeout=60.0)
    return any("makes room for" in step.text for step in told.steps)


async def test_many_models_share_the_memory_of_few_nodes(tmp_path: Path, checkpoint: Path) -> None:
    asked = prompts(3, TINY.vocab_size)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=NODES, settings=TIGHT, min_instances=0
    ) as up:
        models = [await publish(up, tmp_path, number) for number in range(MODELS)]
        wanted = {name: oracle.tokens(asked, TOKENS) for name, oracle in models}

        async def serve(name: ModelName) -> None:
            answers = await up.ask_all(asked, TOKENS, model=name)
            assert {answer.error for answer in answers} == {""}
            assert [answer.tokens for answer in answers] == wanted[name]

        for name, _ in models:  # one after the other: what sleeps gives way
            await serve(name)
        await asyncio.gather(*(serve(name) for name, _ in models))  # at once: they take turns
        assert any([await gave_way(up, f"{node_id(number)}") for number in range(NODES)])
