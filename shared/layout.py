"""How a model lies in memory: blocks of packed tensors, described by a manifest.

A *block* is the unit of execution: a run of whole units, where unit 0 is the embedding, units 1..L
are the decoder layers and unit L+1 is the final norm with the head. All tensors of a block lie in
one contiguous region (tensor packing: FaaScale, section 4.4), each aligned to ALIGN bytes. So a
block fits in one arena and one registered region, and nothing is copied after it has arrived. A
*chunk* is the unit of transfer and of checking: `chunk_bytes` long (the last chunk of a block may
be shorter), with a digest of its own (BLAKE3, cryptographic, because relays are
not trusted with the bytes).
"""

import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.errors import BadInput, CorruptCheckpoint
from shared.ids import ModelId

ALIGN = 256
PAGE = 4096
"""Bytes of a page of memory."""
LARGE = 64 * PAGE
DIGEST_BYTES = 32


class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    """The name in the checkpoint, for example `model.layers.3.mlp.up_proj.weight`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the block."""
    nbytes: int


class BlockSpec(msgspec.Struct, frozen=True):
    index: int
    first_unit: int
    last_unit: int
    """Inclusive. The module's docstring says what the units are."""
    nbytes: int
    tensors: tuple[TensorSpec, ...]
    digests: tuple[Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)], ...]
    """BLAKE3 of each chunk, in order."""


class Manifest(msgspec.Struct, frozen=True):
    """Everything that is needed to hold, check and run a model, without its weights."""

    architecture: str
    """The first of the config's `architectures`, for example `LlamaForCausalLM`."""
    config: dict[str, Any]
    """The content of the checkpoint's config.json (shared.vision says what is added to it)."""
    chunk_bytes: int
    blocks: tuple[BlockSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    def n_chunks(self, block: int) -> int:
        return len(self.blocks[block].digests)

    def chunk_range(self, block: int, chunk: int) -> tuple[int, int]:
        """(offset, length) of a chunk within its block, in bytes."""
        offset = chunk * self.chunk_bytes
        return offset, min(self.chunk_bytes, self.blocks[block].nbytes - offset)

    def chunks_at(self, block: int, offset: int, nbytes: int) -> range:
        """The chunks that lie in these bytes of a block. BadInput if they are not whole chunks."""
        first, end = offset // self.chunk_bytes, offset + nbytes
        chunks = range(first, -(-end // self.chunk_bytes))
        whole = 0 <= offset < end and chunks[-1] < self.n_chunks(block)
        if not whole or self.run_range(block, chunks) != (offset, nbytes):
            raise BadInput(f"bytes [{offset}, {end}) of block {block} are no whole chunks")
        return chunks

    def run_range(self, block: int, chunks: range) -> tuple[int, int]:
        """(offset, length) of consecutive chunks within their block, in bytes."""
        first, _ = self.chunk_range(block, chunks[0])
        return first, sum(self.chunk_range(block, chunks[-1])) - first


def room_of(nbytes: int) -> int:
    """What a block takes of an arena, at most: large ones begin at a page
    (services/node/memory/arena.py)."""
    return nbytes + (PAGE if nbytes >= LARGE else ALIGN)


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes: equal manifests have equal bytes."""
    return _encoder.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """CorruptCheckpoint: it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"a manifest cannot be read: {error}") from error


def model_id(manifest: Manifest) -> ModelId:
    """The content address: the first 32 hex digits of the SHA-256 of the canonical bytes."""
    return ModelId(hashlib.sha256(encode_manifest(manifest)).hexdigest()[:32])
