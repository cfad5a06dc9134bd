"""An image classifier's encoder (ViT; Dosovitskiy et al. 2021), unit by unit: embeddings of the
patches, layers, and final norm with the classifier.

A sequence is an image. All its positions run in one row, because attention goes both ways, and
nothing is kept afterwards. Attention does not depend on the order of positions, so the class token
comes last: a class is drawn after the last position, as a token is.

An image's result does not depend on the other images of a step. On a CPU each image runs by itself,
in products of one shape. Packed together, eight images would be at most 15 % faster (ViT-B, one
thread), but torch's bf16 products would then give other bits (linear.py). On a GPU all images run
together.
"""

from collections.abc import Iterable, Sequence
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
from services.node.engine.base import Bell, Row, RowsRefused, Weights
from services.node.engine.copies import to_device
from services.node.engine.huge_pages import Pages
from services.node.engine.linear import Form, Linear
from services.node.engine.sampling import largest_ids
from services.node.engine.weights import BlockTensors, Norm
from shared.errors import BadInput
from shared.layout import BlockSpec
from shared.vision import CHANNELS


@dataclass(frozen=True, slots=True)
class PatchUnit:
    projection: Linear
    """Applied to the values of a patch, [channels x height x width]."""
    positions: torch.Tensor
    """[positions, hidden], added to each position. The last one includes the class token."""


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
        """Turns the convolution into a product, which is the same since its patches do not overlap.
        Moves the class token's position from first, as in the checkpoint, to last."""
        kernel = self._joined([PROJECTION + ".weight"]).flatten(1)
        positions = self._joined([POSITIONS])[0]
        token = positions[:1] + self._joined([CLASS_TOKEN])[0]
        return PatchUnit(
            self._formed(kernel, self._joined([PROJECTION + ".bias"])),
            torch.cat((positions[1:], token)),
        )


class Encoder:
    """The parts that all steps of a model share."""

    keeps_kv = False

    def __init__(self, config: VitConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.positions = config.context_length
        """Of every image."""
        # Made once: making a GPU tensor from numbers of the host waits for the GPU.
        self._mean = torch.tensor(config.image.mean, device=device)
        self._std = torch.tensor(config.image.std, device=device)

    def refusal(self, row: Row) -> str:
        if (row.position, row.count) == (0, self.positions):
            return ""
        return (
            f"{row.count} positions from {row.position} on; expected all {self.positions} of an "
            f"image"
        )

    def units(
        self, spec: BlockSpec, weights: Weights, form: Form, pages: Pages | None = None
    ) -> tuple[EncoderUnit, ...]:
        tensors = EncoderTensors(spec, weights, form, pages)
        units = range(spec.first_unit, spec.last_unit + 1)
        return tuple(tensors.encoder_unit(self.config, unit) for unit in units)

    def embed(self, unit: PatchUnit, rows: Sequence[Row]) -> torch.Tensor:
        """Returns [positions of the rows, hidden_size]. RowsRefused names rows without an image of
        the model's size."""
        nbytes = self.config.image.nbytes
        for row in rows:
            if len(row.image) != nbytes:
                why = f"an image of {nbytes} bytes is due, not of {len(row.image)}"
                raise RowsRefused((row.sequence,), BadInput(f"sequence {row.sequence}: {why}"))
        shape = (len(rows), self.positions, self.config.hidden_size)
        embedded = torch.empty(shape, dtype=self.dtype, device=self.device)
        for row, hidden in zip(rows, embedded, strict=True):
            hidden[:-1] = unit.projection(self._patches(row.image))
            hidden[-1] = 0
            hidden += unit.positions
        return embedded.flatten(0, 1)

    def step(self, spans: Sequence[Span]) -> "EncoderStep":
        return EncoderStep(self, len(spans))

    def head(self, unit: ClassifierUnit, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), labels] in float32, computed from the given rows of hidden [n,
        hidden_size]."""
        return unit.classifier(self.states(unit, hidden, rows), torch.float32)

    def states(
        self, unit: ClassifierUnit, hidden: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor:
        picked = hidden[to_device(torch.tensor(rows), self.device)]
        return self.normed(picked, unit.norm)

    def largest_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return largest_ids(logits)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        shape = (self.config.hidden_size,)
        return functional.layer_norm(x, shape, norm.weight, norm.bias, self.config.norm_eps)

    def _patches(self, image: bytes) -> torch.Tensor:
        """The image as [patches, channels x height x width], rescaled and normalised."""
        how, size = self.config.image, self.config.patch_size
        side = how.size // size
        pixels = to_device(torch.frombuffer(bytearray(image), dtype=torch.uint8), self.device)
        values = pixels.view(-1, CHANNELS).float() * how.factor
        values -= self._mean
        values /= self._std
        patches = values.view(side, size, side, size, CHANNELS).permute(0, 2, 4, 1, 3)
        return patches.reshape(side * side, -1).to(self.dtype)


class EncoderStep:
    """Runs layers over the images of one step."""

    def __init__(self, encoder: Encoder, images: int) -> None:
        self._encoder = encoder
        self._images = images
        self._together = 1 if encoder.device.type == "cpu" else images

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[EncoderLayer]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        """Runs the first block's layers. Updates hidden [rows, hidden_size]; kv stays empty."""
        images = hidden.view(self._images, self._encoder.positions, -1)
        for layer in next(iter(blocks)):
            for some in torch.split(images, self._together):
                self._run(layer, some)
        return 1

    def _run(self, layer: EncoderLayer, images: torch.Tensor) -> None:
        """Runs one layer over images [images, positions, hidden_size]."""
        encoder, n_heads = self._encoder, self._encoder.config.n_heads
        rows = images.flatten(0, 1)
        qkv = layer.qkv(encoder.normed(rows, layer.before))
        heads = qkv.view(*images.shape[:2], 3, n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        layer.o.add(attended.flatten(0, 1), rows)
        active = functional.gelu(layer.up(encoder.normed(rows, layer.after)))
        layer.down.add(active, rows)
