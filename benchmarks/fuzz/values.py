"""Draws inputs: values of a type, values that fit no type, and bytes that were damaged."""

import json
import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**63), 0.0, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, "", " ", ".", "*", ">",
    "../..", "\0", "\n", "no such thing", "é" * 300, "x" * 5000, "\U0001f600", [], {}, [[]],
    [None], {"": ""}, {"a": {"b": {}}},
)  # fmt: skip
DEEPEST = 600
MORE = 0.7
"""How often a field is there that need not be."""


class Source:
    """Everything that is drawn follows from the seed."""

    def __init__(self, seed: int | str, likely: Mapping[str, Sequence[Any]] | None = None) -> None:
        """`likely`: values that fields of these names have most of the time, so that inputs get
        past the first checks."""
        self.random = Random(seed)
        self._likely = likely or {}

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def odd(self) -> Any:
        """A value that few fields expect."""
        if self.chance(0.02):
            value: Any = 0
            for _ in range(self.random.randrange(DEEPEST)):
                value = [value] if self.chance(0.5) else {"a": value}
            return value
        return self.random.choice(ODD)

    def text(self) -> str:
        size = self.random.choice((0, 1, 3, 8, 40))
        return "".join(chr(self._character()) for _ in range(size))

    def _character(self) -> int:
        if self.chance(0.8):
            return self.random.randrange(32, 127)
        character = self.random.randrange(0x10FFFF)
        return 63 if 0xD800 <= character < 0xE000 else character

    def value(self, kind: Any, *, odd: float = 0.05) -> Any:
        """A value of the type, made of plain ones, in which each part is odd with this share."""
        return self._value(inspect.type_info(kind), odd, 0)

    def _value(self, kind: inspect.Type, odd: float, depth: int) -> Any:
        if self.chance(odd):
            return self.odd()
        many = 0 if depth > 6 else self.random.choice((0, 1, 1, 2, 5))
        match kind:
            case inspect.StructType():
                return self._struct(kind, odd, depth)
            case inspect.UnionType(types=types):
                return self._value(self.random.choice(types), odd, depth)
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                return [self._value(item, odd, depth + 1) for _ in range(many)]
            case inspect.SetType(item_type=item) | inspect.FrozenSetType(item_type=item):
                return [self._value(item, odd, depth + 1) for _ in range(many)]
            case inspect.TupleType(item_types=items):
                return [self._value(item, odd, depth + 1) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                keys = (self._value(key, 0, depth + 1) for _ in range(many))
                return {each: self._value(value, odd, depth + 1) for each in keys}
            case inspect.EnumType(cls=enum):
                return self.random.choice([member.value for member in enum])
            case inspect.LiteralType(values=values):
                return self.random.choice(values)
            case inspect.BoolType():
                return self.chance(0.5)
            case inspect.IntType(ge=least, le=most):
                low = int(least) if least is not None else self.random.choice((0, 0, -(2**63)))
                high = int(most) if most is not None else self.random.choice((3, 300, 2**63 - 1))
                return self.random.randint(min(low, high), max(low, high))
            case inspect.FloatType():
                return self.random.choice((0.0, 0.5, 1.0, self.random.uniform(-1e3, 1e6)))
            case inspect.StrType():
                return self.text()
            case inspect.BytesType(min_length=least):
                return self.random.randbytes(least or self.random.choice((0, 1, 32, 500)))
            case inspect.NoneType():
                return None
            case _:
                return self.odd()

    def _struct(self, kind: inspect.StructType, odd: float, depth: int) -> Any:
        fields = {field.encode_name: self._field(field, odd, depth) for field in kind.fields
                  if field.required or self.chance(MORE)}  # fmt: skip
        if kind.array_like:
            return [self._field(field, odd, depth) for field in kind.fields]
        if self.chance(odd):
            fields[self.text()] = self.odd()
        if kind.tag_field is not None and not self.chance(odd / 4):
            fields[kind.tag_field] = kind.tag
        return fields

    def _field(self, field: inspect.Field, odd: float, depth: int) -> Any:
        if field.encode_name in self._likely and not self.chance(odd):
            return self.random.choice(self._likely[field.encode_name])
        return self._value(field.type, odd, depth + 1)

    # --- bytes ---

    def packed(self, value: Any) -> bytes:
        """In MessagePack, which may be damaged."""
        try:
            data = msgspec.msgpack.encode(value)
        except (OverflowError, RecursionError):
            data = b"\xc1"
        return self.damaged(data) if self.chance(0.1) else data

    def json(self, value: Any) -> bytes:
        """In JSON, which may be damaged."""
        try:
            data = json.dumps(value, default=repr).encode(errors="surrogatepass")
        except (ValueError, RecursionError):
            data = b"["
        return self.damaged(data) if self.chance(0.1) else data

    def damaged(self, data: bytes) -> bytes:
        """Some bytes changed, added, gone, repeated or cut off."""
        found = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            place = self.random.randrange(len(found) + 1)
            match self.random.randrange(5):
                case 0 if place < len(found):
                    found[place] ^= 1 << self.random.randrange(8)
                case 1:
                    found[place:place] = self.random.randbytes(self.random.choice((1, 4, 40)))
                case 2:
                    del found[place : place + self.random.choice((1, 4, 40))]
                case 3:
                    found[place:place] = found[place : place + self.random.randrange(1, 60)]
                case _ if self.chance(0.3):
                    del found[place:]
        return bytes(found)
