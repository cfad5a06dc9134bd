"""What must hold of every set of instances that a planner publishes."""

from collections import Counter

from shared.ids import NodeId
from shared.messages.instances import InstanceSet, InstanceState

EPSILON = 1e-6


def of_set(instances: InstanceSet, blocks: int) -> list[str]:
    """What is wrong with a set: capacity counted twice, or paths that do not cover the model."""
    wrong: list[str] = []
    load: dict[NodeId, float] = {}
    for instance in instances.instances:
        run = [block for s in instance.stages for block in range(s.start, s.stop)]
        if run != list(range(blocks)):
            wrong.append(f"{instance.id} of {instances.name} does not run every block once")
        if instance.state is InstanceState.SERVING:
            for stage in instance.stages:
                share = instance.capacity * (stage.stop - stage.start) / blocks
                load[stage.node] = load.get(stage.node, 0.0) + share
    wrong += [
        f"{node} is counted {share:.6f} times for {instances.name}, revision {instances.revision}"
        for node, share in load.items()
        if share > 1 + EPSILON
    ]
    ids = Counter(instance.id for instance in instances.instances)
    return wrong + [f"{i} is twice in a set of {instances.name}" for i, n in ids.items() if n > 1]
