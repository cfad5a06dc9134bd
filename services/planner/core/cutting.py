"""How one model is cut into parts, and when that is decided (`cut` has the rule)."""

from collections.abc import Iterable
from dataclasses import replace

from services.planner.core.cut import Room, cut, known_cut, room_for
from services.planner.core.desk import Desk
from services.planner.core.fleet import Fleet
from services.planner.core.standing import Standing
from shared.messages.pool import Duty, ModelRecord
from shared.parts import Part, whole
from shared.wording import counted


class Cutting:
    def __init__(self, desk: Desk, record: ModelRecord, fleet: Fleet, standing: Standing) -> None:
        """It only reads `standing`, and decides the fleet's cut."""
        self._desk = desk
        self._record = record
        self._fleet = fleet
        self._standing = standing

    @property
    def room(self) -> int:
        """What a device needs, at most."""
        if len(self._fleet.cut) == 1:
            return self._record.nbytes
        sizes = self._record.block_bytes
        rooms = (room_for(sizes[part.start : part.stop]) for part in self._fleet.cut)
        return max(rooms, default=self._record.nbytes)

    @property
    def too_large(self) -> str:
        """Why the model has no room anywhere, in numbers; empty: it has."""
        if self._fleet.cut:
            return ""
        arenas = [info.arena_bytes for info in self._desk.cluster.nodes.values()]
        nodes = counted(len(arenas), "node")
        return (
            f"it takes {self._record.nbytes} bytes in blocks of up to "
            f"{max(self._record.block_bytes)}, and the arenas of all {nodes} together have "
            f"{sum(arenas)}, the largest {max(arenas, default=0)}"
        )

    def choose(self, *, scaling: bool, planned: Iterable[Part] = ()) -> None:
        """Decides how the model is cut, by the room that devices have free, or else by all that
        they have: then others give way. The cut stays while anything of the model is in an arena or
        on its way there. `planned`: parts that an earlier planner's event loads."""
        cluster, record = self._desk.cluster, self._record
        if scaling or self._fleet.members or self._standing.released:
            return
        nodes = list(cluster.with_space(record.model_id))
        spaces = (cluster.part(node, record.model_id) for node in nodes)
        parts = {part for part in (*spaces, *planned) if part is not None}
        known = known_cut(parts, record.n_blocks) if parts else None
        if known is not None and self._fits(known):
            self._fleet.cut = known
        elif record.nbytes <= cluster.largest_arena or nodes:
            self._fleet.cut = (whole(record.n_blocks),)
        else:
            infos = [info for info in cluster.nodes.values() if info.duty is Duty.ALL]
            sizes = [Room(info.node, info.host, info.arena_bytes) for info in infos]
            free = [replace(r, nbytes=min(r.nbytes, cluster.free(r.node) or 0)) for r in sizes]
            blocks = record.block_bytes
            self._fleet.cut = cut(blocks, free) or cut(blocks, sizes) or ()

    def _fits(self, parts: Iterable[Part]) -> bool:
        sizes, largest = self._record.block_bytes, self._desk.cluster.largest_arena
        return all(sum(sizes[part.start : part.stop]) <= largest for part in parts)
