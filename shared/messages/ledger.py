"""Where the time of a scaling event went: its phases, in the order in which they come."""

import enum

import msgspec


class Phase(enum.Enum):
    """What an event waits for. Each phase ends with what its comment says."""

    EVIDENCE = "evidence"
    """The planner hears that work waits and that replicas are missing."""
    HOLD = "hold"
    """The policy asks for replicas: weak evidence must last for a while."""
    ROOM = "room"
    """The event begins: memory has been freed for it, by evictions and drains."""
    RESERVE = "reserve"
    """The registry has set targets aside and named sources."""
    PLAN = "plan"
    """The multicast is chosen."""
    FORM = "form"
    """The group has formed, for a strategy that needs one."""
    ORDERS = "orders"
    """A target has taken its part and asks a source (or its own disk) for the first block."""
    FIRST_BYTE = "first byte"
    """The first byte of any block has come: connections, and what the source does first."""
    FIRST_PATH = "first path"
    """A path over nodes that still load can serve."""
    FIRST_TOKEN = "first token"
    """Such a path has served a token."""
    LAST_BLOCK = "last block"
    """The last block has come and is verified (blocks are verified while they come)."""
    ATTACH = "attach"
    """The engine can run the last block."""
    REGISTER = "register"
    """The planner knows that the last node is complete: it is a replica."""
    GROW = "grow"
    """The time from asking for more targets until they join, if the last node was one of them."""
    REPAIR = "repair"
    """The times from a trouble that concerned the last node until another plan for it."""


class Spent(msgspec.Struct, frozen=True):
    """One line of an event's ledger."""

    phase: Phase
    seconds: float
    predicted_s: float | None
    """As it was predicted before the phase began. None: it was not."""
