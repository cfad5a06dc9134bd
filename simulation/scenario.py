"""The parts of a run under faults, all drawn from a seed: cluster, requests, faults.

Links, disks and engines are those of the quick start, or somewhat faster, so that copying the model
takes about as long as a fault lasts. Every node has every model on its disk, and faults leave at
least two nodes alone. So whatever happens, all requests can be served.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from simulation import systems
from simulation.cluster import GATEWAY, PLANNER, REGISTRY, ClusterSpec, node_name
from simulation.faults import (
    Absence,
    BusCut,
    ClockJump,
    Corrupt,
    Crash,
    Drain,
    Fault,
    Jitter,
    Leaderless,
    Leave,
    Loss,
    Outage,
    Pause,
    PeerCut,
    Reclaim,
    Restart,
    Role,
    SlowLink,
    Vanish,
    Whom,
)
from simulation.hardware import hardware
from simulation.models import model

SPAN_S = 40.0
"""Seconds within which requests come and faults begin."""
MODEL, HARDWARE = "demo", "paced-laptop"
TOO_SMALL_BYTES = 52e6
"""Memory of a device that has no room for MODEL, but for two thirds of it."""
HOST_BYTES = 110_000_000
"""Memory of a host cache that has room for two models."""
OTHER_SYSTEMS = ("lambdapipe", "blitzscale", "faasnet", "nccl", "serverlessllm")


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    model: str
    prompt_tokens: int
    output_tokens: int
    leaves_after: float | None = None
    """Seconds until its client hangs up."""
    kills_at: int | None = None
    """It kills every node that computes its token of this index. None: it is harmless."""


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    spec: ClusterSpec
    requests: tuple[Arrival, ...]
    """In order of time."""
    faults: tuple[Fault, ...]
    """In order of time."""

    def in_words(self) -> list[str]:
        spec = self.spec
        return [
            f"seed {self.seed}: {spec.system.name}, {spec.nodes} nodes in {spec.racks} racks, "
            f"{spec.devices} on a machine, "
            f"{len(spec.models)} models of {spec.blocks} blocks, {spec.chunks} chunks a block, "
            f"{spec.slots} slots, {spec.hardware.memory_bytes / 1e6:.0f} MB a node, "
            f"links {spec.hardware.nic_bytes_per_s / 1e6:.1f} MB/s, "
            f"disks {spec.hardware.ssd_bytes_per_s / 1e6:.1f} MB/s, "
            f"at least {spec.min_instances} instances, {spec.standbys} standbys, "
            f"{'copies sleep as history says' if spec.anticipate else 'no history'}, "
            f"{'KV moves' if spec.kv_moves == 'always' else 'KV is computed'}, "
            f"{spec.gateways} gateways",
            f"{len(self.requests)} requests, "
            f"{sum(r.leaves_after is not None for r in self.requests)} of whose clients hang up, "
            f"{sum(r.kills_at is not None for r in self.requests)} of which kill nodes",
            *(f"{fault.at:7.3f} s: {fault}" for fault in self.faults),
        ]


def scenario(seed: int) -> Scenario:
    draw = random.Random(seed)
    kv_moves: Literal["always", "never"] = "always" if seed % 4 < 2 else "never"
    spec = replace(_spec(draw), anticipate=seed % 2 == 0, kv_moves=kv_moves)
    match seed % 8:
        case 3:
            spec = _in_groups(spec, draw)
        case 6:
            system = systems.named("lambdascale")
            spec = replace(spec, system=system, prefill_share=0.5, host_bytes=HOST_BYTES)
    requests = sorted(_requests(draw, spec), key=lambda request: request.at)
    faults = sorted(_faults(draw, spec), key=lambda fault: fault.at)
    if draw.random() < 0.2:
        poison = draw.randrange(len(requests))
        kills_at = draw.choice((0, draw.randrange(requests[poison].output_tokens)))
        requests[poison] = replace(requests[poison], kills_at=kills_at, leaves_after=None)
        faults = [fault for fault in faults if not isinstance(fault, _NODE_FAULTS)]
    elif draw.random() < 0.4:
        faults = sorted([*faults, *_departures(draw, spec)], key=lambda fault: fault.at)
    return Scenario(seed, spec, tuple(requests), tuple(faults))


def _spec(draw: random.Random) -> ClusterSpec:
    nodes = draw.randint(3, 7)
    models = draw.choice((1, 1, 2))
    laptop = hardware(HARDWARE)
    return ClusterSpec(
        system=systems.named("lambdascale" if draw.random() < 0.7 else draw.choice(OTHER_SYSTEMS)),
        hardware=msgspec.structs.replace(
            laptop,
            memory_bytes=laptop.memory_bytes * draw.choice((1, 4)),
            nic_bytes_per_s=laptop.nic_bytes_per_s * draw.choice((1, 2, 5)),
            ssd_bytes_per_s=draw.choice((5e6, 2e7, laptop.ssd_bytes_per_s)),
        ),
        models=tuple(model(MODEL, f"model-{index}") for index in range(models)),
        nodes=nodes,
        racks=draw.choice((1, 1, 2)),
        blocks=draw.randint(3, 8),
        chunks=draw.randint(2, 5),
        slots=draw.choice((2, 4, 8)),
        min_instances=1 if draw.random() < 0.8 else 0,
        standbys=draw.choice((0, 1, 2)),
        gateways=draw.choice((1, 2, 3)),
    )


def _in_groups(spec: ClusterSpec, draw: random.Random) -> ClusterSpec:
    """Two or three machines of several devices, none of which has room for a model."""
    devices = draw.choice((2, 3))
    return replace(
        spec,
        system=systems.named("lambdascale"),
        hardware=msgspec.structs.replace(
            spec.hardware, memory_bytes=TOO_SMALL_BYTES, nvlink_bytes_per_s=1e9
        ),
        nodes=devices * draw.choice((2, 3)),
        devices=devices,
        racks=1,
    )


def _requests(draw: random.Random, spec: ClusterSpec) -> list[Arrival]:
    """A trickle of requests, and bursts that take several nodes."""
    names = [each.name for each in spec.models]
    found = [_arrival(draw, draw.uniform(0, SPAN_S), draw.choice(names)) for _ in range(8)]
    for _ in range(draw.randint(2, 4)):
        start, name = draw.uniform(0.5, SPAN_S - 5), draw.choice(names)
        size = draw.randint(2, 3 * spec.nodes) * spec.slots
        found += [_arrival(draw, start + draw.uniform(0, 1.5), name) for _ in range(size)]
    return found


def _arrival(draw: random.Random, at: float, name: str) -> Arrival:
    leaves = draw.uniform(0.01, 4) if draw.random() < 0.1 else None
    return Arrival(at, name, draw.randint(1, 60), draw.randint(1, 40), leaves)


# --- faults ---

ROLES = (None, *Role)


def _faults(draw: random.Random, spec: ClusterSpec) -> list[Fault]:
    """Some faults that hit nodes, and of those that hit everybody each at most once."""
    several = [draw.choice(_OF_NODES)(draw, spec) for _ in range(draw.randint(1, 5))]
    return several + [kind(draw) for kind in _OF_ALL if draw.random() < 0.2]


def _at(draw: random.Random) -> float:
    return round(draw.uniform(0.2, SPAN_S - 5), 3)


def _lasts(draw: random.Random, longest: float) -> float:
    """A duration that is short in most cases."""
    return round(longest * draw.random() ** 2 + 0.05, 3)


def _whom(draw: random.Random, spec: ClusterSpec) -> Whom:
    return Whom(draw.choice(ROLES), node_name(draw.randrange(spec.nodes)))


def _crash(draw: random.Random, spec: ClusterSpec) -> Fault:
    return Crash(at=_at(draw), lasts=_lasts(draw, 15), whom=_whom(draw, spec))


def _leave(draw: random.Random, spec: ClusterSpec) -> Fault:
    return Leave(at=_at(draw), lasts=_lasts(draw, 10), whom=_whom(draw, spec))


def _pause(draw: random.Random, spec: ClusterSpec) -> Fault:
    return Pause(at=_at(draw), lasts=_lasts(draw, 12), whom=_whom(draw, spec))


def _bus_cut(draw: random.Random, spec: ClusterSpec) -> Fault:
    return BusCut(at=_at(draw), lasts=_lasts(draw, 20), whom=_whom(draw, spec))


def _peer_cut(draw: random.Random, spec: ClusterSpec) -> Fault:
    other = node_name(draw.randrange(spec.nodes))
    return PeerCut(at=_at(draw), lasts=_lasts(draw, 15), whom=_whom(draw, spec), other=other)


def _slow_link(draw: random.Random, spec: ClusterSpec) -> Fault:
    share = draw.choice((0.5, 0.1, 0.01))
    return SlowLink(at=_at(draw), lasts=_lasts(draw, 20), whom=_whom(draw, spec), share=share)


def _corrupt(draw: random.Random, spec: ClusterSpec) -> Fault:
    return Corrupt(at=_at(draw), lasts=0, whom=_whom(draw, spec), reads=draw.choice((1, 10, 100)))


def _departures(draw: random.Random, spec: ClusterSpec) -> list[Fault]:
    """Nodes that operators drain, and machines that are taken away after a notice."""
    drains: list[Fault] = [
        Drain(at=_at(draw), lasts=_lasts(draw, 25), whom=_whom(draw, spec), limit_s=limit_s)
        for limit_s in draw.choice(((0.0,), (2.0,), (0.0, 10.0)))
    ]
    if draw.random() < 0.6:
        return drains
    notice_s = draw.choice((2.0, 10.0, 30.0))
    return [*drains, Reclaim(at=_at(draw), lasts=_lasts(draw, 15), notice_s=notice_s)]


def _planner(draw: random.Random) -> Fault:
    killed = draw.random() < 0.7
    return Restart(at=_at(draw), lasts=_lasts(draw, 8), role=PLANNER, killed=killed)


def _registry(draw: random.Random) -> Fault:
    killed = draw.random() < 0.7
    return Restart(at=_at(draw), lasts=_lasts(draw, 8), role=REGISTRY, killed=killed)


def _gateway(draw: random.Random) -> Fault:
    killed = draw.random() < 0.7
    return Restart(at=_at(draw), lasts=_lasts(draw, 8), role=GATEWAY, killed=killed)


def _absence(draw: random.Random) -> Fault:
    role, stopped = draw.choice((PLANNER, REGISTRY, GATEWAY)), draw.random() < 0.5
    return Absence(at=_at(draw), lasts=_lasts(draw, 20), role=role, stopped=stopped)


def _vanish(draw: random.Random) -> Fault:
    return Vanish(at=_at(draw), lasts=_lasts(draw, 15))


def _leaderless(draw: random.Random) -> Fault:
    return Leaderless(at=_at(draw), lasts=_lasts(draw, 8))


def _clock_jump(draw: random.Random) -> Fault:
    process = draw.choice((PLANNER, REGISTRY, GATEWAY, node_name(0), node_name(1)))
    by_s = draw.choice((-86400.0, -3.0, 0.5, 3600.0, 86400.0))
    return ClockJump(at=_at(draw), lasts=0, process=process, by_s=by_s)


def _outage(draw: random.Random) -> Fault:
    return Outage(at=_at(draw), lasts=_lasts(draw, 12))


def _loss(draw: random.Random) -> Fault:
    return Loss(at=_at(draw), lasts=_lasts(draw, 10), share=draw.choice((0.002, 0.01, 0.03)))


def _jitter(draw: random.Random) -> Fault:
    return Jitter(at=_at(draw), lasts=_lasts(draw, 20), up_to_s=draw.choice((0.002, 0.02, 0.1)))


_NODE_FAULTS = (Crash, Leave, Pause, Vanish, BusCut, PeerCut, SlowLink, Corrupt)
_OF_NODES: tuple[Callable[[random.Random, ClusterSpec], Fault], ...] = (
    *(_crash,) * 3, _leave, _pause, _bus_cut, _peer_cut, _slow_link, _corrupt,
)  # fmt: skip
_OF_ALL: tuple[Callable[[random.Random], Fault], ...] = (
    _planner, _registry, _gateway, _absence, _absence, _vanish, _outage, _leaderless, _loss,
    _jitter, _clock_jump,
)  # fmt: skip
