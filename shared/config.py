"""Frozen configuration: defaults < file (TOML) < environment. Unknown keys refuse to start.

One file serves all processes; its tables are the fields of `Config`. In the environment a value
is `LAMBDASCALE_<TABLE>_<KEY>`, for example `LAMBDASCALE_NODE_LINK_BYTES_PER_S=9000000`.
"""

import os
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from shared.errors import ConfigError

PREFIX = "LAMBDASCALE_"


Count = Annotated[int, msgspec.Meta(ge=1)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\\Z")]
"""One token of a subject (see shared.ids.check_name)."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BusConfig(_Section, frozen=True, kw_only=True):
    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    connect_timeout_s: Positive = 5.0
    replicas: Count = 1
    """Copies of durable state that NATS keeps; 3 on a cluster."""


class TelemetryConfig(_Section, frozen=True, kw_only=True):
    log_level: str = "info"
    log_json: bool = False
    """Logs go to standard error, for people (False) or as JSON lines."""
    trace_dir: str = ""
    """Directory for `<service>.jsonl` span files; empty: none."""
    otlp_endpoint: str = ""
    """For example http://127.0.0.1:4318; empty: none."""
    health_socket: str = ""
    """Path of a Unix socket that says whether the service is well (`python -m services.health` asks
    it); empty: none."""


class GatewayConfig(_Section, frozen=True, kw_only=True):
    id: Name = "gateway-0"
    host: str = "127.0.0.1"
    port: Port = 8000
    api_keys: tuple[str, ...] = ()
    """SHA-256 (hex) of each accepted key, from `lambdascale key`; empty: no key is asked for."""
    max_body_bytes: Count = 1 << 20
    max_image_bytes: Count = 16 << 20
    """Of a body with an image."""
    max_queue: Size = 1024
    """Requests that wait for an instance; more are answered 429."""
    queue_timeout_s: Seconds = 120.0
    """Longest wait for an instance, then 429 with Retry-After."""
    max_attempts: Count = 8
    """Failures a request survives before it ends with an error."""


class PlannerConfig(_Section, frozen=True, kw_only=True):
    tick_s: Positive = 0.1
    queue_per_instance: Positive = 0.25
    """Queued work that is worth one more instance, in units of what an instance takes at once."""
    prefill_wait_s: Positive = 0.5
    """Prompts that wait for their prefill are worth one more instance when an instance would take
    longer than this for them, as fast as nodes have measured themselves to be."""
    idle_s: Seconds = 2.0
    """An instance more than the load needs for this long is given back."""
    scale_up_hold_s: Seconds = 0.2
    """The load must want more for this long, so that a blip moves no weights."""
    horizon_s: Seconds = 1.0
    """While load grows, what it will have grown to so much later is prepared for; about the time
    that loading takes. 0: no look ahead."""
    stray_s: Seconds = 10.0
    """Weights in memory that nothing uses, such as part of a model from an event that was cut off,
    are freed after this long."""
    max_stages: Count = 4
    """Longest path, in stages."""
    link_bytes_per_s: Size = 0
    """Assumed where a node does not say; 0: unknown (no predictions)."""
    strategy: str = "auto"
    """How blocks spread: `auto` chooses for each event; `lambdascale plan --help` names the others.
    """
    serving: str = "pools"
    """Who serves while blocks spread: pools, pools-only-targets, pipelines, zigzag or none."""
    step_overhead_s: Seconds = 0.001
    """alpha of the cost model, at most (nodes measure it): until the first bytes from a new source
    come."""


class RegistryConfig(_Section, frozen=True, kw_only=True):
    report_s: Seconds = 0.2
    """How long a registry that starts waits for nodes to say what they hold."""


class NodeConfig(_Section, frozen=True, kw_only=True):
    id: Name = "node-0"
    host: str = "127.0.0.1"
    """Address that the data plane binds to and tells others."""
    port: Port = 0
    """Data-plane port; 0: any free one."""
    machine: str = msgspec.field(default_factory=socket.gethostname)
    """Name of the machine: nodes with the same one share local links and disks."""
    rack: str = ""
    """Name of the rack: its nodes share a trunk to other racks, and fail together; empty: not
    known. Replicas of a model are kept in at least two racks."""
    trunk_bytes_per_s: Size = 0
    """Rate of the rack's trunk each way; 0: not known, taken to be no limit."""
    local_bytes_per_s: Size = 0
    """Rate to other nodes of the same machine (shared memory), which it is paced to; 0: not known,
    planned as if it were the data link's, and as fast as it goes."""
    data_dir: str = "lambdascale-data"
    """Holds the node's packed models, under store/."""
    device: str = "cpu"
    cpu_weights: Literal["stored", "packed", "int8"] = "packed"
    """How a CPU computes with weights. `stored`: as they lie in the arena, at no more memory, and
    slowest. `packed`: from a second copy, ordered for the processor. `int8`: from a copy rounded to
    8 bits, with activations rounded too: fastest, and tokens may be others."""
    arena_bytes: Count = 1 << 30
    """Memory for weights, allocated at the start; on `cuda` so much on the host and on the device.
    """
    kv_bytes: Size = 0
    """Memory for KV caches, where the engine computes; 0: what is left of it once the arenas are
    taken, less a tenth of all there is. A model has as much of it as it has of the arena."""
    kv_share: Share = 1.0
    """Where `kv_bytes` is 0: the part of that which this node takes; less than 1 where several
    nodes share a machine or a device."""
    slots: Count = 8
    """Sequences that a full replica runs at once."""
    step_tokens: Count = 512
    """Most tokens that one step prefills."""
    speculation: Size = 7
    """Most tokens a step that are proposed for a sequence, from what its prompt and answer said
    before, and checked at once: as few steps as an answer repeats, the same tokens. Steps under
    load have none. 0: none at all."""
    threads: Size = 0
    """Torch threads; 0: torch's default."""
    link_bytes_per_s: Size = 0
    """Paces each direction of the data link; 0: as fast as it goes."""
    rdma_device: str = ""
    """Name of the RDMA device to move weights by, for example `mlx5_0`; empty: none."""
    rdma_gid_index: Size = 0
    """Of the device's address: for RoCE that of its IPv4 address, see `ibv_devinfo -v`."""
    device_direct: bool = True
    """Blocks may come from peers right to the GPU's memory, by GPUDirect RDMA and CUDA IPC; false:
    always by the host's."""
    tls_certificate: str = ""
    """PEM file: what the node shows to others; with `tls_key` and `tls_authority`, all that nodes
    send each other over TCP is encrypted. All nodes have it or none. Empty: no TLS."""
    tls_key: str = ""
    tls_authority: str = ""
    """PEM file: whose certificates others must show."""
    mesh_peers: Size = 64
    """Peers that connections are made to before a plan needs them, the nearest first; the others
    are connected to when they are."""
    step_floor_s: Seconds = 0.0
    """Least time of a step through the whole model (a part of it: its share). For running many
    nodes on one machine as if each had its own accelerator; 0: as fast as it goes."""
    lease_s: Count = 2
    """The node is gone this long after it stops renewing (whole seconds)."""


class Config(_Section, frozen=True, kw_only=True):
    bus: BusConfig = BusConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    gateway: GatewayConfig = GatewayConfig()
    planner: PlannerConfig = PlannerConfig()
    registry: RegistryConfig = RegistryConfig()
    node: NodeConfig = NodeConfig()


def load(path: Path | None, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration; ConfigError names the file or variable, the key and what is wrong."""
    environment = os.environ if environment is None else environment
    merged = _from_file(path) if path else {}
    for variable, value in sorted(environment.items()):
        if variable.startswith(PREFIX):
            _set_from_variable(merged, variable, value)
    return _convert(merged, str(path) if path else "configuration")


def _from_file(path: Path) -> dict[str, Any]:
    try:
        parsed = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError, or UnicodeDecodeError
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    _convert(parsed, str(path))
    return parsed


def _set_from_variable(merged: dict[str, Any], variable: str, value: str) -> None:
    table, _, key = variable.removeprefix(PREFIX).lower().partition("_")
    sections = get_type_hints(Config)
    if table not in sections or key not in get_type_hints(sections[table]):
        known = get_type_hints(sections[table]) if table in sections else sections
        raise ConfigError(
            f"environment variable {variable}: no such {'key' if table in sections else 'table'}; "
            f"there are {', '.join(known)}"
        )
    is_list = str(get_type_hints(sections[table])[key]).startswith("tuple")
    parsed: Any = [item for item in value.split(",") if item] if is_list else value
    try:
        _convert({table: {key: parsed}}, variable)
    except ConfigError as error:
        raise ConfigError(f"environment variable {error}") from error
    merged.setdefault(table, {})[key] = parsed


def _convert(raw: dict[str, Any], where: str) -> Config:
    try:
        return msgspec.convert(raw, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
