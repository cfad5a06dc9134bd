"""How an image becomes the input of an image classifier, and how its answer becomes a label.

This follows transformers' ViTImageProcessor. The gateway decodes and resizes the image
(`ImageInput.size`, `resample`) and sends 8-bit RGB; the node that embeds it rescales and
normalises. Both read the model's manifest, whose config includes the checkpoint's
preprocessor_config.json.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from shared.errors import CorruptCheckpoint, UnsupportedModel

CLASSIFIER = "ViTForImageClassification"
"""The architecture's name in config.json."""
PREPROCESSOR = "preprocessor_config.json"
IN_CONFIG = "preprocessor_config"
"""The key of preprocessor_config.json in the config of a manifest."""
CHANNELS = 3
MAX_SIZE = 1024
"""The most pixels of a side. Such an image fits into a message of the control bus."""
PROCESSORS = (
    "ViTImageProcessor",
    "ViTImageProcessorFast",
    "ViTImageProcessorPil",
    "ViTFeatureExtractor",
)

_Channels = tuple[float, float, float]


class _Preprocessor(msgspec.Struct, frozen=True, kw_only=True):
    """preprocessor_config.json, with the defaults of ViTImageProcessor."""

    image_processor_type: str = ""
    feature_extractor_type: str = ""
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_center_crop: bool = False
    do_pad: bool = False
    size: dict[str, int] | int = 224
    resample: Annotated[int, msgspec.Meta(ge=0, le=5)] = 2
    rescale_factor: float = 1 / 255
    image_mean: _Channels | float = 0.5
    image_std: _Channels | float = 0.5


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    """Height and width in pixels."""
    resample: int | None
    """Pillow's filter for resizing. None: images must already have that size."""
    factor: float
    mean: _Channels
    std: _Channels
    """One for each channel. A pixel's value, 0 to 255, becomes (value x factor - mean) / std."""

    @property
    def nbytes(self) -> int:
        """Bytes of an image as it is sent: rows of pixels, one byte each for red, green and
        blue."""
        return self.size * self.size * CHANNELS


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or a manifest's config, is of an image classifier."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and architectures[:1] == [CLASSIFIER]


def image_input(config: Mapping[str, Any]) -> ImageInput:
    """The image input of a classifier's manifest. CorruptCheckpoint, or UnsupportedModel with the
    name."""
    raw = config.get(IN_CONFIG)
    if not isinstance(raw, dict):
        raise CorruptCheckpoint(f"the model's {PREPROCESSOR} is missing; import it again")
    given = {key: value for key, value in raw.items() if value is not None}
    try:
        found = msgspec.convert(given, _Preprocessor)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"{PREPROCESSOR}: {error}") from error
    kind = found.image_processor_type or found.feature_extractor_type
    if kind and kind not in PROCESSORS:
        raise UnsupportedModel(
            f"{PREPROCESSOR}: image_processor_type {kind!r} is not supported; supported: "
            f"{', '.join(PROCESSORS)}"
        )
    for name in ("do_center_crop", "do_pad"):
        if getattr(found, name):
            raise UnsupportedModel(f"{PREPROCESSOR}: {name} is not supported; only resizing")
    mean, std = _by_channel(found.image_mean), _by_channel(found.image_std)
    if not min(std) > 0:
        raise CorruptCheckpoint(f"{PREPROCESSOR}: image_std must be positive, not {std}")
    return ImageInput(
        size=_side(found.size),
        resample=found.resample if found.do_resize else None,
        factor=found.rescale_factor if found.do_rescale else 1.0,
        mean=mean if found.do_normalize else (0.0, 0.0, 0.0),
        std=std if found.do_normalize else (1.0, 1.0, 1.0),
    )


def labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A classifier's classes by index, from `id2label` or, without it, as transformers numbers
    them. CorruptCheckpoint if they are malformed."""
    given = config.get("id2label")
    if given is None:
        count = 2 if config.get("num_labels") is None else config["num_labels"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise CorruptCheckpoint(f"config.json: num_labels must be positive, not {count!r}")
        return tuple(f"LABEL_{index}" for index in range(count))
    try:
        found = msgspec.convert(given, dict[int, str], strict=False)
    except msgspec.ValidationError as error:
        raise CorruptCheckpoint(f"config.json: id2label: {error}") from error
    if not found or sorted(found) != list(range(len(found))):
        raise CorruptCheckpoint(
            "config.json: id2label must name the classes from 0 on, without a gap"
        )
    return tuple(found[index] for index in range(len(found)))


def _side(size: Mapping[str, int] | int) -> int:
    sides = {"height": size, "width": size} if isinstance(size, int) else dict(size)
    side = sides.get("height", 0)
    if sides != {"height": side, "width": side} or not 0 < side <= MAX_SIZE:
        raise UnsupportedModel(
            f"{PREPROCESSOR}: size {size} is not supported; only height and width alike, of at "
            f"most {MAX_SIZE} pixels"
        )
    return side


def _by_channel(value: _Channels | float) -> _Channels:
    return value if isinstance(value, tuple) else (value, value, value)
