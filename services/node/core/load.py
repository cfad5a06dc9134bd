"""What an engine has to do, and what it has done since its start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    running: int = 0
    """Sequences that this node leads or is a stage of."""
    waiting: int = 0
    kv_used: int = 0
    kv_capacity: int = 0
    tokens_out: int = 0
    """Tokens drawn here since the start."""
    prompt_tokens: int = 0
    """Tokens that sequences led here have begun with since then."""
    cached_tokens: int = 0
    """Those of them whose KV was found in the prefix cache."""
    preemptions: int = 0
    """Times since then that a sequence gave its KV back, so that others had room."""
    tokens_proposed: int = 0
    """By speculation, for sequences led here, since the start; and those of them that were drawn.
    """
    tokens_accepted: int = 0
    violations: int = 0
    """Messages of peers that were malformed or out of place."""
    faults: int = 0
    """Bugs that were contained: see the log."""
