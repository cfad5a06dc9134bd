"""The main job with real processes: every token equals the oracle's, whatever happens meanwhile."""

import asyncio
import itertools
import signal
from collections.abc import Sequence
from pathlib import Path

from services.cli.events import read_spans
from services.local.cluster import node_id
from services.planner.core.events import TERMINAL
from shared import subjects
from shared.bus.base import On
from shared.ids import GatewayId, NodeId
from shared.messages.load import GatewayLoad
from shared.messages.scaling import BlockArrived, EventState
from shared.messages.story import StoryQuery, Told
from tests.support.cluster import LIMIT_S, Answer, Oracle, Running, prompts, running
from tests.support.commands import run
from tests.support.models import TINY
from tests.support.modes import a_request_in_every_mode

TOKENS = 24
LONG = 100
"""Tokens: 5 s with the steps of SLOW_LINKS."""
LASTING = 8
"""Requests that run until the copies are complete. More would fill SLOW_LINKS with activations."""
SLOW_LINKS = {
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",  # a copy of 0.6 MB takes 3 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": "4",
}


def check(
    oracle: Oracle, asked: Sequence[Sequence[int]], got: Sequence[list[int]], count: int
) -> None:
    assert list(got) == oracle.tokens(asked, count)


async def scale(up: Running, count: int) -> None:
    await up.scale(count)
    await up.replicas(count)


async def test_one_node_and_paths_of_two_to_five_stages(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=5, blocks=6) as up:
        asked = prompts(3, TINY.vocab_size)
        answers = await up.ask_all(asked, TOKENS)
        check(oracle, asked, [answer.tokens for answer in answers], TOKENS)
        assert [answer.finish for answer in answers] == ["length"] * 3

        await scale(up, 5)
        for count in range(2, 6):
            stages = await up.path(*(node_id(number) for number in range(count)))
            traces = [f"00-{count:031x}{number}-{1:016x}-01" for number in range(len(asked))]
            tokens = await asyncio.gather(
                *(
                    up.over_path(stages, prompt, TOKENS, trace=trace)
                    for prompt, trace in zip(asked, traces, strict=True)
                )
            )
            check(oracle, asked, tokens, TOKENS)
            for trace in traces:
                await check_spans(up, trace, [stage.node for stage in stages])


async def check_spans(up: Running, trace: str, nodes: Sequence[NodeId]) -> None:
    """Each later stage records one span, in that of the attempt, which the leader records."""
    leader, *others = nodes
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = read_spans(up.cluster.spec.directory / "traces", trace.split("-")[1])
            spans = {span["attributes"].get("node"): span for span in found}
            if set(spans) >= set(nodes):
                break
            await asyncio.sleep(0.05)
    assert [span["name"] for span in found].count("stage") == len(others)
    assert spans[leader]["name"] == "attempt"
    for node in others:
        assert spans[node]["parent_id"] == spans[leader]["span_id"]
        ran = spans[node]["attributes"]["positions"]
        assert ran >= TOKENS or ran == 0, "nothing, if the leader has gone on alone"


