"""Small random checkpoints of more decoders that are a row (see sibling_cases.py)."""

from .cases import pick
from .sibling_cases import (
    ATTENTION,
    LATER_REFERENCE,
    REMOVED,
    cases_of,
    combined,
    experts,
    experts_in_groups,
    given,
    layer_norm,
    ntk,
    sizes_of_heads,
    windows,
)

REFERENCE = LATER_REFERENCE


def cases():
    return cases_of(FAMILIES, _SEEDS)


_SEEDS = {"vaultgemma-1": 5000}
"""Of cases where, with another seed, rounding would decide a token: see record.py."""


def _exaone_moe(number, random, config):
    """Experts in groups beside shared ones; which layers have them is said in two ways."""
    count, layers = config["num_hidden_layers"], ["sparse", "dense"] * 2
    said = {"mlp_layer_types": layers[:count]} if number == 1 else {"first_k_dense_replace": 1}
    grouped = experts_in_groups(number, random, config)
    return {
        **grouped,
        **dict.fromkeys(("n_routed_experts", "n_shared_experts", "first_k_dense_replace"), REMOVED),
        "num_experts": grouped["n_routed_experts"],
        "num_shared_experts": grouped["n_shared_experts"],
        "norm_topk_prob": number != 2,
        **said,
    }


def _ernie_moe(number, random, config):
    return {
        "num_hidden_layers": 3,
        "moe_num_experts": [4, 7, 5][number],
        "moe_k": [2, 6, 1][number],
        "moe_intermediate_size": pick(random, [5, 8, 11]),
        "moe_num_shared_experts": [1, 0, 2][number],
        "moe_layer_start_index": [1, 0, 0][number],
        "moe_layer_end_index": [-1, 1, 2][number],
        "moe_layer_interval": [1, 1, 2][number],
    }


FAMILIES = {
    "cohere": (
        "Cohere",
        combined(
            ATTENTION,
            layer_norm,
            given(logit_scale=[0.5, 0.25, 1.5], use_qk_norm=[True, False, True]),
        ),
    ),
    "ernie4_5_moe": ("Ernie4_5_Moe", combined(sizes_of_heads, _ernie_moe)),
    "exaone_moe": (
        "ExaoneMoe",
        combined(windows, _exaone_moe, given(sliding_window_pattern=[2, 4, 3])),
    ),
    "flex_olmo": (
        "FlexOlmo",
        combined(ATTENTION, experts("num_experts"), given(norm_topk_prob=[False, True, False])),
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        combined(
            ATTENTION,
            ntk,
            given(num_experts=[4, 7, 5], moe_topk=[[2, 2], 6, 1]),
        ),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        combined(
            experts("num_local_experts"),
            lambda number, random, config: {
                "head_dim": [8, 6, 10][number],
                "rotary_dim": [4, 6, 8][number],
            },
        ),
    ),
    "olmo": (
        "Olmo",
        combined(ATTENTION, given(rms_norm_eps=REMOVED, clip_qkv=[0.3, None, 1.0])),
    ),
    "solar_open": (
        "SolarOpen",
        combined(
            sizes_of_heads,
            ATTENTION,
            experts_in_groups,
            given(
                intermediate_size=REMOVED,
                first_k_dense_replace=REMOVED,
                norm_topk_prob=[True, True, False],
            ),
        ),
    ),
    "vaultgemma": (
        "VaultGemma",
        combined(
            sizes_of_heads,
            ATTENTION,
            windows,
            given(
                hidden_act=REMOVED,
                hidden_activation=["gelu_pytorch_tanh", "silu", "gelu"],
                query_pre_attn_scalar=[5, 16, 9],
                attn_logit_softcapping=[2.0, None, 50.0],
                final_logit_softcapping=[None, 3.0, 30.0],
            ),
        ),
    ),
}
"""The class of transformers, and what a configuration has, for each model_type."""
