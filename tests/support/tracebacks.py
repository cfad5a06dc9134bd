"""Tracebacks that pytest can print.

The handler of a signal, such as that of a test's time limit, runs between any two instructions, and
Python 3.11 has instructions without a line (`tb_lineno` is None there). pytest fails on such an
entry, and not only the test ends but the process that runs it, with what all of them have reported.
"""

from types import TracebackType


def give_lines(error: BaseException) -> None:
    """Gives every entry of the error's traceback, and of those of its causes, a line: where an
    entry has none, its function's first one."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _with_lines(each.__traceback__)
        errors += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            errors += each.exceptions


def _with_lines(first: TracebackType | None) -> TracebackType | None:
    entries = []
    while first is not None:
        entries.append(first)
        first = first.tb_next
    for entry in reversed(entries):
        line: int | None = entry.tb_lineno  # typeshed promises a number
        if line is None:
            frame = entry.tb_frame
            nowhere = -1  # an instruction that pytest asks nothing about
            entry = TracebackType(first, frame, nowhere, frame.f_code.co_firstlineno)
        else:
            entry.tb_next = first
        first = entry
    return first
