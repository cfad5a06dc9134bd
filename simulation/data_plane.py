"""temporary"""
import asyncio
from collections import deque
from services.node.mover import Mover
from services.node.transport.memory import MemoryNetwork, MemoryTransport
NET = MemoryNetwork()
class ModelledDataPlane:
    def __init__(self, network, name, *, unit, on_message, on_peer_lost, on_arrived, on_failed, rate=12207031):
        self.address = f"mem://{name}"
        self._t = MemoryTransport(NET, self.address, link_bytes_per_s=int(46e9/unit), on_message=on_message, on_peer_lost=on_peer_lost)
        self._cb = (on_arrived, on_failed)
        self._stop = asyncio.Event()
        self._send = {}
    async def __aenter__(self):
        await self._t.__aenter__()
        self._mover = Mover(self._t, on_arrived=self._cb[0], on_failed=self._cb[1])
        return self
    async def __aexit__(self, *e):
        await self._mover.close(); self._stop.set(); await self._t.__aexit__(None,None,None)
    async def wait(self): await self._stop.wait()
    async def host(self, model, manifest, space): self._mover.host(model, manifest, space, ())
    async def take_over(self, model, block): return await self._mover.take_over(model, block)
    async def mark_held(self, model, block): self._mover.mark_held(model, block)
    async def apply(self, model, event, revision, pulls, addresses): self._mover.apply(model, event, revision, pulls, addresses)
    async def drop(self, model): await self._mover.drop(model)
    async def connect(self, address): await self._t.connect(address)
    def send(self, address, header, payload):
        try:
            peer = self._t._link(address)
        except Exception:
            return
        body = memoryview(bytearray(header))
        rest = memoryview(payload[0]) if payload else memoryview(b"")
        asyncio.get_running_loop().call_later(0.001, self._go, peer, body, rest)

    def _go(self, peer, body, rest):
        if peer._open:
            peer._on_message(self.address, body, rest)
