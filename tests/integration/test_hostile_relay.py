"""A relay that sends wrong bytes stops no scaling event, and nothing wrong is run."""

import sys
from pathlib import Path

from services.local.nats_servers import Place
from shared import subjects
from shared.bus.base import On
from shared.errors import DigestMismatch
from shared.ids import NodeId
from shared.messages.scaling import (
    EventChanged,
    EventState,
    PullFailed,
    ScaleAccepted,
    SetInstances,
)
from tests.support.cluster import MODEL, Oracle, prompts, running
from tests.support.models import TINY

LIAR = NodeId("node-1")
PLACES: dict[str, Place] = {LIAR: Place(within=(sys.executable, "-m", "tests.integration.liar"))}
SETTINGS = {
    "LAMBDASCALE_PLANNER_STRATEGY": "chain",
    "LAMBDASCALE_NODE_LINK_BYTES_PER_S": "20000000",
}


async def test_wrong_bytes_are_refused_and_come_from_another(
    tmp_path: Path, checkpoint: Path, oracle: Oracle
) -> None:
    async with running(
        tmp_path, checkpoint, nodes=4, settings=SETTINGS, blocks=6, places=PLACES
    ) as up:
        events: list[EventChanged] = []
        failures: list[PullFailed] = []

        async def changed(message: EventChanged) -> None:
            events.append(message)

        async def failed(message: PullFailed) -> None:
            failures.append(message)

        await up.bus.subscribe(subjects.EVENTS, On(EventChanged, changed))
        await up.bus.subscribe(subjects.ARRIVALS, On(PullFailed, failed))
        request = SetInstances(name=MODEL, instances=4)
        await up.bus.request(subjects.PLANNER_SCALE, request, ScaleAccepted, timeout=10)
        await up.replicas(4)
        assert any(
            transfer.src == LIAR for event in events for transfer in event.record.transfers
        ), "nothing was to come from the liar"
        assert {failure.source for failure in failures} == {LIAR}
        assert {failure.code for failure in failures} == {DigestMismatch.code}
        record = events[-1].record
        assert record.state is EventState.COMPLETE
        assert LIAR not in {transfer.src for transfer in record.transfers}
        assert "got wrong bytes of block 0 from node-1" in record.repairs[0].why
        asked = prompts(16, TINY.vocab_size)
        answers = await up.ask_all(asked, 12)
        assert [answer.tokens for answer in answers] == oracle.tokens(asked, 12)
