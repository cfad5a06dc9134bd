"""Random models of any family and config: in memory as blocks, and as transformers runs them."""

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.packing import UnitTensor, lay_out
from services.node.engine.base import Draw, PartResult, Row, StagePart
from services.node.engine.budget import KvBudget
from services.node.engine.engine import TorchEngine
from services.node.engine.linear import Form
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages.serving import Sampling
from shared.parts import Part

MODEL = ModelId("model")
GREEDY = Sampling()


class Model:
    def __init__(self, manifest: Manifest, buffers: tuple[bytearray, ...], oracle: Any) -> None:
        """`oracle`: transformers' model with the same weights."""
        self.manifest = manifest
        self.buffers = buffers
        self.oracle = oracle
        self.cpu_weights: Form = "packed"
        self._said: dict[tuple[int, ...], list[int]] = {}
        """The longest greedy continuation of each prompt so far."""

    @property
    def n_blocks(self) -> int:
        return self.manifest.n_blocks

    def engine(
        self,
        start: int = 0,
        stop: int | None = None,
        kv_tokens: int = 4096,
        kv_bytes: int = 0,
        room: Part | None = None,
    ) -> TorchEngine:
        """An engine that holds blocks start <= block < stop. `kv_bytes`: memory that models can
        share, in place of `kv_tokens` positions for this one. `room`: no other blocks will come."""
        kv = KvBudget(kv_bytes) if kv_bytes else kv_tokens
        engine = TorchEngine("cpu", kv, threads=1, cpu_weights=self.cpu_weights)
        engine.open_model(MODEL, self.manifest, room)
        for block in range(start, self.n_blocks if stop is None else stop):
            engine.attach(MODEL, block, memoryview(self.buffers[block]))
        return engine

    def expected_logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] float32."""
        with torch.no_grad():
            logits: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0].float()
        return logits

    def expected_tokens(
        self, prompt: list[int], count: int, guess: Sequence[int] = ()
    ) -> list[int]:
        """Greedy continuation, whatever the guess is. One pass over the prompt and the guess shows
        how many of its tokens are right; without it each token takes a pass."""
        said = self._said.setdefault(tuple(prompt), [])
        tokens, end = [*prompt, *said], len(prompt) + count
        while len(tokens) < end:
            left = guess[len(tokens) - len(prompt) : count - 1]
            logits = self.expected_logits([*tokens, *left])[len(tokens) - 1 :]
            for token, guessed in zip(logits.argmax(dim=-1).tolist(), [*left, None], strict=True):
                tokens.append(token)
                if token != guessed:
                    guess = ()
                    break
        said[:] = tokens[len(prompt) :]
        return said[:count]


def make_model(seed: int = 0, blocks: int = 0, model_type: str = "llama", **changes: Any) -> Model:
    """A transformers config with changes; weights random enough that tokens vary. Models that are
    made alike have one oracle, which nobody may change."""
    made = _made(seed, blocks, model_type, json.dumps(changes, sort_keys=True))
    model = copy.copy(made)
    model.buffers = tuple(map(bytearray, made.buffers))
    return model


@lru_cache(maxsize=16)
def _made(seed: int, blocks: int, model_type: str, changes: str) -> Model:
    oracle = make_oracle(seed, model_type, **json.loads(changes))
    raw = oracle.config.to_dict() | {"architectures": [type(oracle).__name__]}
    return Model(*pack(raw, oracle.state_dict(), blocks), oracle)


def make_oracle(seed: int = 0, model_type: str = "llama", **changes: Any) -> Any:
    base: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "dtype": "float32",
    }
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(base | changes))
    dtype = config.dtype
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
        elif parameter.dim() == 1:
            parameter.normal_(mean=1.0, std=0.1)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    oracle.lm_head.weight.mul_(4)
    oracle.config.dtype = dtype
    return oracle.to(dtype)


def pack(
    raw: dict[str, Any], state: dict[str, torch.Tensor], blocks: int
) -> tuple[Manifest, tuple[bytearray, ...]]:
    config = read_config(raw)
    units = [
        [UnitTensor(name, config.dtype, shape) for name, shape in config.unit_tensors(u).items()]
        for u in range(config.n_units)
    ]
    raw = {key: value for key, value in raw.items() if key != "dtype"} | {"dtype": config.dtype}
    manifest = Manifest(raw["architectures"][0], raw, 1 << 18, lay_out(units, blocks))
    buffers = []
    for block in manifest.blocks:
        buffer = bytearray(block.nbytes)
        for tensor in block.tensors:
            (name,) = config.sources(tensor.name, tensor.shape)[0]
            data = state[name].contiguous().flatten()
            content = data.view(torch.uint8).numpy().tobytes()
            buffer[tensor.offset : tensor.offset + tensor.nbytes] = content
        buffers.append(buffer)
    return manifest, tuple(buffers)


def row(
    key: str, position: int, tokens: list[int], limit: int = 512, draw: int | None = None
) -> Row:
    """A row that draws the token with index `draw` greedily, if any."""
    what = None if draw is None else Draw(draw, GREEDY)
    return Row(key, position, len(tokens), limit, tuple(tokens), what)


def part(rows: list[Row], start: int, stop: int, hidden: torch.Tensor | None = None) -> StagePart:
    return StagePart(start, stop, tuple(rows), hidden)


def run(engine: TorchEngine, given: StagePart, model_id: ModelId = MODEL) -> PartResult:
    """Runs one part in a sweep of its own."""
    (result,) = run_all(engine, [given], model_id)
    return result


def run_all(
    engine: TorchEngine, parts: Sequence[StagePart], model_id: ModelId = MODEL
) -> list[PartResult]:
    """Runs all parts in one sweep."""
    sweep = engine.begin(model_id)
    numbers = [sweep.join(one) for one in parts]
    left: dict[int, PartResult] = {}
    while len(left) < len(parts):
        left |= sweep.advance()
    return [left[number] for number in numbers]


class Path:
    """Engines that run a model together, each some blocks; one engine is a replica."""

    def __init__(self, model: Model, cuts: tuple[int, ...] = (), kv_tokens: int = 4096) -> None:
        bounds = (0, *cuts, model.n_blocks)
        self.stages = [
            (model.engine(start, stop, kv_tokens), start, stop) for start, stop in pairwise(bounds)
        ]

    def run(self, rows: list[Row]) -> tuple[tuple[int, ...], ...]:
        hidden: torch.Tensor | None = None
        for engine, start, stop in self.stages:
            stage_rows = rows if start == 0 else [replace(row, tokens=()) for row in rows]
            result = run(engine, part(stage_rows, start, stop, hidden))
            hidden = result.hidden
        return result.sampled

    def generate(self, prompt: list[int], count: int, key: str = "s") -> list[int]:
        """Greedy: one prefill, then decode steps."""
        tokens: list[int] = []
        new, position = prompt, 0
        for index in range(count):
            ((token,),) = self.run([row(key, position, new, draw=index)])
            tokens.append(token)
            position += len(new)
            new = [token]
        return tokens
