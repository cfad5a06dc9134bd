"""The engine threads over the real engine: images on paths of stages against transformers."""

import asyncio

import pytest
import torch

from services.node.core.kv import PAGE
from shared.ids import ModelId
from shared.messages.instances import Stage
from shared.messages.serving import Submit
from tests.support.submits import BLOCKS, THREE, TWO, WHOLE, stages, submit
from tests.support.worker_cluster import Attempt, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.engine.test_encoder import (
    LABELS,
    POSITIONS,
    assert_close,
    expected_logits,
    image,
    make_vit,
)
from tests.unit.node.execution.builders import torch_engine

LOADING = stages(("b", 0, 1), ("a", 1, 4), ("c", 4, BLOCKS))
IMAGES = [image(i) for i in range(5)]


@pytest.fixture(scope="module")
def vit() -> Model:
    return make_vit()


def picture(name: str, path: tuple[Stage, ...], pixels: bytes) -> Submit:
    prompt = (0,) * POSITIONS
    return submit(name, path, prompt=prompt, max_tokens=1, logprobs=LABELS, image=pixels)


async def classify(
    model: Model, *asked: tuple[tuple[Stage, ...], bytes], step_tokens: int = 64
) -> list[Attempt]:
    async with cluster(
        "a",
        "b",
        "c",
        slots=12,
        step_tokens=step_tokens,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        attempts = []
        for number, (path, pixels) in enumerate(asked):
            attempts.append(await nodes.submit(picture(f"r{number}", path, pixels)))
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        return attempts


@pytest.mark.parametrize("step_tokens", [1, 64])
async def test_on_many_paths_at_once(vit: Model, step_tokens: int) -> None:
    asked = [(path, pixels) for pixels in IMAGES for path in (WHOLE, TWO, THREE, LOADING)]
    attempts = await classify(vit, *asked, step_tokens=step_tokens)
    expected = torch.log_softmax(expected_logits(vit, [pixels for _, pixels in asked]), -1)
    for attempt, logprobs in zip(attempts, expected, strict=True):
        assert attempt.failed is None
        (token,) = attempt.tokens
        assert (token.index, token.finish) == (0, "length")
        assert token.token == logprobs.argmax()
        assert token.logprobs is not None
        actual = torch.empty(LABELS)
        for index, logprob in token.logprobs.top:
            actual[index] = logprob
        assert_close(actual, logprobs)


async def test_images_need_no_kv_beside_a_text_model_that_has_little(vit: Model) -> None:
    reader = make_model(dtype="float32")
    async with cluster(
        "a",
        "b",
        "c",
        step_tokens=64,
        kv_capacity=dict.fromkeys("abc", PAGE),
        manifest=vit.manifest,
        buffers=vit.buffers,
        make_engine=torch_engine,
    ) as nodes:
        for worker in nodes.workers.values():
            await worker.open_model(ModelId("reader"), reader.manifest)
        asked = [(path, pixels) for pixels in IMAGES for path in (WHOLE, TWO, THREE)]
        attempts = [
            await nodes.submit(picture(f"r{i}", path, pixels))
            for i, (path, pixels) in enumerate(asked)
        ]
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        assert [worker.load().kv_capacity for worker in nodes.workers.values()] == [PAGE] * 3
    assert POSITIONS > PAGE
    best = expected_logits(vit, [pixels for _, pixels in asked]).argmax(-1).tolist()
    assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
    assert [attempt.ids for attempt in attempts] == [[label] for label in best]


async def test_a_wrong_image_fails_alone(vit: Model) -> None:
    attempts = await classify(vit, (WHOLE, IMAGES[0]), (WHOLE, b"short"), (WHOLE, IMAGES[1]))
    assert [attempt.code for attempt in attempts] == [None, "bad_input", None]
    assert len(attempts[0].ids) == len(attempts[2].ids) == 1
