"""What the processes of a release say to each other and store: recorded, and read back as types.

`wire_form.json` has the form of the last release: every message kind, and whatever else another
process reads (ROOTS). Tests hold this release to it, in both directions, so that the two can work
side by side. `python -m tests.support.wire_form` records the form anew; that belongs to the making
of a release, and to nothing else (CONTRIBUTING.md, "Change a message").
"""

import enum
import json
from pathlib import Path
from typing import Any, Union

import msgspec
from msgspec import inspect

from services.gateway.core.keyed_record import Record
from services.node.core.microbatches import Admit, Admitted, Failed, Forward, Free, Sampled
from services.planner.core.rhythm import History
from services.registry.core.reservations import Reservation
from shared.election.lease import LeaseRecord
from shared.messages import KINDS
from shared.messages.access import KeyRecord, TenantRecord
from shared.messages.pool import ModelRecord, NodeInfo
from shared.messages.scaling import EventRecord
from shared.usage import UsageBatch

FILE = Path(__file__).with_suffix(".json")
SPOKEN: dict[str, Any] = {
    **{str(kind.__struct_config__.tag): kind for kind in KINDS},
    "stage message": Admit | Admitted | Forward | Sampled | Free | Failed,
}
STORED: dict[str, Any] = {
    "event": EventRecord,
    "rhythm": History,
    "model": ModelRecord,
    "node": NodeInfo,
    "access": TenantRecord | KeyRecord,
    "usage": UsageBatch,
    "reservation": Reservation,
    "answer": Record,
    "lease of a role": LeaseRecord,
}
ROOTS = SPOKEN | {f"stored {name}": kind for name, kind in STORED.items()}
"""Name -> type of everything that one process encodes and another decodes."""

Form = Any
"""A type in JSON: the name of a plain type, a list that begins with the name of a generic type, or
{"struct": its key in the table of structs}."""
_PLAIN: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "bytes": bytes,
    "none": None,
    "any": Any,
}


class Recorder:
    """Types to forms. `structs`: the structs that were met."""

    def __init__(self) -> None:
        self.structs: dict[str, Form] = {}

    def form(self, kind: Any) -> Form:
        return self._form(inspect.type_info(kind))

    def _form(self, info: inspect.Type) -> Form:
        match info:
            case inspect.StructType():
                return {"struct": self._struct(info)}
            case inspect.UnionType():
                return ["union", *(self._form(each) for each in info.types)]
            case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
                return ["list", self._form(info.item_type)]
            case inspect.TupleType():
                return ["tuple", *(self._form(each) for each in info.item_types)]
            case inspect.DictType():
                return ["dict", self._form(info.key_type), self._form(info.value_type)]
            case inspect.EnumType():
                return ["enum", *(member.value for member in info.cls)]
            case _:
                name = type(info).__name__.removesuffix("Type").lower()
                assert name in _PLAIN, f"{info} has no form yet"
                return name

    def _struct(self, info: inspect.StructType) -> str:
        key = f"{info.cls.__module__}.{info.cls.__qualname__}"
        if key in self.structs:
            return key
        fields: dict[str, Form] = {}
        self.structs[key] = {
            "fields": fields,
            "array": info.array_like,
            "tag_field": info.tag_field,
            "tag": info.tag,
        }
        for field in info.fields:
            form = fields[field.encode_name] = {"type": self._form(field.type)}
            if not field.required:
                # The version is what is said; what else is left out need only be there.
                form["default"] = field.default if field.encode_name == "v" else None
        return key


class Reader:
    """The types of a recorded form, which encode and decode as those of that release did."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self._structs = recorded["structs"]
        self._made: dict[str, type[msgspec.Struct]] = {}
        self.roots: dict[str, Any] = {
            name: self._type(form) for name, form in recorded["roots"].items()
        }

    def _type(self, form: Form) -> Any:
        if isinstance(form, str):
            return _PLAIN[form]
        if isinstance(form, dict):
            return self._struct(form["struct"])
        generic, *inner = form
        if generic == "enum":
            return enum.Enum("Recorded", {str(value): value for value in inner})
        types = [self._type(each) for each in inner]
        if generic == "union":
            return Union[tuple(types)]  # noqa: UP007 - built at run time
        if generic == "list":
            return tuple[types[0], ...]  # type: ignore[valid-type]
        return tuple[tuple(types)] if generic == "tuple" else dict[types[0], types[1]]  # type: ignore[misc, valid-type]

    def _struct(self, key: str) -> type[msgspec.Struct]:
        if key not in self._made:
            recorded = self._structs[key]
            self._made[key] = msgspec.defstruct(
                key.rpartition(".")[2],
                [self._field(name, form) for name, form in recorded["fields"].items()],
                frozen=True,
                kw_only=True,
                array_like=recorded["array"],
                tag_field=recorded["tag_field"],
                tag=recorded["tag"],
            )
        return self._made[key]

    def _field(self, name: str, form: Form) -> tuple[Any, ...]:
        kind = self._type(form["type"])
        return (name, kind, form["default"]) if "default" in form else (name, kind)


def recorded() -> dict[str, Any]:
    """The form of the last release."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def current() -> dict[str, Any]:
    """The form of this release."""
    recorder = Recorder()
    roots = {name: recorder.form(kind) for name, kind in ROOTS.items()}
    return {"roots": roots, "structs": recorder.structs}


def _text(form: dict[str, Any]) -> str:
    """A line for each root and struct, so that a change can be read."""
    tables = []
    for name, table in form.items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
        tables.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    return "{\n" + ",\n".join(tables) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(_text(current()))
