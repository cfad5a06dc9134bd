"""Prompts that are scored, over the real engine: the log probabilities are those of transformers,
each is given once, in order, and before the first token."""

import asyncio

import pytest

from services.node.core.leading import Leader
from services.node.core.microbatches import Command, Failure
from services.node.core.sequences import Sequence
from shared.messages.instances import Stage
from shared.messages.serving import Logprobs
from tests.support.submits import THREE, TWO, WHOLE, submit
from tests.support.worker_cluster import Attempt, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.execution.builders import CLOSE, LONG, PROMPTS, torch_engine

TOP = 3


def check(model: Model, prompt: tuple[int, ...], attempt: Attempt, *, score_from: int = 1) -> None:
    """The scores of the prompt's tokens from one on, and the log probabilities of the answer."""
    assert attempt.failed is None
    first = score_from - len(prompt)
    ends = [one.index + len(one.logprobs) for one in attempt.scores]
    assert [one.index for one in attempt.scores] == [first, *ends][: len(ends)]
    assert (ends or [first])[-1] == 0
    ids = [*prompt, *attempt.ids]
    found = [one for scores in attempt.scores for one in scores.logprobs]
    found += [token.logprobs for token in attempt.tokens if token.logprobs]
    expected = model.expected_logits(ids).log_softmax(-1)[score_from - 1 : -1]
    for token, logprobs, row in zip(ids[score_from:], found, expected, strict=True):
        assert isinstance(logprobs, Logprobs)
        assert logprobs.drawn == pytest.approx(float(row[token]), abs=CLOSE)
        best = row.topk(TOP)
        assert [one for one, _ in logprobs.top] == best.indices.tolist()
        values = [value for _, value in logprobs.top]
        assert values == pytest.approx(best.values.tolist(), abs=CLOSE)


@pytest.mark.parametrize("path", [WHOLE, TWO, THREE], ids=["whole", "two", "three"])
@pytest.mark.parametrize("step_tokens", [7, 512])
async def test_scores_are_those_of_transformers(path: tuple[Stage, ...], step_tokens: int) -> None:
    """Beside requests that are not scored, and with proposals."""
    model = make_model(dtype="float32")
    looping = LONG[:9] * 6
    async with cluster(
        "a", "b", "c", slots=12, step_tokens=step_tokens, speculation=7, manifest=model.manifest,
        buffers=model.buffers, make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        plain = await nodes.submit(submit("plain", WHOLE, prompt=looping, max_tokens=30))
        scored = {
            prompt: await nodes.submit(
                submit(f"r{i}", path, prompt=prompt, max_tokens=20, logprobs=TOP, score_from=1)
            )
            for i, prompt in enumerate((*PROMPTS, looping))
        }
        await asyncio.gather(*(attempt.end() for attempt in (plain, *scored.values())))
        for prompt, attempt in scored.items():
            check(model, prompt, attempt)
            assert attempt.ids == model.expected_tokens(list(prompt), 20, attempt.ids)
        assert plain.ids == model.expected_tokens(list(looping), 30, plain.ids)
        assert plain.scores == []
        assert nodes.workers["a"].load().tokens_accepted > 0


async def test_a_score_has_the_same_bits_however_its_prompt_is_cut() -> None:
    model = make_model(dtype="float32", vocab_size=5000)
    found = []
    for path, step_tokens in ((WHOLE, 512), (WHOLE, 1), (TWO, 7), (THREE, 64)):
        async with cluster(
            "a", "b", "c", step_tokens=step_tokens, manifest=model.manifest,
            buffers=model.buffers, make_engine=torch_engine,
        ) as nodes:  # fmt: skip
            message = submit("r", path, prompt=LONG, max_tokens=1, logprobs=TOP, score_from=1)
            attempt = await (await nodes.submit(message)).end()
            found.append([one for scores in attempt.scores for one in scores.logprobs])
    assert len(found[0]) == len(LONG) - 1
    assert found == [found[0]] * 4


async def test_no_score_is_missing_where_the_prompt_is_cached() -> None:
    model = make_model(dtype="float32")
    async with cluster(
        "a", step_tokens=64, manifest=model.manifest, buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        await (await nodes.submit(submit("before", WHOLE, prompt=LONG))).end()
        message = submit("r", WHOLE, prompt=LONG, max_tokens=2, logprobs=TOP, score_from=1)
        check(model, LONG, await (await nodes.submit(message)).end())
        assert nodes.workers["a"].load().cached_tokens == 0
        again = submit("again", WHOLE, prompt=LONG, max_tokens=2)
        await (await nodes.submit(again)).end()
        assert nodes.workers["a"].load().cached_tokens == len(LONG) // 16 * 16


@pytest.mark.parametrize("path", [WHOLE, TWO], ids=["whole", "two"])
@pytest.mark.parametrize("score_from", [2, 17, 18, 100, len(LONG) - 1, len(LONG)])
async def test_a_resumption_gives_the_scores_that_are_left(
    path: tuple[Stage, ...], score_from: int
) -> None:
    """Where some of the prompt is cached, and where nothing is."""
    model = make_model(dtype="float32")
    async with cluster(
        "a", "b", step_tokens=20, manifest=model.manifest, buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:  # fmt: skip
        for attempt in (2, 3):
            message = submit(
                "r", path, attempt=attempt, prompt=LONG, max_tokens=3, logprobs=TOP,
                score_from=score_from,
            )  # fmt: skip
            found = await (await nodes.submit(message)).end()
            check(model, LONG, found, score_from=score_from)
            assert (found.scores == []) == (score_from == len(LONG))


async def test_a_request_that_is_preempted_while_it_is_scored_gets_each_score_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut: list[int] = []
    preempt = Leader.preempt

    def watched(self: Leader, sequence: Sequence, why: Failure) -> list[Command]:
        if sequence.scoring:
            cut.append(sequence.scored)
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
            submit("r", WHOLE, prompt=prompt, max_tokens=3, logprobs=TOP, score_from=1),
        )
        await asyncio.gather(grows.end(), attempt.end())
        assert cut
        assert 16 < cut[0] < len(prompt)
        check(model, prompt, attempt)
