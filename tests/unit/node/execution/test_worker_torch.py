"""The engine threads over the real engine: paths of stages against transformers."""

import asyncio

import pytest

from shared.messages.instances import Stage
from shared.messages.serving import LogitRules
from tests.support.submits import BLOCKS, THREE, TWO, WHOLE, stages, submit
from tests.support.worker_cluster import Attempt, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.execution.builders import torch_engine

PATHS = (WHOLE, TWO, THREE)
LOADING = (
    WHOLE,
    stages(("b", 0, 1), ("a", 1, BLOCKS)),
    stages(("c", 0, 3), ("a", 3, BLOCKS)),
    stages(("b", 0, 2), ("a", 2, 4), ("c", 4, BLOCKS)),
)
"""Node a is a stage of each, with other blocks every time."""
PROMPTS = tuple(tuple(range(7 * i, 7 * i + 2 + 5 * i)) for i in range(4))


async def generate(
    model: Model, temperature: float, paths: tuple[tuple[Stage, ...], ...] = PATHS
) -> list[list[int]]:
    """The tokens of each prompt on each path, all running at once."""
    async with cluster(
        "a",
        "b",
        "c",
        slots=12,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        attempts: list[Attempt] = []
        for number, path in enumerate(paths):
            for i, prompt in enumerate(PROMPTS):
                name = f"r{number}-{i}"
                message = submit(
                    name, path, prompt=prompt, max_tokens=12, seed=i, temperature=temperature
                )
                attempts.append(await nodes.submit(message))
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
        return [attempt.ids for attempt in attempts]


@pytest.mark.parametrize("paths", [PATHS, LOADING], ids=["stages", "loading"])
async def test_greedy_tokens_are_those_of_transformers(
    paths: tuple[tuple[Stage, ...], ...],
) -> None:
    model = make_model(dtype="float32")
    wanted = [model.expected_tokens(list(prompt), 12) for prompt in PROMPTS]
    assert await generate(model, 0.0, paths) == wanted * len(paths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_drawn_tokens_are_the_same_on_every_path(dtype: str) -> None:
    tokens = await generate(make_model(dtype=dtype), 0.8)
    one, two, three = tokens[:4], tokens[4:8], tokens[8:]
    assert one == two == three
    assert len({tuple(ids) for ids in one}) == len(one)


RULES = LogitRules(
    repetition_penalty=1.3,
    frequency_penalty=0.7,
    presence_penalty=-0.4,
    logit_bias=((3, -100.0), (17, 4.0)),
    min_tokens=4,
)


async def ruled(
    model: Model, rules: LogitRules | None, so_far: tuple[int, ...] = ()
) -> list[Attempt]:
    """One request with rules, or what is left of it, on each path beside others without."""
    async with cluster(
        "a", "b", "c", slots=12, manifest=model.manifest, buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        attempts: list[Attempt] = []
        for number, path in enumerate(PATHS):
            await nodes.submit(submit(f"plain {number}", path, prompt=PROMPTS[1], max_tokens=12))
            message = submit(
                f"r{number}",
                path,
                prompt=PROMPTS[2],
                so_far=so_far,
                max_tokens=24,
                seed=3,
                temperature=0.9,
                stop_ids=(5,),
                logprobs=2,
                rules=rules,
            )
            attempts.append(await nodes.submit(message))
        await asyncio.gather(*(attempt.end() for attempt in attempts))
        assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
        return attempts


async def test_rules_hold_on_every_path_and_after_a_move() -> None:
    model = make_model()
    whole = await ruled(model, RULES)
    ids = whole[0].ids
    assert [attempt.ids for attempt in whole] == [ids] * len(PATHS)
    assert (await ruled(model, None))[0].ids != ids
    for cut in (1, len(ids) // 2, len(ids) - 1):
        rest = await ruled(model, RULES, tuple(ids[:cut]))
        assert [attempt.ids for attempt in rest] == [ids[cut:]] * len(PATHS)


async def test_log_probabilities_come_with_tokens_from_every_path() -> None:
    model = make_model()
    for attempt in await ruled(model, RULES):
        logits = model.expected_logits([*PROMPTS[2], *attempt.ids])
        expected = logits.log_softmax(-1)[len(PROMPTS[2]) - 1 :]
        for token, row in zip(attempt.tokens, expected, strict=False):
            assert token.logprobs is not None
            assert token.logprobs.drawn == pytest.approx(float(row[token.token]), abs=1e-3)
            best = row.topk(2)
            assert [one for one, _ in token.logprobs.top] == best.indices.tolist()
            values = [value for _, value in token.logprobs.top]
            assert values == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("path", [WHOLE, THREE], ids=["whole", "stages"])
async def test_rules_that_cannot_be_followed_end_their_own_request_only(
    path: tuple[Stage, ...],
) -> None:
    model = make_model()
    async with cluster(
        "a", "b", "c", slots=12, step_tokens=64, manifest=model.manifest, buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        without_tokenizer = LogitRules(grammar="start: /a/")
        messages = [
            submit("plain", path, prompt=PROMPTS[1]),
            submit("ruled", path, prompt=PROMPTS[1], rules=without_tokenizer),
            submit("after", path, prompt=PROMPTS[1]),
        ]
        plain, refused, after = [await nodes.submit(message) for message in messages]
        await asyncio.gather(*(one.end() for one in (plain, refused, after)))
        assert refused.code == "not_ready"
        assert plain.ids == after.ids == model.expected_tokens(list(PROMPTS[1]), 8)


async def test_preempted_requests_get_the_tokens_of_transformers() -> None:
    """KV for one and a half of the three: they all end, and say what they would alone."""
    model = make_model(dtype="float32")
    prompts = [tuple(range(i, i + 14)) for i in range(3)]
    async with cluster(
        "a",
        kv_capacity={"a": 80},
        step_tokens=64,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        # Later, when others have grown, a request is refused.
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
        assert nodes.workers["a"].load().preemptions > 0
        assert nodes.workers["a"].load().kv_used == 0


async def test_a_shared_prefix_gives_the_tokens_of_transformers() -> None:
    model = make_model(dtype="float32")
    shared = tuple(range(70))
    async with cluster(
        "a",
        step_tokens=64,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        for i in range(3):
            prompt = (*shared, i, 2 * i)
            attempt = await nodes.submit(submit(f"r{i}", WHOLE, prompt=prompt, max_tokens=20))
            assert (await attempt.end()).ids == model.expected_tokens(list(prompt), 20)
