"""This release reads what releases wrote: a sample of every message, frame and stored record."""

from typing import Any

import msgspec
import pytest

from services.node.transport import wire
from shared.messages import Message, decode
from tests.support.samples import FRAMES, kinds, name_of, recorded

SAMPLES = recorded()
KINDS = dict(kinds())
MAKE = "python -m tests.support.samples"


def test_everything_has_a_sample() -> None:
    expected = KINDS.keys() | {name_of(kind) for kind in wire.Kind}
    assert expected <= SAMPLES.keys(), f"add what is missing with `{MAKE}`"
    assert SAMPLES.keys() <= expected, "a kind that a release wrote is still read by the next one"


@pytest.mark.parametrize("name", sorted(KINDS))
def test_it_is_read(name: str) -> None:
    """As it was said: nothing is lost, but what a field of another release says."""
    heard = msgspec.msgpack.decode(SAMPLES[name], type=KINDS[name])
    if isinstance(heard, Message):
        assert decode(SAMPLES[name]) == heard
    said = msgspec.msgpack.decode(SAMPLES[name], strict=False)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(heard), strict=False)
    assert _without_new(again, said) == said


@pytest.mark.parametrize("kind", wire.Kind, ids=lambda kind: kind.name)
def test_a_frame_is_read(kind: wire.Kind) -> None:
    data = SAMPLES[name_of(kind)]
    prefix = wire.parse_prefix(data[: wire.PREFIX_BYTES], max_payload=4)
    assert prefix.kind is kind
    rest = data[wire.PREFIX_BYTES :]
    assert len(rest) == prefix.body + prefix.payload
    assert FRAMES[kind].read(rest) == FRAMES[kind].said


def _without_new(heard: Any, said: Any) -> Any:
    """What was heard, without the fields that the sample's release did not have."""
    if isinstance(heard, dict) and isinstance(said, dict):
        return {key: _without_new(heard[key], said[key]) for key in said if key in heard}
    if isinstance(heard, list) and isinstance(said, list):
        return [_without_new(*pair) for pair in zip(heard, said, strict=False)]
    return heard
