"""Messages that pass the decoder and mean nothing, and every error that a dependency may raise.

The decoder refuses what is badly framed or does not fit the schema (`shared.messages.decode`). What
gets through may still be nonsense: empty tuples, negative counts, integers near 2^64, NaN, ids that
nobody knows, an instance without stages. A service answers such a message with a typed error, or
drops it, and goes on serving. Each service's test_boundary.py holds it to that:

    @given(message=well_framed(ApplyPlan, node=["a"], generation=[1], model_id=[MODEL]))
    def test_a_plan_that_makes_no_sense_is_refused(message: ApplyPlan) -> None: ...

`node=["a"]` names likely values of every field called `node`, at any depth: half of the messages
have them, so that some pass the first checks and reach the code behind. And for what the service
calls (its store, its engine, the bus):

    @with_every_error
    async def test_the_service_outlives_its_store(error: BaseException) -> None: ...
"""

import asyncio
import dataclasses
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import strategies as st

from shared.errors import LambdaScaleError, from_code

S = TypeVar("S")
T = TypeVar("T", bound=msgspec.Struct)

STRANGE_TEXTS = ("", ".", "*", ">", "../..", "\0", "no such id", "é" * 300)
STRANGE_NUMBERS = (0, -1, -(2**63), 2**31, 2**63, 2**64 - 1)

_texts = st.sampled_from(STRANGE_TEXTS) | st.text(max_size=8)
_ints = st.sampled_from(STRANGE_NUMBERS) | st.integers(-(2**63), 2**64 - 1)
Likely = dict[str, Sequence[object]]


def well_framed(
    kind: type[S], *, nan: bool = True, **likely: Sequence[object]
) -> st.SearchStrategy[S]:
    """Messages (or other structs, or dataclasses) of this kind, any that the decoder lets through.

    `nan` False leaves NaN out, for tests that compare. `likely`: see the module.
    """
    hints = get_type_hints(kind)
    fields = {name: _field(name, hints[name], nan, likely) for name in _fields(kind)}
    return st.builds(kind, **fields)


def altered(message: T) -> st.SearchStrategy[T]:
    """The message with one of its fields, or two, replaced by whatever the decoder lets through:
    so it often passes all checks but the one that it is to meet."""
    hints = get_type_hints(type(message))

    def replaced(names: list[str]) -> st.SearchStrategy[T]:
        fields = st.fixed_dictionaries({name: _values(hints[name], True, {}) for name in names})
        return fields.map(lambda values: msgspec.structs.replace(message, **values))

    names = st.lists(st.sampled_from(_fields(type(message))), min_size=1, max_size=2, unique=True)
    return names.flatmap(replaced)


def _fields(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [name for name in cast(type[msgspec.Struct], kind).__struct_fields__ if name != "v"]


def _field(name: str, hint: Any, nan: bool, likely: Likely) -> st.SearchStrategy[Any]:
    anything = _values(hint, nan, likely)
    return st.sampled_from(likely[name]) | anything if name in likely else anything


def _values(hint: Any, nan: bool, likely: Likely) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = get_origin(hint), get_args(hint)
    inner = [_values(a, nan, likely) for a in arguments if a is not ...]
    if origin in (types.UnionType, Union):
        return st.one_of(*inner)
    if origin is tuple:
        if arguments[1:] == (...,):
            return st.lists(inner[0], max_size=3).map(tuple)
        return st.tuples(*inner)
    if origin is dict:
        return st.dictionaries(*inner, max_size=3)
    if issubclass(hint, msgspec.Struct) or dataclasses.is_dataclass(hint):
        return well_framed(hint, nan=nan, **likely)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    plain: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: _ints,
        float: st.floats(allow_nan=nan),
        str: _texts,
        bytes: st.binary(max_size=8),
        types.NoneType: st.none(),
    }
    return plain[hint]


def _typed_errors(cls: type[LambdaScaleError] = LambdaScaleError) -> list[LambdaScaleError]:
    found = [cls("injected")] if cls.__module__ == LambdaScaleError.__module__ else []
    return [*found, *(error for sub in cls.__subclasses__() for error in _typed_errors(sub))]


ERRORS: tuple[BaseException, ...] = (
    *_typed_errors(),
    from_code("a code of a later release", "injected"),
    RuntimeError("injected"),  # torch.OutOfMemoryError is one
    ValueError("injected"),
    TypeError("injected"),
    KeyError("injected"),
    IndexError("injected"),
    AttributeError("injected"),
    AssertionError("injected"),
    ZeroDivisionError("injected"),
    OverflowError("injected"),
    RecursionError("injected"),
    MemoryError("injected"),
    OSError(28, "No space left on device"),
    ConnectionResetError(104, "Connection reset by peer"),
    TimeoutError("injected"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "injected"),
    msgspec.ValidationError("injected"),
    asyncio.InvalidStateError("injected"),
    asyncio.QueueFull("injected"),
    ExceptionGroup("injected", [ValueError("one of them")]),
    asyncio.CancelledError("injected: something it awaited was cancelled, not the task itself"),
)
"""One of each kind that code may meet in what it calls."""

with_every_error = pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
