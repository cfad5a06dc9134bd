"""A Hugging Face checkpoint on disk, opened without reading its weights and without unpickling.

Every fault that can be known at this point is refused here, by name, before a byte is copied.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.node.checkpoints.architecture import AnyConfig, read_config
from services.node.checkpoints.config import HEAD, Shapes
from services.node.checkpoints.packing import ITEMSIZE, UnitTensor
from services.node.checkpoints.safetensors_header import StoredTensor, read_header
from shared.chat_template import CHAT_TEMPLATE, template_source
from shared.confined.jobs import Compile, Refused, Template
from shared.confined.pool import run_once
from shared.errors import (
    BadInput,
    CorruptCheckpoint,
    MissingTensor,
    NotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from shared.vectors import SENTENCE_FILES, is_encoder, vector_rule
from shared.vision import IN_CONFIG, PREPROCESSOR, is_classifier

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    "generation_config.json",
    "special_tokens_map.json",
)
BARE = "embed_tokens.weight"
"""A tensor that whole models have in `model.`."""
MAX_FILE = 64 << 20
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Buffers that older exports wrote beside the weights. They follow from the config.
DERIVED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    config: AnyConfig
    raw_config: dict[str, Any]
    """The content of config.json. An image classifier's also has preprocessor_config.json, as a
    key."""
    units: tuple[tuple[UnitTensor, ...], ...]
    """The tensors that each unit is packed from, in order."""
    stored: dict[str, tuple[StoredTensor, ...]]
    """For each name in `units`, the stored tensors whose bytes, one after the other, are the unit
    tensor's."""
    files: dict[str, bytes]
    """Tokenizer and template files (those of FILES that exist). An image classifier has none."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads configs, tokenizer files and safetensors headers of the checkpoint directory `path`.

    Errors: NotFound, BadInput (not a directory), UnsupportedModel, UnsafeCheckpoint, MissingTensor,
    CorruptCheckpoint. Each names the file or tensor at fault.
    """
    check_directory(path)
    raw_config = read_json(path / "config.json")
    classifies = is_classifier(raw_config)
    if classifies:
        raw_config[IN_CONFIG] = read_json(path / PREPROCESSOR)
    _check_encodable(path / "config.json", raw_config)
    config = read_config(raw_config)
    stored = _stored(path, config, _named(_weights(path)))
    units = tuple(
        tuple(
            UnitTensor(name, stored[name][0].dtype, shape)
            for name, shape in config.unit_tensors(unit).items()
        )
        for unit in range(config.n_units)
    )
    files = {} if classifies else _text_files(path)
    _check_vectors(path, files, encoder=is_encoder(raw_config))
    return Checkpoint(config, raw_config, units, stored, files)


def check_directory(path: Path) -> None:
    try:
        if path.is_dir():
            return
        is_file = path.exists()
    except OSError as error:  # the name is too long, or a folder above may not be searched
        raise BadInput(f"there can be no checkpoint at {path}: {error.strerror}") from error
    if is_file:
        raise BadInput(f"{path} is a file; give the checkpoint's directory")
    raise NotFound(f"there is no checkpoint directory {path}")


