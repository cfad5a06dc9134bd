"""Who may say and hear what on the bus. NATS' users get their permissions from these tables.

A role may do nothing that is not here. Nodes have a user each: where a subject or a key carries a
node's id, a node has only its own. The other roles have one user each, which all their processes
share.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shared import subjects
from shared.ids import GatewayId, NodeId

ANSWER_WITHIN = "1h"
"""How long after a request its answer may be sent; importing a model takes longest."""
_ANY = "*"
_INBOXES = "_INBOX"
_OF_ANY_NODE = subjects.of_node(NodeId(_ANY))


class Role(enum.StrEnum):
    REGISTRY = "registry"
    PLANNER = "planner"
    GATEWAY = "gateway"
    NODE = "node"
    OPERATOR = "operator"
    """The commands that a person runs."""


@dataclass(frozen=True, slots=True)
class Topic:
    subject: str
    says: frozenset[Role]
    """Who publishes there, or sends requests."""
    hears: frozenset[Role]
    """Who subscribes, or answers requests."""


@dataclass(frozen=True, slots=True)
class Bucket:
    name: str
    writes: Mapping[Role, str]
    """The keys that a role may write: a key, `>` for all, or with `*` for a node's own id."""
    gets: frozenset[Role] = frozenset()
    """Who may read a key that it can name, beside those who write."""
    lists: frozenset[Role] = frozenset()
    """Who may read all keys, and watch them. It takes a consumer, and whoever makes one says where
    NATS is to deliver what the bucket holds. So no role from which others are defended may have it,
    least of all together with writing."""


@dataclass(frozen=True, slots=True)
class Log:
    name: str
    appends: frozenset[Role]
    reads: frozenset[Role]
    """It takes a consumer (see Bucket.lists), so who reads may not append."""


