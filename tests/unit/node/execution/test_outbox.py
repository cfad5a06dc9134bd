from services.node.core.microbatches import Emit
from services.node.execution.outbox import VECTOR_BYTES, Outbox
from shared.ids import GatewayId, ModelId, NodeId, RequestId
from shared.messages.serving import AttemptFailed, Token

HERE, THERE = GatewayId("here"), GatewayId("there")
MODEL = ModelId("m")


def token(number: int, vector: bytes = b"") -> Token:
    return Token(RequestId(f"r{number}"), 1, 0, 0, "length", vector=vector)


def test_a_gateway_gets_one_message() -> None:
    out = Outbox(NodeId("n"))
    failed = AttemptFailed(RequestId("r9"), 1, "capacity", "full")
    for gateway, what in ((HERE, token(1)), (THERE, token(2)), (HERE, failed), (HERE, token(3))):
        out.put(Emit(gateway, what))
    (first, here), (second, there) = out.empty(0.5, {MODEL: 70})
    assert (here.kv_used, there.kv_used) == (0.5, 0.5)
    assert here.kv_free == there.kv_free == {MODEL: 70}
    assert (first, here.tokens, here.failed) == (HERE, (token(1), token(3)), (failed,))
    assert (second, there.tokens) == (THERE, (token(2),))
    assert out.empty(0.0, {}) == []


def test_vectors_that_a_message_has_no_room_for_come_in_the_next() -> None:
    out = Outbox(NodeId("n"))
    vector = bytes(VECTOR_BYTES // 3)
    sent = [token(number, vector) for number in range(10)]
    for one in sent:
        out.put(Emit(HERE, one))
    messages = [message for _, message in out.empty(0.0, {})]
    assert [one for message in messages for one in message.tokens] == sent
    for message in messages:
        assert sum(len(one.vector) for one in message.tokens) <= VECTOR_BYTES + len(vector)
    assert len(messages) == 3
