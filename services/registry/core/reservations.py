"""Nodes set aside for scaling events: a node belongs to at most one event.

A reservation is of a node's generation, and ends with it.
"""

from collections.abc import Iterable

import msgspec

from shared.errors import Conflict
from shared.ids import EventId, Generation, ModelId, NodeId
from shared.parts import Part


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    generation: Generation
    event: EventId
    model_id: ModelId
    part: Part | None = None
    """The blocks that the node is to hold, as one device of a group. None: all."""


class Reservations:
    def __init__(self) -> None:
        self._by_node: dict[NodeId, Reservation] = {}

    def add(self, reservation: Reservation) -> None:
        """Adds a reservation. Conflict if the node belongs to another event."""
        held = self._by_node.get(reservation.node)
        if held is not None and held.event != reservation.event:
            raise Conflict(
                f"node {reservation.node} is reserved by event {held.event}: "
                f"unreserve it there before event {reservation.event} takes it"
            )
        self._by_node[reservation.node] = reservation

    def of(self, node: NodeId) -> Reservation | None:
        return self._by_node.get(node)

    def others(self, event: EventId | None) -> list[Reservation]:
        """The reservations of other events, in no order."""
        return [held for held in self._by_node.values() if held.event != event]

    def check_model(self, event: EventId, model_id: ModelId) -> None:
        """Conflict if the event moves another model."""
        for held in self._by_node.values():
            if held.event == event and held.model_id != model_id:
                raise Conflict(
                    f"event {event} holds nodes for model {held.model_id}, not {model_id}: "
                    "one event moves one model"
                )

    def release(self, event: EventId, nodes: Iterable[NodeId]) -> list[Reservation]:
        """Ends the event's reservations of these nodes; of all its nodes if none is named.

        Nodes that are not (or no longer) the event's are left alone: the call may come late or
        twice.
        """
        named = set(nodes)
        ended = [
            held
            for held in self._by_node.values()
            if held.event == event and (not named or held.node in named)
        ]
        for held in ended:
            del self._by_node[held.node]
        return ended

    def lose(self, node: NodeId, generation: Generation) -> Reservation | None:
        """Ends the reservation of a generation that is over."""
        held = self._by_node.get(node)
        if held is None or held.generation != generation:
            return None
        return self._by_node.pop(node)

    def validate(self) -> None:
        """Raises AssertionError if an event moves two models, or a node is listed as another."""
        assert all(held.node == node for node, held in self._by_node.items())
        moved = {(held.event, held.model_id) for held in self._by_node.values()}
        assert len(moved) == len({event for event, _ in moved})

    @property
    def all(self) -> tuple[Reservation, ...]:
        return tuple(self._by_node[node] for node in sorted(self._by_node))
