"""Many racks behind narrow trunks: a binomial pipeline whose nodes are racks.

A row of racks (`taps.py`) adds floor(log2(n + 1)) steps for each rack. But a rack that takes in one
block in each step can also send one out, `lag` steps later, while it spreads the blocks inside: it
is a node of the step model with a slower clock. So the blocks go in batches of `lag` from rack to
rack, by the binomial pipeline of R racks, in turns of `lag` steps. Inside a rack, the first node
takes in what comes and is the source of a binomial pipeline of the rack; one of the nodes that this
leaves idle sends what goes out. That takes about b + lag * ceil(log2 R) + ceil(log2 n) steps
instead of b + R * floor(log2(n + 1)).
"""

from collections.abc import Sequence

from services.planner.core.multicast.binomial import pipeline
from services.planner.core.multicast.schedule import Move, by_step

_TRIES = 4
"""How many lags to try, from the least possible one on. A larger lag may fit the number of blocks
better."""


def rack_moves(racks: Sequence[Sequence[int]], order: Sequence[int]) -> list[Move] | None:
    """Moves from racks[0][0] to all other nodes, in order of steps; None if no lag works.

    In a step a rack sends at most one block to other racks and takes in at most one.
    """
    least = max(len(rack).bit_length() for rack in racks)
    turns = (len(racks) - 1).bit_length() - 1

    def steps(lag: int) -> int:
        return lag * (-(-len(order) // lag) + turns)

    for lag in sorted(range(least, least + _TRIES), key=steps):
        if moves := _with_lag(racks, order, lag):
            return moves
    return None


def _with_lag(racks: Sequence[Sequence[int]], order: Sequence[int], lag: int) -> list[Move] | None:
    # This many steps after the source, a block leaves the first rack.
    first = len(racks[0]).bit_length() - 1
    batches = range(-(-len(order) // lag))
    turns = pipeline([0], range(1, len(racks)), batches).moves
    # Moves between racks. They name racks by their places in `racks`.
    crossing = [
        Move(first + (turn - 1) * lag + i + 1, src, dst, order[place])
        for turn, src, dst, batch in turns
        for i, place in enumerate(range(batch * lag, min((batch + 1) * lag, len(order))))
    ]
    moves = pipeline(racks[0][:1], racks[0][1:], order).moves
    for rack, nodes in enumerate(racks[1:], 1):
        moves += _spread(nodes, [move for move in crossing if move.dst == rack])
    sent = {(move.step, move.src) for move in moves}
    arrived = {(move.dst, move.block): move.step for move in moves}
    arrived |= {(racks[move.dst][0], move.block): move.step for move in crossing}
    arrived |= {(racks[0][0], block): 0 for block in order}
    for step, src, dst, block in crossing:
        able = (
            node for node in racks[src] if (step, node) not in sent and arrived[node, block] < step
        )
        sender = next(able, None)
        if sender is None:
            return None
        moves.append(Move(step, sender, racks[dst][0], block))
    return by_step(moves)


def _spread(nodes: Sequence[int], coming: Sequence[Move]) -> list[Move]:
    """Spreads what comes to nodes[0], at most one block a step, to the others of the rack."""
    start, stop = coming[0].step, coming[-1].step
    stream: list[int | None] = [None] * (stop - start + 1)
    for move in coming:
        stream[move.step - start] = move.block
    return pipeline(nodes[:1], nodes[1:], stream, start).moves
