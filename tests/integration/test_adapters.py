"""LoRA adapters in real clusters: the tokens of their base with the adapter merged in."""

import asyncio
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from services.local.publishing import import_model
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
