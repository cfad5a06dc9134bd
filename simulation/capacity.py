"""What one complete node can do on paper. Workloads are fitted to this, and SLOs are multiples of
it."""

from dataclasses import dataclass, field

from shared.config import NodeConfig
from shared.errors import BadInput
from simulation.engine import Costs
from simulation.hardware import Hardware
from simulation.models import Model

MEMORY_SHARE = 0.9
"""The share of an accelerator's memory for weights and KV cache."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a node that runs nothing but this model, in seconds of the modelled engine.

    BadInput if the model does not fit.
    """

    model: Model
    hardware: Hardware
    slots: int
    """Requests that run at once, if their KV cache fits."""
    step_tokens: int = NodeConfig().step_tokens
    """Tokens of a prompt that one pass takes."""
    _costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        if self._room <= 0:
            raise BadInput(
                f"{self.model.name} takes {self.model.nbytes / 1e9:.0f} GB: more than a node of "
                f"{self.hardware.name} has for it ({self.hardware.memory_bytes / 1e9:.0f} GB)"
            )
        object.__setattr__(self, "_costs", Costs(self.model, self.hardware))

    def prefill_s(self, prompt: int) -> float:
        """Time to the first token of a request that is alone on the node."""
        passes_s = 0.0
        for start in range(0, prompt, self.step_tokens):
            count = min(self.step_tokens, prompt - start)
            passes_s += self._pass_s(count, start + count, count * (start + (count + 1) / 2))
        return passes_s + self._costs.head(1)

    def step_s(self, batch: int, context: int) -> float:
        """Time between tokens while `batch` requests run, each with `context` positions of KV."""
        read = batch * context
        return self._pass_s(batch, read, read) + self._costs.head(batch)

    def batch(self, length: int) -> int:
        """How many requests of `length` tokens run at once; at least one."""
        return max(1, min(self.slots, int(self._room / (length * self.model.kv_bytes))))

    def work_s(self, prompt: int, output: int) -> float:
        """Seconds that a request takes of a node that is full of requests like it."""
        batch = self.batch(prompt + output)
        return self.prefill_s(prompt) + (output - 1) / batch * self.step_s(
            batch, prompt + output // 2
        )

    @property
    def _room(self) -> float:
        """Bytes for the KV cache."""
        return MEMORY_SHARE * self.hardware.memory_bytes - self.model.nbytes

    def _pass_s(self, positions: int, context: int, pairs: float) -> float:
        return self._costs.sweep_overhead + self._costs.layers(
            self.model.layers, positions, context, pairs
        )
