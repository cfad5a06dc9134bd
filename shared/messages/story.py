"""What a service did lately about one subject, and why: the question and its answer.

Planner, registry, nodes and gateways each keep a story (`shared/story.py`) and serve StoryQuery
(`shared/subjects.py` has the subjects). `lambdascale events ID --story` asks all of them.
"""

from collections.abc import Iterable
from typing import Self

import msgspec

from shared.messages.base import Message
from shared.story import Transition


class StoryQuery(Message, frozen=True, kw_only=True, tag="story_query"):
    """Asks what a service remembers of a subject. Answered with Told."""

    subject: str
    """The id of a scaling event, a node, a model, an instance, a request or an API call (its
    `X-Request-ID`)."""


class Step(msgspec.Struct, frozen=True):
    """One transition of a state machine."""

    at_ns: int
    """Wall-clock time in ns since the epoch."""
    cause: str
    """The id of the event that led to it, or the kind of the message."""
    subjects: tuple[str, ...]
    """Ids of what it concerns."""
    text: str
    """What changed, in a few words."""


class Told(Message, frozen=True, kw_only=True, tag="told"):
    steps: tuple[Step, ...]
    """The service's last steps (a hundred at most), oldest first. Empty: it remembers nothing of
    the subject."""

    @classmethod
    def of(cls, transitions: Iterable[Transition], at: float, at_ns: int) -> Self:
        """An answer made of a machine's transitions. `at` and `at_ns` are the same moment, on the
        machine's clock and on the wall's."""
        steps = (
            Step(at_ns - round((at - told.at) * 1e9), told.cause, told.subjects, told.text)
            for told in transitions
        )
        return cls(steps=tuple(steps))
