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
"""A name that can be one token of a subject (see shared.ids.check_name)."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class BusConfig(_Section, frozen=True, kw_only=True):
    url: str = "nats://127.0.0.1:4222"
    """Address of nats-server; of a cluster of them several, with commas between them."""
    credentials: str = ""
    """Directory with the key of one NATS user, from `lambdascale init`: who this process is. Empty:
    none, for a server that asks for none."""
    tls_authority: str = ""
    """PEM file with the authority that the server's certificate is from. NATS is then spoken to
    with TLS only. Empty: without TLS."""
    connect_timeout_s: Positive = 5.0
    """How long a process that starts, and each attempt to connect again, waits for NATS."""
    replicas: Count = 1
    """Copies that NATS keeps of durable state. 3 on a cluster of NATS servers."""


class TelemetryConfig(_Section, frozen=True, kw_only=True):
    log_level: str = "info"
    """The least that is logged: debug, info, warning, error or off."""
    log_json: bool = False
    """Whether logs on standard error are JSON lines (True), or lines for people (False)."""
    trace_dir: str = ""
    """Directory for span files, `<service>.jsonl`, and `<service>-2.jsonl` of a second process of
    that name. A file of 256 MiB is put aside, as `<service>.old.jsonl`, in place of the one before.
    Empty: no files."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector, for example http://127.0.0.1:4318. Empty: none."""
    metrics_host: str = "127.0.0.1"
    """The address of the endpoints that `metrics_port` of each role opens."""


class GatewayConfig(_Section, frozen=True, kw_only=True):
    name: Name = "gateway"
    """What its id begins with; the rest comes from the durable store. Gateways may share it."""
    host: str = "127.0.0.1"
    """The address at which the API is served."""
    port: Port = 8000
    """The port of the API."""
    share_port: bool = False
    """Whether several gateway processes of a machine listen at this address, as more processors are
    needed than one process uses. Each connection goes to one of them (SO_REUSEPORT)."""
    api_keys: tuple[str, ...] = ()
    """SHA-256 (hex) of keys, from `lambdascale key static`, that count beside those of
    `lambdascale key add`. With any, the API asks for a key even before there are others."""
    tls_certificate: str = ""
    """PEM file with the certificate (and those between it and its authority) that clients see. With
    `tls_key`, the API is HTTPS. Empty: HTTP."""
    tls_key: str = ""
    """PEM file with the key of `tls_certificate`."""
    hosts: tuple[str, ...] = ()
    """Names by which clients call the gateway. Where it listens on loopback, or where names are
    given, requests for other hosts are refused, but for addresses, `localhost` and the machine's
    name."""
    cors_origins: tuple[str, ...] = ()
    """Origins (such as https://chat.example.org) whose pages may call the gateway from a browser,
    beside its own origin. `*`: all may."""
    max_connections: Count = 8192
    """The most connections at a time. Further ones are answered with 503."""
    max_connections_per_client: Size = 0
    """The most connections from one address (a proxy counts as one client); further ones are
    answered with 429. 0: no limit of its own."""
    client_timeout_s: Positive = 30.0
    """How long the headers of a request, and then its body, may take to arrive, and how long a
    client may leave its answer unread."""
    max_body_bytes: Count = 1 << 20
    """Limit for the body of a request, when it is unpacked."""
    max_image_bytes: Count = 16 << 20
    """Limit for a body with an image."""
    max_queue: Size = 1024
    """The most requests that wait for an instance. Further ones are answered with 429."""
    queue_timeout_s: Seconds = 120.0
    """The longest wait for an instance, then 429 with Retry-After."""
    max_attempts: Count = 8
    """After this many failures a request ends with an error."""
    check_s: Seconds = 60.0
    """How often each replica is asked for the log probabilities of a few known tokens while it is
    idle. One whose answers are not those of the others is taken out. 0: never."""
    keep_answers_s: Positive = 600.0
    """How long an answer with an `Idempotency-Key` can be fetched again. At least 1 s."""
    max_keys: Count = 10_000
    """The most idempotency keys of one client that a gateway keeps answers for."""


