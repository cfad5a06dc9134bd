"""Random LoRA adapters as PEFT saves them, and the weights of their base with them merged in."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterSpec:
    seed: int = 0
    rank: int = 4
    alpha: float = 8.0
    targets: Sequence[str] = ALL
    rslora: bool = False
    layers: Sequence[int] | None = None
    """None: all."""
    dtype: torch.dtype = torch.float32

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def tensors(spec: AdapterSpec, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By PEFT's names. Strong enough that tokens change."""
    generator = torch.Generator().manual_seed(1000 + spec.seed)
    found: dict[str, torch.Tensor] = {}
    for module in _modules(spec, base):
        outputs, inputs = base[f"{module}.weight"].shape
        a = torch.randn(spec.rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, spec.rank, generator=generator) * 0.5 / spec.scaling
        found[f"base_model.model.{module}.lora_A.weight"] = a.to(spec.dtype)
        found[f"base_model.model.{module}.lora_B.weight"] = b.to(spec.dtype)
    return found


def merged(spec: AdapterSpec, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + scaling B A, as PEFT's merge_and_unload does."""
    own, state = tensors(spec, base), dict(base)
    for module in _modules(spec, base):
        a = own[f"base_model.model.{module}.lora_A.weight"].float()
        b = own[f"base_model.model.{module}.lora_B.weight"].float()
        weight = state[f"{module}.weight"]
        state[f"{module}.weight"] = (weight.float() + spec.scaling * (b @ a)).to(weight.dtype)
    return state


def save(path: Path, spec: AdapterSpec, base: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """`changes`: to adapter_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.rslora,
        "target_modules": sorted(spec.targets),
        "bias": "none",
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
        "base_model_name_or_path": "base",
    }
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(tensors(spec, base), path / "adapter_model.safetensors")
    return path


def _modules(spec: AdapterSpec, base: Mapping[str, torch.Tensor]) -> list[str]:
    found = []
    for name in base:
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        if kind != "weight" or parts[-1] not in spec.targets or parts[1] != "layers":
            continue
        if spec.layers is None or int(parts[2]) in spec.layers:
            found.append(module)
    return found
