"""The spans of the sequences that a node runs as a later stage of others' paths.

There is one for each sequence, whatever its length. It lies in the span of the attempt, which the
path's leader records, and says how long the stage held the sequence up.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from services.node.core.microbatches import Admit, Command, Failed, Forward, Send
from services.node.core.rows import SequenceKey, request_of
from shared import telemetry
from shared.clock import wall_ns
from shared.ids import NodeId


@dataclass(slots=True)
class _Open:
    admit: Admit
    begun_ns: int
    kept: float
    """When room was kept for it."""
    came: float = 0.0
    """When its first micro-batch came; 0: none has."""
    here: float | None = None
    """Since when a micro-batch of it is here; None: none is."""
    drawing: bool = False
    """Whether the micro-batch that came last completes its prompt, or a later token."""
    first: float = 0.0
    """When that was handed on; 0: not yet."""
    busy_s: float = 0.0
    micro_batches: int = 0
    positions: int = 0


class StageSpans:
    def __init__(self, node: NodeId, clock: Callable[[], float]) -> None:
        self._node = node
        self._clock = clock
        self._open: dict[SequenceKey, _Open] = {}
        """Sequences of requests that have a trace."""

    def asked(self, admit: Admit) -> None:
        """A leader asks for room."""
        if admit.trace:
            self._open.setdefault(admit.sequence, _Open(admit, wall_ns(), self._clock()))

    def came(self, forward: Forward) -> None:
        if not self._open:
            return
        now = self._clock()
        for row in forward.rows:
            if (stage := self._open.get(row.sequence)) is None:
                continue
            stage.here = now
            stage.came = stage.came or now
            stage.drawing = row.draw is not None
            stage.micro_batches += 1
            stage.positions += row.count

    def went(self, keys: Collection[SequenceKey]) -> None:
        """Their micro-batch was run here, and is handed on."""
        if not self._open:
            return
        now = self._clock()
        for key in keys:
            stage = self._open.get(key)
            if stage is None or stage.here is None:
                continue
            stage.busy_s += now - stage.here
            stage.here = None
            if stage.drawing:
                stage.first = stage.first or now

    def failing(self, commands: Iterable[Command]) -> None:
        """Ends those that fail here, before the command that gives their KV back."""
        for command in commands if self._open else ():
            if isinstance(command, Send) and isinstance(command.message, Failed):
                self.over(command.message.sequences, command.message.code)

    def over(self, keys: Collection[SequenceKey], error: str = "") -> None:
        """`error`: the code of what they failed with here; empty: they are not needed any more."""
        for key in keys:
            if stage := self._open.pop(key, None):
                self._record(stage, error)

    def _record(self, stage: _Open, error: str) -> None:
        admit = stage.admit
        mine = admit.path.stages[admit.stage]
        attributes: dict[str, telemetry.Attribute] = {
            "node": self._node,
            "request": request_of(admit.sequence),
            "stage": admit.stage,
            "blocks": f"{mine.start}:{mine.stop}",
            "micro_batches": stage.micro_batches,
            "positions": stage.positions,
            "busy_s": stage.busy_s,
        }
        if stage.came:
            attributes["waited_s"] = stage.came - stage.kept
        if stage.first:
            attributes["prefill_s"] = stage.first - stage.came
        telemetry.record(
            "stage",
            start_ns=stage.begun_ns,
            end_ns=wall_ns(),
            parent=admit.trace,
            attributes=attributes,
            error=error,
        )
