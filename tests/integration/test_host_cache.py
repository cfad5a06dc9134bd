"""Host caches with real processes: models take turns in one arena, and no idle model is lost from
memory with its node."""

import asyncio
import dataclasses
import json
import signal
from pathlib import Path

from services.local.demo_model import make_checkpoint
from services.local.publishing import import_model
from shared import subjects
from shared.bus.base import On
from shared.ids import ModelId, ModelName, NodeId
from shared.messages.copies import CopiesQuery, PoolCopies
from shared.messages.pool import Tier
from shared.messages.scaling import BlockArrived, ImportModel
from shared.messages.story import StoryQuery, Told
from tests.support.cluster import LIMIT_S, MODEL, Oracle, Running, prompts, running
from tests.support.models import TINY

SETTINGS = {
    "LAMBDASCALE_NODE_ARENA_BYTES": "700000",  # one model of 0.6 MB
    "LAMBDASCALE_NODE_HOST_BYTES": "1400000",  # two
    "LAMBDASCALE_NODE_KV_BYTES": str(4 << 20),
    "LAMBDASCALE_PLANNER_IDLE_S": "0.3",
}
TOKENS = 12


def cached(up: Running, model: ModelId) -> set[NodeId]:
    """Nodes that say that their host caches have the whole model."""
    return {
        status.node
        for status in up.statuses.values()
        for holding in status.holdings
        if (holding.model_id, holding.tier) == (model, Tier.CACHE)
    }


def waited_for(up: Running, node: NodeId) -> set[ModelId]:
    """The models whose copies a node waited for before it ended, as its log says."""
    log = up.cluster.spec.directory / "logs" / f"{node}.log"
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return {model for line in lines for model in line.get("for_copies_of", ())}


def served(up: Running) -> set[ModelId]:
    """Models that are open on some device."""
    return {
        holding.model_id
        for status in up.statuses.values()
        for holding in status.holdings
        if holding.tier is Tier.GPU
    }


async def test_two_models_share_one_arena_in_turns(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    arrived: list[BlockArrived] = []

    async def hear(message: BlockArrived) -> None:
        arrived.append(message)

    (prompt,) = prompts(1, TINY.vocab_size)
    async with running(
        tmp_path / "cluster", checkpoint, nodes=1, settings=SETTINGS, min_instances=0
    ) as up:
        path = tmp_path / "other"
        make_checkpoint(path, dataclasses.replace(TINY, seed=100))
        request = ImportModel(path=str(path), name=ModelName("other"), min_instances=0)
        other = await import_model(up.bus, request, say=lambda _: None)
        await up.bus.subscribe(subjects.ARRIVALS, On(BlockArrived, hear))
        models = {MODEL: (up.record, oracle), other.name: (other, Oracle(path))}
        for record, _ in models.values():
            await up.until(lambda r=record: bool(cached(up, r.model_id)), f"{record.name} cached")  # type: ignore[misc]
        wanted = {name: source.tokens([prompt], TOKENS) for name, (_, source) in models.items()}
        for _ in range(2):
            for name in models:
                answer = await up.ask(prompt, TOKENS, name)
                assert (answer.error, [answer.tokens]) == ("", wanted[name])
        assert {message.model_id for message in arrived} == {
            record.model_id for record, _ in models.values()
        }
        assert {message.transport for message in arrived} == {"host cache"}
        await up.until(lambda: not served(up), "both asleep")
        assert {node for r, _ in models.values() for node in cached(up, r.model_id)} == {"node-0"}

        query = StoryQuery(subject=up.record.model_id)
        told = await up.bus.request(subjects.node_story(NodeId("node-0")), query, Told, timeout=60)
        assert any("comes up from the host cache" in step.text for step in told.steps)


async def test_the_only_copy_in_memory_is_made_anew_after_a_kill_and_handed_over_before_an_end(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Every disk has the model, so that the copy in memory is all that a node has to wait for."""
    settings = SETTINGS | {
        "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "3",
        "LAMBDASCALE_TELEMETRY_LOG_JSON": "true",
        "LAMBDASCALE_NODE_EVACUATE_S": "200",
    }
    (prompt,) = prompts(1, TINY.vocab_size)
    async with running(tmp_path, checkpoint, nodes=3, settings=settings, min_instances=0) as up:
        model = up.record.model_id

        def durable() -> int:
            tiers = [h.tier for s in up.statuses.values() for h in s.holdings]
            return tiers.count(Tier.DISK)

        await up.until(lambda: durable() == 3 and len(cached(up, model)) == 1, "copies")
        (killed,) = cached(up, model)
        up.kill(killed)
        del up.statuses[killed]
        await up.until(lambda: len(cached(up, model) - {killed}) == 1, "a new copy in memory")
        (ending,) = cached(up, model) - {killed}

        up.kill(ending, signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            assert await up.cluster.ended(ending) == 0
        assert waited_for(up, ending) == {model}
        said = await up.bus.request(subjects.REGISTRY_COPIES, CopiesQuery(), PoolCopies, timeout=60)
        (copies,) = said.models
        assert copies.host == tuple(up.statuses.keys() - {killed, ending})
        answer = await up.ask(prompt, TOKENS)
        assert (answer.error, [answer.tokens]) == ("", oracle.tokens([prompt], TOKENS))
