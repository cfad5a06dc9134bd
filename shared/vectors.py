"""What a checkpoint says about its vectors: whether it gives nothing else, and
sentence-transformers' files about how the states of a text's tokens become one vector.

The node that imports a checkpoint refuses what cannot be followed; the gateway follows the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shared.errors import CorruptCheckpoint, UnsupportedModel
from shared.messages.serving import Pooling

ENCODER = "BertModel"
"""The architecture's name in config.json."""
POOLING, MODULES = "pooling.json", "modules.json"
SENTENCE_FILES = {POOLING: "1_Pooling/config.json", MODULES: "modules.json"}
"""Our names of sentence-transformers' files, and where they lie in a checkpoint."""
_MODE = "pooling_mode"
_POOLINGS = {
    "cls": Pooling.CLS,
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "mean_tokens": Pooling.MEAN,
}
"""By the names that `pooling_mode` has as a value, and as the beginning of keys."""
_NORMALIZE = "Normalize"
_FOLLOWED = frozenset({"Transformer", "Pooling", _NORMALIZE})

_T = TypeVar("_T")


class _Module(msgspec.Struct, frozen=True):
    """An entry of modules.json."""

    type: str
    """For example `sentence_transformers.models.Pooling`; its last part is the same in every
    release."""


@dataclass(frozen=True, slots=True)
class VectorRule:
    pooling: Pooling
    normalized: bool
    """Whether vectors have the length 1."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or a manifest's config, is of a model that gives vectors of texts, and
    generates none."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and architectures[:1] == [ENCODER]


def vector_rule(files: Mapping[str, bytes], *, encoder: bool) -> VectorRule:
    """From a checkpoint's POOLING and MODULES, which may be missing: an encoder's states are then
    averaged, as sentence-transformers does, and of a decoder the last state counts.
    UnsupportedModel names what cannot be followed, CorruptCheckpoint the file at fault."""
    modules = _read(files, MODULES, list[_Module])
    for module in modules or ():
        if (kind := module.type.rpartition(".")[2]) not in _FOLLOWED:
            raise UnsupportedModel(
                f"{SENTENCE_FILES[MODULES]}: module {kind} is not supported; supported: "
                f"{', '.join(sorted(_FOLLOWED))}"
            )
    return VectorRule(
        _pooling(_read(files, POOLING, dict[str, Any]) or {}, encoder=encoder),
        modules is None or any(m.type.rpartition(".")[2] == _NORMALIZE for m in modules),
    )


def _pooling(given: Mapping[str, Any], *, encoder: bool) -> Pooling:
    names = [
        name.removeprefix(f"{_MODE}_")
        for name, on in given.items()
        if name.startswith(f"{_MODE}_") and on is True
    ]
    if isinstance(mode := given.get(_MODE), str):
        names.append(mode)
    if not names:
        return Pooling.MEAN if encoder else Pooling.LAST
    if len(names) > 1 or names[0] not in _POOLINGS:
        raise UnsupportedModel(
            f"{SENTENCE_FILES[POOLING]}: pooling {' with '.join(names)} is not supported; "
            f"supported is one of cls_token, lasttoken and mean_tokens"
        )
    return _POOLINGS[names[0]]


def _read(files: Mapping[str, bytes], name: str, kind: type[_T]) -> _T | None:
    if name not in files:
        return None
    try:
        return msgspec.json.decode(files[name], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{SENTENCE_FILES[name]}: {error}") from error
