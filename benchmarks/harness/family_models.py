"""Make models of other families with random weights, in bfloat16, as models.py makes GPT-2 and Llama.

    qwen3-600m    Qwen3 0.6B
    olmoe-part    4 of the 16 layers of OLMoE 1B-7B, with 32 of its 64 experts, 8 of them for each token
    lfm2-part     8 of the 16 layers of LFM2 1.2B, 3 of them with attention and 5 with short convolutions

A token reads as much of a layer as in the whole mixture or hybrid. The whole mixture would take 14 GB in each
of the forms that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.harness import models
from benchmarks.harness.models import Shapes
from benchmarks.harness.workload import BYTES, EPSILON, HEAD_BYTES

WIDTH, HEADS, HEAD = 2048, 16, 128
LAYERS, EXPERTS, CHOSEN, INNER = 4, 32, 8, 1024
"""Sizes of the mixture."""
_ATTENDING = (2, 5, 7)
_HYBRID_LAYERS, _HYBRID_HEADS, _KV_HEADS, _HYBRID_INNER, _TAPS = 8, 32, 8, 8192, 3
_QWEN_LAYERS, _QWEN_WIDTH, _QWEN_HEADS, _QWEN_INNER, _QWEN_TOKENS = 28, 1024, 16, 3072, 151936


def qwen3_shapes() -> Shapes:
    """Return names and shapes of Qwen3 0.6B."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (_QWEN_TOKENS, _QWEN_WIDTH),
        "model.norm.weight": (_QWEN_WIDTH,),
    }
    for layer in range(_QWEN_LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (_QWEN_WIDTH,)
        for name, heads in (("q", _QWEN_HEADS), ("k", _KV_HEADS), ("v", _KV_HEADS)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (heads * HEAD, _QWEN_WIDTH)
        shapes[f"{at}.self_attn.o_proj.weight"] = (_QWEN_WIDTH, _QWEN_HEADS * HEAD)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{at}.self_attn.{norm}.weight"] = (HEAD,)
        for name in ("gate", "up"):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (_QWEN_INNER, _QWEN_WIDTH)
        shapes[f"{at}.mlp.down_proj.weight"] = (_QWEN_WIDTH, _QWEN_INNER)
    return shapes


def qwen3_config() -> dict[str, object]:
    """Return the config.json of Qwen3 0.6B."""
    return {
        **_config("Qwen3ForCausalLM", "qwen3", _QWEN_TOKENS, _QWEN_LAYERS, _QWEN_HEADS, _KV_HEADS),
        **{"hidden_size": _QWEN_WIDTH, "head_dim": HEAD, "intermediate_size": _QWEN_INNER},
        **{"hidden_act": "silu", "rms_norm_eps": EPSILON, "rope_theta": 1e6},
        **{"attention_bias": False, "tie_word_embeddings": True},
        "max_position_embeddings": 40960,
    }


def olmoe_shapes() -> Shapes:
    """Return names and shapes of the mixture."""
    shapes: Shapes = {
        name: (50304, WIDTH) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    shapes["model.norm.weight"] = (WIDTH,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (WIDTH,)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"{at}.{norm}.weight"] = (WIDTH,)
        for name in "qkvo":
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
        shapes[f"{at}.mlp.gate.weight"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                shapes[f"{at}.mlp.experts.{expert}.{name}_proj.weight"] = (INNER, WIDTH)
            shapes[f"{at}.mlp.experts.{expert}.down_proj.weight"] = (WIDTH, INNER)
    return shapes


def olmoe_config() -> dict[str, object]:
    """Return the config.json of the mixture."""
    return {
        **_config("OlmoeForCausalLM", "olmoe", 50304, LAYERS, HEADS, HEADS),
        **{"intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
        **{"hidden_act": "silu", "rms_norm_eps": EPSILON, "norm_topk_prob": False},
        "tie_word_embeddings": False,
    }


def lfm2_shapes() -> Shapes:
    """Return names and shapes of the hybrid."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (65536, WIDTH),
        "model.embedding_norm.weight": (WIDTH,),
    }
    shared = WIDTH // _HYBRID_HEADS * _KV_HEADS
    for layer in range(_HYBRID_LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("operator_norm", "ffn_norm"):
            shapes[f"{at}.{norm}.weight"] = (WIDTH,)
        if layer in _ATTENDING:
            for name, outputs in (("q_proj", WIDTH), ("k_proj", shared), ("v_proj", shared)):
                shapes[f"{at}.self_attn.{name}.weight"] = (outputs, WIDTH)
            shapes[f"{at}.self_attn.out_proj.weight"] = (WIDTH, WIDTH)
            for name in ("q_layernorm", "k_layernorm"):
                shapes[f"{at}.self_attn.{name}.weight"] = (WIDTH // _HYBRID_HEADS,)
        else:
            shapes[f"{at}.conv.conv.weight"] = (WIDTH, 1, _TAPS)
            shapes[f"{at}.conv.in_proj.weight"] = (3 * WIDTH, WIDTH)
            shapes[f"{at}.conv.out_proj.weight"] = (WIDTH, WIDTH)
        for name in ("w1", "w3"):
            shapes[f"{at}.feed_forward.{name}.weight"] = (_HYBRID_INNER, WIDTH)
        shapes[f"{at}.feed_forward.w2.weight"] = (WIDTH, _HYBRID_INNER)
    return shapes


def lfm2_config() -> dict[str, object]:
    """Return the config.json of the hybrid."""
    kinds = ["full_attention" if n in _ATTENDING else "conv" for n in range(_HYBRID_LAYERS)]
    return {
        **_config("Lfm2ForCausalLM", "lfm2", 65536, _HYBRID_LAYERS, _HYBRID_HEADS, _KV_HEADS),
        **{"intermediate_size": _HYBRID_INNER, "block_auto_adjust_ff_dim": False},
        **{"layer_types": kinds, "conv_L_cache": _TAPS, "conv_bias": False, "norm_eps": EPSILON},
        "tie_word_embeddings": True,
    }


def _config(
    name: str, kind: str, tokens: int, layers: int, heads: int, kv_heads: int
) -> dict[str, object]:
    return {
        **{"architectures": [name], "model_type": kind, "dtype": "bfloat16"},
        **{"vocab_size": tokens, "hidden_size": WIDTH, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_theta": 10000.0},
        **{"max_position_embeddings": 2048, "bos_token_id": tokens - 2, "eos_token_id": tokens - 1},
    }


FAMILY_MODELS: Mapping[str, tuple[Callable[[], Shapes], Callable[[], dict[str, object]]]] = {
    "qwen3-600m": (qwen3_shapes, qwen3_config),
    "olmoe-part": (olmoe_shapes, olmoe_config),
    "lfm2-part": (lfm2_shapes, lfm2_config),
}
"""The models by name: their tensors and their config.json."""


def step_bytes(name: str, dtype: str) -> int:
    """Return the bytes of matrices that one decode step of a model must read."""
    total = 0.0
    shapes = FAMILY_MODELS[name][0]()
    for tensor, shape in shapes.items():
        if len(shape) != 2 or (
            tensor == "model.embed_tokens.weight" and "lm_head.weight" in shapes
        ):
            continue
        is_head = tensor in ("model.embed_tokens.weight", "lm_head.weight")
        share = CHOSEN / EXPERTS if ".experts." in tensor else 1
        of_one = (
            4.0
            if tensor.endswith(".mlp.gate.weight")
            else (HEAD_BYTES if is_head else BYTES)[dtype]
        )
        total += of_one * share * shape[0] * shape[1]
    return int(total)


def make(directory: Path, name: str) -> None:
    """Make a model unless it exists."""
    if (directory / name).is_dir():
        return
    make_shapes, make_config = FAMILY_MODELS[name]
    partial = models.begin(directory / name)
    models.write_repeating(partial / "model.safetensors", make_shapes(), 0.03)
    models.finish(partial, make_config())
