"""What is taken as an adapter, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.local.demo_model import make_checkpoint
from services.node.checkpoints.adapter import WEIGHTS, base_of, memory_of
from services.node.checkpoints.store import Imported, Store
from shared.errors import CorruptCheckpoint, MissingTensor, UnsafeCheckpoint, UnsupportedModel
from tests.support import adapters
from tests.support.adapters import AdapterSpec
from tests.support.models import TINY

Q = "base_model.model.model.layers.0.self_attn.q_proj"


class Disk:
    def __init__(self, folder: Path) -> None:
        make_checkpoint(folder / "base", TINY)
        self.store = Store(folder / "store")
        self.base = self.store.import_checkpoint(folder / "base")
        self.path = folder / "adapter"
        self._state = load_file(folder / "base" / "model.safetensors")

    def save(self, spec: AdapterSpec | None = None, **changes: Any) -> None:
        adapters.save(self.path, spec or AdapterSpec(), self._state, **changes)

    def change(self, **tensors: torch.Tensor | None) -> None:
        """Tensors of the first query projection; None: it goes."""
        file = self.path / WEIGHTS
        found = load_file(file)
        for name, tensor in tensors.items():
            key = name if "." in name else f"{Q}.{name}.weight"
            del found[key]
            if tensor is not None:
                found[key] = tensor
        save_file(found, file)

    def imported(self) -> Imported:
        return self.store.import_adapter(self.path, self.base.model_id, self.base.manifest)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_an_adapter_is_a_model_of_one_block_that_names_its_base(disk: Disk) -> None:
    disk.save(AdapterSpec(rank=4, alpha=6))
    found = disk.imported()
    assert base_of(found.manifest) == disk.base.model_id
    assert base_of(disk.base.manifest) is None
    assert found.manifest.n_blocks == 1
    assert found.manifest.config["scaling"] == 1.5
    assert found.context_length == TINY.context_length
    assert found.model_id in disk.store.manifests()
    numbers = sum(tensor.numel() for tensor in load_file(disk.path / WEIGHTS).values())
    assert memory_of(found.manifest) == 4 * numbers
    disk.save(AdapterSpec(rank=4, alpha=6, rslora=True))
    assert disk.imported().manifest.config["scaling"] == 3.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 0}, "r is 0"),
        ({"r": 513}, "1 to 512"),
    ],
)
def test_other_ways_to_compute_are_refused_by_name(
    disk: Disk, changes: dict[str, Any], named: str
) -> None:
    disk.save(**changes)
    with pytest.raises(UnsupportedModel, match=named):
        disk.imported()


def test_tensors_that_do_not_fit_are_refused_by_name(disk: Disk) -> None:
    disk.save(lora_alpha="much")
    with pytest.raises(CorruptCheckpoint, match="lora_alpha is 'much'"):
        disk.imported()
    disk.save()
    disk.change(lora_B=None)
    with pytest.raises(MissingTensor, match=r"layers.0.self_attn.q_proj.lora_B"):
        disk.imported()
    disk.save(r=5)
    with pytest.raises(CorruptCheckpoint, match="a rank of 5"):
        disk.imported()
    disk.save()
    disk.change(lora_A=torch.zeros(4, TINY.hidden, dtype=torch.int64))
    with pytest.raises(UnsupportedModel, match="dtype"):
        disk.imported()
    disk.save()
    (disk.path / WEIGHTS).rename(disk.path / "adapter_model.bin")
    with pytest.raises(UnsafeCheckpoint, match="pickled"):
        disk.imported()


@pytest.mark.parametrize(
    "module",
    ["lm_head", "model.embed_tokens", "model.layers.0.mlp.experts", "model.layers.9.mlp.up_proj"],
)
def test_modules_that_cannot_be_adapted_are_refused_by_name(disk: Disk, module: str) -> None:
    disk.save()
    found = load_file(disk.path / WEIGHTS)
    found[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, TINY.hidden)
    found[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(8, 4)
    save_file(found, disk.path / WEIGHTS)
    with pytest.raises(UnsupportedModel, match=module):
        disk.imported()


def test_tensors_of_other_kinds_are_refused_by_name(disk: Disk) -> None:
    disk.save()
    found = load_file(disk.path / WEIGHTS)
    found[f"{Q}.lora_magnitude_vector"] = torch.zeros(4)
    save_file(found, disk.path / WEIGHTS)
    with pytest.raises(UnsupportedModel, match="lora_magnitude_vector"):
        disk.imported()
