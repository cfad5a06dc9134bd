"""What happens next in a network of schedulers, as hypothesis chooses."""

import msgspec
from hypothesis import strategies as st

from services.node.core.microbatches import (
    Failure,
)
from shared.ids import GatewayId, InstanceId, RequestId
from shared.messages.serving import (
    LogitRules,
    Pooling,
    Sampling,
    Submit,
)
from tests.support.schedulers.engine import BLOCKS, MODELS, PATHS, STOP_ID
from tests.support.schedulers.network import Network

SOME_PATHS = st.lists(st.sampled_from(PATHS), min_size=1, max_size=3, unique=True)


def a_submit(network: Network, draw: st.DataObject) -> Submit:
    """The next attempt of some request; now and then, the last one again."""
    request = draw.draw(st.sampled_from([f"r{i}" for i in range(8)]))
    last = network.last
    if request in last and draw.draw(st.integers(0, 5)) == 0:
        return last[request]
    prompt = draw.draw(st.one_of(st.integers(1, 9), st.integers(14, 18)))
    score_from = draw.draw(st.sampled_from([0, 0, 1, 1 + prompt // 2, prompt]))
    so_far = draw.draw(st.integers(0, 3)) if score_from in (0, prompt) else 0
    before = last[request].attempt if request in last else 0
    last[request] = Submit(
        request=RequestId(request),
        attempt=before + 1,
        takes_over=draw.draw(st.sampled_from([0, before])),
        gateway=GatewayId("g"),
        model_id=draw.draw(st.sampled_from(MODELS)),
        instance=InstanceId("i"),
        stages=draw.draw(st.sampled_from(network.paths)),
        tokens=tuple(range(prompt + so_far)),
        prompt_tokens=prompt,
        max_tokens=so_far + draw.draw(st.integers(1, 40)),
        stop_ids=draw.draw(st.sampled_from([(), (STOP_ID,)])),
        sampling=Sampling(logprobs=0 if score_from else None),
        rules=draw.draw(st.sampled_from([None, None, LogitRules(grammar="g")])),
        score_from=score_from,
    )
    if draw.draw(st.integers(0, 4)) == 0:
        last[request] = msgspec.structs.replace(
            last[request],
            tokens=tuple(range(prompt)),
            max_tokens=1,
            stop_ids=(),
            sampling=Sampling(),
            rules=None,
            score_from=0,
            pooling=draw.draw(st.sampled_from(Pooling)),
        )
    return last[request]


def a_move(network: Network, draw: st.DataObject) -> Submit:
    """An attempt that takes a running one over, with its KV."""
    key = draw.draw(st.sampled_from(sorted(network.movable())))
    before = network.open[key]
    known = network.generated[key]
    moved = msgspec.structs.replace(
        before,
        attempt=network.last[before.request].attempt + 1,
        takes_over=before.attempt,
        kv_from=before.stages,
        stages=draw.draw(st.sampled_from([*PATHS[:2], *network.paths])),
        tokens=(*before.tokens[: before.prompt_tokens], *known),
        score_from=before.prompt_tokens if before.score_from else 0,
    )
    network.last[before.request] = moved
    return moved


def happen(network: Network, draw: st.DataObject) -> None:
    """One thing, of those that can happen now."""
    live = network.live_nodes()
    choices: list[tuple[str, str | tuple[str, str]]] = [("submit", "")] * 2
    choices += [("deliver", link) for link in network.live_links()] * 2
    choices += [("begin", name) for name in live if network.nodes[name].sweep is None]
    choices += [("advance", name) for name in live if network.nodes[name].sweep is not None] * 2
    choices += [("prepare", name) for name in live if network.nodes[name].preparing]
    lacking = [name for name in live if len(network.nodes[name].engine.blocks) < BLOCKS]
    choices += [("attach", name) for name in lacking]
    choices += [("cancel", key) for key in network.open]
    choices += [("bring", name) for name in live if network.nodes[name].bringing] * 2
    if draw.draw(st.integers(0, 9)) == 0:
        choices += [("late", key) for name in live for key in network.nodes[name].unsettled]
    choices += [("move", "")] * 2 if network.movable() else []
    if len(live) > 1 and draw.draw(st.integers(0, 12)) == 0:
        choices += [("break", (live[0], live[-1])), ("kill", live[-1])] * 5
    match draw.draw(st.sampled_from(choices)):
        case ("submit", _):
            network.submit(a_submit(network, draw))
        case ("deliver", (str(sender), str(target))):
            network.deliver((sender, target))
        case ("begin", str(name)):
            network.begin(name)
        case ("advance", str(name)):
            network.advance(name)
        case ("attach", str(name)):
            network.attach(name)
        case ("prepare", str(name)):
            bad = draw.draw(st.sampled_from([None, None, None, Failure("bad_input", "no grammar")]))
            network.prepare(name, bad)
        case ("cancel", str(key)):
            network.cancel(key)
        case ("bring", str(name)):
            network.bring(name, right=draw.draw(st.integers(0, 4)) > 0)
        case ("late", str(key)):
            network.late(network.open[key].stages[0].node, key)
        case ("move", _):
            network.submit(a_move(network, draw))
        case ("break", (str(one), str(other))):
            network.break_link(one, other)
        case ("kill", str(name)):
            network.kill(name)
