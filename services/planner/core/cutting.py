"""How one model is cut into parts, and when that is decided (`cut` has the rule)."""

from collections.abc import Iterable
from dataclasses import replace

from services.planner.core import ways
from services.planner.core.cut import Room, completed, room_for
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
        self._way: ways.Chosen | None = None
        """Who runs the model. None: it fits on one device, or there is no room for it."""

    @property
    def together(self) -> bool:
        """Whether the devices of a machine that have a part each run each part together."""
        return self._way is not None and self._way.way.together

    @property
    def why(self) -> str:
        """Why these devices run the model, and whether together, in words and numbers; empty: there
        was no choice."""
        return self._way.why if self._way else ""

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
        on its way there, if there are devices enough for it. `planned`: parts that an earlier
        planner's event loads."""
        cluster, record = self._desk.cluster, self._record
        stays = scaling or self._fleet.members or self._standing.released
        if stays and self._fleet.cut:
            return
        spaces = [cluster.part(n, record.model_id) for n in cluster.with_space(record.model_id)]
        parts = {part for part in (*spaces, *planned) if part is not None}
        if not parts and (record.nbytes <= cluster.largest_arena or spaces):
            self._fleet.cut, self._way = (whole(record.n_blocks),), None
            return
        infos = [info for info in cluster.nodes.values() if info.duty is Duty.ALL]
        sizes = [Room(info.node, info.host, info.arena_bytes) for info in infos]
        free = [replace(r, nbytes=min(r.nbytes, cluster.free(r.node) or 0)) for r in sizes]
        blocks = record.block_bytes
        known = completed(parts, blocks, sizes) if parts else None
        model = ways.Decoded(blocks, record.shape)
        if known:
            self._way = ways.choose_for(model, map(self._device, sizes), known)
        else:
            given = (map(self._device, rooms) for rooms in (free, sizes))
            self._way = next(filter(None, (ways.choose(model, each) for each in given)), None)
        self._fleet.cut = self._way.way.parts if self._way else ()

    def _device(self, room: Room) -> ways.Device:
        return ways.Device(room, self._desk.cluster.profile(room.node).steps)
