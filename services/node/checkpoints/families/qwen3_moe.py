"""Qwen3 with a mixture of experts in all or some of its layers."""

from services.node.checkpoints.families.family import DOWN, GATE_UP, ROUTER, Experts, Family
from services.node.checkpoints.families.windows import all_layers_if_used
from services.node.checkpoints.raw_config import RawConfig, given, integer
from shared.errors import CorruptCheckpoint


def _has_experts(config: RawConfig, layer: int) -> bool:
    """Whether the layer has experts: every `decoder_sparse_step`-th does, except those in
    `mlp_only_layers`."""
    plain = given(config).get("mlp_only_layers", [])
    if not isinstance(plain, list):
        raise CorruptCheckpoint(
            f"config.json: mlp_only_layers must be a list of layers, not {plain!r}"
        )
    step = integer({"decoder_sparse_step": 1} | given(config), "decoder_sparse_step")
    return layer not in plain and (layer + 1) % step == 0


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    window=all_layers_if_used,
    experts=Experts(
        count=("num_experts", "num_local_experts"),
        per_token="num_experts_per_tok",
        intermediate_size="moe_intermediate_size",
        normalized="norm_topk_prob",
        in_layer=_has_experts,
        stored={
            ROUTER: ("mlp.gate.weight",),
            GATE_UP: ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
            DOWN: ("mlp.experts.{}.down_proj.weight",),
        },
    ),
)