class PlannerConfig(_Section, frozen=True, kw_only=True):
    tick_s: Positive = 0.1
    """The least time between decisions about a model, and between attempts at what failed."""
    queue_per_instance: Positive = 0.25
    """Queued work that justifies one more instance, as a share of the work that an instance takes
    at once."""
    prefill_wait_s: Positive = 0.5
    """One more instance is justified when the prompts that wait for their prefill would take an
    instance longer than this, at the speed that nodes have measured."""
    fill: Share = 1.0
    """The share of an instance that a model's load is meant to fill. Less: there is room for a
    burst before work waits, for more device time."""
    idle_s: Seconds = 2.0
    """What it is worth not to load an instance again, in device seconds. An instance is given back
    when the load has not needed it for this long. Its copy in host memory stays for about a hundred
    times as long, or for as long as the model's history says."""
    scale_up_hold_s: Seconds = 0.0
    """The load must justify more instances for up to this long, the shorter the more there is of
    it. More than 0: fewer loads in vain where they are dear, and later answers to bursts."""
    horizon_s: Seconds = 1.0
    """How long loading is taken to take, and so how far the planner looks ahead, while no rate is
    known."""
    anticipate: bool = True
    """Whether a model's history decides how long its replicas and their copies in memory are kept,
    and replicas are loaded ahead of load that came at this time on both of the last two days, or on
    this weekday in both of the last two weeks."""
    stray_s: Positive = 10.0
    """Weights in memory that nothing uses (such as a part of a model from an event that was cut
    off) are freed after this long."""
    max_stages: Count = 4
    """The most stages that a path may have. More than 7 are never worth their price, except for
    models that fit no device."""
    link_bytes_per_s: Size = 0
    """The rate of a node's link if the node does not say. 0: not known, so there are no
    predictions."""
    disk_bytes_per_s: Count = 10**9
    """The rate that is taken for a node's disk until the node has read it."""
    strategy: str = "auto"
    """How blocks spread. `auto` chooses for each event; `lambdascale plan --help` names the
    others."""
    serving: str = "pools"
    """Who serves while blocks spread: pools, pools-only-targets, pipelines, zigzag or none."""
    signing_key_file: str = ""
    """File with the key (from `lambdascale init`) that signs what nodes may read of each other's
    blocks for a scaling event; see `node.signers_file`. Empty: nothing is signed."""
    step_overhead_s: Seconds = 0.001
    """The most that alpha of the cost model may be: the time until the first bytes from a new
    source arrive. (Nodes measure it.)"""
    metrics_port: Port = 0
    """The port of `/metrics`, `/live` and `/ready`. 0: none."""
    scaler_port: Port = 0
    """The port at which the active planner tells KEDA how many nodes are wanted (gRPC, an external
    scaler). 0: none."""
    scaler_host: str = "127.0.0.1"
    """The address that it listens on. Nothing there asks for a key."""


class RegistryConfig(_Section, frozen=True, kw_only=True):
    report_s: Seconds = 0.2
    """How long a registry that starts waits for nodes to report what they hold."""
    durable_copies: Count = 2
    """How many machines keep each model on a disk. The first is the machine that imports it."""
    restore_after_s: Seconds = 60.0
    """How long the durable copies of a node that is gone are waited for, while others are there. A
    restart that is over by then moves nothing."""
    host_copies: Size = 1
    """How many machines keep each idle model in memory, as far as nodes have host caches
    (`node.host_bytes`)."""
    copies_at_a_time: Count = 4
    """The most copies that are made at a time on disks, and the most in host caches, each on a node
    of its own."""
    signing_key_file: str = ""
    """The same as `planner.signing_key_file`, for the copies that the registry orders."""
    copy_bytes_per_s: Size = 0
    """The rate of each. 0: a quarter of the slower link of the two nodes, or 100 MB/s if neither
    rate is known."""
    metrics_port: Port = 0
    """The port of `/metrics`, `/live` and `/ready`. 0: none."""


