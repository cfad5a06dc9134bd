"""Mixtral: Mistral with a mixture of experts in every layer."""

from services.node.checkpoints.families.family import DOWN, GATE_UP, ROUTER, Experts, Family
from services.node.checkpoints.families.windows import all_layers

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    window=all_layers,
    rope_theta=1000000.0,
    experts=Experts(
        count=("num_local_experts", "num_experts"),
        per_token="num_experts_per_tok",
        intermediate_size="intermediate_size",
        normalized=True,
        in_layer=lambda config, layer: True,
        stored={
            ROUTER: ("block_sparse_moe.gate.weight",),
            GATE_UP: (
                "block_sparse_moe.experts.{}.w1.weight",
                "block_sparse_moe.experts.{}.w3.weight",
            ),
            DOWN: ("block_sparse_moe.experts.{}.w2.weight",),
        },
    ),
)
