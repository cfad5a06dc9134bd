"""The models that users can ask for, and what turns text into tokens, or images into a model's
input."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gateway.asked import model_defaults
from services.gateway.embeds import Embeds, embeds_of
from services.gateway.replies.form import THOUGHT
from services.gateway.text import TextCodec
from shared.bus.base import ObjectStore
from shared.chat_template import CHAT_TEMPLATE, template_source
from shared.confined.jobs import Template
from shared.errors import BadInput, LambdaScaleError, ModelError, NotFound
from shared.ids import ModelId, ModelName
from shared.layout import decode_manifest
from shared.messages.pool import ModelRecord, Task
from shared.vectors import SENTENCE_FILES, is_encoder
from shared.vision import ImageInput, image_input, labels

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Lingo:
    """What is needed to read and write a model's text."""

    codec: TextCodec
    template: Template | None
    """Run by a ConfinedPool only, as `tool_template`."""
    tool_template: Template | None
    """For chats with tools, if the model has a template of its own for them."""
    thinks: bool
    """Whether replies may begin with thoughts."""
    eos: tuple[int, ...]
    """Ids that end a completion."""
    vocab_size: int
    kv_bytes: int
    """How many bytes the KV of a token takes. 0: the model keeps none, or its config does not
    say."""
    defaults: Mapping[str, float]
    """Of sampling, by the names that requests have for it."""
    embeds: Embeds
    generates: bool
    """Whether the model generates text; all give vectors of it."""

    def template_for(self, tools: bool) -> Template | None:
        """The template for a chat, which may have tools."""
        return self.tool_template if tools and self.tool_template else self.template


@dataclass(frozen=True, slots=True)
class Sight:
    """What an image classifier takes and answers."""

    input: ImageInput
    labels: tuple[str, ...]
    """One for each class, in order."""


class Catalog:
    def __init__(self, objects: ObjectStore) -> None:
        self.known = False
        """Whether the registry has answered once."""
        self.records: dict[ModelName, ModelRecord] = {}
        self._objects = objects
        self._known: dict[ModelId, Lingo | Sight] = {}
        self._loading: dict[ModelId, asyncio.Lock] = {}

    def remove(self, name: ModelName, model_id: ModelId) -> None:
        record = self.records.get(name)
        if record is not None and record.model_id == model_id:
            del self.records[name]
        self._known.pop(model_id, None)
        self._loading.pop(model_id, None)

    def kv_bytes(self, record: ModelRecord) -> int:
        """How many bytes the KV of a token takes. 0: it is not known."""
        found = self._known.get(record.served_by)
        return found.kv_bytes if isinstance(found, Lingo) else 0

    async def lingo(self, record: ModelRecord) -> Lingo:
        """A text model's Lingo. BadInput if the model is for images; else as `load`."""
        found = await self.load(record)
        if not isinstance(found, Lingo):
            raise BadInput(f"model {record.name!r} classifies images: use /v1/classify")
        return found

    async def writer(self, record: ModelRecord) -> Lingo:
        """The Lingo of a model that generates text. BadInput if it gives only vectors; else as
        `lingo`."""
        if record.embeds:
            raise BadInput(f"model {record.name!r} gives vectors, no text: use /v1/embeddings")
        return await self.lingo(record)

    async def sight(self, record: ModelRecord) -> Sight:
        """A classifier's Sight. BadInput if the model is for text; else as `load`."""
        found = await self.load(record)
        if not isinstance(found, Sight):
            use = "/v1/completions or /v1/chat/completions"
            if record.embeds:
                raise BadInput(f"model {record.name!r} gives vectors of texts: use /v1/embeddings")
            raise BadInput(f"model {record.name!r} generates text: use {use}")
        return found

    async def load(self, record: ModelRecord) -> Lingo | Sight:
        """Loads the model's files at the first call; an adapter has its base's. ModelError,
        NotFound or BusError if that fails."""
        if record.base:
            record = self.base(record)
        if found := self._known.get(record.model_id):
            return found
        async with self._loading.setdefault(record.model_id, asyncio.Lock()):
            if record.model_id not in self._known:
                found = await self._read(record)
                if self.records.get(record.name) != record:  # removed meanwhile
                    return found
                self._known[record.model_id] = found
            return self._known[record.model_id]

    def base(self, adapter: ModelRecord) -> ModelRecord:
        """The model that an adapter is for. NotFound."""
        for record in self.records.values():
            if record.model_id == adapter.base:
                return record
        raise NotFound(f"the base of adapter {adapter.name!r} is not published")

    async def _read(self, record: ModelRecord) -> Lingo | Sight:
        try:
            return await (self._sight if record.task is Task.CLASSIFY else self._lingo)(record)
        except LambdaScaleError:
            raise
        # The model's files come from strangers, and fail in their readers' own ways.
        except Exception as error:
            raise ModelError(f"the model's files cannot be used: {error!r}") from error

    async def _sight(self, record: ModelRecord) -> Sight:
        config = await self._config(record)
        return Sight(image_input(config), labels(config))

    async def _config(self, record: ModelRecord) -> dict[str, Any]:
        return decode_manifest(await self._objects.get(record.manifest)).config

    async def _lingo(self, record: ModelRecord) -> Lingo:
        if TOKENIZER not in record.files:
            raise ModelError(f"model {record.name!r} has no {TOKENIZER}: publish it with one")
        wanted = (
            TOKENIZER,
            TOKENIZER_CONFIG,
            SPECIAL_TOKENS,
            GENERATION_CONFIG,
            CHAT_TEMPLATE,
            *SENTENCE_FILES,
        )
        files = {
            name: await self._objects.get(record.files[name])
            for name in wanted
            if name in record.files
        }
        config = await self._config(record)
        # Parsing a tokenizer of 100,000 tokens takes a good part of a second.
        return await asyncio.to_thread(read_lingo, files, config)


def read_lingo(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Lingo:
    """Reads a checkpoint's text files and its config.json. ModelError names the file at fault."""
    tokenizer_config = _json(files, TOKENIZER_CONFIG)
    special = _special_tokens({**_json(files, SPECIAL_TOKENS), **tokenizer_config})
    codec = TextCodec(
        files[TOKENIZER],
        bos=special.get("bos_token"),
        add_bos=tokenizer_config.get("add_bos_token") is True,
    )
    sources = [template_source(files, tokenizer_config, name) for name in ("default", "tool_use")]
    template, tool_template = (Template(source, special) if source else None for source in sources)
    generation = _json(files, GENERATION_CONFIG)
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if "eos_token" in special:
        eos |= _ids(codec.token_id(special["eos_token"]))
    generates = not is_encoder(config)
    return Lingo(
        codec=codec,
        template=template,
        tool_template=tool_template,
        thinks=codec.token_id(THOUGHT) is not None
        or any(source and THOUGHT in source for source in sources),
        eos=tuple(sorted(eos)),
        vocab_size=int(config["vocab_size"]),
        kv_bytes=_kv_bytes(config) if generates else 0,
        defaults=model_defaults(generation),
        embeds=embeds_of(config, files),
        generates=generates,
    )


def _kv_bytes(config: Mapping[str, Any]) -> int:
    """Keys and values of all layers, as the weights' type has them."""
    try:
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        width = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
        return int(2 * config["num_hidden_layers"] * kv_heads * dim * width)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return msgspec.json.decode(files[name], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{name} cannot be read: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are texts, or objects with their `content`."""
    tokens = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int)}
