"""The engine thread over the real engine, with a host tier: what comes back from host memory gives
the tokens of transformers."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest

from services.node.core.kv import PAGE
from services.node.engine import kv_host
from services.node.engine.base import Engine
from services.node.engine.engine import TorchEngine
from services.node.engine.linear import Form
from shared import telemetry
from shared.messages.serving import Cancel, Pooling, Submit
from tests.support.spans import exported
from tests.support.submits import WHOLE, submit
from tests.support.worker_cluster import Attempt, Cluster, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.engine.test_kv import FewPages, LateCopies

POSITION = 4 * 2 * 2 * 8 * 4
"""Bytes of a position: 4 layers, keys and values of 2 heads of 8 numbers of 4 bytes."""
AMPLE = 1 << 24


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model(dtype="float32")


@pytest.fixture(params=[(1, False), (2, True), (1000, False), (1000, True)], ids=str)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """(how many pages are copied between two steps, whether as late as may be)"""
    pages, late = request.param
    monkeypatch.setattr(kv_host, "CopyRate", lambda: FewPages(pages))
    if late:
        monkeypatch.setattr(kv_host, "CpuCopies", LateCopies)
        monkeypatch.setattr(LateCopies, "pages", pages)


def engine(host: int, form: Form = "packed") -> Callable[[int], Engine]:
    return lambda kv: TorchEngine("cpu", kv, 1, cpu_weights=form, kv_host_bytes=host)


def nodes_of(
    model: Model, positions: int, host: int, form: Form = "packed", speculation: int = 0
) -> AbstractAsyncContextManager[Cluster]:
    return cluster(
        "a",
        kv_capacity={"a": positions},
        step_tokens=64,
        speculation=speculation,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=engine(host, form),
    )


async def one(nodes: Cluster, message: Submit) -> Attempt:
    attempt = await (await nodes.submit(message)).end()
    assert attempt.failed is None
    return attempt


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("form", ["packed", "stored"])
async def test_preempted_requests_come_back_and_get_the_tokens_of_transformers(
    model: Model, form: Form
) -> None:
    """KV for one and a half of the three: they all end, and say what they would alone."""
    prompts = [tuple(range(i, i + 14)) for i in range(3)]
    async with nodes_of(model, 80, AMPLE, form) as nodes:
        attempts = await nodes.submit_together(
            *(
                submit(f"r{i}", WHOLE, prompt=prompt, max_tokens=40)
                for i, prompt in enumerate(prompts)
            )
        )
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        for attempt, prompt in zip(attempts, prompts, strict=True):
            assert attempt.failed is None
            assert attempt.ids == model.expected_tokens(list(prompt), 40, attempt.ids)
            assert attempt.tokens[0].cached == 0, "nothing was there when they began"
        load = nodes.workers["a"].load()
        assert load.preemptions > 0
        assert load.kv_used == 0
        assert load.host_tier.tokens == load.host_tier.restored * PAGE > 0


async def test_a_prefix_comes_back_and_is_said_to_be_cached(model: Model) -> None:
    shared, others = tuple(range(70)), tuple(range(20, 90))
    async with nodes_of(model, 128, AMPLE) as nodes:
        for number, (prompt, cached) in enumerate(
            [((*shared, 1), 0), ((*others, 1), 0), ((*shared, 2), 64), ((*others, 2), 64)]
        ):
            attempt = await one(nodes, submit(f"{number}", WHOLE, prompt=prompt, max_tokens=20))
            assert attempt.ids == model.expected_tokens(list(prompt), 20, attempt.ids)
            assert attempt.tokens[0].cached == cached
        load = nodes.workers["a"].load()
        assert (load.cached_tokens, load.host_tier.tokens) == (128, 128)
        assert load.host_tier.used == load.host_tier.saved * PAGE * POSITION
        assert load.host_tier.nbytes == AMPLE


async def test_what_has_left_host_memory_is_computed_again(model: Model) -> None:
    shared, others = tuple(range(70)), tuple(range(20, 90))
    async with nodes_of(model, 128, 2 * PAGE * POSITION) as nodes:
        for number, prompt in enumerate([shared, others, shared, others] * 2):
            attempt = await one(nodes, submit(f"{number}", WHOLE, prompt=prompt, max_tokens=20))
            assert attempt.ids == model.expected_tokens(list(prompt), 20, attempt.ids)
            assert attempt.tokens[0].cached in (0, 2 * PAGE), "two pages had room"
        load = nodes.workers["a"].load()
        assert load.host_tier.tokens > 0
        assert load.host_tier.used == 2 * PAGE * POSITION


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("pages", "seed"), [(1, 0), (5, 1), (1000, 2)])
async def test_a_mixture_gets_the_tokens_of_transformers(
    model: Model, pages: int, seed: int
) -> None:
    """Prefixes that others have too, preemption, requests that end early, and host memory for few
    pages or many."""
    rng = random.Random(seed)
    prefixes = [rng.choices(range(96), k=32) for _ in range(3)]
    prompts = [
        (*rng.choice(prefixes)[: rng.choice([16, 32, 32])], *rng.choices(range(96), k=5))
        for _ in range(15)
    ]
    async with nodes_of(model, 128, pages * PAGE * POSITION, speculation=4 * seed) as nodes:
        for first in range(0, len(prompts), 3):
            messages = [
                submit(f"r{number}", WHOLE, prompt=prompts[number], max_tokens=50)
                for number in range(first, first + 3)
            ]
            over, *attempts = await nodes.submit_together(*messages)
            await over.until(lambda attempt: len(attempt.tokens) > 10)
            nodes.workers["a"].cancel(Cancel(request=messages[0].request, attempt=1))
            for attempt, message in zip(attempts, messages[1:], strict=True):
                await attempt.end()
                assert attempt.ids == model.expected_tokens(list(message.tokens), 50, attempt.ids)
        await nodes.workers["a"].ready()
        await nodes.workers["a"].ready()  # what the first one waited for is in the load now
        load = nodes.workers["a"].load()
        assert (load.kv_used, load.faults) == (0, 0)
        assert load.host_tier.used <= pages * PAGE * POSITION
        assert load.host_tier.tokens > 0
        assert load.preemptions > 0


async def test_a_vector_and_a_scored_prompt_use_what_they_may(model: Model) -> None:
    """A mean needs all positions, so it takes nothing from host memory; the last state may."""
    prompt, others = tuple(range(70)), tuple(range(20, 90))
    for pooling, cached in ((Pooling.MEAN, 0), (Pooling.LAST, 64)):
        async with nodes_of(model, 96, AMPLE) as nodes:
            await one(nodes, submit("a", WHOLE, prompt=prompt, max_tokens=2))
            await one(nodes, submit("b", WHOLE, prompt=others, max_tokens=2))
            found = await one(
                nodes, submit("c", WHOLE, prompt=prompt, max_tokens=1, pooling=pooling)
            )
            assert nodes.workers["a"].load().host_tier.tokens == cached
            assert found.tokens[0].vector


async def test_both_costs_are_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the request's story, and in a span of its trace."""
    spans = exported(monkeypatch)
    shared, others = tuple(range(70)), tuple(range(20, 90))
    trace = telemetry.new_trace()
    async with nodes_of(model, 96, AMPLE) as nodes:
        await one(nodes, submit("a", WHOLE, prompt=shared, max_tokens=2))
        await one(nodes, submit("b", WHOLE, prompt=others, max_tokens=2))
        again = submit("c", WHOLE, prompt=shared, max_tokens=2)
        await one(nodes, msgspec.structs.replace(again, trace=trace))
        story = [told.text for told in await nodes.workers["a"].story("c#1")]
    (told,) = [text for text in story if "host memory" in text]
    assert told.startswith("KV of 64 tokens is copied from host memory: ")
    (span,) = [span for span in spans.get_finished_spans() if span.name == "kv_restore"]
    attributes = span.attributes
    assert attributes is not None
    assert (attributes["tokens"], attributes["copied"], attributes["compute_s"]) == (64, True, 0.0)
    assert isinstance(copy_s := attributes["copy_s"], float)
    assert copy_s > 0
    context = telemetry.context_of(trace)
    assert context is not None
    assert span.context is not None
    assert span.context.trace_id == context.trace_id
