"""The parts of a reply, put together: its runs, and the steps in which they came."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.replies.parts import (
    Argued,
    Began,
    Called,
    Ended,
    Grew,
    Part,
    Reply,
    Run,
    Said,
    Step,
    Thought,
)

texts = st.text(min_size=1, max_size=3)
plain: st.SearchStrategy[list[Part]] = st.lists(
    st.one_of(texts.map(Said), texts.map(Thought)), max_size=4
)
calls = st.lists(texts, max_size=3)


@st.composite
def replies(draw: st.DrawFn) -> list[Part]:
    parts = list(draw(plain))
    for number in range(draw(st.integers(0, 2))):
        parts.append(Called(number, f"id-{number}", f"f{number}"))
        parts += [Argued(number, text) for text in draw(calls)]
        parts += draw(plain)
    return parts


@given(parts=replies(), cut=st.integers(1, 5))
def test_steps_tell_the_runs(parts: list[Part], cut: int) -> None:
    reply = Reply()
    steps: list[Step] = []
    for begin in range(0, len(parts), cut):
        steps += reply.add(parts[begin : begin + cut])
    steps += reply.end()
    assert not reply.end()

    told: list[tuple[Run, str]] = []
    open_: Run | None = None
    for step in steps:
        match step:
            case Began(run):
                assert open_ is None
                open_ = run
                told.append((run, ""))
            case Grew(run, text):
                assert run is open_
                told[-1] = (run, told[-1][1] + text)
            case Ended(run):
                assert run is open_
                open_ = None
    assert open_ is None
    assert told == [(run, run.text) for run in reply.runs]
    assert [run.number for run in reply.runs] == list(range(len(reply.runs)))


@given(parts=replies())
def test_runs_of_a_kind_are_apart(parts: list[Part]) -> None:
    reply = Reply()
    reply.add(parts)
    pairs = zip(reply.runs, reply.runs[1:], strict=False)
    assert all(a.kind is not b.kind or a.kind is Called for a, b in pairs)
    assert reply.content == "".join(part.text for part in parts if isinstance(part, Said))
    assert reply.reasoning == "".join(part.text for part in parts if isinstance(part, Thought))
    assert [call.name for call in reply.calls] == [p.name for p in parts if isinstance(p, Called)]
