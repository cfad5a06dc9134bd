"""An image classifier's encoder (ViT; Dosovitskiy et al. 2021), unit by unit: embeddings of the
patches, layers, and final norm with the classifier.

A sequence is an image. All its positions are run in one row, since attention goes both ways, and
nothing of it is kept after that. Attention does not know an order, so the class token is put last:
a class is drawn after the last position, as a token is.

An image's result does not depend on the others in a step. On a CPU each is run by itself, in
products of one shape: packed together, eight are at most 15 % faster (ViT-B, one thread), but
torch's bf16 products then have other bits (linear.py). On a GPU all are run together.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.node.checkpoints.vit_config import (
    CLASS_TOKEN,
    CLASSIFIER,
    FINAL_NORM,
    POSITIONS,
    PROJECTION,
    VitConfig,
)
from services.node.engine.attention import Span
from services.node.engine.base import Row, RowsRefused, Weights
from services.node.engine.copies import to_device
from services.node.engine.linear import Form, Linear
from services.node.engine.weights import BlockTensors
from shared.errors import BadInput
from shared.layout import BlockSpec
from shared.vision import CHANNELS


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class PatchUnit:
    projection: Linear
    """Of a patch's values, [channels x height x width]."""
    positions: torch.Tensor
    """[positions, hidden]: what is added to each; to the last, the class token itself."""


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    before: Norm
    qkv: Linear
    o: Linear
    after: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ClassifierUnit:
    norm: Norm
    classifier: Linear


EncoderUnit = PatchUnit | EncoderLayer | ClassifierUnit


class EncoderTensors(BlockTensors):
    def encoder_unit(self, config: VitConfig, unit: int) -> EncoderUnit:
        if unit == 0:
            return self._patches()
        if unit == config.n_units - 1:
            return ClassifierUnit(self._norm(FINAL_NORM), self._linear("", (CLASSIFIER,)))
        layer = f"vit.layers.{unit - 1}."
        return EncoderLayer(
            before=self._norm(layer + "layernorm_before"),
            qkv=self._linear(layer + "attention.", ("q_proj", "k_proj", "v_proj")),
            o=self._linear(layer + "attention.", ("o_proj",)),
            after=self._norm(layer + "layernorm_after"),
            up=self._linear(layer + "mlp.", ("fc1",)),
            down=self._linear(layer + "mlp.", ("fc2",)),
        )

    def _patches(self) -> PatchUnit:
        """The convolution, whose patches do not overlap, as a product; the class token's position,
        the checkpoint's first, as the last."""
        kernel = self._joined([PROJECTION + ".weight"]).flatten(1)
        positions = self._joined([POSITIONS])[0]
        token = positions[:1] + self._joined([CLASS_TOKEN])[0]
        return PatchUnit(
            self._formed(kernel, self._joined([PROJECTION + ".bias"])),
            torch.cat((positions[1:], token)),
        )

    def _norm(self, name: str) -> Norm:
        return Norm(self._joined([name + ".weight"]), self._joined([name + ".bias"]))


class Encoder:
    """What a model's steps share."""

    def __init__(self, config: VitConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.whole = config.context_length
        # Made once: a tensor that is made on a GPU of a host's numbers is waited for.
        self._mean = torch.tensor(config.image.mean, device=device)
        self._std = torch.tensor(config.image.std, device=device)

    def units(self, spec: BlockSpec, weights: Weights, form: Form) -> tuple[EncoderUnit, ...]:
        tensors = EncoderTensors(spec, weights, form)
        units = range(spec.first_unit, spec.last_unit + 1)
        return tuple(tensors.encoder_unit(self.config, unit) for unit in units)

    def embed(self, unit: PatchUnit, rows: Rows[Row]) -> torch.Tensor:
        """[positions of the rows, hidden_size]. RowsRefused if a row has no image of the size."""
        nbytes = self.config.image.nbytes
        for row in rows:
            if len(row.image) != nbytes:
                why = f"an image of {nbytes} bytes is due, not of {len(row.image)}"
                raise RowsRefused((row.sequence,), BadInput(f"sequence {row.sequence}: {why}"))
        shape = (len(rows), self.whole, self.config.hidden_size)
        embedded = torch.empty(shape, dtype=self.dtype, device=self.device)
        for row, hidden in zip(rows, embedded, strict=True):
            hidden[:-1] = unit.projection(self._patches(row.image))
            hidden[-1] = 0
            hidden += unit.positions
        return embedded.flatten(0, 1)

    def step(self, spans: Rows[Span]) -> "EncoderStep":
        return EncoderStep(self, len(spans))

    def head(self, unit: ClassifierUnit, hidden: torch.Tensor, rows: Rows[int]) -> torch.Tensor:
        """Logits [len(rows), labels] float32 after the given rows of hidden [n, hidden_size]."""
        picked = hidden[to_device(torch.tensor(rows), self.device)]
        return unit.classifier(self.normed(picked, unit.norm), torch.float32)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        shape = (self.config.hidden_size,)
        return functional.layer_norm(x, shape, norm.weight, norm.bias, self.config.norm_eps)

    def _patches(self, image: bytes) -> torch.Tensor:
        """[patches, channels x height x width], rescaled and normalised."""
        how, size = self.config.image, self.config.patch_size
        side = how.size // size
        pixels = to_device(torch.frombuffer(bytearray(image), dtype=torch.uint8), self.device)
        values = pixels.view(-1, CHANNELS).float() * how.factor
        values -= self._mean
        values /= self._std
        patches = values.view(side, size, side, size, CHANNELS).permute(0, 2, 4, 1, 3)
        return patches.reshape(side * side, -1).to(self.dtype)


class EncoderStep:
    """Runs layers over one step's images."""

    def __init__(self, encoder: Encoder, images: int) -> None:
        self._encoder = encoder
        self._images = images
        self._together = 1 if encoder.device.type == "cpu" else images

    def run(
        self, block: int, layers: Rows[EncoderLayer], hidden: torch.Tensor, kv: torch.Tensor
    ) -> None:
        """A block's layers. hidden [rows, hidden_size] is updated; kv stays empty."""
        whole = self._encoder.whole
        images = hidden.view(self._images, whole, -1)
        for layer in layers:
            for some in torch.split(images, self._together):
                self._run(layer, some)

    def _run(self, layer: EncoderLayer, images: torch.Tensor) -> None:
        """[images, positions, hidden_size]."""
        encoder, n_heads = self._encoder, self._encoder.config.n_heads
        rows = images.flatten(0, 1)
        qkv = layer.qkv(encoder.normed(rows, layer.before))
        heads = qkv.view(*images.shape[:2], 3, n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        layer.o.add(attended.flatten(0, 1), rows)
        active = functional.gelu(layer.up(encoder.normed(rows, layer.after)))
        layer.down.add(active, rows)
