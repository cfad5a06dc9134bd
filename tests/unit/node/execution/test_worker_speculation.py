"""Speculation changes how many tokens a step has, and never which: over the real engine."""

import asyncio
import re
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec
import pytest
from llguidance import LLMatcher

from services.local.demo_tokenizer import train_tokenizer
from services.node.core.leading import Leader
from services.node.core.microbatches import Command, Failure
from services.node.core.sequences import Sequence
from shared import grammar
from shared.messages.serving import LogitRules, Submit, Token
from tests.support.submits import MODEL, THREE, TWO, WHOLE, submit
from tests.support.worker_cluster import Attempt, cluster
from tests.unit.node.engine.models import Model, make_model
from tests.unit.node.execution.builders import torch_engine

PROMPTS = tuple((7 * i, 3, 50, 4, 60 + i) * 5 + (7 * i, 3) for i in range(4))
COUNT = 60


class Run:
    def __init__(self, attempts: list[Attempt], accepted: int, proposed: int) -> None:
        self.attempts = attempts
        self.accepted = accepted
        self.proposed = proposed

    @property
    def ids(self) -> list[list[int]]:
        return [attempt.ids for attempt in self.attempts]

    @property
    def tokens(self) -> list[list[Token]]:
        """The tokens of each attempt, with their log probabilities and how it ended. How much
        of a prompt was cached is left out: that depends on which attempt ended first."""
        return [
            [msgspec.structs.replace(token, cached=0) for token in attempt.tokens]
            for attempt in self.attempts
        ]


async def serve(
    model: Model,
    messages: Iterable[Submit],
    speculation: int = 15,
    *,
    at_a_time: int = 12,
    kv: Mapping[str, int] = MappingProxyType({}),
    tokenizer: bytes = b"",
) -> Run:
    """A few at a time: batches change as requests end and others begin."""
    async with cluster(
        "a",
        "b",
        "c",
        slots=12,
        step_tokens=64,
        speculation=speculation,
        kv_capacity=kv,
        manifest=model.manifest,
        buffers=model.buffers,
        make_engine=torch_engine,
    ) as nodes:
        limit = asyncio.Semaphore(at_a_time)

        async def answer(message: Submit) -> Attempt:
            async with limit:
                return await (await nodes.submit(message)).end()

        for worker in nodes.workers.values() if tokenizer else ():
            worker.use_tokenizer(MODEL, tokenizer)
        attempts = await asyncio.gather(*map(answer, messages))
        assert [attempt.failed for attempt in attempts] == [None] * len(attempts)
        for worker in nodes.workers.values():
            await worker.ready()
            await worker.ready()  # what the first one waited for is in the load now
        loads = [worker.load() for worker in nodes.workers.values()]
        assert [load.kv_used for load in loads] == [0, 0, 0]
        return Run(
            attempts,
            sum(load.tokens_accepted for load in loads),
            sum(load.tokens_proposed for load in loads),
        )


async def test_greedy_tokens_are_those_of_transformers_on_every_path() -> None:
    model = make_model(dtype="float32")
    expected = [model.expected_tokens(list(prompt), COUNT) for prompt in PROMPTS]
    for paths in ((WHOLE,), (TWO,), (WHOLE, TWO, THREE)):
        run = await serve(
            model,
            [
                submit(f"{number} {i}", path, prompt=prompt, max_tokens=COUNT)
                for number, path in enumerate(paths)
                for i, prompt in enumerate(PROMPTS)
            ],
        )
        assert run.ids == expected * len(paths)
        assert run.accepted > len(run.ids) * COUNT / 10
        assert all([token.index for token in tokens] == list(range(COUNT)) for tokens in run.tokens)


RULES = {
    "none": None,
    "penalties": LogitRules(repetition_penalty=1.3, presence_penalty=-1.0, min_tokens=30),
    "repeating": LogitRules(frequency_penalty=-2.0, logit_bias=((3, 4.0),), min_tokens=50),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.4])
async def test_tokens_and_log_probabilities_are_those_without_it(
    rules: LogitRules | None, temperature: float
) -> None:
    """Several seeds of one prompt, while others of all lengths come and go."""
    model = make_model()
    messages = [
        submit(
            f"r{i}",
            (WHOLE, TWO, WHOLE, THREE)[i % 4],
            prompt=PROMPTS[i % 2],
            max_tokens=20 + 7 * i,
            seed=i,
            temperature=temperature,
            stop_ids=(5, 11),
            logprobs=2,
            rules=rules,
        )
        for i in range(8)
    ]
    without = await serve(model, messages, speculation=0, at_a_time=3)
    run = await serve(model, messages, at_a_time=3)
    assert run.tokens == without.tokens
    assert run.accepted > 20
    assert run.proposed > run.accepted
    assert (without.proposed, without.accepted) == (0, 0)