@dataclass(frozen=True, slots=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool
    """Whether it may answer each request that it gets, once, wherever the answer has to go."""


REGISTRY = frozenset({Role.REGISTRY})
PLANNER = frozenset({Role.PLANNER})
GATEWAY = frozenset({Role.GATEWAY})
NODE = frozenset({Role.NODE})
OPERATOR = frozenset({Role.OPERATOR})
_NODE_ID, _GATEWAY_ID = NodeId(_ANY), GatewayId(_ANY)

TOPICS = (
    # --- requests to the registry ---
    Topic(subjects.REGISTRY_MODEL_ADD, says=NODE, hears=REGISTRY),
    Topic(subjects.REGISTRY_MODEL_REMOVE, says=OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_MODEL_SET, says=OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_MODELS, says=PLANNER | GATEWAY | NODE | OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_SOURCES, says=PLANNER | NODE, hears=REGISTRY),
    Topic(subjects.REGISTRY_RESERVE, says=PLANNER, hears=REGISTRY),
    Topic(subjects.REGISTRY_UNRESERVE, says=PLANNER, hears=REGISTRY),
    Topic(subjects.REGISTRY_PULSE, says=REGISTRY, hears=REGISTRY),
    Topic(subjects.REGISTRY_POOL, says=PLANNER | GATEWAY | OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_NODES, says=NODE | OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_STORY, says=OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_COPIES, says=GATEWAY | OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_DUTY, says=OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_LEAVE, says=NODE, hears=REGISTRY),
    Topic(subjects.REGISTRY_ACCESS, says=GATEWAY | OPERATOR, hears=REGISTRY),
    Topic(subjects.REGISTRY_ACCESS_CHANGE, says=OPERATOR, hears=REGISTRY),
    # --- the pool's broadcasts ---
    Topic(subjects.POOL_STATUS, says=NODE, hears=REGISTRY | PLANNER | OPERATOR),
    Topic(subjects.POOL_REPORT, says=REGISTRY | OPERATOR, hears=NODE),
    Topic(subjects.POOL_NODES, says=REGISTRY, hears=PLANNER | GATEWAY | NODE),
    Topic(subjects.POOL_MODELS, says=REGISTRY, hears=PLANNER | GATEWAY | NODE),
    # --- the planner ---
    Topic(subjects.PLANNER_STATE, says=OPERATOR, hears=PLANNER),
    Topic(subjects.PLANNER_INSTANCES, says=GATEWAY, hears=PLANNER),
    Topic(subjects.PLANNER_SCALE, says=OPERATOR, hears=PLANNER),
    Topic(subjects.PLANNER_DECISIONS, says=OPERATOR, hears=PLANNER),
    Topic(subjects.PLANNER_CHRONICLE, says=GATEWAY | OPERATOR, hears=PLANNER),
    Topic(subjects.PLANNER_EVENT, says=GATEWAY | OPERATOR, hears=PLANNER),
    Topic(subjects.PLANNER_STORY, says=OPERATOR, hears=PLANNER),
    Topic(subjects.PLANNER_SUSPECT, says=NODE, hears=PLANNER),
    Topic(subjects.INSTANCES, says=PLANNER, hears=GATEWAY | OPERATOR),
    Topic(subjects.EVENTS, says=PLANNER, hears=OPERATOR),
    Topic(subjects.ARRIVALS, says=GATEWAY | NODE, hears=PLANNER | OPERATOR),
    Topic(subjects.candidate(_ANY), says=REGISTRY | PLANNER, hears=REGISTRY | PLANNER),
    # --- nodes ---
    Topic(subjects.node_plan(_NODE_ID), says=PLANNER, hears=NODE),
    Topic(subjects.node_release(_NODE_ID), says=PLANNER, hears=NODE),
    Topic(subjects.node_import(_NODE_ID), says=OPERATOR, hears=NODE),
    Topic(subjects.node_keep(_NODE_ID), says=REGISTRY, hears=NODE),
    Topic(subjects.node_drop(_NODE_ID), says=REGISTRY, hears=NODE),
    Topic(subjects.node_report(_NODE_ID), says=REGISTRY | PLANNER, hears=NODE),
    Topic(subjects.node_ping(_NODE_ID), says=PLANNER | GATEWAY, hears=NODE),
    Topic(subjects.node_distrust(_NODE_ID), says=GATEWAY, hears=NODE),
    Topic(subjects.node_story(_NODE_ID), says=OPERATOR, hears=NODE),
    Topic(subjects.node_submit(_NODE_ID), says=GATEWAY, hears=NODE),
    Topic(subjects.node_adapted(_NODE_ID), says=GATEWAY, hears=NODE),
    Topic(subjects.node_adapter(_NODE_ID), says=NODE, hears=NODE),
    Topic(subjects.node_cancel(_NODE_ID), says=GATEWAY, hears=NODE),
    Topic(subjects.compiled(_ANY), says=NODE, hears=NODE),
    # --- gateways ---
    Topic(subjects.GATEWAYS_GONE, says=GATEWAY, hears=NODE),
    Topic(subjects.LOAD_GATEWAY, says=GATEWAY, hears=PLANNER | GATEWAY | OPERATOR),
    Topic(subjects.LOAD_TENANTS, says=GATEWAY, hears=GATEWAY),
    Topic(subjects.gateway_tokens(_GATEWAY_ID), says=NODE, hears=GATEWAY),
    Topic(subjects.gateway_story(_GATEWAY_ID), says=GATEWAY | OPERATOR, hears=GATEWAY),
)
_BY_PATTERN = tuple((topic.subject.split("."), topic) for topic in TOPICS)


@lru_cache(maxsize=4096)
def topic_of(subject: str) -> Topic | None:
    """The row of TOPICS for a subject; None: it is nobody's."""
    tokens = subject.split(".")
    for pattern, topic in _BY_PATTERN:
        if len(pattern) == len(tokens) and all(
            part in (_ANY, token) for part, token in zip(pattern, tokens, strict=True)
        ):
            return topic
    return None


ALL_KEYS = ">"
BUCKETS = (
    Bucket(subjects.KV_LEASES, writes={Role.NODE: _ANY}, lists=REGISTRY),
    Bucket(subjects.KV_MODELS, writes={Role.REGISTRY: ALL_KEYS}, lists=REGISTRY),
    Bucket(subjects.KV_RESERVATIONS, writes={Role.REGISTRY: ALL_KEYS}, lists=REGISTRY),
    Bucket(subjects.KV_NODES, writes={Role.REGISTRY: ALL_KEYS}, lists=REGISTRY),
    Bucket(subjects.KV_DUTIES, writes={Role.REGISTRY: ALL_KEYS}, lists=REGISTRY),
    Bucket(subjects.KV_ACCESS, writes={Role.REGISTRY: ALL_KEYS}, lists=REGISTRY),
    Bucket(subjects.KV_EVENTS, writes={Role.PLANNER: ALL_KEYS}, lists=PLANNER),
    Bucket(subjects.KV_SCALE, writes={Role.PLANNER: ALL_KEYS}, lists=PLANNER),
    Bucket(subjects.KV_RHYTHMS, writes={Role.PLANNER: ALL_KEYS}, lists=PLANNER),
    Bucket(
        subjects.KV_ACTIVE,
        writes={role: role for role in (Role.REGISTRY, Role.PLANNER)},
        lists=OPERATOR,
    ),
    Bucket(
        subjects.KV_COUNTERS,
        writes={
            **{role: role for role in (Role.REGISTRY, Role.PLANNER)},
            Role.NODE: subjects.node_counter(_NODE_ID),
        },
        gets=OPERATOR,
    ),
    Bucket(subjects.KV_ANSWERS, writes={Role.GATEWAY: ALL_KEYS}),
    Bucket(subjects.KV_GATEWAYS, writes={Role.GATEWAY: ALL_KEYS}),
)
LOGS = (Log(subjects.LOG_USAGE, appends=GATEWAY, reads=OPERATOR),)
ASSETS_WRITTEN = NODE
ASSETS_READ = NODE | GATEWAY
ANSWER_ONCE = NODE | GATEWAY
ANSWER_ANYWHERE = REGISTRY | PLANNER
"""NATS remembers what it has delivered for as long as that may be answered, and what a bucket's
watcher gets never is. So those who watch may answer at any time, in any inbox. Others have to be
defended from answers to requests that were not theirs."""


def inbox_of(key: str) -> str:
    """The subject below which the user with this public key gets answers, and nobody else."""
    return f"{_INBOXES}.{key}"


def permissions(role: Role, node: NodeId | None, inbox: str) -> Permissions:
    """What a user of the role may do. `node`: which node it is; `inbox`: where it gets answers."""
    # What a node says to other nodes goes to any of them.
    says = [
        topic.subject if Role.NODE in topic.hears else _narrowed(topic.subject, node)
        for topic in TOPICS
        if role in topic.says
    ]
    hears = [_narrowed(topic.subject, node) for topic in TOPICS if role in topic.hears]
    stored = [subject for bucket in BUCKETS for subject in _on_bucket(bucket, role, node)]
    stored += _on_assets(role)
    stored += [subject for log in LOGS for subject in _on_log(log, role)]
    if role in ANSWER_ANYWHERE:
        stored.append(f"{_INBOXES}.>")
    publish = tuple(dict.fromkeys([*says, *stored]))
    return Permissions(publish, (*hears, f"{inbox}.>"), answers=role in ANSWER_ONCE)


def _narrowed(subject: str, node: NodeId | None) -> str:
    """The subject of this node alone, if it is one of any node's and `node` is given."""
    if node is None or not subject.startswith(_OF_ANY_NODE):
        return subject
    return subject.replace(_OF_ANY_NODE, subjects.of_node(node), 1)


def _on_bucket(bucket: Bucket, role: Role, node: NodeId | None) -> list[str]:
    """The bucket is made by whoever is first to use it. Nobody may change or delete it."""
    if role not in bucket.gets | bucket.lists | bucket.writes.keys():
        return []
    stream = f"KV_{bucket.name}"
    found = [*_on_stream(stream), f"$JS.API.STREAM.MSG.GET.{stream}"]
    if role in bucket.lists:
        found.append(f"$JS.API.CONSUMER.CREATE.{stream}")
    if keys := bucket.writes.get(role):
        found.append(f"$KV.{bucket.name}.{keys.replace(_ANY, node) if node else keys}")
    return found


def _on_assets(role: Role) -> list[str]:
    if role not in ASSETS_READ:
        return []
    stream = f"OBJ_{subjects.OBJECTS}"
    found = [*_on_stream(stream), f"$JS.API.STREAM.MSG.GET.{stream}"]
    return [*found, f"$O.{subjects.OBJECTS}.>"] if role in ASSETS_WRITTEN else found


def _on_log(log: Log, role: Role) -> list[str]:
    """The log is made by whoever is first to use it. Nobody may change or delete it."""
    stream = f"LOG_{log.name}"
    if role in log.appends:
        return [*_on_stream(stream), f"$LOG.{log.name}"]
    if role in log.reads:
        return [*_on_stream(stream), f"$JS.API.CONSUMER.CREATE.{stream}"]
    return []


def _on_stream(stream: str) -> tuple[str, ...]:
    return "$JS.API.INFO", f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.CREATE.{stream}"
