"""What a model's first steps would wait for on a GPU, done while its blocks travel.

CUDA makes its context, its libraries their handles and workspaces, and loads each kernel, when
they are first used; which kernels those are depends on the model's shapes and the batch. So a
layer of each kind and the head, with zeros for weights, are run over a few batches. Nothing of the
model itself is touched: it may be running already.
"""

from collections.abc import Iterator

import torch

from services.node.core.kv import PAGE, pages_of
from services.node.engine.attention import Span
from services.node.engine.base import Draw, SequenceKey
from services.node.engine.decoder import Decoder
from services.node.engine.kv import Sequence
from services.node.engine.sampling import sample
from services.node.engine.weights import DecoderTensors, HeadUnit, LayerUnit, Unit
from services.node.model.packing import UnitTensor, lay_out
from shared.ids import ModelId
from shared.messages.serving import Sampling

BATCHES = (*((n, 1) for n in (1, 2, 4, 8, 16, 32, 64)), (1, 64), (1, 512))
"""(sequences, positions of each): decode steps, of the sizes of which there are graphs
(graphs.py), and prefills."""


def warm_up(decoder: Decoder) -> Iterator[None]:
    """One batch at each step of the iterator."""
    kinds = {layer: unit for unit, layer in enumerate(decoder.config.layers, start=1)}
    for unit in kinds.values():
        layer = _without_weights(decoder, unit)
        assert isinstance(layer, LayerUnit)
        for sequences, positions in BATCHES:
            _run_layer(decoder, layer, sequences, positions)
            yield
        del layer
    head = _without_weights(decoder, decoder.config.n_units - 1)
    assert isinstance(head, HeadUnit)
    for sequences in sorted({sequences for sequences, _ in BATCHES}):
        _run_head(decoder, head, sequences)
        yield


def _without_weights(decoder: Decoder, unit: int) -> Unit:
    dtype = str(decoder.dtype).removeprefix("torch.")
    shapes = decoder.config.unit_tensors(unit)
    (block,) = lay_out([[UnitTensor(name, dtype, shape) for name, shape in shapes.items()]])
    zeros = torch.zeros(block.nbytes, dtype=torch.uint8, device=decoder.device)
    return DecoderTensors(block, zeros, "stored", decoder.ops.silu_times).unit(decoder.config, unit)


@torch.inference_mode()
def _run_layer(decoder: Decoder, layer: LayerUnit, sequences: int, positions: int) -> None:
    attention, pages = decoder.attention, pages_of(positions)
    shape = (sequences * pages * PAGE, 2, attention.n_kv_heads, attention.head_dim)
    kv = torch.zeros(shape, dtype=attention.dtype, device=decoder.device)
    spans: list[Span] = [
        (
            Sequence(
                SequenceKey(""),
                ModelId(""),
                (0, 1),
                range(1),
                positions,
                pages=list(range(i * pages, (i + 1) * pages)),
            ),
            0,
            positions,
        )
        for i in range(sequences)
    ]
    hidden = _hidden(decoder, sequences * positions)
    decoder.step(spans).run(0, (layer,), hidden, kv[None])


@torch.inference_mode()
def _run_head(decoder: Decoder, head: HeadUnit, sequences: int) -> None:
    logits = decoder.head(head, _hidden(decoder, sequences), range(sequences))
    sample(logits, [Draw(0, Sampling())] * sequences)


def _hidden(decoder: Decoder, rows: int) -> torch.Tensor:
    shape = (rows, decoder.config.hidden_size)
    return torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)
