"""Who runs each of an engine's decoders: this process alone, or a team of ranks; with the threads
of this device, or of several."""

import torch

from services.node.checkpoints.config import ModelConfig
from services.node.core.degrees import Choice, choose
from services.node.engine.leading import EngineRanks, Leads
from services.node.engine.linear import Form
from services.node.engine.model import layers_of
from services.node.engine.share import shape_of
from shared.layout import Manifest
from shared.parts import Part, whole
from shared.step_costs import StepCosts


class Division:
    def __init__(
        self, ranks: EngineRanks | None, costs: tuple[StepCosts, ...], form: Form, threads: int
    ) -> None:
        """`costs`: what was measured. Empty: all ranks run each decoder. `threads`: of this
        device."""
        self._ranks = ranks
        self._costs = costs
        self._form: Form = form
        self._threads = threads

    @property
    def chooses(self) -> bool:
        """Whether each model has a degree of its own."""
        return bool(self._costs)

    @property
    def devices(self) -> int:
        """With how many devices steps were measured."""
        return max((costs.devices for costs in self._costs), default=1)

    @property
    def able(self) -> tuple[StepCosts, ...]:
        """The costs of what can be run now."""
        degrees = self._ranks.degrees if self._ranks else ()
        return tuple(costs for costs in self._costs if costs.degree in (1, *degrees))

    def threads(self, lead: Leads | None, devices: int) -> int:
        """The threads of this process that run a model. `lead`: see `lead`."""
        return lead.threads(devices) if lead else self._threads * devices

    def lead(
        self,
        manifest: Manifest,
        config: ModelConfig,
        dtype: torch.dtype,
        part: Part | None = None,
        devices: int = 1,
    ) -> Leads | None:
        """The team that runs the model; None: this process does."""
        if self._ranks is None:
            return None
        if self._costs:
            degree = self.choice(manifest, config, dtype, part, devices).degree
            return self._ranks.teams.get(degree)
        (lead,) = self._ranks.teams.values()
        lead.check_divides(config, dtype)
        return lead

    def choice(
        self,
        manifest: Manifest,
        config: ModelConfig,
        dtype: torch.dtype,
        part: Part | None,
        devices: int,
    ) -> Choice:
        assert self._ranks is not None
        part = part or whole(manifest.n_blocks)
        layers = len(layers_of(manifest, config, part))
        shape = shape_of(manifest, config, dtype, part, layers, int8=self._form == "int8")
        return choose(shape, self.able, self._ranks.loss, devices=devices)
