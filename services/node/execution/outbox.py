"""Messages to gateways, gathered during a step: each gateway gets one message."""

from dataclasses import dataclass, field

from services.node.core.microbatches import Emit
from shared.ids import GatewayId, NodeId
from shared.messages.serving import AttemptFailed, Scores, Token, Tokens


@dataclass(slots=True)
class _Box:
    tokens: list[Token] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


class Outbox:
    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._boxes: dict[GatewayId, _Box] = {}

    def put(self, command: Emit) -> None:
        box = self._boxes.get(command.gateway)
        if box is None:
            box = self._boxes[command.gateway] = _Box()
        match command.what:
            case Token():
                box.tokens.append(command.what)
            case Scores():
                box.scores.append(command.what)
            case AttemptFailed():
                box.failed.append(command.what)

    def empty(self) -> list[tuple[GatewayId, Tokens]]:
        """Takes out one message for each gateway."""
        boxes, self._boxes = self._boxes, {}
        return [
            (
                gateway,
                Tokens(
                    node=self._node,
                    tokens=tuple(box.tokens),
                    failed=tuple(box.failed),
                    scores=tuple(box.scores),
                ),
            )
            for gateway, box in boxes.items()
        ]
