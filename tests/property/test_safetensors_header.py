"""Damaged safetensors files are refused by name, whatever the damage; nothing else escapes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.checkpoints.safetensors_header import read_header
from shared.errors import CorruptCheckpoint

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("header")


def file_bytes(header: object, data: int = 32) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


WHOLE = file_bytes(HEADER)


def opens(folder: Path, content: bytes) -> bool:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CorruptCheckpoint:
        return False
    for tensor in tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)
    return True


@given(length=st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_refused(folder: Path, length: int) -> None:
    assert not opens(folder, WHOLE[:length])


@given(extra=st.binary(min_size=1, max_size=9))
def test_bytes_too_many_are_refused(folder: Path, extra: bytes) -> None:
    assert not opens(folder, WHOLE + extra)


@given(
    edits=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=4),
)
def test_changed_bytes_never_give_a_tensor_outside_the_file(
    folder: Path, edits: list[tuple[int, int]]
) -> None:
    content = bytearray(WHOLE)
    for position, value in edits:
        content[position] = value
    opens(folder, bytes(content))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "dtype", "shape", "data_offsets"]) | st.text(max_size=3),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_as_a_header_is_refused_or_read(folder: Path, header: object) -> None:
    opens(folder, file_bytes(header))


@pytest.mark.parametrize("offsets", [[24, 40], [16, 24], [32, 40], [0, 8], [24, 20]])
def test_gaps_and_overlaps_are_refused(folder: Path, offsets: list[int]) -> None:
    shape = [abs(offsets[1] - offsets[0]) // 2]
    header = HEADER | {"b": {"dtype": "BF16", "shape": shape, "data_offsets": offsets}}
    assert opens(folder, file_bytes(header, data=40)) == (offsets == [24, 40])
