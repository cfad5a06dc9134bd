"""LoRA adapters in real clusters: the tokens of their base with the adapter merged in."""

import asyncio
import shutil
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from services.local.cluster import node_id
from services.local.publishing import import_model
from services.node.checkpoints.adapter import WEIGHTS
from shared.ids import ModelName
from shared.messages.pool import ModelRecord
from shared.messages.scaling import ImportModel
from tests.support import adapters
from tests.support.adapters import AdapterSpec
from tests.support.cluster import MODEL, Oracle, Running, prompts, running
from tests.support.commands import run
from tests.support.models import TINY

SPECS = {"sql": AdapterSpec(1, rank=8), "poems": AdapterSpec(2, rank=5, targets=adapters.ATTENTION)}
TOKENS = 24
LONG = 100
"""Tokens: requests still run when the first copies are complete."""


class Tuned:
    """Adapters on disk, and the oracle of each."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        state = load_file(checkpoint / "model.safetensors")
        self.paths, self.oracles = {}, {}
        for name, spec in SPECS.items():
            self.paths[name] = adapters.save(folder / name, spec, state)
            merged = folder / f"{name}-merged"
            merged.mkdir()
            for file in checkpoint.iterdir():
                (merged / file.name).write_bytes(file.read_bytes())
            save_file(
                adapters.merged(spec, state),
                merged / "model.safetensors",
                metadata={"format": "pt"},
            )
            self.oracles[name] = Oracle(merged)

    async def publish(self, up: Running) -> dict[str, ModelRecord]:
        return {
            name: await import_model(
                up.bus,
                ImportModel(path=str(path), name=ModelName(name), base=MODEL),
                say=lambda _: None,
            )
            for name, path in self.paths.items()
        }


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Tuned:
    return Tuned(tmp_path_factory.mktemp("adapters"), checkpoint)


async def test_adapters_are_published_asked_for_and_removed(
    tmp_path: Path, checkpoint: Path, tuned: Tuned, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=1) as up:
        command = partial(run, cwd=up.cluster.spec.directory)
        data = ("--data", up.cluster.spec.directory)
        for name, path in tuned.paths.items():
            added = await command("model", "add", path, "--name", name, "--base", MODEL, *data)
            assert added.code == 0, added.err
        asked = prompts(3, TINY.vocab_size)
        names = [MODEL, *SPECS]
        oracles = {MODEL: oracle, **tuned.oracles}
        answers = await asyncio.gather(
            *(up.ask_all(asked, TOKENS, model=name) for name in names * 2)
        )
        for name, answer in zip(names * 2, answers, strict=True):
            assert {one.error for one in answer} == {""}
            assert [one.tokens for one in answer] == oracles[name].tokens(asked, TOKENS), name

        async with aiohttp.ClientSession(up.url) as http, http.get("/v1/models") as response:
            cards = {card["id"]: card for card in (await response.json())["data"]}
        assert {name: card["parent"] for name, card in cards.items()} == {
            MODEL: None,
            "sql": MODEL,
            "poems": MODEL,
        }
        refused = await command("model", "rm", MODEL, *data)
        assert refused.code != 0
        assert "remove poems, sql first" in refused.err
        refused = await command("model", "set", "sql", "--min-instances", "1", *data)
        assert "change its base 'tiny'" in refused.err
        for name in (*SPECS, MODEL):
            removed = await command("model", "rm", name, *data)
            assert removed.code == 0, removed.err


async def test_over_paths_with_room_for_one_adapter(
    tmp_path: Path, checkpoint: Path, tuned: Tuned, oracle: Oracle
) -> None:
    """Only one disk has the adapters: the other nodes read them from there, again and again."""
    size = max(memory(path) for path in tuned.paths.values())
    settings = {"LAMBDASCALE_NODE_ADAPTER_BYTES": str(size), "LAMBDASCALE_NODE_SLOTS": "4"}
    async with running(tmp_path, checkpoint, nodes=3, settings=settings, min_instances=3) as up:
        records = await tuned.publish(up)
        asked = prompts(2, TINY.vocab_size)
        stages = await up.path(*(node_id(number) for number in range(3)))
        for name in ("sql", "poems", "sql"):
            expected = tuned.oracles[name].tokens(asked, TOKENS)
            adapter = records[name].model_id
            own = [up.over_path(stages, prompt, TOKENS, adapter) for prompt in asked]
            plain = [up.over_path(stages, prompt, TOKENS) for prompt in asked]
            answers = await asyncio.gather(*own, *plain)
            assert answers == expected + oracle.tokens(asked, TOKENS)


def memory(path: Path) -> int:
    return sum(tensor.numel() * 4 for tensor in load_file(path / WEIGHTS).values())


async def test_across_a_mode_switch_and_the_death_of_a_node(
    tmp_path: Path, checkpoint: Path, tuned: Tuned, oracle: Oracle
) -> None:
    settings = {
        "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",  # a copy of 0.6 MB takes 3 s
        "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
        "LAMBDASCALE_NODE_SLOTS": "4",
        "LAMBDASCALE_NODE_SPECULATION": "0",
        "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "2",
    }
    async with running(tmp_path, checkpoint, nodes=3, settings=settings) as up:
        await tuned.publish(up)
        asked = prompts(8, TINY.vocab_size)
        oracles = {MODEL: oracle, **tuned.oracles}

        async def ask_all() -> None:
            answers = await asyncio.gather(*(up.ask_all(asked, LONG, model=n) for n in oracles))
            for name, answer in zip(oracles, answers, strict=True):
                assert {one.error for one in answer} == {""}
                assert [one.tokens for one in answer] == oracles[name].tokens(asked, LONG), name

        await ask_all()
        assert any(token.stages > 1 for token in up.watch.partial_tokens)
        assert up.watch.switched
        load = asyncio.create_task(ask_all())
        await up.until(lambda: len(up.watch.replicas) > 1, "a second replica")
        await up.until(lambda: has_requests(up), "requests that run")
        up.kill(next(s.node for i in up.watch.instances for s in i.stages))
        await load


def has_requests(up: Running) -> bool:
    return up.watch.load is not None and up.watch.load.running_requests > 4


def lose(folder: Path, record: ModelRecord) -> None:
    (lost,) = folder.rglob(record.model_id)
    shutil.rmtree(lost)


async def test_an_adapter_that_is_lost_fails_its_requests_only(
    tmp_path: Path, checkpoint: Path, tuned: Tuned, oracle: Oracle
) -> None:
    settings = {"LAMBDASCALE_GATEWAY_MAX_ATTEMPTS": "1"}
    async with running(tmp_path, checkpoint, nodes=1, settings=settings) as up:
        records = await tuned.publish(up)
        await asyncio.to_thread(lose, tmp_path, records["sql"])
        asked = prompts(2, TINY.vocab_size)
        failed, *answers = await asyncio.gather(
            up.ask(asked[0], TOKENS, "sql"),
            up.ask_all(asked, TOKENS),
            up.ask_all(asked, TOKENS, "poems"),
        )
        assert f"adapter {records['sql'].model_id} cannot be loaded" in failed.error
        expected = [oracle.tokens(asked, TOKENS), tuned.oracles["poems"].tokens(asked, TOKENS)]
        assert [[one.tokens for one in answer] for answer in answers] == expected
