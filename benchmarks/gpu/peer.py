"""transformers with a model of the same shape, whose weights are random and made on the device."""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ours import synchronize
from benchmarks.gpu.scale import SHAPES, Scale, raw_config, scale_of


class Peer:
    def __init__(self, name: str, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._device, self._vocab = device, SHAPES[name]["vocab_size"]
        config = AutoConfig.for_model(**raw_config(name))
        with device:
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def times(self, batch: int, prompt: int, steps: int) -> tuple[float, float]:
        """(seconds to the first token, median seconds of the decode steps); greedy, without
        padding."""
        ids = torch.randint(0, self._vocab, (batch, prompt), device=self._device)
        synchronize()
        began = time.perf_counter()
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(steps + 1):
            last = out.logits[:, -1].argmax(-1, keepdim=True)
            synchronize()
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
            out = self._model(last, past_key_values=out.past_key_values, use_cache=True)
        return times[0], median(times[1:])


def figures(name: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    """The same as `ours.figures`."""
    scale: Scale = scale_of(name)
    peer = Peer(name, torch.device(device))
    measured = [peer.times(1, scale.prompt, scale.steps) for _ in range(min(runs, 3) + 1)][1:]
    yield "first token", median(first for first, _ in measured)
    yield "decode one", median(step for _, step in measured)
    yield "decode many", peer.times(scale.batch, scale.batch_prompt, scale.steps)[1]
