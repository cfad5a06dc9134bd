"""The peer: transformers' own generation from the same checkpoint, in this process."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

NAME = "transformers"
BATCHING = "transformers, continuous batching"
PAGE = 256
"""Positions of a page; the default of transformers."""


def missing() -> str:
    """The reason why transformers cannot be measured. Empty if it can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (requirements/dev.lock has it)"
    return ""


class Peer:
    def __init__(self, checkpoint: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype)
        ).eval()
        self.batches = hasattr(self._model, "generate_batch")
        """Whether this version has continuous batching."""

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """(seconds to the first token, median seconds of the decode steps after it).

        Prompts of unequal lengths are padded on the left, as transformers' documentation says.
        """
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        came: list[float] = []
        began = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
                eos_token_id=None,
                stopping_criteria=[_noting(came)],
            )
        steps = [later - earlier for earlier, later in pairwise(came)]
        return came[0] - began, median(steps) if steps else 0.0

    def generate_batch(self, prompts: Sequence[Sequence[int]], tokens: int, step: int) -> float:
        """Median seconds of the decode steps of its continuous batching, once all prompts have
        their first token. `step`: the most tokens of a step."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        meanwhile = len(prompts) + sum(map(len, prompts)) // step
        longest = max(map(len, prompts)) + meanwhile + tokens
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=len(prompts) * (-(-longest // PAGE) + 1),
            max_batch_tokens=step,
            cpu_offload_space=0.0,
        )
        greedy = GenerationConfig(
            max_new_tokens=meanwhile + tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=greedy,
            continuous_batching_config=settings,
            record_timestamps=True,
        )
        came: list[list[float]] = [answer.timestamps for answer in answers.values()]
        steady = max(times[0] for times in came)
        return median(
            later - earlier
            for times in came
            for earlier, later in pairwise(times)
            if earlier >= steady
        )


def _noting(came: list[float]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A stopping criterion that never stops, but records when each token came."""

    def note(ids: torch.Tensor, _: torch.Tensor, **__: object) -> torch.Tensor:
        came.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    return note
