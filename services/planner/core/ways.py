"""Who runs a model that fits no device: which devices hold its parts, and whether these run them
one after the other or together; chosen by what a token takes; pure.

Three ways are priced, by the costs of a decode step that devices measured when they started
(shared/step_costs.py):

- stages on one machine: each device runs its own part;
- together: a part is still held by one device, and led by it, but processes with the threads of all
  devices of the group run each layer (tensor parallelism: services/node/engine/ranks.py);
- stages over machines, with fewer parts than any machine could do with.

With g devices, weights W, rates r of one device and R of g together, L layers and costs of m or M
for each to wait in a layer, c or C to call everybody for a step, and hops h from stage to stage,
one sequence gets a token in

    stages      W / r + L m + g c + (g - 1) h
    together    W / R + L M + g C + (g - 1) h.

Many sequences do not change the order of the two. If all stages are busy, each has a part of the
sequences, and reads its part of the weights for these only. Together, all sequences are in one
step. The arithmetic of further sequences takes the threads of all devices either way. So the time
of one sequence decides. Where R is no more than r, because one device's threads read as fast as the
memory gives, what is called and waited for together makes it the slower of the two.

The cut into the fewest parts on one machine, as stages, is what is chosen if nothing was measured,
and unless another way is faster by GAIN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from services.planner.core.cut import Cut, Room, cuts
from shared.messages.pool import DecodeShape
from shared.parts import Part
from shared.step_costs import GAIN, Shape, StepCosts, decode_s, fastest
from shared.wording import counted

LOCAL_HOP_S = 0.0016
"""What one more stage adds to a token on one machine: hidden states go on to its process, and the
token comes back. It was measured on a machine of two cores (docs/planning.md)."""
REMOTE_HOP_S = LOCAL_HOP_S + 0.0001
"""The same between machines: a network takes some 50 us in either direction."""


@dataclass(frozen=True, slots=True)
class Device:
    room: Room
    costs: tuple[StepCosts, ...] = ()
    """What it measured. Empty: nothing."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a token of a model has to read."""

    block_bytes: tuple[int, ...]
    shape: DecodeShape | None
    """None: not known."""

    def shapes(self, parts: Sequence[Part], *, int8: bool) -> list[Shape]:
        """What each part has to do. Layers are spread over the blocks as evenly as they go."""
        shape = self.shape
        assert shape is not None
        blocks, found = len(self.block_bytes), list[Shape]()
        for part in parts:
            nbytes = sum(self.block_bytes[part.start : part.stop])
            nbytes -= shape.looked_up if part.start == 0 else 0
            layers = shape.layers * part.stop // blocks - shape.layers * part.start // blocks
            read = max(0, nbytes) // (shape.itemsize if int8 else 1)
            found.append(Shape(layers, read, shape.heads))
        return found


@dataclass(frozen=True, slots=True)
class Way:
    parts: tuple[Part, ...]
    together: bool = False
    machine: str = ""
    """Where all parts are. Empty: on several machines, or wherever there is room."""
    token_s: float | None = None
    """Seconds of one token of one sequence. None: not known."""

    @property
    def name(self) -> str:
        devices = counted(len(self.parts), "device")
        where = f"of {self.machine}" if self.machine else "of several machines"
        how = "together" if self.together else "one after the other"
        return f"{devices} {where} {how}"


@dataclass(frozen=True, slots=True)
class Chosen:
    way: Way
    why: str
    """In words and numbers. Empty: there was no choice."""


def choose(model: Decoded, devices: Iterable[Device]) -> Chosen | None:
    """The way for a model that fits on no device. None: the devices are too small, even all
    together."""
    devices = tuple(devices)
    found = cuts(model.block_bytes, [device.room for device in devices])
    return _chosen(model, devices, found) if found else None


def choose_for(model: Decoded, devices: Iterable[Device], parts: tuple[Part, ...]) -> Chosen:
    """The way for a model whose cut is known already. Its parts may lie on any machine that has
    enough devices."""
    devices = tuple(devices)
    hosts = dict.fromkeys(_host(device) for device in devices)
    found = [
        Cut(parts, host)
        for host in hosts
        if sum(_host(device) == host for device in devices) >= len(parts)
    ]
    return _chosen(model, devices, found or [Cut(parts, "")])


def _chosen(model: Decoded, devices: Sequence[Device], found: Sequence[Cut]) -> Chosen:
    """`found`: the possible cuts. The first is taken if no costs are known."""
    ways = [way for made in found for way in _ways(model, devices, made)]
    best = plain = ways[0]
    if plain.token_s is None or len(ways) == 1:
        return Chosen(plain, "")
    priced = [(way.token_s, way) for way in ways if way.token_s is not None]
    fastest_s, way = min(priced, key=lambda each: each[0])
    if fastest_s * GAIN < plain.token_s:
        best = way
    kinds: dict[tuple[bool, bool], tuple[float, Way]] = {}
    """The fastest of each kind: all machines would be too many to name."""
    for each in sorted(priced, key=lambda each: each[0]):
        kinds.setdefault((each[1].together, bool(each[1].machine)), each)
    shown = dict.fromkeys(((plain.token_s, plain), *kinds.values()))
    said = "; ".join(f"{1e3 * seconds:.3g} ms by {way.name}" for seconds, way in shown)
    return Chosen(best, f"{best.name}: a token is expected to take {said}")


def _ways(model: Decoded, devices: Sequence[Device], made: Cut) -> list[Way]:
    there = [d for d in devices if not made.host or _host(d) == made.host]
    hop_s = LOCAL_HOP_S if made.host else REMOTE_HOP_S
    hops_s = hop_s * (len(made.parts) - 1)

    def token_s(count: int) -> float | None:
        """Seconds of a token if `count` devices run each part. The slowest device decides, since it
        may lead them."""
        seconds = [_token_s(model, made.parts, device, count) for device in there]
        known = [each for each in seconds if each is not None]
        return max(known) + hops_s if len(known) == len(there) else None

    ways = [Way(made.parts, False, made.host, token_s(1))]
    together_s = token_s(len(made.parts)) if made.host and len(made.parts) > 1 else None
    if together_s is not None:
        ways.append(Way(made.parts, True, made.host, together_s))
    return ways


def _token_s(model: Decoded, parts: Sequence[Part], device: Device, count: int) -> float | None:
    """Seconds of a token if such a device, with `count` - 1 others, ran all parts."""
    if model.shape is None:
        return None
    seconds = 0.0
    measured = _sound(device.costs)
    for shape in model.shapes(parts, int8=any(costs.int8 for costs in measured)):
        costs = fastest(shape, measured, count)
        if costs is None:
            return None
        seconds += decode_s(shape, costs)
    return seconds


def _sound(costs: Sequence[StepCosts]) -> list[StepCosts]:
    """The costs, as far as they make sense together: g devices do not read more than g times as
    fast as one. Where it seems so, something else disturbed the measurement of the one."""
    rates = (each.bytes_per_s / each.devices for each in costs if each.devices > 0)
    least = max(rates, default=0.0)
    return [
        msgspec.structs.replace(each, bytes_per_s=max(each.bytes_per_s, least))
        if each.devices == 1
        else each
        for each in costs
    ]


def _host(device: Device) -> str:
    return device.room.host or device.room.node
