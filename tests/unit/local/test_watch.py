"""The demo's observer: what it makes of the messages on the bus."""

from services.local.watch import Role, Watch
from shared.ids import Generation
from shared.messages.instances import InstanceState
from shared.messages.pool import Holding, NodeStatus, Tier
from tests.unit.cli import records
from tests.unit.cli.records import MODEL_ID, SOURCE, TARGET, instances, path, replica, watched


async def test_roles_are_noted_when_they_change() -> None:
    watch = await watched()
    assert [role for _, role in watch.roles[SOURCE]] == [Role.REPLICA]
    assert [role for _, role in watch.roles[TARGET]] == [Role.PATH, Role.REPLICA, Role.IDLE]
    times = [at for at, _ in watch.roles[TARGET]]
    assert times == sorted(times)
    assert watch.role(TARGET) is Role.IDLE


async def test_a_path_that_gives_its_requests_up_is_noted_once() -> None:
    watch = Watch()
    moving = instances(replica(SOURCE), path(InstanceState.MOVING))
    for _ in range(3):
        await watch.hear(moving)
    assert [name for _, name in watch.switched] == ["path"]


async def test_blocks_held_are_those_that_arrived_or_that_the_node_reports() -> None:
    watch = Watch()
    await watch.hear(records.arrived(1, begin_s=0, end_s=1))
    assert watch.held[TARGET] == {1}
    await watch.hear(
        NodeStatus(
            node=TARGET,
            generation=Generation(1),
            seq=1,
            arena_free=0,
            holdings=(Holding(MODEL_ID, Tier.GPU, (0, 1)), Holding(MODEL_ID, Tier.DISK, (7,))),
        )
    )
    assert watch.held[TARGET] == {0, 1}


async def test_samples_follow_the_gateways_reports() -> None:
    watch = await watched()
    seen = [(s.queued, s.running, s.replicas, s.paths) for s in watch.samples]
    assert seen == [(9, 4, 1, 0), (3, 8, 1, 1), (0, 8, 2, 0), (0, 0, 1, 0)]


async def test_the_scale_out_is_the_event_that_moved_the_most() -> None:
    watch = await watched()
    found = watch.scale_out()
    assert found is not None
    assert found.id == records.EVENT
    assert Watch().scale_out() is None
