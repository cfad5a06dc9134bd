"""What a peer may say of its end of an RDMA connection."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.transport.rdma_endpoint import Endpoint, decode, encode
from shared.errors import ProtocolViolation

NUMBERS = st.integers(0, (1 << 24) - 1)
ENDPOINTS = st.builds(
    Endpoint,
    gid=st.binary(min_size=16, max_size=16),
    lid=st.integers(0, (1 << 16) - 1),
    qpn=NUMBERS,
    psn=NUMBERS,
    mtu=st.integers(1, 5),
    reads=st.integers(1, 255),
)
LIMITS = {"gid": None, "lid": 1 << 16, "qpn": 1 << 24, "psn": 1 << 24, "mtu": 6, "reads": 256}


@given(ENDPOINTS)
def test_an_endpoint_arrives_as_it_was(endpoint: Endpoint) -> None:
    data = encode(endpoint)
    assert len(data) <= 64
    assert decode(data) == endpoint


@given(ENDPOINTS, st.data())
def test_what_is_cut_or_longer_is_refused(endpoint: Endpoint, data: st.DataObject) -> None:
    whole = encode(endpoint)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + data.draw(st.binary(min_size=1))):
        with pytest.raises(ProtocolViolation):
            decode(wrong)


@given(ENDPOINTS, st.sampled_from([*LIMITS]), st.data())
def test_fields_out_of_range_are_refused(
    endpoint: Endpoint, field: str, data: st.DataObject
) -> None:
    limit = LIMITS[field]
    outside = [b"short", b"x" * 17] if limit is None else [-1, limit, (1 << 64) - 1]
    fields = dict(zip(LIMITS, msgspec.structs.astuple(endpoint), strict=True))
    fields[field] = data.draw(st.sampled_from([*outside, None, "text", 1.5]))
    with pytest.raises(ProtocolViolation):
        decode(msgspec.msgpack.encode([*fields.values()]))


@given(st.binary(max_size=80))
def test_any_bytes_are_an_endpoint_or_refused(data: bytes) -> None:
    try:
        endpoint = decode(data)
    except ProtocolViolation:
        return
    assert decode(encode(endpoint)) == endpoint
    assert 1 <= endpoint.mtu <= 5
    assert len(endpoint.gid) == 16
