"""An event that grows while it runs, with real processes, and where its time went."""

import asyncio
from pathlib import Path

from shared import subjects
from shared.bus.base import On
from shared.messages.ledger import Phase
from shared.messages.load import GatewayLoad
from shared.messages.scaling import EventRecord, EventState
from tests.support.cluster import Oracle, Running, prompts, running
from tests.support.models import TINY

TOKENS = 60
SLOTS = 4
SETTINGS = {
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "200000",  # a copy of 0.6 MB takes 3 s
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.05",
    "LAMBDASCALE_NODE_SLOTS": str(SLOTS),
    "LAMBDASCALE_NODE_SPECULATION": "0",  # or answers of random weights end before the blocks come
}
SHARE = 0.999


async def test_one_replica_becomes_two_and_then_four_in_one_event(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(tmp_path, checkpoint, nodes=4, settings=SETTINGS) as up:
        waiting_since = asyncio.get_running_loop().create_future()

        async def hear(load: GatewayLoad) -> None:
            of_model = load.models[0]
            if of_model.queued_requests and not waiting_since.done():
                waiting_since.set_result(of_model.waiting_since_ns)

        await up.bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
        await up.scale(1)  # only the operator scales
        asked = prompts(SLOTS + 2, TINY.vocab_size)
        answers = asyncio.create_task(up.ask_all(asked, TOKENS))
        await waiting_since

        event = (await up.scale(2)).event
        assert event is not None
        await up.until(lambda: _state(up, event) is EventState.TRANSFERRING, "the transfers")
        begun = up.watch.records[event]
        assert (await up.scale(4)).event == event
        await up.until(lambda: _state(up, event) is EventState.COMPLETE, "the end")
        got = await answers
        assert {answer.error for answer in got} == {""}
        assert [answer.tokens for answer in got] == oracle.tokens(asked, TOKENS)

        record = up.watch.records[event]
        check_growth(up, begun, record)
        check_ledger(up, record, waiting_since.result())


def _state(up: Running, event: str) -> EventState | None:
    record = next((each for each in up.watch.records.values() if each.id == event), None)
    return None if record is None else record.state


def check_growth(up: Running, begun: EventRecord, record: EventRecord) -> None:
    newcomers = [node for growth in record.growths for node in growth.nodes]
    assert (len(begun.targets), len(newcomers)) == (1, 2)
    assert record.targets == (*begun.targets, *newcomers)
    assert not record.repairs, record.repairs
    assert set(begun.transfers) <= set(record.transfers), "what flowed was planned anew"
    assert record.bytes_moved == 3 * record.nbytes, "something came twice"
    planned = {(t.dst, t.block): t.src for t in record.transfers}
    came = {(a.node, a.block): a.source for a in up.watch.arrivals if a.event == record.id}
    assert came == planned


def check_ledger(up: Running, record: EventRecord, waiting_since_ns: int) -> None:
    """At least 99.9 % of the time from the first waiting request, as the gateway said, to the last
    block of the last node, as that node said."""
    last_ns = max(a.ready_ns for a in up.watch.arrivals if a.event == record.id)
    whole_s = (last_ns - waiting_since_ns) / 1e9
    ledger = {spent.phase: spent.seconds for spent in record.ledger}
    assert sum(ledger.values()) >= SHARE * whole_s
    assert any(record.last in growth.nodes for growth in record.growths)
    assert ledger[Phase.GROW] > 0
    copying = (Phase.FIRST_BYTE, Phase.FIRST_PATH, Phase.FIRST_TOKEN, Phase.LAST_BLOCK)
    after_evidence_s = sum(ledger.values()) - ledger[Phase.EVIDENCE]
    assert sum(ledger.get(phase, 0.0) for phase in copying) > after_evidence_s / 2
