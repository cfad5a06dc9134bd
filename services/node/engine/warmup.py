"""Does, while a model's blocks travel, what its first steps on a GPU would wait for.

When they are first used, CUDA makes its context, its libraries make handles and workspaces, and
each kernel is loaded. Which kernels these are depends on the model's shapes and the batch. So a
layer of each kind and the head, with zeros for weights, run over a few batches. The model itself,
which may be running already, is not touched.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from services.node.checkpoints.packing import UnitTensor, lay_out
from services.node.core.kv import PAGE, pages_of
from services.node.engine.attention import Span
from services.node.engine.base import Draw, Row, SequenceKey
from services.node.engine.decoder import Decoder
from services.node.engine.encoder import Encoder
from services.node.engine.kv_sequence import KvSequence
from services.node.engine.model import Network
from services.node.engine.sampling import sample
from services.node.engine.text_encoder import TextEncoder
from services.node.engine.weights import HeadUnit, LayerUnit
from shared.ids import ModelId
from shared.messages.serving import Sampling

BATCHES = (*((n, 1) for n in (1, 2, 4, 8, 16, 32, 64)), (1, 64), (1, 512))
"""(sequences, positions of each): decode steps in the sizes that have graphs (graphs.py), and
prefills."""

IMAGES = (1, 2, 4, 8)
TEXTS = ((1, 16), (8, 64), (1, 512))
"""(texts, positions of each)."""
RANDOM = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
"""A sampling that uses every cut."""


def warm_up(network: Network) -> Iterator[None]:
    """Runs one batch at each step of the iterator."""
    if isinstance(network, Decoder):
        yield from _warm_up_decoder(network)
    elif isinstance(network, Encoder):
        yield from _warm_up_encoder(network)
    elif isinstance(network, TextEncoder):
        yield from _warm_up_text_encoder(network)


def _warm_up_decoder(decoder: Decoder) -> Iterator[None]:
    kinds = {layer: unit for unit, layer in enumerate(decoder.config.layers, start=1)}
    for unit in kinds.values():
        layer = _without_weights(decoder, unit, decoder.weights_at)
        assert isinstance(layer, LayerUnit)
        for sequences, positions in BATCHES:
            _run_layer(decoder, layer, sequences, positions)
            yield
        del layer
    head = _without_weights(decoder, decoder.config.n_units - 1, decoder.weights_at)
    assert isinstance(head, HeadUnit)
    for sequences in sorted({sequences for sequences, _ in BATCHES}):
        _run_head(decoder, head, sequences)
        yield


def _warm_up_encoder(encoder: Encoder) -> Iterator[None]:
    last = encoder.config.n_units - 1
    patches, layer, head = (_without_weights(encoder, n, encoder.device) for n in (0, 1, last))
    for images in IMAGES:
        _run_encoder(encoder, patches, layer, head, images)
        yield


def _warm_up_text_encoder(encoder: TextEncoder) -> Iterator[None]:
    last = encoder.config.n_units - 1
    words, layer, norm = (_without_weights(encoder, n, encoder.device) for n in (0, 1, last))
    for texts, positions in TEXTS:
        _run_text_encoder(encoder, words, layer, norm, texts, positions)
        yield


def _without_weights(network: Network, unit: int, at: torch.device) -> Any:
    """`at`: where the bytes of its blocks lie."""
    dtype = str(network.dtype).removeprefix("torch.")
    shapes = network.config.unit_tensors(unit)
    (block,) = lay_out([[UnitTensor(name, dtype, shape) for name, shape in shapes.items()]])
    block = msgspec.structs.replace(block, first_unit=unit, last_unit=unit)
    zeros = torch.zeros(block.nbytes, dtype=torch.uint8, device=at)
    (made,) = network.units(block, zeros, "stored")
    return made


@torch.inference_mode()
def _run_layer(decoder: Decoder, layer: LayerUnit, sequences: int, positions: int) -> None:
    attention, pages = decoder.attention, pages_of(positions)
    shape = (sequences * pages * PAGE, 2, attention.n_kv_heads, attention.head_dim)
    kv = torch.zeros(shape, dtype=attention.dtype, device=decoder.device)
    spans = [_span(positions, range(i * pages, (i + 1) * pages)) for i in range(sequences)]
    hidden = _hidden(decoder, sequences * positions)
    decoder.step(spans).run(0, ((layer,),), hidden, kv[None])


@torch.inference_mode()
def _run_head(decoder: Decoder, head: HeadUnit, sequences: int) -> None:
    logits = decoder.head(head, _hidden(decoder, sequences), range(sequences))
    for sampling in (Sampling(), RANDOM):
        sample(logits, [Draw(0, sampling)] * sequences)


@torch.inference_mode()
def _run_encoder(encoder: Encoder, patches: Any, layer: Any, head: Any, images: int) -> None:
    positions = encoder.positions
    image = bytes(encoder.config.image.nbytes)
    rows = [Row(SequenceKey(""), 0, positions, positions, image=image)] * images
    hidden = encoder.embed(patches, rows)
    spans = [_span(positions, range(0))] * images
    encoder.step(spans).run(0, ((layer,),), hidden, hidden.new_empty(0))
    logits = encoder.head(head, hidden, range(positions - 1, len(hidden), positions))
    sample(logits, [Draw(0, Sampling())] * images)


@torch.inference_mode()
def _run_text_encoder(
    encoder: TextEncoder, words: Any, layer: Any, norm: Any, texts: int, positions: int
) -> None:
    positions = min(positions, encoder.config.context_length)
    row = Row(SequenceKey(""), 0, positions, positions, (0,) * positions)
    hidden = encoder.embed(words, [row] * texts)
    encoder.step([_span(positions, range(0))] * texts).run(
        0, ((layer,),), hidden, hidden.new_empty(0)
    )
    encoder.states(norm, hidden, range(len(hidden)))


def _span(positions: int, pages: range) -> Span:
    sequence = KvSequence(
        SequenceKey(""), ModelId(""), (0, 1), range(1), positions, pages=list(pages)
    )
    return sequence, 0, positions


def _hidden(decoder: Decoder, rows: int) -> torch.Tensor:
    shape = (rows, decoder.config.hidden_size)
    return torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
