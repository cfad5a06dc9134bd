"""The modes in which a request runs, on two nodes: the same test on a CPU and on a GPU."""

import asyncio
from pathlib import Path

from services.local.processes import log_of
from shared.messages.scaling import EventState
from tests.support.cluster import Oracle, Running, prompts, running
from tests.support.models import TINY

REQUESTS, TOKENS = 12, 80
SHORT = 24
"""Tokens of requests that need not outlast a transfer."""


async def a_request_in_every_mode(
    directory: Path, checkpoint: Path, oracle: Oracle, *, device: str, apart: bool
) -> None:
    """Alone on a node; over a path of two stages, the one or the other first; on a path while its
    blocks arrive, and from there to a complete node. The oracle's tokens every time.

    `device`: of both nodes. Each says to be on a machine of its own, if they are `apart`.
    """
    settings = {
        "LAMBDASCALE_NODE_DEVICE": device,
        "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",  # a copy of 0.6 MB takes 3 s
        "LAMBDASCALE_NODE_LOCAL_BYTES_PER_S": "200000",
        "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
        "LAMBDASCALE_NODE_SLOTS": "4",
        "LAMBDASCALE_NODE_KV_MOVES": "always",  # copying takes longer than to compute so little
        "LAMBDASCALE_NODE_SPECULATION": "0",  # with it answers end before the blocks come
        "LAMBDASCALE_PLANNER_IDLE_S": "600",
    }
    asked = prompts(REQUESTS, TINY.vocab_size)
    expected = oracle.tokens(asked, TOKENS)
    try:
        async with running(directory, checkpoint, nodes=2, settings=settings, apart=apart) as up:
            alone = await up.ask(asked[0], SHORT)
            assert (alone.tokens, alone.error) == (expected[0][:SHORT], "")
            answers = await up.ask_all(asked, TOKENS)
            assert {answer.error for answer in answers} == {""}
            assert [answer.tokens for answer in answers] == expected
            await over_a_growing_path(up)
            for names in (("node-0", "node-1"), ("node-1", "node-0"), ("node-1",)):
                stages = await up.path(*names)
                tokens = await asyncio.gather(
                    *(up.over_path(stages, prompt, SHORT) for prompt in asked[:3])
                )
                assert list(tokens) == [each[:SHORT] for each in expected[:3]]
    except BaseException:
        for name in ("node-0", "node-1", "gateway", "planner"):
            print(f"--- {name}", log_of(directory, name).read_text()[-4000:], sep="\n")
        raise


async def over_a_growing_path(up: Running) -> None:
    """The requests before caused a scale-out, ran over nodes that were still loading, and moved."""
    await up.until(lambda: complete(up), "the event's end")
    assert any(token.stages == 2 for token in up.watch.partial_tokens)
    assert await up.moved() > 0
    await up.until(
        lambda: any(status.received_tokens for status in up.statuses.values()),
        "a request that moves with its KV",
    )


def complete(up: Running) -> bool:
    event = up.watch.scale_out()
    return event is not None and event.state is EventState.COMPLETE
