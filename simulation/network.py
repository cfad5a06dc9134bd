"""The cluster's links as a fluid: what moves between nodes, how fast, and what goes wrong.

The model is that of `services.planner.core.multicast.fabric`: each node has a port in each
direction, each rack a trunk in each direction, hosts have local links, and everything is full
duplex. Transfers of one flow between two nodes at one priority form a stream, which carries them
one after the other, as a connection does. Streams share ports as `sharing` says.
Something happens only when a transfer ends, or when a stream begins, ends or changes its rate; and
only the streams that this affects are looked at.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import chain

from shared.errors import BadInput, Conflict, NotFound, PeerLost, TransportError
from simulation.sharing import Port, reshare
from simulation.streams import Node, OnEnd, Stream, Transfer


class Network:
    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        trunks: Mapping[str, float] | None = None,
        local_bytes_per_s: float = 0.0,
    ) -> None:
        """`latency_s`: of every byte, on any way. `trunks`: rack -> bytes/s in each direction
        between it and all others (a missing rack has no limit). `local_bytes_per_s`: for each node,
        in each direction, to others of its (named) host; 0: they use their ports."""
        self.latency_s = latency_s
        self.on_change: dict[Callable[[str], None], None] = {}
        """Called with the name of a node that may now reach other nodes than before."""
        self._local_bytes_per_s = local_bytes_per_s
        self._trunks = {
            rack: (Port(f"{rack} out", rate), Port(f"{rack} into", rate))
            for rack, rate in (trunks or {}).items()
        }
        self._nodes: dict[str, Node] = {}
        self._streams: dict[tuple[str, str, str, int], Stream] = {}
        self._flows = Counter[str]()
        """How many streams of each flow are open, without messages."""
        self._blocked: set[frozenset[str]] = set()
        self._changed: dict[Port, float] = {}
        """Ports to share anew at the end of this moment, and from which priority on."""

    # --- nodes ---

    def add(self, name: str, *, out: float, into: float, rack: str = "", host: str = "") -> None:
        """Rates in bytes/s."""
        if name in self._nodes:
            raise Conflict(f"{name} is in the network already")
        if min(out, into) < 0:
            raise BadInput(f"{name}: a rate below 0")
        local = self._local_bytes_per_s
        self._nodes[name] = Node(
            name,
            rack,
            host,
            Port(f"{name} out", out),
            Port(f"{name} into", into),
            Port(f"{name} local out", local),
            Port(f"{name} local into", local),
        )

    def node(self, name: str) -> Node:
        node = self._nodes.get(name)
        if node is None:
            raise NotFound(f"{name} is not in the network")
        return node

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def reachable(self, one: str, other: str) -> bool:
        """Whether bytes pass between the two now."""
        if one not in self._nodes or other not in self._nodes:
            return False
        return _passes(self._nodes[one], self._nodes[other], self._blocked)

    def rates(self) -> dict[tuple[str, str, str, int], float]:
        """The current rate, in bytes/s, of every (source, destination, flow, priority) with
        something to send."""
        return {key: stream.rate for key, stream in self._streams.items()}

    # --- transfers ---

    async def transfer(
        self, src: str, dst: str, nbytes: float, priority: int, flow: str = ""
    ) -> None:
        """Returns when the last byte has arrived. PeerLost if a node is missing or dies."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_end(error: TransportError | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        transfer = self.begin(src, dst, nbytes, priority, on_end, flow)
        try:
            await done
        finally:
            if done.cancelled():
                self.abort(transfer)

    def begin(
        self, src: str, dst: str, nbytes: float, priority: int, on_end: OnEnd, flow: str = ""
    ) -> Transfer:
        """Begins a transfer, behind those of its flow that were begun before between the same two
        at this priority."""
        for name in (src, dst):
            if name not in self._nodes:
                raise PeerLost(f"{name} is not in the network")
        key = src, dst, flow, priority
        stream = self._streams.get(key) or self._stream(*key)
        transfer = Transfer(nbytes, stream, on_end)
        stream.put(transfer)
        self._refresh(stream)
        return transfer

    def abort(self, transfer: Transfer) -> None:
        """Ends a transfer: nothing more of it is sent or told. It may be over already."""
        if transfer.landing is not None:
            transfer.landing.cancel()
        if transfer in transfer.stream.queue:
            transfer.stream.remove(transfer)
            self._refresh(transfer.stream)

    # --- faults ---

    def set_rates(self, name: str, *, out: float | None = None, into: float | None = None) -> None:
        """Sets the rates of the node's ports from now on; 0 stops them."""
        node = self.node(name)
        for port, rate in ((node.out, out), (node.into, into)):
            if rate is not None:
                self._set_port(port, rate)

    def block(self, one: str, other: str) -> None:
        """Lets nothing pass between the two until `unblock`. What is under way waits."""
        self._blocked.add(frozenset((one, other)))
        self._reroute([self.node(one), self.node(other)])

    def unblock(self, one: str, other: str) -> None:
        self._blocked.discard(frozenset((one, other)))
        self._reroute([self.node(one), self.node(other)])

    def partition(self, *sides: Iterable[str]) -> None:
        """Lets nothing pass between sides. All nodes that are on no side form a side of their own.
        Without any sides, everything passes again."""
        numbers = {name: number for number, side in enumerate(sides, 1) for name in side}
        moved = []
        for node in self._nodes.values():
            side = numbers.get(node.name, 0)
            if node.side != side:
                node.side = side
                moved.append(node)
        self._reroute(moved)

    def pause(self, name: str) -> None:
        """The node neither sends nor receives until `resume`."""
        self.node(name).paused = True
        self._reroute([self.node(name)])

    def resume(self, name: str) -> None:
        self.node(name).paused = False
        self._reroute([self.node(name)])

    def corrupt(self, name: str, reads: int) -> None:
        """The next `reads` region reads from the node bring a wrong byte."""
        self.node(name).corrupt += reads

    def spoils(self, name: str) -> bool:
        """Whether the next region read from the node is to be spoiled by `corrupt`. This call
        counts as that read."""
        node = self._nodes.get(name)
        if node is None or not node.corrupt:
            return False
        node.corrupt -= 1
        return True

    def kill(self, name: str) -> None:
        """The node is gone. Transfers from and to it end with PeerLost."""
        node = self.node(name)
        del self._nodes[name]
        lost: list[Transfer] = []
        for stream in list(node.streams):
            lost += stream.queue
            while stream.queue:
                stream.remove(stream.queue[-1])
            self._refresh(stream)
        for transfer in lost:
            transfer.on_end(PeerLost(f"{name} is gone"))
        self._tell(name)

    # --- streams ---

    def _stream(self, src: str, dst: str, flow: str, priority: int) -> Stream:
        one, other = self._nodes[src], self._nodes[dst]
        ports = self._way(one, other)
        stream = Stream(one, other, ports, priority, flow, self.latency_s, self._sent)
        self._streams[src, dst, flow, priority] = stream
        one.streams[stream] = other.streams[stream] = None
        return stream

    def _way(self, src: Node, dst: Node) -> tuple[Port, ...]:
        if self._local_bytes_per_s and src.host and src.host == dst.host:
            return src.local_out, dst.local_into
        if src.rack == dst.rack:
            return src.out, dst.into
        trunks = [
            self._trunks[rack][way]
            for way, rack in enumerate((src.rack, dst.rack))
            if rack in self._trunks
        ]
        return src.out, *trunks, dst.into

    def _sent(self, stream: Stream, transfer: Transfer) -> None:
        stream.src.sent_bytes += transfer.nbytes
        stream.dst.received_bytes += transfer.nbytes
        self._refresh(stream)
        if self.latency_s:
            loop = asyncio.get_running_loop()
            transfer.landing = loop.call_later(self.latency_s, transfer.on_end, None)
        else:
            transfer.on_end(None)

    def _refresh(self, stream: Stream) -> None:
        """Opens or closes the stream, depending on whether it has something to send that passes.
        Forgets it if it has nothing."""
        if not stream.queue:
            stream.src.streams.pop(stream, None)
            stream.dst.streams.pop(stream, None)
            key = stream.src.name, stream.dst.name, stream.flow, stream.priority
            self._streams.pop(key, None)
        wanted = bool(stream.queue) and _passes(stream.src, stream.dst, self._blocked)
        if wanted != stream.is_open:
            concerns = self._concerns(stream)
            if wanted:
                stream.open()
            else:
                stream.close()
            for port in stream.ports:
                self._mark(port, concerns)

    def _concerns(self, stream: Stream) -> int:
        """The best priority that its opening or closing concerns."""
        if stream.priority < 0:
            return stream.priority
        if stream.is_open:
            several = len(self._flows) > 1
            self._flows[stream.flow] -= 1
            if not self._flows[stream.flow]:
                del self._flows[stream.flow]
        else:
            self._flows[stream.flow] += 1
            several = len(self._flows) > 1
        return 0 if several else stream.priority

    def _reroute(self, nodes: Iterable[Node]) -> None:
        """Adapts to a change of what passes from and to these nodes."""
        nodes = list(nodes)
        for stream in dict.fromkeys(chain.from_iterable(node.streams for node in nodes)):
            self._refresh(stream)
        for node in nodes:
            self._tell(node.name)

    def _tell(self, name: str) -> None:
        for tell in list(self.on_change):
            tell(name)

    def _set_port(self, port: Port, rate: float) -> None:
        port.rate = rate
        if port.lanes:
            self._mark(port, -math.inf)

    def _mark(self, port: Port, priority: float) -> None:
        if not self._changed:
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time(), self._share)
        self._changed[port] = min(self._changed.get(port, math.inf), priority)

    def _share(self) -> None:
        changed, self._changed = self._changed, {}
        for lane, rate in reshare(changed).items():
            lane.set_rate(rate)


def _passes(one: Node, other: Node, blocked: Set[frozenset[str]]) -> bool:
    return (
        one.side == other.side
        and not one.paused
        and not other.paused
        and (not blocked or frozenset((one.name, other.name)) not in blocked)
    )
