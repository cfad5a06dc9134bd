"""Two releases side by side: which versions of what another process says are understood.

While a cluster is upgraded, processes of a release and of the next one work together. A release
therefore understands a new version before the next release says it (CONTRIBUTING.md, "Change a
message"): a process takes its own version, the one before and the one after. Anything further away
is refused.
"""


def beside(version: int, oldest: int = 1) -> range:
    """The versions that a process of this version understands, none below `oldest`."""
    return range(max(oldest, version - 1), version + 2)


def refusal(what: str, theirs: int, ours: int) -> str:
    """The text of the error for a version that is not understood."""
    return (
        f"{what} has version {theirs}, this process speaks {ours}, which understands its "
        "neighbours only: upgrade the cluster one release at a time"
    )
