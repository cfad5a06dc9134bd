"""Every subject, bucket and object store on the bus. No other module spells them."""

from shared.ids import GatewayId, NodeId

ROOT = "ls"

# --- registry (requests) ---
REGISTRY_MODEL_ADD = f"{ROOT}.registry.model_add"
REGISTRY_MODEL_REMOVE = f"{ROOT}.registry.model_remove"
REGISTRY_MODEL_SET = f"{ROOT}.registry.model_set"
REGISTRY_MODELS = f"{ROOT}.registry.models"
REGISTRY_SOURCES = f"{ROOT}.registry.sources"
REGISTRY_RESERVE = f"{ROOT}.registry.reserve"
REGISTRY_UNRESERVE = f"{ROOT}.registry.unreserve"
REGISTRY_PULSE = f"{ROOT}.registry.pulse"
"""Ping, from the registry to itself."""
REGISTRY_POOL = f"{ROOT}.registry.pool"
REGISTRY_NODES = f"{ROOT}.registry.nodes"
REGISTRY_STORY = f"{ROOT}.registry.story"
REGISTRY_COPIES = f"{ROOT}.registry.copies"
REGISTRY_DUTY = f"{ROOT}.registry.duty"
REGISTRY_LEAVE = f"{ROOT}.registry.leave"
REGISTRY_ACCESS = f"{ROOT}.registry.access"
REGISTRY_ACCESS_CHANGE = f"{ROOT}.registry.access_change"

# --- the pool's broadcasts ---
POOL_STATUS = f"{ROOT}.pool.status"
"""NodeStatus, from nodes."""
POOL_REPORT = f"{ROOT}.pool.report"
"""ReportStatus, from the registry."""
POOL_NODES = f"{ROOT}.pool.nodes"
"""NodeJoined and NodeGone, from the registry."""
POOL_MODELS = f"{ROOT}.pool.models"
"""ModelAdded and ModelRemoved, from the registry."""

# --- planner ---
PLANNER_STATE = f"{ROOT}.planner.state"
PLANNER_INSTANCES = f"{ROOT}.planner.instances"
PLANNER_SCALE = f"{ROOT}.planner.scale"
PLANNER_DECISIONS = f"{ROOT}.planner.decisions"
PLANNER_CHRONICLE = f"{ROOT}.planner.chronicle"
PLANNER_EVENT = f"{ROOT}.planner.event"
PLANNER_STORY = f"{ROOT}.planner.story"
PLANNER_SUSPECT = f"{ROOT}.planner.suspect"
INSTANCES = f"{ROOT}.instances"
"""InstanceSet, from the planner."""
EVENTS = f"{ROOT}.events"
"""EventChanged, from the planner."""
ARRIVALS = f"{ROOT}.arrivals"
"""BlockArrived and PullFailed, from nodes; FirstPartialToken, from gateways."""

GATEWAYS_GONE = f"{ROOT}.gateways.gone"
"""GatewayGone, from gateways."""

# --- load ---
LOAD_GATEWAY = f"{ROOT}.load.gateway"
LOAD_TENANTS = f"{ROOT}.load.tenants"
"""GatewayUse, among gateways."""

# --- durable state (JetStream) ---
KV_LEASES = "ls_leases"
KV_MODELS = "ls_models"
KV_RESERVATIONS = "ls_reservations"
KV_NODES = "ls_nodes"
"""Nodes that joined and were not yet reported gone. A registry that restarts must settle them."""
KV_DUTIES = "ls_duties"
"""What operators have said that nodes may be used for."""
KV_ACCESS = "ls_access"
"""Tenants and API keys."""
KV_EVENTS = "ls_events"
KV_SCALE = "ls_scale"
"""Numbers of replicas that operators asked for, by model id."""
KV_ACTIVE = "ls_active"
"""Which process of a role is the active one, by role (`shared/election`)."""
KV_ANSWERS = "ls_answers"
"""Answers with idempotency keys, so far (`services/gateway/core/keyed.py`)."""
KV_GATEWAYS = "ls_gateways"
"""The gateways that run, by their numbers (`services/gateway/lease.py`)."""
KV_RHYTHMS = "ls_rhythms"
"""When load of each model came, by model id."""
KV_COUNTERS = "ls_counters"
"""The last generation of each node and the last term of each role (`shared/counters.py`)."""
OBJECTS = "ls_assets"
LOG_USAGE = "ls_usage"
"""What each call used (`shared/usage.py`)."""

# --- names of counters (a role's has its name) ---


def node_counter(node: NodeId) -> str:
    return f"node.{node}"


def candidate(holder: str) -> str:
    """Where a process that has a role, or stands by for it, hears the others of the role."""
    return f"{ROOT}.candidate.{holder}"


def of_node(node: NodeId) -> str:
    """What the subjects begin with at which a node gets what is meant for it alone."""
    return f"{ROOT}.node.{node}."


def node_plan(node: NodeId) -> str:
    return f"{of_node(node)}plan"


def node_release(node: NodeId) -> str:
    return f"{of_node(node)}release"


def node_import(node: NodeId) -> str:
    return f"{of_node(node)}import"


def node_keep(node: NodeId) -> str:
    return f"{of_node(node)}keep"


def node_drop(node: NodeId) -> str:
    return f"{of_node(node)}drop"


def node_report(node: NodeId) -> str:
    """ReportStatus, for one node."""
    return f"{of_node(node)}report"


def node_ping(node: NodeId) -> str:
    return f"{of_node(node)}ping"


def compiled(name: str) -> str:
    """Nodes that have the compiled library of this file name answer here."""
    return f"{ROOT}.compiled.{name.replace('.', '-')}"


def node_story(node: NodeId) -> str:
    return f"{of_node(node)}story"


def node_submit(node: NodeId) -> str:
    return f"{of_node(node)}submit"


def node_adapted(node: NodeId) -> str:
    """Submit with an adapter. A node of the release before would not see the adapter, and does not
    listen here."""
    return f"{of_node(node)}adapted"


def node_adapter(node: NodeId) -> str:
    return f"{of_node(node)}adapter"


def node_distrust(node: NodeId) -> str:
    return f"{of_node(node)}distrust"


def node_cancel(node: NodeId) -> str:
    return f"{of_node(node)}cancel"


def gateway_tokens(gateway: GatewayId) -> str:
    return f"{ROOT}.gateway.{gateway}.tokens"


def gateway_story(gateway: GatewayId) -> str:
    return f"{ROOT}.gateway.{gateway}.story"
