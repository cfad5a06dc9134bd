"""The optimum of live scaling, by the greedy rule of docs/planning.md (BlitzScale, section 5.2).

A source with all blocks has batches to run, all alike and there at time 0. A target that is loading
the same blocks, first to last, runs the first blocks of a batch, and the source the rest. The rule
is the optimum wherever brute force or a solver could tell (`tests/support/zigzag.py`, in units of
layers); here blocks differ, and arrive at any times.
"""

from bisect import insort
from collections.abc import Sequence


def finishes(batches: int, block_s: Sequence[float], ready: Sequence[float]) -> list[float]:
    """When each batch is finished. `block_s`: what each block takes; `ready`: when the target can
    run it.

    The target runs the next block that it has of the earliest batch. An idle source takes the
    earliest batch that the target does not run at that moment.
    """
    done, finish = [0] * batches, [0.0] * batches
    waiting = list(range(batches))
    on_target: int | None = None
    time = source_free = target_free = 0.0
    while waiting or on_target is not None:
        if on_target is not None and target_free <= time:
            batch, on_target = on_target, None
            done[batch] += 1
            if done[batch] == len(block_s):
                finish[batch] = time
            else:
                insort(waiting, batch)
        if waiting and source_free <= time:
            batch = waiting.pop(0)
            finish[batch] = source_free = time + sum(block_s[done[batch] :])
        if on_target is None:
            on_target = next((b for b in waiting if ready[done[b]] <= time), None)
            if on_target is not None:
                waiting.remove(on_target)
                target_free = time + block_s[done[on_target]]
        coming = [ready[done[b]] for b in waiting if ready[done[b]] > time]
        if waiting:
            coming.append(source_free)
        if on_target is not None:
            coming.append(target_free)
        time = min((at for at in coming if at > time), default=time)
    return finish
