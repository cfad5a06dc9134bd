"""What one complete node can do, on paper: for fitting workloads to a cluster and for SLOs.

A roofline: a pass over the model takes as long as its weights and KV cache take to read, or its
arithmetic to do, whichever is more, and the fixed costs of its layers.
"""

from dataclasses import dataclass

from simulation.hardware import Hardware
from simulation.models import Model

KV_SHARE = 0.9
"""Of an accelerator's memory, for weights and KV cache."""


@dataclass(frozen=True, slots=True)
class Capacity:
    hardware: Hardware
    model: Model
    slots: int
    """Requests that run at once, if their KV cache fits."""

    def prefill_s(self, tokens: int) -> float:
        """Time of a pass over a prompt alone on the node: the least TTFT."""
        return self._pass_s(tokens, self.model.nbytes + tokens * self.model.kv_bytes)

    def step_s(self, batch: int, context: int) -> float:
        """Time of a decode step of `batch` requests, each with so many tokens before it."""
        return self._pass_s(batch, self.model.nbytes + batch * context * self.model.kv_bytes)

    def batch(self, context: int) -> int:
        """How many requests of that length run at once; at least one."""
        memory = KV_SHARE * self.hardware.memory_bytes - self.model.nbytes
        return max(1, min(self.slots, int(memory / (max(context, 1) * self.model.kv_bytes))))

    def work_s(self, prompt: int, output: int) -> float:
        """Seconds of a node that is full of requests like this one, each."""
        batch = self.batch(prompt + output)
        decode_s = (output - 1) * self.step_s(batch, prompt + output // 2)
        return self.prefill_s(prompt) + decode_s / batch

    def _pass_s(self, tokens: int, read_bytes: float) -> float:
        flops = 2.0 * self.model.layers * self.model.layer_parameters * tokens
        fixed_s = (
            self.hardware.sweep_overhead_s + self.model.layers * self.hardware.layer_overhead_s
        )
        return fixed_s + max(
            read_bytes / self.hardware.read_bytes_per_s, flops / self.hardware.compute_flops
        )
