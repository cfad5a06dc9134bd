"""A network of schedulers under random submits, cancels, losses, interleavings and lack of KV."""

from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.node.core.rows import request_of
from shared.ids import GatewayId, InstanceId, RequestId
from shared.messages.serving import (
    LogitRules,
    Sampling,
    Submit,
)
from tests.support.amounts import examples
from tests.support.schedulers.engine import MODELS, NODES
from tests.support.schedulers.happenings import SOME_PATHS, a_move, a_submit, happen
from tests.support.schedulers.network import Network


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_attempt_ends_once_and_leaves_nothing(data: st.DataObject) -> None:
    capacity = st.sampled_from([1000, 32, 48])
    network = Network({name: data.draw(capacity) for name in NODES}, data.draw(SOME_PATHS))
    for _ in range(data.draw(st.integers(1, 120))):
        happen(network, data)
    network.settle()
    for dead in network.dead:  # the lease of a dead node ends later than its connections
        for name in network.live_nodes():
            network.links[dead, name] = deque([None])
    network.settle()
    assert not network.open
    for name in network.live_nodes():
        node = network.nodes[name]
        assert not node.engine.kv
        assert node.engine.made <= node.released
        assert (node.batcher.running, node.batcher.waiting) == (0, 0)


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_without_losses_every_attempt_ends_with_its_last_token(data: st.DataObject) -> None:
    network = Network(dict.fromkeys(NODES, 1000), data.draw(SOME_PATHS))
    for _ in range(data.draw(st.integers(1, 12))):
        network.submit(a_submit(network, data))
        for _ in range(data.draw(st.integers(0, 4))):
            for link in network.live_links():
                network.deliver(link)
            for name in NODES:
                if network.nodes[name].sweep is None:
                    network.begin(name)
                else:
                    network.advance(name)
    network.settle()
    assert not network.open
    assert not network.failed


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_what_runs_moves_with_its_kv_and_no_token_is_lost(data: st.DataObject) -> None:
    network = Network(dict.fromkeys(NODES, 1000), data.draw(SOME_PATHS))
    for index in range(data.draw(st.integers(1, 3))):
        first = Submit(
            request=RequestId(f"r{index}"),
            attempt=1,
            gateway=GatewayId("g"),
            model_id=MODELS[0],
            instance=InstanceId("i"),
            stages=data.draw(st.sampled_from(network.paths)),
            tokens=tuple(range(data.draw(st.integers(15, 40)))),
            prompt_tokens=15,
            max_tokens=60,
            stop_ids=(),
            sampling=Sampling(),
            rules=data.draw(st.sampled_from([None, LogitRules(grammar="g")])),
        )
        network.last[first.request] = first
        network.submit(first)
    for _ in range(data.draw(st.integers(20, 60))):
        for link in network.live_links():
            network.deliver(link)
        for name in NODES:
            while network.nodes[name].preparing:
                network.prepare(name)
            if network.nodes[name].sweep is None:
                network.begin(name)
            else:
                network.advance(name)
    for _ in range(data.draw(st.integers(10, 150))):
        if network.movable() and data.draw(st.integers(0, 9)) == 0:
            network.submit(a_move(network, data))
        choices = [("deliver", link) for link in network.live_links()]
        choices += [("step", (name, name)) for name in NODES]
        if data.draw(st.integers(0, 4)) == 0:
            waiting = [(key, name) for name in NODES for key in network.nodes[name].unsettled]
            choices += [("late", each) for each in waiting] * 3
        what, (sender, name) = data.draw(st.sampled_from(choices))
        node = network.nodes[name]
        if what == "deliver":
            network.deliver((sender, name))
        elif what == "late":
            network.late(name, sender)
        elif node.preparing:
            network.prepare(name)
        elif node.bringing:
            network.bring(name, right=data.draw(st.integers(0, 9)) > 0)
        elif node.sweep is None:
            network.begin(name)
        else:
            network.advance(name)
    network.settle()
    assert not network.open
    assert not network.failed
    for node in network.nodes.values():
        assert not node.engine.kv
        assert not node.unsettled
    whole = [key for key, tokens in network.generated.items() if len(tokens) == 60]
    assert {request_of(key) for key in whole} == set(network.last), "a last token never came"