class NodeConfig(_Section, frozen=True, kw_only=True):
    id: Name = "node-0"
    """The node's name, which no other node of the cluster may have."""
    host: str = "127.0.0.1"
    """The address that the data plane binds to and tells others."""
    port: Port = 0
    """The port of the data plane. 0: any free port."""
    machine: str = msgspec.field(default_factory=socket.gethostname)
    """The machine's name. Nodes that name the same machine share local links and disks."""
    rack: str = ""
    """The rack's name. Nodes of one rack share a trunk to other racks, and fail together. Replicas
    of a model are kept in at least two racks. Empty: not known."""
    trunk_bytes_per_s: Size = 0
    """The rate of the rack's trunk in each direction. 0: not known, and taken to be no limit."""
    local_bytes_per_s: Size = 0
    """The rate between nodes of the same machine (shared memory); transfers are paced to it. 0: not
    known: they are not paced, and plans assume the rate of the data link."""
    data_dir: str = "lambdascale-data"
    """Holds the node's packed models, in store/."""
    disk_bytes_per_s: Size = 0
    """Paces reads of packed models, for a disk that others use too. 0: as fast as it goes."""
    device: str = "cpu"
    """What computes: `cpu`, or a GPU such as `cuda:0`, the first of several if `tensor_parallel` is
    more than 1."""
    cpu_weights: Literal["stored", "packed", "int8"] = "packed"
    """How a CPU computes with weights. `stored`: from the arena, without further memory, slowest.
    `packed`: from a second copy, ordered for the processor. `int8`: from a copy rounded to 8 bits;
    fastest, but tokens may differ."""
    tensor_parallel: Count | Literal["auto"] = 1
    """How many processes run each decoder together, each its share of the heads and of every
    matrix. It has to divide the number of the model's KV heads. On a CPU each has its share of
    `threads`, and `cpu_weights` cannot be `stored`. On GPUs each has a GPU of its own: `device` and
    those after it; `kv_host_bytes` has to be 0. auto: on a GPU 1; on a CPU, of 1, 2, 4 and 8, up to
    `threads`, each model has the number with which a decode step is expected to be fastest, by what
    the node measures when it starts."""
    team_devices: Count = 1
    """How many nodes of this machine, each with `threads` of its own, may run a model together that
    fits into none of their arenas. Each holds a part of it, and all of them compute each part, if
    the planner expects that to be faster than one part after the other. Give all nodes of the
    machine the same number. More than 1 only where `tensor_parallel` is auto and `threads` is not
    0. 1: each node runs its own part alone."""
    arena_bytes: Count = 1 << 30
    """Memory for weights, taken when the node starts. With `cuda` it is taken twice: on the host
    and on the device. With several GPUs it is taken on the host, and each of them keeps its share
    of the blocks that are in use."""
    host_bytes: Size = 0
    """Size of the host cache: memory beside the arena, for models that are not in use here. Copies
    that are given back move there, and come back from there. 0: no host cache; they stay in the
    arena until others need the room."""
    keep_weights_s: Seconds = 60.0
    """How long the node's weights stay in memory after its process has ended, for the process that
    takes its place: a keeper, a small process of its own, holds them. 0: no keeper; they end with
    the process."""
    kv_bytes: Size = 0
    """Memory for KV caches, where the engine computes; of several GPUs, on each. 0: what is left
    there once the arenas are taken, less a tenth of the whole. The models that are open share
    it."""
    kv_share: Share = 1.0
    """The share of that memory which this node takes if `kv_bytes` is 0. Less than 1 if several
    nodes share a machine or a device."""
    kv_host_bytes: Size = 0
    """Memory of the machine for KV that has to leave `kv_bytes`: of sequences that are preempted,
    and of prefixes that nobody uses. It comes back from there if copying takes less time than
    computing, by what the node has measured. 0: it is computed again."""
    adapter_bytes: Size = 256 << 20
    """Memory for LoRA adapters, where the engine computes. Those that were used last stay in it."""
    slots: Count = 8
    """How many sequences a full replica runs at once."""
    step_tokens: Count = 512
    """The most tokens that one step prefills."""
    speculation: Size = 7
    """The most tokens that a step proposes for a sequence, from what its prompt and answer said
    before, and checks at once. Answers that repeat take fewer steps, and get the same tokens. Under
    load there are no proposals. 0: never."""
    kv_moves: Literal["auto", "always", "never"] = "auto"
    """Whether a sequence that moves here brings its KV along. auto: if that takes less time than to
    compute it, by what the node has measured."""
    threads: Size = 0
    """Number of torch's threads. 0: torch's default; under `up`, the node's share of all
    cores."""
    link_bytes_per_s: Size = 0
    """Paces each direction of the data link. 0: as fast as it goes."""
    rdma_device: str = ""
    """The RDMA device that moves weights, for example `mlx5_0`. Empty: none."""
    rdma_gid_index: Size = 0
    """The index of the device's address; for RoCE, of its IPv4 address (see `ibv_devinfo -v`)."""
    device_direct: bool = True
    """Whether blocks may come from peers directly to the GPU's memory, by GPUDirect RDMA and CUDA
    IPC, and KV by the latter, which takes 128 MiB of that memory. False: always through the
    host's."""
    tls_certificate: str = ""
    """PEM file with the node's own certificate. With `tls_key` and `tls_authority`, everything that
    nodes send each other over TCP is encrypted. All nodes have a certificate or none. Empty: no
    TLS."""
    tls_key: str = ""
    """PEM file with the key of `tls_certificate`."""
    tls_authority: str = ""
    """PEM file with the authority whose certificates other nodes must show."""
    secret_file: str = ""
    """File with the cluster's secret: at least 32 bytes, which only its owner may read. Nodes that
    have it connect only to nodes that have the same. Empty: whoever can reach a node may
    connect."""
    signers_file: str = ""
    """File with the public keys (from `lambdascale init`) of planner and registry. Other nodes may
    then read from this one only what these have ordered. Empty: any node may read every block."""
    mesh_peers: Size = 64
    """How many peers, nearest first, the node connects to before a plan needs them. It connects to
    others when they are needed."""
    share_compiled: bool = False
    """Whether the node gives its compiled C libraries to other nodes, and takes theirs in place of
    compiling its own. Only with `bus.credentials`, because whoever may speak as a node on the bus
    can then give nodes native code."""
    evacuate_s: Seconds = 10.0
    """How long a node that is told to stop serves on, at most, until others have taken over what it
    serves, and another machine has the models of which it holds the only durable copy."""
    engine_timeout_s: Seconds = 30.0
    """An engine that has been at one step for so long, and for ten times its longest step, hangs:
    the node says that it is unfit, hands its requests over, and ends with an error, to be started
    again. 0: never."""
    notice: str = ""
    """Where the cloud says that it is about to take the machine away: a file (a relative path is
    taken from `data_dir`), or an http URL of its metadata service, which is asked every second. The
    node then leaves as if it were told to stop. Empty: there is none. docs/deploy.md has
    examples."""
    step_floor_s: Seconds = 0.0
    """The least time of a step through the whole model; a part of the model takes its share. It
    lets many nodes run on one machine as if each had its own accelerator. 0: as fast as it goes."""
    lease_s: Count = 2
    """The node counts as gone this long after it stopped renewing its lease (whole seconds)."""
    metrics_port: Port = 0
    """The port of `/metrics`, `/live` and `/ready`. 0: none. The nodes of `up` have this port and
    those after it."""


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
    except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
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
