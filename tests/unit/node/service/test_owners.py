"""A gateway that is gone keeps no slot: what nobody reads any more is not generated."""

import asyncio
from pathlib import Path

import pytest

from services.node import owners
from shared import subjects
from shared.bus.base import On
from shared.messages.pool import NodeStatus
from shared.messages.serving import GatewayGone, Tokens
from tests.unit.node.cluster import GATEWAY, WAIT_S, Nodes, nodes
from tests.unit.node.service.builders import SLOW

TOKENS = subjects.gateway_tokens(GATEWAY)


def free(up: Nodes) -> bool:
    said = [m for m in up.statuses.messages if isinstance(m, NodeStatus)]
    return bool(said) and not said[-1].running


async def hang_up(up: Nodes) -> None:
    for subscription in up.bus.subscriptions:
        if subscription.subject == TOKENS:
            await subscription.close()


async def ended(up: Nodes) -> None:
    """The request ends, and its node says why."""
    await up.statuses.until(lambda: free(up))
    told = await up.services["a"].story("r")
    assert any(step.cause == GATEWAY for step in told)


async def begun(up: Nodes) -> None:
    """A request is under way."""
    await up.submit("a", max_tokens=400)
    await up.tokens.until(lambda: len(up.tokens_of("r")) >= 2)
    await up.statuses.until(lambda: not free(up))


async def test_attempts_of_a_gateway_that_is_gone_end(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LOOK_S", 0.05)
    monkeypatch.setattr(owners, "ASK_TIMEOUT_S", 0.02)
    async with nodes(tmp_path, checkpoint, "a", settings=SLOW) as up:
        await up.promoted("a")
        assert len(await up.generate("a", request="lives")) == 8, "somebody listens"
        await begun(up)
        await hang_up(up)
        await ended(up)


async def test_they_end_at_once_if_another_gateway_misses_it_too(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LOOK_S", 1000.0)
    monkeypatch.setattr(owners, "ASK_TIMEOUT_S", 0.02)
    async with nodes(tmp_path, checkpoint, "a", settings=SLOW) as up:
        await up.promoted("a")
        await begun(up)
        gone, before = GatewayGone(gateway=GATEWAY), len(up.tokens_of("r"))
        await up.bus.publish(subjects.GATEWAYS_GONE, gone)
        await up.tokens.until(lambda: len(up.tokens_of("r")) >= before + 10)  # it is there
        await hang_up(up)
        await up.bus.publish(subjects.GATEWAYS_GONE, gone)
        await ended(up)


async def test_they_go_on_if_it_is_back_soon(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that missed it was cut off as well, and was back first."""
    monkeypatch.setattr(owners, "LOOK_S", 1000.0)
    monkeypatch.setattr(owners, "ASK_TIMEOUT_S", 0.02)
    came = asyncio.Queue[Tokens]()
    async with nodes(tmp_path, checkpoint, "a", settings=SLOW) as up:
        await up.promoted("a")
        await begun(up)
        await hang_up(up)
        await up.bus.publish(subjects.GATEWAYS_GONE, GatewayGone(gateway=GATEWAY))
        await asyncio.sleep(owners.AGAIN_S / 2)
        await up.bus.subscribe(TOKENS, On(Tokens, came.put))
        await asyncio.sleep(owners.AGAIN_S)
        while not came.empty():
            came.get_nowait()
        async with asyncio.timeout(WAIT_S):
            for _ in range(5):
                await came.get()
