"""What `lambdascale top` shows of what services say."""

import asyncio
import io

import pytest
from rich.console import Console
from rich.table import Table

from services.cli.top import SILENT_S, Loads, events_table, models_table, nodes_table
from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.instances import Coming, Instance, InstanceSet, InstanceState, Stage
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import NodeInfo, NodeView, PoolState
from shared.messages.scaling import PlannerState

pytestmark = pytest.mark.virtual_time
NAME = ModelName("tiny")


def text(table: Table) -> list[list[str]]:
    out = io.StringIO()
    Console(file=out, width=150).print(table)
    return [line.split() for line in out.getvalue().splitlines()]


def instance(name: str, *nodes: str, state: InstanceState = InstanceState.SERVING) -> Instance:
    stages = tuple(Stage(NodeId(node), "", n, n + 1) for n, node in enumerate(nodes))
    return Instance(
        id=InstanceId(name), stages=stages, state=state, capacity=1.0, slots=8, event=None
    )


def load(gateway: str, *, whole: bool = True, queued: int = 0, running: int = 0) -> GatewayLoad:
    model = ModelLoad(model=NAME, queued_requests=queued, running_requests=running)
    models = (model,) if queued or running else ()
    return GatewayLoad(gateway=GatewayId(gateway), models=models, whole=whole)


async def test_load_is_that_of_all_gateways_that_are_there() -> None:
    loads = Loads()
    await loads.hear(load("a", queued=2, running=1))
    await loads.hear(load("b", queued=1, running=5))
    await loads.hear(load("b", whole=False))
    assert loads.of(NAME) == (3, 6)
    await loads.hear(load("b"))
    assert loads.of(NAME) == (2, 1)
    await asyncio.sleep(SILENT_S)
    assert loads.of(NAME) == (0, 0)


async def test_models_have_replicas_paths_and_what_comes() -> None:
    loads = Loads()
    await loads.hear(load("a", queued=2, running=1))
    instances = (
        instance("i", "n0"),
        instance("p", "n0", "n1"),
        instance("d", "n2", state=InstanceState.DRAINING),
    )
    coming = Coming(share=0.5, first_s=0.1, complete_s=1.0, replicas=2)
    found = InstanceSet(
        name=NAME, model_id=ModelId("m"), epoch=1, revision=1, instances=instances, coming=coming
    )
    *_, row = text(models_table(PlannerState(sets=(found,), events=()), loads))
    assert row == ["tiny", "2", "1", "1", "1", "50%", "of", "2"]


async def test_nodes_have_load_and_room() -> None:
    info = NodeInfo(
        node=NodeId("n0"),
        generation=Generation(1),
        address="tcp://n0",
        host="h",
        device="cpu",
        arena_bytes=2 * 10**9,
        link_bytes_per_s=0,
        slots=4,
    )
    view = NodeView(
        info=info,
        holdings=(),
        arena_free=10**9,
        reserved_by=None,
        running=3,
        kv_used=1,
        kv_capacity=4,
        prompt_tokens=10,
        cached_tokens=5,
    )
    *_, row = text(nodes_table(PoolState(nodes=(view,), models=())))
    assert row == ["n0", "all", "3", "25%", "50%", "0", "1.0", "of", "2.0"]


async def test_nothing_is_an_empty_table() -> None:
    assert len(text(events_table(PlannerState(sets=(), events=())))) == 2
