"""Where the planner's shell computes, and whom it takes for dead."""

import asyncio
import threading
from typing import cast

import pytest

from services.planner.core import commands
from services.planner.core.planner import Planner
from services.planner.core.tickets import Ticket
from services.planner.shell import FEW, PINGS, Shell, compute
from services.planner.store import Store
from shared import subjects, telemetry
from shared.bus.memory import MemoryBus
from shared.ids import NodeId
from shared.messages import Message, Ok
from simulation.bus import DETECT_S, SimBroker


async def test_what_is_about_few_nodes_is_computed_at_once_and_the_rest_in_a_thread() -> None:
    here = threading.get_ident()
    assert await compute(FEW, threading.get_ident) == here
    assert await compute(FEW + 1, threading.get_ident) != here


@pytest.mark.virtual_time
async def test_while_it_is_cut_off_itself_it_takes_no_node_for_dead() -> None:
    broker = SimBroker()
    async with MemoryBus(broker, "planner") as own, MemoryBus(broker, "node") as node:

        async def take(_: Message) -> Ok:
            return Ok()

        ping = commands.Ping(ticket=Ticket(0, 1, None, None, 0), node=NodeId("n"), cause="test")
        await node.serve(subjects.node_ping(NodeId("n")), Message, take)
        log = telemetry.logger("test")
        nothing = cast("Planner", None), cast("Store", None)
        shell = Shell(own, *nothing, log, lambda *_: None, lambda _: None)
        broker.cut("planner")
        await asyncio.sleep(DETECT_S)
        asked = asyncio.create_task(shell._ping(ping))
        await asyncio.sleep(DETECT_S)
        assert not asked.done()
        broker.heal("planner")
        assert await asked
        broker.cut("node")
        assert not await shell._ping(ping)
        assert PINGS > 1
