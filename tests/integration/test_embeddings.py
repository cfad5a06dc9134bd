"""Vectors of texts with real processes and OpenAI's own client: transformers' states, whatever
happens meanwhile."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from tokenizers import Tokenizer
from transformers import AutoModel

from services.local.demo_model import make_checkpoint
from shared import subjects
from shared.ids import InstanceId, NodeId
from shared.messages.scaling import EventState, ScaleAccepted, SetInstances
from tests.support.cluster import MODEL, Running, prompts, running
from tests.support.embeddings import SLOW_LINKS, client_of
from tests.support.models import TINY

CLOSE = 1e-5
NUMBERS = 40
"""The inputs of a call."""


class Oracle:
    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def vector(self, ids: Sequence[int], pooling: str) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            states = self._model(torch.tensor([list(ids)])).last_hidden_state[0]
        found = states[-1] if pooling == "last" else states.mean(0)
        vector: npt.NDArray[np.float32] = (found / found.norm()).numpy()
        return vector


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(directory, TINY)
    return directory


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def check(
    oracle: Oracle, asked: Sequence[Sequence[int]], pooling: str, said: CreateEmbeddingResponse
) -> None:
    assert [each.index for each in said.data] == list(range(len(asked)))
    for ids, each in zip(asked, said.data, strict=True):
        np.testing.assert_allclose(each.embedding, oracle.vector(ids, pooling), atol=CLOSE)
    tokens = sum(map(len, asked))
    assert (said.usage.prompt_tokens, said.usage.total_tokens) == (tokens, tokens)


async def ask(
    client: openai.AsyncOpenAI, asked: Sequence[Sequence[int]], pooling: str
) -> CreateEmbeddingResponse:
    """The client asks for base64."""
    return await client.embeddings.create(
        model=MODEL, input=[list(ids) for ids in asked], extra_body={"pooling": pooling}
    )


async def test_texts(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    texts = ["The scheduler decided", "that", "a longer text of several words, with a comma"]
    ids = [tokenizer.encode(text).ids for text in texts]
    async with running(tmp_path, checkpoint, nodes=1) as up, client_of(up) as client:
        said = await client.embeddings.create(model=MODEL, input=texts)
        check(oracle, ids, "last", said)
        plain = await client.embeddings.create(
            model=MODEL, input=texts[0], encoding_format="float", user="somebody"
        )
        assert plain.data[0].embedding == pytest.approx(said.data[0].embedding, abs=CLOSE)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            await client.embeddings.create(model=MODEL, input=texts, dimensions=8)


async def test_scale_out_under_load(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    """Over paths of nodes that hold a part of the model, and across the switch to replicas."""
    given = prompts(NUMBERS, TINY.vocab_size)
    kinds = ("last", "mean", "last", "mean")
    async with (
        running(tmp_path, checkpoint, nodes=4, settings=SLOW_LINKS) as up,
        client_of(up) as client,
    ):
        answers = await asyncio.gather(*(ask(client, given, pooling) for pooling in kinds))
        for pooling, said in zip(kinds, answers, strict=True):
            check(oracle, given, pooling, said)
        event = up.watch.scale_out()
        assert event is not None
        assert event.state is not EventState.FAILED
        assert any(token.stages > 1 for token in up.watch.partial_tokens)


async def test_a_node_is_killed_while_it_computes_vectors(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    settings = {"LAMBDASCALE_NODE_STEP_FLOOR_S": "0.3", "LAMBDASCALE_NODE_SLOTS": "2"}
    given = prompts(12, TINY.vocab_size)
    async with (
        running(tmp_path, checkpoint, nodes=2, settings=settings) as up,
        client_of(up) as client,
    ):
        scale = SetInstances(name=MODEL, instances=2)
        await up.bus.request(subjects.PLANNER_SCALE, scale, ScaleAccepted, timeout=60.0)
        await up.replicas(2)
        asked = asyncio.create_task(ask(client, given, "mean"))
        await up.until(lambda: serving(up, NodeId("node-1")) > 0, "vectors on node-1")
        up.kill("node-1")
        check(oracle, given, "mean", await asked)


def serving(up: Running, node: NodeId) -> int:
    load = up.watch.load
    return load.instance_requests.get(InstanceId(f"replica-{node}"), 0) if load else 0