async def test_scale_out_under_load_and_back(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Requests begun while blocks arrive, over partial nodes, across the switch, then scale-in."""
    # Answers of random weights repeat themselves: with speculation they end before the blocks come.
    settings = {**SLOW_LINKS, "LAMBDASCALE_NODE_SPECULATION": "0"}
    async with running(tmp_path, checkpoint, nodes=5, settings=settings) as up:
        asked = prompts(40, TINY.vocab_size)
        lasting = (until_the_end(up, prompt) for prompt in asked[:LASTING])
        answers, rounds = await asyncio.gather(up.ask_all(asked, LONG), asyncio.gather(*lasting))
        assert {answer.error for answer in (*answers, *itertools.chain(*rounds))} == {""}
        check(oracle, asked, [answer.tokens for answer in answers], LONG)
        for first, again in zip(answers, rounds, strict=False):
            assert all(answer.tokens == first.tokens for answer in again)

        event = up.watch.scale_out()
        assert event is not None
        assert event.state is EventState.COMPLETE
        assert len(event.targets) == 4
        assert event.bytes_moved == 4 * event.nbytes
        assert any(token.stages > 1 for token in up.watch.partial_tokens)
        assert up.watch.switched
        await up.replicas(1)
        await nodes_that_leave_hand_over(up, oracle)


async def until_the_end(up: Running, prompt: Sequence[int]) -> list[Answer]:
    """Asks again and again until the event has ended: requests run at every moment of it, however
    long the copies take beside other tests."""
    answers: list[Answer] = []
    while not ended(up):
        answers.append(await up.ask(prompt, LONG))
    return answers


async def nodes_that_leave_hand_over(up: Running, oracle: Oracle) -> None:
    """Under load, the only replica's node is drained, and then its successor is told to end."""
    asked = prompts(8, TINY.vocab_size)
    for leave in (drain, end):
        (node,) = serves(up)
        load = asyncio.create_task(up.ask_all(asked, LONG))
        await up.until(lambda: has_requests(up), "requests that run")
        await leave(up, node)
        answers = await load
        assert {answer.error for answer in answers} == {""}
        check(oracle, asked, [answer.tokens for answer in answers], LONG)
        await up.replicas(1)


def has_requests(up: Running) -> bool:
    return up.watch.load is not None and up.watch.load.running_requests > 0


async def drain(up: Running, node: str) -> None:
    drained = await operate(up, "drain", node)
    assert f"{node} is empty" in drained
    assert node not in serves(up)
    await operate(up, "uncordon", node)


async def operate(up: Running, action: str, node: str) -> str:
    """What `lambdascale node ACTION NODE` tells the operator."""
    directory = up.cluster.spec.directory
    ran = await run("node", action, node, "--data", directory, cwd=directory)
    assert ran.code == 0, ran.err
    return ran.err


async def end(up: Running, node: str) -> None:
    up.kill(node, signal.SIGTERM)
    await up.until(lambda: node not in serves(up), "others taking over")


def serves(up: Running) -> set[str]:
    return {s.node for i in up.watch.instances for s in i.stages}


async def test_speculation_across_the_switch(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Greedy answers that repeat themselves are mostly proposals; drawn ones have seeds."""
    async with running(tmp_path, checkpoint, nodes=3, settings=SLOW_LINKS) as up:
        greedy = prompts(16, TINY.vocab_size)
        drawn = prompts(20, TINY.vocab_size)[16:]

        async def ask_drawn() -> list[list[int]]:
            asked = (
                up.ask(prompt, 120, temperature=0.7, seed=seed) for seed, prompt in enumerate(drawn)
            )
            return [answer.tokens for answer in await asyncio.gather(*asked)]

        answers, across = await asyncio.gather(up.ask_all(greedy, 400), ask_drawn())
        assert {answer.error for answer in answers} == {""}
        check(oracle, greedy, [answer.tokens for answer in answers], 400)
        assert any(token.stages > 1 for token in up.watch.partial_tokens)
        assert up.watch.switched
        assert await up.moved() > 0
        async with asyncio.timeout(LIMIT_S):  # how many a node was given depends on the machine
            while not all(status.tokens_accepted for status in up.statuses.values()):
                await up.ask_all(greedy, 100)
        await scale(up, 1)
        assert [len(tokens) for tokens in across] == [120] * len(drawn)
        assert await ask_drawn() == across


async def test_a_request_in_every_mode(tmp_path: Path, checkpoint: Path, oracle: Oracle) -> None:
    await a_request_in_every_mode(tmp_path, checkpoint, oracle, device="cpu", apart=True)


async def test_node_killed_while_it_receives_and_relays(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=5, settings=SLOW_LINKS) as up:
        asked = prompts(40, TINY.vocab_size)
        load = asyncio.gather(*(up.ask(prompt, 40) for prompt in asked))
        await up.until(lambda: 8 <= len(pulled(up)) < 20, "a transfer in its middle")
        victim = next(a.node for a in pulled(up) if a.node != "node-0")
        up.kill(victim)
        answers = await load
        assert {answer.error for answer in answers} == {""}
        check(oracle, asked, [answer.tokens for answer in answers], 40)
        await up.until(lambda: ended(up), "the event's end")
        event = up.watch.scale_out()
        assert event is not None
        assert event.state is EventState.COMPLETE
        assert event.revision > 0
        assert victim not in event.targets


def ended(up: Running) -> bool:
    event = up.watch.scale_out()
    return event is not None and event.state in TERMINAL


def pulled(up: Running) -> list[BlockArrived]:
    return [a for a in up.watch.arrivals if a.source != a.node]


async def test_nodes_killed_by_a_request_in_the_middle_of_others(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    """Whichever node streams its tokens is killed: two of three, then it is refused, also when it
    comes again. The other requests go on."""
    settings = {"LAMBDASCALE_NODE_STEP_FLOOR_S": "0.1"}
    async with running(tmp_path, checkpoint, nodes=3, settings=settings) as up:
        await scale(up, 3)
        asked = prompts(10, TINY.vocab_size)
        poison = asked.pop()
        headers = {"X-Request-ID": "poison", "Idempotency-Key": "poison"}
        load = asyncio.gather(*(up.ask(prompt, 40) for prompt in asked))
        killed = set[NodeId]()
        kills = asyncio.create_task(kill_what_runs(up, "poison", killed))
        refused = await up.ask(poison, 40, headers=headers)
        assert "request_kills_nodes" in refused.error
        assert len(killed) == 2
        answers = await load
        assert {answer.error for answer in answers} == {""}
        check(oracle, asked, [answer.tokens for answer in answers], 40)
        again = await up.ask(poison, 40, headers=headers)
        assert "request_kills_nodes" in again.error
        kills.cancel()
        assert len(up.watch.replicas) == 1


async def kill_what_runs(up: Running, call: str, killed: set[NodeId]) -> None:
    """Kills each node that gives a token of the call's request, once. A request that is tried is
    cleared after a few tokens, so it looks often."""
    gateway: asyncio.Future[GatewayId] = asyncio.get_running_loop().create_future()

    async def hear(load: GatewayLoad) -> None:
        if not gateway.done():
            gateway.set_result(load.gateway)

    await up.bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
    subject = subjects.gateway_story(await gateway)
    while True:
        told = await up.bus.request(subject, StoryQuery(subject=call), Told, timeout=LIMIT_S)
        for step in told.steps:
            instance = next((each for each in step.subjects if each.startswith("replica-")), "")
            node = NodeId(instance.removeprefix("replica-"))
            if step.text.startswith("streaming") and node not in killed:
                killed.add(node)
                up.kill(node)
        await asyncio.sleep(0.01)
