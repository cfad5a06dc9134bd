"""What a state machine did lately, and why: the last transitions, each with its cause.

Every core keeps one `Story`. A transition names its cause (the id of the event that led to it) and
its subjects (the ids of the nodes, scaling events, requests and models that it concerns), so that a
fault in production can be followed backwards: `lambdascale events ID --story`.
"""

import enum
from collections import deque
from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from shared.errors import IllegalTransition

State = TypeVar("State", bound=enum.Enum | None)


class Transition(msgspec.Struct, frozen=True, gc=False):
    at: float
    """Seconds, on the clock that the machine was given."""
    cause: str
    """The id of the event that led to it: a scaling event, a request, or a message's kind."""
    subjects: tuple[str, ...]
    """Ids of what it concerns."""
    text: str
    """What changed, in a few words."""


class Story:
    """The newest `limit` transitions of one machine."""

    def __init__(self, limit: int = 10_000) -> None:
        self._transitions: deque[Transition] = deque(maxlen=limit)

    def tell(self, at: float, cause: str, text: str, *subjects: str) -> None:
        self._transitions.append(Transition(at, cause, subjects, text))

    def of(self, subject: str, most: int = 100) -> tuple[Transition, ...]:
        """The last transitions that concern the subject or were caused by it, oldest first."""
        found: list[Transition] = []
        for transition in reversed(self._transitions):
            if len(found) == most:
                break
            if subject == transition.cause or subject in transition.subjects:
                found.append(transition)
        return tuple(reversed(found))

    def check_step(
        self,
        subject: str,
        table: Mapping[State, Collection[State]],
        before: State,
        after: State,
    ) -> None:
        """IllegalTransition if the table of legal steps (state -> the states that may follow) has
        no such step. The state None means that the subject has none."""
        if after not in table[before]:
            raise self.illegal(subject, f"{_name(before)} -> {_name(after)}")

    def illegal(self, subject: str, step: str) -> IllegalTransition:
        """The error for a step that the subject's table does not have, with its story."""
        told = "; ".join(f"{t.text} ({t.cause})" for t in self.of(subject, 20))
        return IllegalTransition(f"{subject}: {step} is not a step; so far: {told or 'nothing'}")


def _name(state: enum.Enum | None) -> str:
    return str(state.value) if state is not None else "nothing"
