"""The supported families of models. A new family is a file here, and a line in FAMILIES."""

from services.node.checkpoints.families.family import Family
from services.node.checkpoints.families.llama import LLAMA
from services.node.checkpoints.families.mistral import MISTRAL
from services.node.checkpoints.families.mixtral import MIXTRAL
from services.node.checkpoints.families.qwen2 import QWEN2
from services.node.checkpoints.families.qwen3 import QWEN3
from services.node.checkpoints.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}
