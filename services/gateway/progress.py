"""What a client is told in words: while it waits, and then where its tokens come from."""

from shared.messages.instances import Coming, Instance


def progress_text(coming: Coming | None, serves: bool) -> str:
    """Empty: nothing is known. `serves`: whether an instance of the model is there already."""
    if coming is None:
        return ""
    if coming.first_s is None:
        return "an instance is being planned"
    text = f"weights {coming.share:.0%}".replace("%", " %")
    if not serves and coming.first_s > 0:
        return f"{text}, first path in {coming.first_s:.1f} s"
    if coming.complete_s:
        return f"{text}, all of {coming.replicas} more in {coming.complete_s:.1f} s"
    return text


def path_text(instance: Instance) -> str:
    """The nodes that run it, each with the blocks that it runs."""
    if instance.is_replica:
        return instance.leader
    return " -> ".join(f"{s.node} {s.start}-{s.stop - 1}" for s in instance.stages)
