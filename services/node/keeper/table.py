"""What a keeper holds: memories by name, and the places of models in them; pure but for the numbers
of descriptors, which it hands on."""

from dataclasses import dataclass, field

from services.node.keeper.messages import Drop, Forget, Held, Hold, Space

MEMORIES = 8192
SPACES = 4096
"""The most that a keeper holds. A node has two arenas, and a memory for each packed block."""


class Malformed(Exception):
    """A message that does not fit what is held. Nothing was changed."""


@dataclass(slots=True)
class Memory:
    held: Held
    descriptor: int
    spaces: dict[str, Space] = field(default_factory=dict)


class Table:
    def __init__(self) -> None:
        self.memories: dict[str, Memory] = {}

    @property
    def spaces(self) -> list[Space]:
        return [space for memory in self.memories.values() for space in memory.spaces.values()]

    def hold(self, message: Hold, descriptor: int) -> int | None:
        """Returns the descriptor that it takes the place of, to be closed. Malformed: too many."""
        before = self.memories.pop(message.memory, None)
        if before is None and len(self.memories) >= MEMORIES:
            raise Malformed(f"more than {MEMORIES} memories")
        held = Held(message.memory, message.nbytes, message.about)
        self.memories[message.memory] = Memory(held, descriptor)
        return None if before is None else before.descriptor

    def drop(self, message: Drop) -> int | None:
        """Returns the descriptor to be closed; None if nothing was held."""
        memory = self.memories.pop(message.memory, None)
        return None if memory is None else memory.descriptor

    def note(self, space: Space) -> None:
        """Takes in a model's place, or what is there by now. Malformed: it lies outside of the
        memory, or over another model's place."""
        memory = self.memories.get(space.memory)
        if memory is None:
            raise Malformed(f"no memory {space.memory!r} is held")
        end = space.offset + space.nbytes
        if end > memory.held.nbytes or not space.nbytes:
            raise Malformed(
                f"{space.nbytes} bytes at {space.offset} of {space.memory!r}, which has "
                f"{memory.held.nbytes}"
            )
        for model, other in memory.spaces.items():
            apart = end <= other.offset or other.offset + other.nbytes <= space.offset
            if model != space.model and not apart:
                raise Malformed(f"the places of {model} and {space.model} overlap")
        if space.model not in memory.spaces and len(self.spaces) >= SPACES:
            raise Malformed(f"more than {SPACES} models")
        memory.spaces[space.model] = space

    def forget(self, message: Forget) -> None:
        memory = self.memories.get(message.memory)
        if memory is not None:
            memory.spaces.pop(message.model, None)

    def validate(self) -> None:
        """For tests. AssertionError: no messages lead here."""
        for memory in self.memories.values():
            end = 0
            for space in sorted(memory.spaces.values(), key=lambda space: space.offset):
                assert space.offset >= end
                end = space.offset + space.nbytes
            assert end <= memory.held.nbytes
