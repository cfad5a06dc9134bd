"""Values of a message's type: all that its decoder lets through, whether it makes sense or not.

Numbers are small, at a border or huge, and texts few, so that names meet names.
"""

from functools import cache
from typing import Any

from hypothesis import strategies as st
from msgspec import inspect

NUMBERS = (0, 1, 2, 3, 5, -1, -(2**63), 2**31, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "a", "b", "r#1", "mem://a", "tcp://127.0.0.1:1", "\0", "é" * 50)


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Of a type as msgspec knows them: a struct, a dataclass, a union, `tuple[int, ...]`, ..."""
    return _of(inspect.type_info(kind))


def _of(found: inspect.Type) -> st.SearchStrategy[Any]:
    match found:
        case inspect.StructType() | inspect.DataclassType():
            fields = {field.name: _of(field.type) for field in found.fields}
            return st.builds(found.cls, **fields)
        case inspect.UnionType():
            return st.one_of(*(_of(each) for each in found.types))
        case inspect.VarTupleType() | inspect.ListType():
            return st.lists(_of(found.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*(_of(each) for each in found.item_types))
        case inspect.DictType():
            return st.dictionaries(_of(found.key_type), _of(found.value_type), max_size=3)
        case inspect.CustomType() | inspect.AnyType():
            return st.none()
        case _:
            return _plain(found)


def _plain(found: inspect.Type) -> st.SearchStrategy[Any]:
    match found:
        case inspect.IntType():
            return st.sampled_from(NUMBERS) | st.integers(-3, 30)
        case inspect.FloatType():
            return st.floats()
        case inspect.StrType():
            return st.sampled_from(TEXTS)
        case inspect.BytesType():
            return st.binary(max_size=4)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.EnumType():
            return st.sampled_from(list(found.cls))
        case inspect.LiteralType():
            return st.sampled_from(found.values)
        case _:
            raise TypeError(f"no values of {found}")
