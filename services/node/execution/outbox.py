"""Messages to gateways, gathered during a step: each gateway gets one message, or several if its
vectors are long."""

from dataclasses import dataclass, field

from services.node.core.microbatches import Emit
from shared.ids import GatewayId, ModelId, NodeId
from shared.messages.serving import AttemptFailed, Scores, Token, Tokens

VECTOR_BYTES = 512 << 10
"""Of vectors in one message. The bus takes 1 MiB."""


@dataclass(slots=True)
class _Box:
    tokens: list[Token] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    vector_bytes: int = 0


class Outbox:
    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._boxes: dict[GatewayId, list[_Box]] = {}

    def __bool__(self) -> bool:
        return bool(self._boxes)

    def put(self, command: Emit) -> None:
        boxes = self._boxes.setdefault(command.gateway, [])
        if not boxes or boxes[-1].vector_bytes >= VECTOR_BYTES:
            boxes.append(_Box())
        box = boxes[-1]
        match command.what:
            case Token(vector=vector):
                box.tokens.append(command.what)
                box.vector_bytes += len(vector)
            case Scores():
                box.scores.append(command.what)
            case AttemptFailed():
                box.failed.append(command.what)

    def empty(self, kv_used: float, kv_free: dict[ModelId, int]) -> list[tuple[GatewayId, Tokens]]:
        """Takes out the messages for each gateway, in order. `kv_used`, `kv_free`: see `Tokens`."""
        found, self._boxes = self._boxes, {}
        return [
            (
                gateway,
                Tokens(
                    node=self._node,
                    tokens=tuple(box.tokens),
                    failed=tuple(box.failed),
                    scores=tuple(box.scores),
                    kv_used=kv_used,
                    kv_free=kv_free,
                ),
            )
            for gateway, boxes in found.items()
            for box in boxes
        ]
