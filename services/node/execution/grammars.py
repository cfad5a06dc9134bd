"""Grammars, which are made on a thread beside the engine's, since each may take long."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from structlog.stdlib import BoundLogger

from services.node.core.microbatches import Prepare
from services.node.core.rows import SequenceKey
from services.node.engine.base import Engine, Rules
from shared.errors import LambdaScaleError

Aside = Callable[[Callable[[], Callable[[], None]]], None]
"""Has a function called on another thread, and then what it returns on this thread."""


class Listener(Protocol):
    """Who waits for grammars. Called on the engine's thread."""

    def prepared(self, sequence: SequenceKey) -> None:
        """The engine has the sequence's rules."""

    def refused(self, sequence: SequenceKey, error: LambdaScaleError) -> None:
        """The sequence's rules cannot be made."""

    def broke(self, sequence: SequenceKey, error: Exception) -> None:
        """A bug met the sequence, and was logged."""


@dataclass(slots=True, eq=False)
class _Making:
    """A grammar that is made on the other thread."""

    wanted: bool = True
    """Cleared on the engine's thread when the sequence ends; the other thread reads it."""


class Grammars:
    def __init__(self, engine: Engine, aside: Aside, listener: Listener, log: BoundLogger) -> None:
        self.aside = aside
        self._engine = engine
        self._listener = listener
        self._log = log
        self._making: dict[SequenceKey, _Making] = {}

    def make(self, command: Prepare) -> None:
        making = self._making[command.sequence] = _Making()
        try:
            make = self._engine.make_rules(command.model_id, command.context)
        except LambdaScaleError as error:
            self._refuse(command, making, error)
        else:
            self.aside(partial(self._make, command, making, make))

    def forget(self, sequences: Iterable[SequenceKey]) -> None:
        """The sequences are over: grammars that are not made yet need not be."""
        for key in sequences:
            if making := self._making.pop(key, None):
                making.wanted = False

    def _make(
        self, command: Prepare, making: _Making, make: Callable[[], Rules]
    ) -> Callable[[], None]:
        """On the other thread, where other grammars may have been made first."""
        if not making.wanted:
            return lambda: None
        try:
            rules = make()
        except LambdaScaleError as error:
            return partial(self._refuse, command, making, error)
        except BaseException as error:  # a request's boundary; panics of Rust are no Exceptions
            self._log.exception("a grammar failed")
            why = LambdaScaleError(f"the request's rules can't be followed: {error!r}")
            return partial(self._refuse, command, making, why)
        return partial(self._made, command, making, rules)

    def _refuse(self, command: Prepare, making: _Making, error: LambdaScaleError) -> None:
        if making.wanted:
            self._listener.refused(command.sequence, error)

    def _made(self, command: Prepare, making: _Making, rules: Rules) -> None:
        if not making.wanted:
            return
        try:
            self._engine.use_rules(command.model_id, command.sequence, rules)
            self._listener.prepared(command.sequence)
        except Exception as error:  # a request's boundary
            self._log.exception("a grammar failed")
            self._listener.broke(command.sequence, error)
