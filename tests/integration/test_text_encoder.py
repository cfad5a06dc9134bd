"""An encoder of texts with real processes and OpenAI's own client: transformers' BertModel, pooled
as sentence-transformers does, whatever happens meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from transformers import BertModel, BertTokenizer

from shared import subjects
from shared.ids import InstanceId, NodeId
from shared.messages.scaling import EventState, ScaleAccepted, SetInstances
from tests.support.bert import TINY_BERT, make_bert
from tests.support.cluster import MODEL, Running, running
from tests.support.embeddings import SLOW_LINKS, client_of

CLOSE = 1e-5
WORDS = "the cat sat on a statement, while exceptions of class and import raised an object"
TEXTS = [WORDS[i % 7 : 20 + 2 * i] * (1 + i % 3) for i in range(24)]


class Oracle:
    """Pads a batch and masks the padding, as sentence-transformers does."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model = BertModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = BertTokenizer.from_pretrained(checkpoint)

    def vectors(
        self, texts: Sequence[str], *, pooling: str = "mean", normalized: bool = True
    ) -> npt.NDArray[np.float32]:
        given = self._tokenizer(list(texts), padding=True, return_tensors="pt")
        with torch.no_grad():
            states = self._model(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1).float()
        found = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
        if normalized:
            found = torch.nn.functional.normalize(found, dim=1)
        vectors: npt.NDArray[np.float32] = found.numpy()
        return vectors

    def tokens(self, texts: Sequence[str]) -> int:
        return sum(map(len, self._tokenizer(list(texts))["input_ids"]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "bert"
    make_bert(directory)
    return directory


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def check(oracle: Oracle, said: CreateEmbeddingResponse, pooling: str = "mean") -> None:
    found = [each.embedding for each in said.data]
    np.testing.assert_allclose(found, oracle.vectors(TEXTS, pooling=pooling), atol=CLOSE)
    assert said.usage.prompt_tokens == oracle.tokens(TEXTS)


async def ask(client: openai.AsyncOpenAI, **fields: str) -> CreateEmbeddingResponse:
    return await client.embeddings.create(model=MODEL, input=TEXTS, extra_body=fields)


async def test_texts(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    async with running(tmp_path, checkpoint, nodes=1) as up, client_of(up) as client:
        check(oracle, await ask(client))
        check(oracle, await ask(client, pooling="cls"), "cls")
        alone = await client.embeddings.create(model=MODEL, input=TEXTS[5])
        assert alone.data[0].embedding == (await ask(client)).data[5].embedding
        with pytest.raises(openai.BadRequestError, match=f"length is {TINY_BERT.positions} tokens"):
            await client.embeddings.create(model=MODEL, input="the cat " * TINY_BERT.positions)
        with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
            await client.completions.create(model=MODEL, prompt="the cat")
        assert (await client.models.retrieve(MODEL)).to_dict()["task"] == "feature-extraction"


async def test_a_checkpoint_that_says_otherwise(tmp_path: Path) -> None:
    """The first state, and vectors of any length."""
    make_bert(tmp_path / "bert", replace(TINY_BERT, pooling="cls_token", normalized=False, seed=1))
    expected = Oracle(tmp_path / "bert").vectors(TEXTS, pooling="cls", normalized=False)
    async with running(tmp_path, tmp_path / "bert", nodes=1) as up, client_of(up) as client:
        found = [each.embedding for each in (await ask(client)).data]
        np.testing.assert_allclose(found, expected, atol=CLOSE)


async def test_scale_out_under_load(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    """Over paths of nodes that hold a part of the model, and across the switch to replicas."""
    kinds = ("mean", "cls", "mean", "cls")
    async with (
        running(tmp_path, checkpoint, nodes=4, settings=SLOW_LINKS) as up,
        client_of(up) as client,
    ):
        answers = await asyncio.gather(*(ask(client, pooling=kind) for kind in kinds))
        for kind, said in zip(kinds, answers, strict=True):
            check(oracle, said, kind)
        event = up.watch.scale_out()
        assert event is not None
        assert event.state is not EventState.FAILED
        assert any(token.stages > 1 for token in up.watch.partial_tokens)


async def test_a_node_is_killed_while_it_computes_vectors(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    settings = {"LAMBDASCALE_NODE_STEP_FLOOR_S": "0.3", "LAMBDASCALE_NODE_SLOTS": "2"}
    async with (
        running(tmp_path, checkpoint, nodes=2, settings=settings) as up,
        client_of(up) as client,
    ):
        scale = SetInstances(name=MODEL, instances=2)
        await up.bus.request(subjects.PLANNER_SCALE, scale, ScaleAccepted, timeout=60.0)
        await up.replicas(2)
        asked = asyncio.create_task(ask(client))
        await up.until(lambda: serving(up, NodeId("node-1")) > 0, "vectors on node-1")
        up.kill("node-1")
        check(oracle, await asked)


def serving(up: Running, node: NodeId) -> int:
    load = up.watch.load
    return load.instance_requests.get(InstanceId(f"replica-{node}"), 0) if load else 0
