"""The torch engine: attaches blocks as they arrive, and runs batches over any range of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from msgspec.structs import asdict

from services.node.checkpoints.adapter import base_of
from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import ModelConfig
from services.node.checkpoints.vit_config import VitConfig
from services.node.engine import kernels
from services.node.engine.adapters import Adapter, AdapterRoom, read_adapter
from services.node.engine.base import Context, MakeAdapter, SequenceKey, Weights
from services.node.engine.budget import KvBudget
from services.node.engine.decoder import Decoder, kv_dtype, units
from services.node.engine.devices import own_stream, torch_device
from services.node.engine.division import Division
from services.node.engine.encoder import Encoder
from services.node.engine.engine_kv import EngineKv
from services.node.engine.kv import KvCache
from services.node.engine.kv_host import KvHost
from services.node.engine.leading import EngineRanks, Leads, LedDecoder
from services.node.engine.linear import Form, check_form
from services.node.engine.model import Model, Network, layers_of
from services.node.engine.ops import TorchOps
from services.node.engine.orders import CloseModel, DropAdapter
from services.node.engine.processors import Processor, Processors
from services.node.engine.ranks import Ranks
from services.node.engine.share import WHOLE
from services.node.engine.shared_pages import PackedBlocks
from services.node.engine.sweep import TorchSweep
from services.node.engine.team import use_threads
from services.node.engine.text_encoder import TextEncoder
from services.node.engine.warmup import warm_up
from services.node.engine.weights import check_manifest
from services.node.memory.recycled import Recycled
from services.node.memory.shelf import Shelf
from shared import telemetry
from shared.errors import (
    Conflict,
    EngineFailed,
    NotFound,
    UnsupportedModel,
)
from shared.ids import ModelId
from shared.layout import Manifest
from shared.parts import Part
from shared.step_costs import StepCosts

if TYPE_CHECKING:
    from services.node.engine.graphs import Capture


Measure = Callable[[Ranks, int, Form, kernels.Kernels], tuple[StepCosts, ...]]
"""See rehearsal.measure."""


class TorchEngine(EngineKv):
    """Implements services.node.engine.base.Engine.

    On CPUs of one kind, a sequence's logits have the same bits in every batch, for every split of
    the model into stages, and however its KV was computed (attention.py says how). The exception is
    bf16 in the stored form (linear.py).

    On `cuda`, blocks are attached where they lie on the device (services/node/memory/device.py) and
    run by fused kernels, decode steps as CUDA graphs. The promise about bits does not hold there.
    """

    def __init__(
        self,
        device: str,
        kv: KvBudget | int,
        threads: int,
        *,
        step_floor_s: float = 0.0,
        cpu_weights: Form = "packed",
        capture: "Capture | None" = None,
        shelf: Shelf | None = None,
        kept_bytes: int = 0,
        kv_host_bytes: int = 0,
        token_s: Callable[[ModelId], float] = lambda model_id: 0.0,
        ranks: EngineRanks | None = None,
        measure: Measure | None = None,
    ) -> None:
        """`kv`: the memory for KV caches, or directly a number of positions, for one model.
        `threads`: 0 takes torch's default; ranks share them. `step_floor_s`: the least seconds
        of a sweep through a whole model (see NodeConfig). `cpu_weights`: the form of matrices
        on a CPU. `capture`: how decode steps are recorded; None lets the device decide. Given
        on a CPU, it makes the kernels for GPUs run there, in Triton's interpreter. `shelf`: for
        packed weights. `kept_bytes`: this much of the packed weights is kept while their
        blocks are away. `kv_host_bytes`: the host tier of KV; 0: none. `token_s`: seconds of
        prefill for a token of a model, as measured; 0: not known. `ranks`: those that run decoders
        together with this one. `measure`: says what their steps cost, so that each model gets the
        number of processes that is fastest; None: all of them run each decoder. Make the engine on
        the thread that calls it."""
        self._device = torch_device(device)
        if self._device.type == "cuda":
            capture = capture or own_stream(self._device)
        self._capture = capture
        self._step_floor_s = step_floor_s
        self._form: Form = "stored" if capture else cpu_weights
        compiled = None
        if capture is None:
            check_form(self._form)
            if self._form != "stored":
                compiled = kernels.load()  # compile them now, before a model waits for them
        self._ranks = ranks
        self._packed = PackedBlocks(shelf or Shelf(), self._form, compiled, kept_bytes)
        host = KvHost(kv_host_bytes, self._device, token_s) if kv_host_bytes else None
        self._kv = KvCache(kv, self._device, ranks.kv(self._device) if ranks else None, host)
        self._models: dict[ModelId, Model] = {}
        self._adapters: dict[ModelId, Adapter] = {}
        self._adapter_memory = Recycled()
        self._threads = threads or torch.get_num_threads()
        measured: tuple[StepCosts, ...] = ()
        self._given: dict[ModelId, dict[int, Weights]] = {}
        """The blocks of models that a team runs, in case that it is lost."""
        if ranks is not None:
            ranks.start(
                threads=self._threads,
                form=self._form,
                kept_bytes=kept_bytes,
                spare=measure is not None,
            )
            if measure is not None:
                assert compiled is not None
                assert isinstance(ranks, Ranks)
                measured = measure(ranks, self._threads, self._form, compiled)
                self._say_what_is_left(ranks)
        self._division = Division(ranks, measured, self._form, self._threads)
        for costs in self.costs:
            telemetry.logger("engine").info("what decode steps cost", **asdict(costs))
        use_threads(self._threads)

    def open_model(
        self,
        model_id: ModelId,
        manifest: Manifest,
        part: Part | None = None,
        devices: int = 1,
    ) -> None:
        if model_id in self._models:
            raise Conflict(f"model {model_id} is open already")
        devices = min(devices, self._division.devices)
        config = read_config(manifest.config)
        dtype = check_manifest(manifest, config)
        network: Network
        graphs, threads = None, self._threads
        if not isinstance(config, ModelConfig):
            if isinstance(config, VitConfig):
                network = Encoder(config, dtype, self._device)
            else:
                network = TextEncoder(config, dtype, self._device)
            self._kv.open_model(model_id, range(config.n_layers), 0, 0, dtype)
        else:
            compiled, fused = self._kernels(dtype), self._capture is not None
            lead = self._division.lead(manifest, config, dtype, part, devices)
            self._kv.open_model(
                model_id,
                layers_of(manifest, config, part) or range(config.n_layers),
                config.n_kv_heads // (self._ranks.kv_ranks if self._ranks else 1),
                config.head_dim,
                kv_dtype(dtype, fused or compiled is not None),
                weight=sum(block.nbytes for block in manifest.blocks),
                erased=not fused and compiled is None,
                transposed=compiled is not None,
            )
            network = self._decoder(model_id, manifest, config, dtype, lead, devices)
            threads = self._division.threads(lead, devices)
            if self._capture is not None and lead is None:
                from services.node.engine.graphs import DecodeGraphs

                graphs = DecodeGraphs(network, self._kv.longest(model_id), self._capture)
        processors = Processors(manifest.config)
        self._models[model_id] = Model(
            manifest, network, processors, threads, part, devices, graphs
        )
        self._refit_adapters(model_id)

    def _decoder(
        self,
        model_id: ModelId,
        manifest: Manifest,
        config: ModelConfig,
        dtype: torch.dtype,
        lead: Leads | None,
        devices: int,
    ) -> Decoder:
        """The model has its KV. `lead`: see `Division.lead`."""
        made: Callable[..., Decoder] = Decoder
        if lead is not None:
            made = partial(lead.decoder, model_id, manifest, devices=devices)
        return made(
            config,
            dtype,
            self._device,
            self._kv.longest(model_id),
            fused=self._capture is not None,
            compiled=self._kernels(dtype),
            adapters=self._adapters,
        )

    @property
    def costs(self) -> tuple[StepCosts, ...]:
        return self._division.able if self._division.devices > 1 else ()

    def division(self, model_id: ModelId) -> str:
        model = self._model(model_id)
        manifest = model.manifest
        config = read_config(manifest.config)
        if not self._division.chooses or not isinstance(config, ModelConfig):
            return ""
        dtype = check_manifest(manifest, config)
        choice = self._division.choice(manifest, config, dtype, model.part, model.devices)
        whose = "1 process runs" if choice.degree == 1 else f"{choice.degree} processes run"
        return f"{whose} it: {choice.why}"

    def _kernels(self, dtype: torch.dtype) -> kernels.Kernels | None:
        """The CPU kernels, if a model in `dtype` runs on them."""
        if self._form == "stored" or self._capture is not None or dtype not in kernels.DTYPES:
            return None
        return kernels.load()

    def warm_up(self, model_id: ModelId) -> Iterator[None]:
        """Does nothing on a CPU: there a model's first step was measured to be as fast as its
        others, except for 10 ms or more in the first step of a process."""
        model = self._model(model_id)
        if self._capture is not None:
            network = model.network
            for _ in network.warm_up() if isinstance(network, LedDecoder) else warm_up(network):
                yield
                if self._models.get(model_id) is not model:
                    return
            if model.graphs is not None:
                model.graphs.warm = True
                for block in sorted(model.blocks):
                    self._record(model_id, block)
                    yield
                    if self._models.get(model_id) is not model:
                        return

    def attach(self, model_id: ModelId, block: int, weights: Weights) -> None:
        model = self._model(model_id)
        if not 0 <= block < model.manifest.n_blocks:
            raise NotFound(f"model {model_id} has no block {block}")
        try:
            self._attach(model_id, model, block, weights)
        except EngineFailed:
            if not self._regroup(model_id):
                raise
            if block not in self._models[model_id].blocks:
                self.attach(model_id, block, weights)

    def _attach(self, model_id: ModelId, model: Model, block: int, weights: Weights) -> None:
        spec = model.manifest.blocks[block]
        network = model.network
        others: AbstractContextManager[None] = nullcontext()
        share = WHOLE
        if isinstance(network, LedDecoder):
            others, share = network.attaching(block, weights), network.share
        elif isinstance(weights, memoryview) and self._device.type == "cuda":
            # No arena of the device has it, since ranks divide decoders.
            weights = torch.frombuffer(weights, dtype=torch.uint8).to(self._device)
        use_threads(model.threads)
        with others, self._packed.of(model_id, block, spec.nbytes, share) as pages:
            made = network.units(spec, weights, self._form, pages)
        model.blocks[block] = made
        if isinstance(network, LedDecoder):
            self._given.setdefault(model_id, {})[block] = weights
        if model.graphs is not None:
            # Graphs have the old addresses of the weights.
            model.graphs.forget(block)
            if model.graphs.warm:
                self._record(model_id, block)

    def regroup(self) -> Iterator[None]:
        if self._ranks is None:
            return
        self._ranks.settle()
        self._say_what_is_left(self._ranks)
        for model_id in list(self._models):
            self._regroup(model_id)
        yield
        for model_id, given in list(self._given.items()):
            for block, weights in list(given.items()):
                still_open = self._given.get(model_id) is given
                if still_open and block not in self._models[model_id].blocks:
                    self.attach(model_id, block, weights)
                    yield

    def _say_what_is_left(self, ranks: EngineRanks) -> None:
        if ranks.loss:
            telemetry.logger("engine").warning(
                "models are run by fewer processes from now on",
                at_most=max(ranks.degrees, default=1),
                why=ranks.loss,
            )

    def _regroup(self, model_id: ModelId) -> bool:
        """If the model's team is lost, has a smaller one run it, or this process alone. Its blocks
        have to be attached anew, and its sequences keep their KV. The first one is attached at
        once: rows wait for any other, but begin with this one. False: it is not lost."""
        model = self._models[model_id]
        manifest, before = model.manifest, model.network
        if not (isinstance(before, LedDecoder) and before.lost):
            return False
        assert self._ranks is not None
        self._ranks.settle()
        self._ranks.tell(CloseModel(model_id, asleep=False))
        config, dtype, devices = before.config, before.dtype, model.devices
        lead = self._division.lead(manifest, config, dtype, model.part, devices)
        network = self._decoder(model_id, manifest, config, dtype, lead, devices)
        threads = self._division.threads(lead, devices)
        self._models[model_id] = replace(model, network=network, threads=threads, blocks={})
        self._refit_adapters(model_id)
        if (given := self._given.get(model_id, {})) and 0 in given:
            self.attach(model_id, 0, given[0])
        return True

    def prepare(self, model_id: ModelId, manifest: Manifest, block: int, weights: Weights) -> bool:
        config, spec = read_config(manifest.config), manifest.blocks[block]
        if model_id in self._models:
            return False
        dtype = check_manifest(manifest, config)
        if not isinstance(config, ModelConfig) or self._kernels(dtype) is None:
            return False
        if self._ranks is not None and (
            not self._division.chooses or self._division.lead(manifest, config, dtype)
        ):
            return False
        if not self._packed.has_room(model_id, block, spec.nbytes):
            return False
        with self._packed.of(model_id, block, spec.nbytes) as pages:
            units(config, spec, weights, self._form, TorchOps(), pages)
        self._packed.expect(model_id)
        return True

    def make_adapter(self, manifest: Manifest) -> Callable[[], MakeAdapter]:
        base = base_of(manifest)
        network = self._model(base).network if base else None
        if not isinstance(network, Decoder):
            raise UnsupportedModel(f"model {base} takes no adapters")
        if isinstance(network, LedDecoder):
            return lambda: partial(network.make_adapter, manifest)
        compiled = self._kernels(network.dtype) is not None
        if not compiled and self._form != "stored":
            raise UnsupportedModel(
                f"adapters of a base in {network.dtype} need node.cpu_weights = stored here"
            )
        return lambda: partial(
            read_adapter,
            manifest,
            config=network.config,
            device=self._device,
            compiled=compiled,
            room=AdapterRoom(manifest, self._adapter_memory),
        )

    def use_adapter(self, name: ModelId, adapter: Adapter) -> None:
        if self._ranks is not None:
            adapter = self._ranks.use_adapter(name, self._fitting(adapter))
        self._adapters[name] = adapter

    def settle_adapter(self, adapter: Adapter) -> None:
        adapter.settle()

    def _fitting(self, adapter: Adapter) -> Adapter:
        """Makes an adapter anew that was made for a team which does not run its base any more."""
        base = self._models.get(adapter.base)
        if base is None or adapter.others is None:
            return adapter
        order, shared = adapter.others
        share = base.network.share if isinstance(base.network, LedDecoder) else WHOLE
        if order.degree == share.of:
            return adapter
        made: Adapter = self.make_adapter(order.manifest)()(shared.bytes.numpy().data)
        made.settle()
        return made

    def _refit_adapters(self, base: ModelId) -> None:
        for name, adapter in self._adapters.items():
            if adapter.base == base and self._fitting(adapter) is not adapter:
                self.use_adapter(name, adapter)

    def drop_adapter(self, name: ModelId) -> None:
        if self._kv.uses(name):
            raise Conflict(f"sequences run with adapter {name}")
        if self._adapters.pop(name, None) is not None and self._ranks is not None:
            self._ranks.tell(DropAdapter(name))

    def use_tokenizer(self, model_id: ModelId, tokenizer_json: bytes) -> None:
        self._model(model_id).processors.use_tokenizer(tokenizer_json)

    def make_rules(self, model_id: ModelId, context: Context) -> Callable[[], Processor]:
        return self._model(model_id).processors.maker(context)

    def use_rules(self, model_id: ModelId, sequence: SequenceKey, rules: Processor) -> None:
        self._model(model_id).processors.keep({sequence: rules})

    def held(self, model_id: ModelId) -> frozenset[int]:
        model = self._models.get(model_id)
        return frozenset(model.blocks) if model else frozenset()

    def close_model(self, model_id: ModelId, *, asleep: bool = False) -> None:
        if self._kv.host is not None:
            self._kv.host.copies.settle()
        if self._device.type == "cuda":  # a sweep that was given up may still have kernels running
            torch.cuda.current_stream(self._device).synchronize()
        self._kv.close_model(model_id)
        self._models.pop(model_id, None)
        self._given.pop(model_id, None)
        if self._ranks is not None:
            self._ranks.tell(CloseModel(model_id, asleep))
            if not self._kv.capacity:
                self._ranks.drop_cache()
        if not asleep:
            self._packed.leave(model_id)

    def free(self, sequences: tuple[SequenceKey, ...]) -> None:
        self._kv.free(sequences)
        for model in self._models.values():
            model.processors.free(sequences)
            model.sums.free(sequences)

    def begin(self, model_id: ModelId) -> TorchSweep:
        if self._kv.host is not None:
            self._kv.host.begin_step()
        check = self._ranks.check_results if self._ranks else lambda: None
        return TorchSweep(
            model_id, self._kv, self._model, self._adapters, self._step_floor_s, check
        )

    @torch.inference_mode()
    def _record(self, model_id: ModelId, block: int) -> None:
        """Records the block's decode steps, before the first of them is needed."""
        model = self._model(model_id)
        if model.graphs is not None and (layers := model.layer_units(block)):
            kv = self._kv.of_layers(model_id, model.layers(block, block + 1))
            model.graphs.prepare(block, layers, kv)
