"""What says only what has changed ends in the same state as what says everything, whatever is lost,
repeated or late on the way."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.others import Others
from services.gateway.core.reporting import Reporting
from services.node.core.told import LATELY, Telling, Told
from services.planner.core.cluster import Cluster
from services.planner.core.load_reports import LoadReports
from services.registry.core.holdings import Holdings, Taken
from shared.ids import GatewayId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import Holding, NodeStatus, Tier
from tests.unit.registry.builders import info, record

MODELS = [ModelId(name) for name in "abcd"]
HELD = st.dictionaries(
    st.tuples(st.sampled_from(MODELS), st.sampled_from([Tier.GPU, Tier.DISK])),
    st.frozensets(st.integers(0, 3)).map(lambda blocks: tuple(sorted(blocks))),
)
FATES = st.sampled_from(["comes", "comes", "comes twice", "is late", "is lost"])


def status(told: Told) -> NodeStatus:
    return NodeStatus(
        node=NodeId("n"),
        generation=Generation(1),
        seq=told.seq,
        since=told.since,
        arena_free=0,
        holdings=told.holdings,
        dropped=told.dropped,
    )


def said(held: dict[tuple[ModelId, Tier], tuple[int, ...]]) -> list[Holding]:
    return [Holding(*key, blocks) for key, blocks in held.items()]


@given(st.lists(st.tuples(HELD, FATES), min_size=1, max_size=25))
def test_statuses(history: list[tuple[dict[tuple[ModelId, Tier], tuple[int, ...]], str]]) -> None:
    node, registry, planner = Telling(), Holdings(), Cluster()
    planner.on_joined(info("n"))
    late: list[NodeStatus] = []
    asked = False
    for held, fate in history:
        message = status(node.next(said(held), whole=asked))
        asked = False
        arriving = [message] * {"comes twice": 2, "comes": 1}.get(fate, 0)
        if fate == "is late":
            late.append(message)
        elif arriving:
            arriving, late = [*arriving, *late], []
        for each in arriving:
            gaps = registry.report(each, 0.0) is Taken.GAP, planner.on_status(each, 0.0).missed
            assert gaps[0] == gaps[1]
            asked = asked or gaps[0]
        planner.validate()
        registry.validate()
        for model in MODELS:  # what is remembered of an answer has to hold after the next status
            planner.whole_on_disk(record(model, model, n_blocks=2))
            planner.fastest_sender(model)
        if arriving and not asked:
            expected: dict[ModelId, dict[Tier, frozenset[int]]] = {}
            for (model, tier), blocks in held.items():
                expected.setdefault(model, {})[tier] = frozenset(blocks)
            assert registry.models(NodeId("n"), Generation(1)) == expected
            assert {
                model: {t: planner.held(NodeId("n"), model, [t]) for t in tiers}
                for model, tiers in expected.items()
            } == expected
            assert set(planner.models_on(NodeId("n"))) == {m for m, t in held if t is Tier.GPU}


def test_a_receiver_that_missed_a_few_statuses_needs_not_ask_and_after_many_it_must() -> None:
    for missed in range(LATELY + 3):
        node, registry = Telling(), Holdings()
        registry.report(status(node.next([])), 0.0)
        for block in range(missed):
            node.next([Holding(MODELS[0], Tier.GPU, (block,))])
        for _ in range(LATELY):  # the first status is a basis for the first ones after it
            node.next([])
        taken = registry.report(status(node.next([])), 0.0)
        assert (taken is Taken.GAP) == (missed > 0), missed


NAMES = [ModelName(name) for name in "abc"]
COUNTS = st.integers(0, 3)
LOADS = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(COUNTS, st.dictionaries(st.sampled_from(["i", "j"]), st.integers(1, 3))),
)


def loads(of: dict[ModelName, tuple[int, dict[str, int]]]) -> list[ModelLoad]:
    return [
        ModelLoad(
            model=name,
            queued_requests=of[name][0],
            running_requests=sum(of[name][1].values()),
            running_tokens=100 * sum(of[name][1].values()),
            instance_requests={InstanceId(k): n for k, n in of[name][1].items()},
        )
        for name in NAMES
        if name in of
    ]


def heard(messages: Iterable[GatewayLoad]) -> tuple[LoadReports, Others]:
    planner, gateway = LoadReports(), Others()
    for message in messages:
        planner.on_load(message, 0.0)
        planner.validate()
        gateway.hear(message, 0.0)
    return planner, gateway


@given(st.lists(st.tuples(LOADS, FATES), min_size=1, max_size=12), LOADS)
def test_load_reports(
    history: list[tuple[dict[ModelName, tuple[int, dict[str, int]]], str]],
    last: dict[ModelName, tuple[int, dict[str, int]]],
) -> None:
    sender, name = Reporting(whole_s=0.5), GatewayId("g")
    arriving: list[GatewayLoad] = []
    late: list[GatewayLoad] = []
    for step, (now, fate) in enumerate(history):
        message = sender.next(name, "", loads(now), 0.1 * step)
        if message is None or fate == "is lost":
            continue
        if fate == "is late":
            late.append(message)
        else:
            arriving += [message] * (2 if fate == "comes twice" else 1) + late
            late = []
    whole = sender.next(name, "", loads(last), 100.0)
    assert whole is not None
    planner, others = heard([*arriving, whole, *late])
    expected, of_others = heard([GatewayLoad(gateway=name, models=tuple(loads(last)))])
    for model in NAMES:
        assert planner.demand(model) == expected.demand(model)
        assert planner.running(model) == expected.running(model)
        assert others.of(model) == of_others.of(model)


@given(st.lists(LOADS, min_size=1, max_size=12))
def test_load_reports_that_all_come_are_always_right(
    history: list[dict[ModelName, tuple[int, dict[str, int]]]],
) -> None:
    sender, name = Reporting(whole_s=0.5), GatewayId("g")
    planner, others = heard([])
    for step, now in enumerate(history):
        if message := sender.next(name, "", loads(now), 0.1 * step):
            planner.on_load(message, 0.0)
            others.hear(message, 0.0)
        expected, of_others = heard([GatewayLoad(gateway=name, models=tuple(loads(now)))])
        listed = [model for model in NAMES if model in now]
        for model in listed:  # a model that is no longer listed goes with the next whole report
            assert planner.demand(model) == expected.demand(model)
            assert others.of(model) == of_others.of(model)
