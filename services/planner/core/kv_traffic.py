"""What KV takes of nodes' ports, and what that leaves for weights; pure.

Where a model's prefill and decode are apart, KV goes out of the nodes that prefill and into those
that decode. Loading plans around it (BlitzScale, OSDI 2025, sections 5.1 and 5.2): who prefills is
no good source of weights, while who decodes is one. A node that decodes has to take in what it is a
target of; its way in is slow then.

Nodes send KV first, but for the share that weights get in any case (`shared.port_shares`). So
weights have what KV leaves of a port. A direction in which KV leaves less than BUSY is *taken*.

How much KV there is, nodes measure, in the mean of the last WINDOW_S. Who prefills changes with
every replica that comes or goes. So what is measured on the nodes of a model counts as shared
evenly by those that now prefill, or decode.
"""

from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from shared.ids import ModelId, NodeId
from shared.messages.instances import Role
from shared.port_shares import WEIGHTS_LEAST

BUSY = 0.5
"""A port that has less than this share left for weights is a bad source."""
SLIGHT = 0.05
"""KV that needs no more than this share of a port is not worth a word."""
WINDOW_S = 10.0
"""How far back KV counts."""
LEAST_S = 0.9
"""The least seconds over which a rate is measured. Nodes report every second."""


class Flow(msgspec.Struct, frozen=True, gc=False):
    """Bytes/s of KV at a node's port."""

    out: float = 0.0
    into: float = 0.0


NO_FLOW = Flow()


def is_taken(rate: float, kv: float) -> bool:
    """Whether KV takes the direction. Bytes/s of both."""
    return kv > (1 - BUSY) * rate


def left(rate: float, kv: float, *, spares: bool) -> float:
    """The rate that KV leaves for weights. `spares`: none of a direction that is taken; otherwise
    as much as weights get if they are sent anyway."""
    if spares and is_taken(rate, kv):
        return 0.0
    return max(rate - kv, WEIGHTS_LEAST * rate)


def words(node: str, kv: Flow, *, out: float, into: float, spares: bool) -> Iterator[str]:
    """What KV does to the ports of a node with these rates, of which 0 is not known or needed.
    Nothing is said of ports that are hardly needed for KV."""
    if into and kv.into > SLIGHT * into:
        slow = f"receives at {_rate(left(into, kv.into, spares=False))}"
        yield f"{node} {slow}: KV takes {_rate(min(kv.into, into))} of {_rate(into)} into it"
    if out and kv.out > SLIGHT * out:
        rate = left(out, kv.out, spares=spares)
        slow = f"sends at {_rate(rate)}" if rate else "sends no weights"
        yield f"{node} {slow}: KV takes {_rate(min(kv.out, out))} of {_rate(out)} out of it"


def _rate(bytes_per_s: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}/s"
    return f"{bytes_per_s:.3g} B/s"


class _Meter:
    """What one node says."""

    __slots__ = ("_said",)

    def __init__(self, now: float, sent: int, received: int) -> None:
        self._said = deque([(now, sent, received)])

    def note(self, now: float, sent: int, received: int) -> None:
        at, sent_before, received_before = self._said[-1]
        if sent < sent_before or received < received_before:  # it has begun anew
            self._said.clear()
        elif now - at < LEAST_S:
            return
        self._said.append((now, sent, received))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._said) > 1 and now - self._said[1][0] >= WINDOW_S:
            self._said.popleft()

    def mean(self, now: float) -> Flow:
        """Of the last WINDOW_S, or since its first KV."""
        self._forget(now)
        (since, sent, received), (until, sent_then, received_then) = self._said[0], self._said[-1]
        seconds = until - since
        if not seconds:
            return NO_FLOW
        return Flow((sent_then - sent) / seconds, (received_then - received) / seconds)


class KvTraffic:
    def __init__(self) -> None:
        self._meters: dict[NodeId, _Meter] = {}
        self._roles: dict[ModelId, Mapping[NodeId, Role]] = {}
        """Of models whose prefill and decode are apart: what their nodes do."""

    def on_status(self, node: NodeId, sent: int, received: int, now: float) -> None:
        """A node's KV in bytes since it started."""
        meter = self._meters.get(node)
        if meter is not None:
            meter.note(now, sent, received)
        elif sent or received:
            self._meters[node] = _Meter(now, sent, received)

    def on_gone(self, node: NodeId) -> None:
        self._meters.pop(node, None)

    def on_roles(self, model: ModelId, roles: Mapping[NodeId, Role]) -> None:
        """What each node does for the model from now on; nothing if it serves no more."""
        if any(role is not Role.BOTH for role in roles.values()):
            self._roles[model] = roles
        else:
            self._roles.pop(model, None)

    def flows(self, now: float) -> dict[NodeId, Flow]:
        """The KV that is expected at nodes' ports, for nodes that have any. On a node that serves
        two models apart, the KV of both counts for each of them."""
        measured = {node: meter.mean(now) for node, meter in self._meters.items()}
        expected = dict(measured)
        for roles in self._roles.values():
            expected |= dict.fromkeys(roles, NO_FLOW)
        for roles in self._roles.values():
            said = [measured.get(node, NO_FLOW) for node in roles]
            prefill = [node for node, role in roles.items() if role is Role.PREFILL]
            decode = [node for node, role in roles.items() if role is Role.DECODE]
            for node in prefill:
                known = expected[node]
                more = sum(flow.out for flow in said) / len(prefill)
                expected[node] = Flow(known.out + more, known.into)
            for node in decode:
                known = expected[node]
                more = sum(flow.into for flow in said) / len(decode)
                expected[node] = Flow(known.out, known.into + more)
        return {node: flow for node, flow in expected.items() if flow.out or flow.into}
