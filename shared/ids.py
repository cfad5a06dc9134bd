"""Typed identifiers. Each is a plain string (or int) on the wire; the type says what it names."""

import re
import secrets
from collections.abc import Callable
from functools import partial
from typing import NewType

from shared.errors import BadInput

NodeId = NewType("NodeId", str)
"""A node's name, chosen by its operator. It survives restarts; the generation does not."""
Generation = NewType("Generation", int)
"""Counts the processes of a node. A later process is another node. See `shared/counters.py`."""
ModelName = NewType("ModelName", str)
"""What users call a model in requests."""
ModelId = NewType("ModelId", str)
"""Digest of a model's manifest: a model with changed weights is another model."""
NO_ADAPTER = ModelId("")
"""In place of an adapter's id."""
GatewayId = NewType("GatewayId", str)
InstanceId = NewType("InstanceId", str)
EventId = NewType("EventId", str)
RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
"""The part of an API key that is no secret."""

id_source: Callable[[], str] = partial(secrets.token_hex, 5)
"""Makes ten hex digits, never the same twice. Replaced where runs are reproducible."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}")


def new_id(prefix: str) -> str:
    """A fresh id such as `ev-3f9a0c12ab`; unique enough for the life of a cluster."""
    return f"{prefix}-{id_source()}"


def check_name(kind: str, value: str) -> str:
    """Checks a name that must be one token of a subject (no dots, spaces or wildcards).
    BadInput."""
    if not _NAME.fullmatch(value):
        raise BadInput(
            f"{kind} {value!r} is not valid: use letters, digits, '-' and '_' (63 at most)"
        )
    return value


def check_model_name(value: str) -> ModelName:
    if not _MODEL_NAME.fullmatch(value):
        raise BadInput(
            f"model name {value!r} is not valid: use letters, digits and '._/-' (127 at most)"
        )
    return ModelName(value)
