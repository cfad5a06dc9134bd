"""The header of a safetensors file, checked against the file's length before any weight is read.

Format: 8 bytes little-endian header length, a JSON object of `name: {dtype, shape, data_offsets:
[begin, end]}` (offsets from the end of the header), the data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import CorruptCheckpoint

MAX_HEADER = 100 << 20
DTYPES: Mapping[str, tuple[str, int]] = {
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    """`float32`, `bfloat16` or `float16`. Any other dtype as the file spells it, for example
    `I64`."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder = msgspec.json.Decoder(_Entry)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of the file by name. CorruptCheckpoint says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            head = file.read(8)
            size = int.from_bytes(head, "little")
            if len(head) < 8 or size > min(length - 8, MAX_HEADER):
                raise CorruptCheckpoint(
                    f"{path}: not a safetensors file, or cut short: it is {length} bytes long and "
                    f"claims a header of {size}"
                )
            raw = file.read(size)
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    entries = _parse(path, raw)
    data = 8 + size
    _check_coverage(path, entries, length - data)
    return {name: _stored(path, name, entry, data) for name, entry in entries.items()}


def _parse(path: Path, raw: bytes) -> dict[str, _Entry]:
    try:
        fields = _decoder.decode(raw)
        return {
            name: _entry_decoder.decode(field)
            for name, field in fields.items()
            if name != "__metadata__"
        }
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{path}: damaged safetensors header: {error}") from error


def _check_coverage(path: Path, entries: Mapping[str, _Entry], available: int) -> None:
    """CorruptCheckpoint unless the tensors cover the data exactly: no gap, no overlap, no byte more
    or less."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if begin != end or stop < begin:
            raise CorruptCheckpoint(
                f"{path}: tensor {name} lies at {begin}..{stop}, where {end} was to come next"
            )
        if stop > available:
            raise CorruptCheckpoint(
                f"{path}: cut short: tensor {name} ends at byte {stop} of the data, and there are "
                f"{available}; copy or download the file again"
            )
        end = stop
    if end != available:
        raise CorruptCheckpoint(
            f"{path}: wrong length: tensors end at byte {end} of {available} of data; "
            "copy or download the file again"
        )


def _stored(path: Path, name: str, entry: _Entry, data: int) -> StoredTensor:
    begin, stop = entry.data_offsets
    dtype, itemsize = DTYPES.get(entry.dtype, (entry.dtype, 0))
    if itemsize and (
        min(entry.shape, default=0) < 0 or math.prod(entry.shape) * itemsize != stop - begin
    ):
        raise CorruptCheckpoint(
            f"{path}: tensor {name} of shape {list(entry.shape)} and dtype {entry.dtype} cannot "
            f"be {stop - begin} bytes long"
        )
    return StoredTensor(dtype, entry.shape, path, data + begin, stop - begin)