class TensorReader:
    """Reads ranges of stored tensors, and keeps the files open. `open_tensors` makes it."""

    def __init__(self, descriptors: Mapping[Path, int]) -> None:
        self._descriptors = descriptors

    def read(self, tensor: StoredTensor, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset` of the tensor on. CorruptCheckpoint if the bytes cannot
        be read."""
        position, done = tensor.offset + offset, 0
        while done < len(into):
            with _readable(tensor.path):
                got = os.preadv(self._descriptors[tensor.path], [into[done:]], position + done)
            if got == 0:
                raise CorruptCheckpoint(f"{tensor.path}: became shorter while it was being read")
            done += got


@contextmanager
def open_tensors(tensors: Iterable[StoredTensor]) -> Iterator[TensorReader]:
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for path in {tensor.path for tensor in tensors}:
            with _readable(path):
                file = stack.enter_context(path.open("rb", buffering=0))
            descriptors[path] = file.fileno()
        yield TensorReader(descriptors)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror}") from error


def _weights(path: Path) -> dict[str, StoredTensor]:
    if (path / SINGLE).exists():
        return read_header(path / SINGLE)
    if (path / INDEX).exists():
        return _sharded(path)
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise UnsafeCheckpoint(
            f"{path}: the weights are pickled only ({', '.join(pickles[:3])}), and opening them "
            f"would run code; save the model with safetensors"
        )
    raise CorruptCheckpoint(f"{path}: there is neither {SINGLE} nor {INDEX}")


def _named(found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by the names that a whole model has for them. Models that were trained for vectors
    are often saved without their head, and without the names' first part."""
    if BARE not in found:
        return found
    return {name if name == HEAD else f"model.{name}": tensor for name, tensor in found.items()}


def _sharded(path: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and shard == Path(shard).name for shard in weight_map.values()
    ):
        raise CorruptCheckpoint(
            f"{path / INDEX}: weight_map must map tensor names to file names in the directory"
        )
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).is_file():
            raise CorruptCheckpoint(f"{path}: shard {shard}, named in {INDEX}, is missing")
        shards[shard] = read_header(path / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise MissingTensor(f"{path / shard}: tensor {name}, said to be in it, is missing")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _stored(
    path: Path, config: AnyConfig, found: Mapping[str, StoredTensor]
) -> dict[str, tuple[StoredTensor, ...]]:
    """The stored tensors for every tensor that the config implies. All must exist, in one supported
    dtype, and nothing else may."""
    sources = {
        name: _source(config.sources(name, shape), found)
        for unit in range(config.n_units)
        for name, shape in config.unit_tensors(unit).items()
    }
    expected = {part: shape for parts in sources.values() for part, shape in parts.items()}
    _check_shapes(path, expected, found)
    check_dtypes(path, expected, found)
    _check_unknown(path, expected.keys() | config.ignored, found)
    return {name: tuple(found[part] for part in parts) for name, parts in sources.items()}


def _source(sources: Sequence[Shapes], found: Mapping[str, StoredTensor]) -> Shapes:
    """Chooses among the ways to store a tensor: the way whose parts are most completely there. If
    several tie, the last of them, which is the most usual."""
    return max(
        reversed(sources), key=lambda parts: sum(part in found for part in parts) / len(parts)
    )


def _check_shapes(path: Path, expected: Shapes, found: Mapping[str, StoredTensor]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise MissingTensor(
            f"{path}: {len(missing)} tensors that config.json implies are missing: {some(missing)}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CorruptCheckpoint(
                f"{path}: tensor {name} has shape {list(found[name].shape)}; config.json implies "
                f"{list(shape)}"
            )


def check_dtypes(path: Path, expected: Shapes, found: Mapping[str, StoredTensor]) -> None:
    dtypes = {found[name].dtype: name for name in expected}
    for dtype, name in dtypes.items():
        if dtype not in ITEMSIZE:
            raise UnsupportedModel(
                f"{path}: tensor {name} has dtype {dtype}; supported: {', '.join(ITEMSIZE)}"
            )
    if len(dtypes) > 1:
        mix = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(dtypes.items()))
        raise UnsupportedModel(f"{path}: tensors of several dtypes: {mix}; save them in one")


def _check_unknown(path: Path, used: Set[str], found: Mapping[str, StoredTensor]) -> None:
    """Refuses tensors that would not be used: they mean another architecture, whose output would be
    wrong."""
    unknown = [name for name in found if name not in used and not name.endswith(DERIVED)]
    if unknown:
        raise UnsupportedModel(
            f"{path}: {len(unknown)} tensors have no place in the architecture that config.json "
            f"names: {some(unknown)}"
        )


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _text_files(path: Path) -> dict[str, bytes]:
    files = {name: _read_file(path / name) for name in FILES if (path / name).is_file()}
    if TOKENIZER not in files:
        raise UnsupportedModel(
            f"{path}: there is no {TOKENIZER}; save the model's fast tokenizer beside its weights"
        )
    read = {name: read_json(path / name) for name in files if name.endswith(".json")}
    _check_template(path, files, read.get(TOKENIZER_CONFIG, {}))
    sentence = {name: path / place for name, place in SENTENCE_FILES.items()}
    return files | {name: _read_file(file) for name, file in sentence.items() if file.is_file()}


def _check_vectors(path: Path, files: Mapping[str, bytes], *, encoder: bool) -> None:
    """A model that gives nothing but vectors is of no use if they cannot be made as it says. Others
    may be for text."""
    try:
        vector_rule(files, encoder=encoder)
    except UnsupportedModel as error:
        if encoder:
            raise UnsupportedModel(f"{path}: {error}") from error
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path}: {error}") from error


def _check_template(
    path: Path, files: Mapping[str, bytes], tokenizer_config: Mapping[str, Any]
) -> None:
    """A gateway could serve no request for a model whose template cannot be read."""
    source = template_source(files, tokenizer_config)
    if source:
        outcome = run_once(Compile(Template(source, {})))
        if isinstance(outcome, Refused):
            raise CorruptCheckpoint(f"{path}: {outcome.why}; mend or remove it")


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path.parent}: there is no {path.name}") from error
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE:
        raise CorruptCheckpoint(f"{path}: longer than {MAX_FILE} bytes")
    return data


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(_read_file(path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path}: must be a JSON object")
    return value


def _check_encodable(path: Path, config: dict[str, Any]) -> None:
    try:
        msgspec.msgpack.encode(config)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{path}: has a value that no manifest can carry: {error}"
        ) from error
