"""The vectors of prompts, over the real engine: they are transformers' final states, the last one
or their mean, with the same bits wherever a request runs."""

import asyncio

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.node.core.leading import Leader
from services.node.core.microbatches import Command, Failure
from services.node.core.sequences import Sequence
from shared.messages.instances import Stage
from shared.messages.serving import Pooling
from tests.support.submits import THREE, TWO, WHOLE, submit
from tests.support.worker_cluster import Attempt, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.execution.builders import CLOSE, LONG, PROMPTS, torch_engine

both = pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])


def expected(model: Model, prompt: tuple[int, ...], pooling: Pooling) -> npt.NDArray[np.float32]:
    with torch.no_grad():
        states = model.oracle.model(torch.tensor([prompt])).last_hidden_state[0].float()
    found = states[-1] if pooling is Pooling.LAST else states.mean(0)
    vector: npt.NDArray[np.float32] = found.numpy()
    return vector


def vector_of(attempt: Attempt) -> npt.NDArray[np.float32]:
    assert attempt.failed is None
    (token,) = attempt.tokens
    assert (token.index, token.finish) == (0, "length")
    return np.frombuffer(token.vector, "<f4")


@both
@pytest.mark.parametrize("path", [WHOLE, TWO, THREE], ids=["whole", "two", "three"])
@pytest.mark.parametrize("step_tokens", [7, 512])
async def test_vectors_are_those_of_transformers(
    path: tuple[Stage, ...], step_tokens: int, pooling: Pooling
) -> None:
    """Beside a request that generates, with proposals."""
    model = make_model(dtype="float32")
    looping = LONG[:9] * 6
    async with cluster(
        "a", "b", "c", slots=12, step_tokens=step_tokens, speculation=7, manifest=model.manifest,
        buffers=model.buffers, make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        plain = await nodes.submit(submit("plain", WHOLE, prompt=looping, max_tokens=30))
        asked = {
            prompt: await nodes.submit(
                submit(f"r{i}", path, prompt=prompt, max_tokens=1, pooling=pooling)
            )
            for i, prompt in enumerate(PROMPTS)
        }
        await asyncio.gather(*(attempt.end() for attempt in (plain, *asked.values())))
        for prompt, attempt in asked.items():
            found = vector_of(attempt)
            np.testing.assert_allclose(found, expected(model, prompt, pooling), atol=CLOSE)
        assert plain.ids == model.expected_tokens(list(looping), 30, plain.ids)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_vector_has_the_same_bits_however_its_prompt_is_cut(
    pooling: Pooling, dtype: str
) -> None:
    model = make_model(dtype=dtype)
    found = []
    for path, step_tokens in ((WHOLE, 512), (WHOLE, 1), (TWO, 7), (THREE, 64)):
        async with cluster(
            "a", "b", "c", step_tokens=step_tokens, manifest=model.manifest,
            buffers=model.buffers, make_engine=torch_engine,
        ) as nodes:  # fmt: skip
            message = submit("r", path, prompt=LONG, max_tokens=1, pooling=pooling)
            attempt = await (await nodes.submit(message)).end()
            found.append(vector_of(attempt).tobytes())
    assert found == [found[0]] * 4


@both
async def test_a_vector_is_whole_where_the_prompt_is_cached(pooling: Pooling) -> None:
    """A mean needs the states of all positions, the last state does not."""
    model = make_model(dtype="float32")
    async with cluster(
        "a", step_tokens=64, manifest=model.manifest, buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        await (await nodes.submit(submit("before", WHOLE, prompt=LONG))).end()
        message = submit("r", WHOLE, prompt=LONG, max_tokens=1, pooling=pooling)
        found = vector_of(await (await nodes.submit(message)).end())
        np.testing.assert_allclose(found, expected(model, LONG, pooling), atol=CLOSE)
        cached = len(LONG) // 16 * 16 if pooling is Pooling.LAST else 0
        assert nodes.workers["a"].load().cached_tokens == cached


@both
async def test_a_request_that_is_preempted_begins_its_vector_again(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    preempt = Leader.preempt

    def watched(self: Leader, sequence: Sequence, why: Failure) -> list[Command]:
        if sequence.submit.pooling:
            cut.append(sequence.position)
        return preempt(self, sequence, why)

    monkeypatch.setattr(Leader, "preempt", watched)
    model = make_model(dtype="float32")
    async with cluster(
        "a", kv_capacity={"a": 160}, step_tokens=1, manifest=model.manifest,
        buffers=model.buffers, make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        prompt = LONG[20:120]
        grows, attempt = await nodes.submit_together(
            submit("grows", WHOLE, prompt=LONG[:14], max_tokens=130),
            submit("r", WHOLE, prompt=prompt, max_tokens=1, pooling=pooling),
        )
        await asyncio.gather(grows.end(), attempt.end())
        assert cut
        assert 16 < cut[0] < len(prompt)
        np.testing.assert_allclose(vector_of(attempt), expected(model, prompt, pooling), atol=CLOSE)
