"""What vLLM's clients may ask for beyond OpenAI's API."""

from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.unit.gateway.http.builders import ASK, CHAT, events, post
from tests.unit.gateway.support import (
    BOS,
    CONTEXT,
    EOS,
    TOKENIZER,
    VOCAB,
    Cluster,
    ids_of,
    replica,
    running,
    text_files,
)


async def text(http: aiohttp.ClientSession, **change: Any) -> str:
    status, answer = await post(http, {**ASK, **change})
    assert status == 200, answer
    found: str = answer["choices"][0]["text"]
    return found


async def test_bad_words_and_allowed_tokens_reach_the_node(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    await text(http, bad_words=["ab", " ab", "c"], allowed_token_ids=[9, 5, 9])
    rules = cluster.nodes[1].submits[0].rules
    assert rules
    assert rules.bad_words == (tuple(ids_of("ab")), tuple(ids_of("c")))
    assert rules.allowed == (5, 9)
    status, answer = await post(http, {**ASK, "allowed_token_ids": [VOCAB]})
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")


async def test_a_word_has_other_tokens_behind_a_space() -> None:
    """As in vLLM: both count if they are equally many."""
    merged = Tokenizer.from_str(TOKENIZER.to_str())
    merged.add_tokens(["bad", " bad", " rude"])
    files = text_files() | {"tokenizer.json": merged.to_str().encode()}
    async with (
        running(replica(1), files=files) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        await text(http, bad_words=["bad", "rude"])
        rules = cluster.nodes[1].submits[0].rules
    assert rules
    bad, spaced = merged.token_to_id("bad"), merged.token_to_id(" bad")
    assert rules.bad_words == ((bad,), (spaced,), tuple(ids_of("rude")))


async def test_special_tokens_are_shown(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    cluster.nodes[1].script = lambda submit: [*ids_of("a"), 2, *ids_of("b")]
    assert await text(http) == "ab"
    assert await text(http, skip_special_tokens=False) == "a<|user|>b"
    kept = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert await text(http, **kept) == f"a<|user|>b{EOS}"
    parts = await events(http, {**CHAT, "skip_special_tokens": False}, "chat/completions")
    deltas = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(deltas) == "a<|user|>b"


async def test_what_ends_a_text_is_kept(http: aiohttp.ClientSession) -> None:
    (o,) = ids_of("o")
    for kept in (True, False):
        more = {"include_stop_str_in_output": kept}
        assert await text(http, stop=["o w"], **more) == ("hello w" if kept else "hell")
        assert await text(http, stop_token_ids=[o], **more) == ("hello" if kept else "hell")
        assert await text(http, **more) == "hello world"


@pytest.mark.parametrize("most", [1, 4, CONTEXT - 60])
async def test_prompts_are_truncated_as_by_transformers(
    cluster: Cluster, http: aiohttp.ClientSession, most: int
) -> None:
    oracle = Tokenizer.from_str(TOKENIZER.to_str())
    oracle.enable_truncation(most, direction="left")
    for prompt in ("hello world", "abc" * 400):
        await text(http, prompt=prompt, truncate_prompt_tokens=most)
        found = cluster.nodes[1].submits[-1].tokens
        assert found == tuple(oracle.encode(prompt).ids)
    await text(http, prompt=list(range(4, 60)) * 20, truncate_prompt_tokens=most)
    assert cluster.nodes[1].submits[-1].tokens == tuple((list(range(4, 60)) * 20)[-most:])
    messages = [{"role": "user", "content": "abc" * 400}]
    body = {**CHAT, "messages": messages, "truncate_prompt_tokens": most}
    assert (await post(http, body, "chat/completions"))[0] == 200
    whole = [0, 2, *ids_of("abc" * 400), 3]
    assert cluster.nodes[1].submits[-1].tokens == tuple(whole[-most:])
    status, answer = await post(http, {**ASK, "truncate_prompt_tokens": CONTEXT + 1})
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


TRIMS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | trim + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KEEPS = TRIMS.replace(" | trim", "")


@pytest.mark.parametrize("template", [TRIMS, KEEPS])
@pytest.mark.parametrize("final", ["The answer", "The answer ", "a"])
async def test_the_last_message_is_continued_as_by_transformers(template: str, final: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": final}]
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, bos_token=BOS, eos_token=EOS, chat_template=template
    )
    expected = oracle.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    async with running(replica(1), files=text_files(template)) as cluster:
        async with aiohttp.ClientSession(cluster.service.url) as http:
            body = {**CHAT, "messages": messages, "continue_final_message": True}
            assert (await post(http, body, "chat/completions"))[0] == 200
        (submit,) = cluster.nodes[1].submits
    assert submit.tokens == tuple(ids_of(str(expected)))


async def test_a_last_message_that_the_template_leaves_out() -> None:
    async with (
        running(replica(1), files=text_files("{{ messages[0].content }}")) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        messages = [{"role": "user", "content": text} for text in "ab"]
        body = {**CHAT, "messages": messages, "continue_final_message": True}
        status, answer = await post(http, body, "chat/completions")
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ messages[0].content }}", "low", None),
    ],
)
async def test_how_much_a_model_thinks(template: str, effort: str, expected: str | None) -> None:
    async with running(replica(1), files=text_files(template)) as cluster:
        async with aiohttp.ClientSession(cluster.service.url) as http:
            body = {**CHAT, "reasoning_effort": effort}
            status, answer = await post(http, body, "chat/completions")
        found = [submit.tokens for submit in cluster.nodes[1].submits]
    if expected is None:
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")
    else:
        assert found == [tuple(ids_of(expected))]
