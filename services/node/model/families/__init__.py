"""The supported families. A new one is a file here, and its line in FAMILIES."""

from services.node.model.families.family import Family
from services.node.model.families.llama import LLAMA
from services.node.model.families.mistral import MISTRAL
from services.node.model.families.mixtral import MIXTRAL
from services.node.model.families.qwen2 import QWEN2
from services.node.model.families.qwen3 import QWEN3
from services.node.model.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}