async def test_a_request_ends_at_its_stop_id_wherever_that_comes() -> None:
    model = make_model(dtype="float32")
    answer = model.expected_tokens(list(PROMPTS[0]), COUNT)
    stops = list(dict.fromkeys(answer))
    run = await serve(
        model,
        [
            submit(f"r{stop}", WHOLE, prompt=PROMPTS[0], max_tokens=COUNT, stop_ids=(stop,))
            for stop in stops
        ],
    )
    assert run.ids == [answer[: answer.index(stop) + 1] for stop in stops]
    assert {attempt.tokens[-1].finish for attempt in run.attempts} == {"stop"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_grammar_is_followed_and_the_tokens_are_those_without_it(
    temperature: float,
) -> None:
    tokenizer = train_tokenizer(320)
    model = make_model(vocab_size=320)
    rules = LogitRules(grammar=grammar.from_regex("(ab|cd){12}(xy){12}"))
    messages = [
        submit(
            f"r{i}",
            path,
            prompt=PROMPTS[i],
            max_tokens=80,
            seed=i,
            temperature=temperature,
            stop_ids=(0, 1),
            rules=rules,
        )
        for i, path in enumerate((WHOLE, WHOLE, TWO))
    ]
    encoded = tokenizer.to_str().encode()
    without = await serve(model, messages, speculation=0, tokenizer=encoded)
    run = await serve(model, messages, tokenizer=encoded)
    assert run.tokens == without.tokens
    assert run.accepted > 10
    for ids in run.ids:
        assert tokenizer.decode(ids).endswith("xy" * 12)


async def test_others_decode_while_llguidance_makes_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = train_tokenizer(320)
    model = make_model(vocab_size=320, dtype="float32")
    begun, go_on = threading.Event(), threading.Event()
    matcher = grammar.matcher

    def slow(text: str, vocabulary: grammar.Vocabulary) -> LLMatcher:
        begun.set()
        assert go_on.wait(20)
        return matcher(text, vocabulary)

    monkeypatch.setattr(grammar, "matcher", slow)
    rules = LogitRules(grammar=grammar.from_regex("(ab|cd){12}"))
    async with cluster(
        "a", "b", "c", manifest=model.manifest, buffers=model.buffers, make_engine=torch_engine
    ) as nodes:
        for worker in nodes.workers.values():
            worker.use_tokenizer(MODEL, tokenizer.to_str().encode())
        for number, path in enumerate((WHOLE, THREE)):
            begun.clear()
            go_on.clear()
            held = await nodes.submit(
                submit(f"held {number}", path, max_tokens=80, stop_ids=(0, 1), rules=rules)
            )
            assert await asyncio.to_thread(begun.wait, 10)
            other = submit(f"other {number}", path, prompt=PROMPTS[1], max_tokens=COUNT)
            ids = (await (await nodes.submit(other)).end()).ids
            assert ids == model.expected_tokens(list(PROMPTS[1]), COUNT, ids)
            assert not held.over
            assert not held.tokens
            go_on.set()
            assert re.fullmatch("(ab|cd){12}", tokenizer.decode((await held.end()).ids))


def watch_preemption(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the sequences that are preempted from now on."""
    preempted: list[str] = []
    preempt = Leader.preempt

    def watched(self: Leader, sequence: Sequence, why: Failure) -> list[Command]:
        preempted.append(sequence.key)
        return preempt(self, sequence, why)

    monkeypatch.setattr(Leader, "preempt", watched)
    return preempted


async def test_preempted_requests_get_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempted = watch_preemption(monkeypatch)
    model = make_model(dtype="float32")
    run = await serve(
        model,
        [submit(f"r{i}", WHOLE, prompt=p, max_tokens=COUNT) for i, p in enumerate(PROMPTS)],
        kv={"a": 240},
    )
    assert run.ids == [
        model.expected_tokens(list(prompt), COUNT, ids)
        for prompt, ids in zip(PROMPTS, run.ids, strict=True)
    ]
    assert preempted
    assert run.accepted > 0


@pytest.mark.parametrize(
    "rules",
    [RULES["penalties"], LogitRules(grammar=grammar.from_regex("[a-f]{9}[g-m]{9}[n-z]{42}"))],
    ids=["penalties", "grammar"],
)
async def test_rules_and_seeds_hold_across_preemption(
    monkeypatch: pytest.MonkeyPatch, rules: LogitRules
) -> None:
    preempted = watch_preemption(monkeypatch)
    tokenizer = train_tokenizer(320)
    messages = [
        submit(
            f"r{i}",
            WHOLE,
            prompt=prompt,
            max_tokens=COUNT,
            seed=i,
            temperature=0.7,
            stop_ids=(0, 1),
            rules=rules,
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    model, encoded = make_model(vocab_size=320), tokenizer.to_str().encode()
    roomy = await serve(model, messages, tokenizer=encoded)
    assert not preempted
    starved = await serve(model, messages, kv={"a": 144}, tokenizer=encoded)
    assert preempted
    assert starved.tokens == roomy.tokens
    assert len({tuple(ids) for ids in roomy.ids}) == len(messages)


async def test_what_was_said_is_known_after_a_move() -> None:
    model = make_model(dtype="float32")
    answer = model.expected_tokens(list(PROMPTS[1]), COUNT)
    run = await serve(
        model,
        [
            submit(
                f"r{cut}",
                path,
                prompt=PROMPTS[1],
                so_far=tuple(answer[:cut]),
                max_tokens=COUNT,
            )
            for cut, path in ((1, WHOLE), (COUNT // 2, TWO), (COUNT - 2, WHOLE))
        ],
    )
    assert run.ids == [answer[cut:] for cut in (1, COUNT // 2, COUNT - 2)]
    assert run.accepted > 0


async def test_requests_that_share_what_was_cached_get_the_tokens_of_transformers() -> None:
    model = make_model(dtype="float32")
    shared = PROMPTS[2] * 3
    for at_a_time in (1, 4):
        prompts = [(*shared, *range(i)) for i in range(6)]
        run = await serve(
            model,
            [submit(f"r{i}", WHOLE, prompt=p, max_tokens=COUNT) for i, p in enumerate(prompts)],
            at_a_time=at_a_time,
        )
        assert run.ids == [
            model.expected_tokens(list(prompt), COUNT, ids)
            for prompt, ids in zip(prompts, run.ids, strict=True)
        ]
        assert run.accepted > 0
