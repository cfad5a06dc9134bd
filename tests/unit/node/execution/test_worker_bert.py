"""The engine threads over the real engine: vectors of an encoder on paths of stages, against
transformers."""

import asyncio

import numpy as np
import pytest

from services.node.core.kv import PAGE
from shared.errors import BadInput
from shared.ids import ModelId
from shared.messages.instances import Stage
from shared.messages.serving import Pooling
from tests.support.submits import BLOCKS, THREE, TWO, WHOLE, stages, submit
from tests.support.worker_cluster import Attempt, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.engine.test_text_encoder import CLOSE, TEXTS, expected, make_encoder
from tests.unit.node.execution.builders import torch_engine

LOADING = stages(("b", 0, 1), ("a", 1, 4), ("c", 4, BLOCKS))
PATHS = (WHOLE, TWO, THREE, LOADING)


@pytest.fixture(scope="module")
def bert() -> Model:
    return make_encoder()


def check(model: Model, attempt: Attempt, tokens: list[int], pooling: Pooling) -> bytes:
    assert attempt.failed is None
    (token,) = attempt.tokens
    assert (token.index, token.finish) == (0, "length")
    found = np.frombuffer(token.vector, "<f4")
    np.testing.assert_allclose(found, expected(model, tokens, pooling), atol=CLOSE, rtol=CLOSE)
    return token.vector


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("step_tokens", [1, 64])
async def test_on_many_paths_at_once(bert: Model, step_tokens: int, pooling: Pooling) -> None:
    """A text has the same bits on each of them."""
    asked = [(path, text) for text in TEXTS for path in PATHS]
    async with cluster(
        "a", "b", "c", slots=24, step_tokens=step_tokens, manifest=bert.manifest,
        buffers=bert.buffers, make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        attempts = [
            await nodes.submit(
                submit(f"r{i}", path, prompt=tuple(text), max_tokens=1, pooling=pooling)
            )
            for i, (path, text) in enumerate(asked)
        ]
        await asyncio.gather(*(attempt.end() for attempt in attempts))
    found: dict[tuple[int, ...], set[bytes]] = {}
    for (_, text), attempt in zip(asked, attempts, strict=True):
        found.setdefault(tuple(text), set()).add(check(bert, attempt, text, pooling))
    assert all(len(vectors) == 1 for vectors in found.values())


async def test_texts_need_no_kv_beside_a_decoder_that_has_little(bert: Model) -> None:
    decoder = make_model(dtype="float32")
    async with cluster(
        "a", "b", "c", slots=24, step_tokens=64, kv_capacity=dict.fromkeys("abc", PAGE),
        manifest=bert.manifest, buffers=bert.buffers, make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        for worker in nodes.workers.values():
            await worker.open_model(ModelId("decoder"), decoder.manifest)
        asked = [(path, text) for text in TEXTS for path in (WHOLE, TWO, THREE)]
        attempts = [
            await nodes.submit(
                submit(f"r{i}", path, prompt=tuple(text), max_tokens=1, pooling=Pooling.CLS)
            )
            for i, (path, text) in enumerate(asked)
        ]
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        assert [worker.load().kv_capacity for worker in nodes.workers.values()] == [PAGE] * 3
    for (_, text), attempt in zip(asked, attempts, strict=True):
        check(bert, attempt, text, Pooling.CLS)


@pytest.mark.parametrize(
    ("length", "pooling", "path", "says"),
    [
        (9, None, WHOLE, "is for tokens; the model gives only vectors"),
        (65, Pooling.MEAN, WHOLE, "has 65 tokens; the model takes 64"),
        (65, Pooling.MEAN, TWO, "has 65 tokens; the model takes 64"),
    ],
)
async def test_what_an_encoder_cannot_serve(
    bert: Model, length: int, pooling: Pooling | None, path: tuple[Stage, ...], says: str
) -> None:
    async with cluster(
        "a", "b", step_tokens=64, manifest=bert.manifest, buffers=bert.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        message = submit("r", path, prompt=(5,) * length, max_tokens=1, pooling=pooling)
        with pytest.raises(BadInput, match=says):
            await nodes.workers["a"].submit(message)


async def test_a_decoder_has_no_first_state() -> None:
    decoder = make_model(dtype="float32")
    async with cluster(
        "a", step_tokens=64, manifest=decoder.manifest, buffers=decoder.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        message = submit("r", WHOLE, prompt=(5, 6), max_tokens=1, pooling=Pooling.CLS)
        with pytest.raises(BadInput, match="depends on nothing else"):
            await nodes.workers["a"].submit(message)
