"""Small models of every family with random weights, and their calls compiled for any shapes."""

import json
from functools import cache

import jax
import numpy as np
from flax import nnx

from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.models.parameters import flat_parameters, with_parameters

CONTEXT, BLOCK, CLOSE = 20, 7, 1e-5
PLACES = {"t5": 9, "whisper": 14}
"""Of the sources of encoder-decoders: tokens, or frames."""
SIZES = {"vocab_size": 29, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
GPT2 = {
    **{"model_type": "gpt2", "vocab_size": 29, "n_positions": CONTEXT},
    **{"n_embd": 12, "n_head": 3, "n_layer": 2},
}
LLAMA = {
    **{**SIZES, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 6, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True},
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5}
GEMMA3 = {
    **{**LLAMA, "model_type": "gemma3_text", "query_pre_attn_scalar": 6, "sliding_window": 4},
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
}
GEMMA4 = {
    **{**LLAMA, "model_type": "gemma4_text", "sliding_window": 4, "num_hidden_layers": 4},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    **{"global_head_dim": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 5, "enable_moe_block": True},
    **{"vocab_size_per_layer_input": 29, "pad_token_id": 0, "num_experts": 5, "top_k_experts": 2},
    "moe_intermediate_size": 7,
}
PHI3 = {**LLAMA, "model_type": "phi3", "hidden_size": 24, "sliding_window": 9, "pad_token_id": 0}
QWEN3_MOE = {
    **{**LLAMA, "model_type": "qwen3_moe", "moe_intermediate_size": 7, "num_experts": 5},
    **{"num_experts_per_tok": 2, "mlp_only_layers": [0]},
}
LFM2 = {
    **{**LLAMA, "model_type": "lfm2", "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
    "layer_types": ["conv", "full_attention"],
}
QWEN3_5 = {
    **{**LLAMA, "model_type": "qwen3_5_text"},
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5},
    **{"linear_value_head_dim": 3, "head_dim": 8, "partial_rotary_factor": 0.5},
}
BERT = {
    **{**SIZES, "model_type": "roberta", "num_attention_heads": 4, "pad_token_id": 1},
    **{"max_position_embeddings": CONTEXT, "type_vocab_size": 1},
}
T5 = {
    **{"model_type": "t5", "vocab_size": 29, "d_model": 12, "d_kv": 5, "d_ff": 20},
    **{"num_layers": 2, "num_decoder_layers": 3, "num_heads": 2},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10},
    **{"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    "tie_word_embeddings": False,
}
WHISPER = {
    **{"model_type": "whisper", "vocab_size": 29, "num_mel_bins": 5, "d_model": 12},
    **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 20},
    **{"decoder_layers": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 16},
    **{"max_source_positions": PLACES["whisper"] // 2, "max_target_positions": CONTEXT},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "decoder_start_token_id": 1,
}
CONFIGS = {
    str(each["model_type"]): each
    for each in (
        *(GPT2, LLAMA, MISTRAL, GEMMA3, GEMMA4, PHI3, QWEN3_MOE, LFM2, QWEN3_5, BERT, T5, WHISPER),
    )
}


def config(values):
    from transformers import AutoConfig

    return config_file.with_layer_heads(AutoConfig.for_model(**values))


def made(directory, family, dtype="float32", *, out_in=False, **change):
    """The module of a changed configuration, read from a file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIGS[family], **change}))
    return read_module(family, directory, dtype, out_in=out_in)


def read_module(family, directory, dtype="float32", *, out_in=False):
    if family not in model_registry.DECODERS:
        return model_registry.make_encoder(config_file.load_encoder(directory))
    read = config_file.load_config(directory)
    return model_registry.make_decoder(read, dtype=dtype, out_in=out_in)


class Model:
    """A small model with weights in a stored dtype."""

    def __init__(self, module, exact):
        changed = quantizing.readers(module, exact.__getitem__)
        self.module, self.graph, self.state = module, *nnx.split(module)
        names = flat_parameters(self.state)
        self.weights = {n: changed[n]() if n in changed else exact[n] for n in names}
        self._encode = jax.jit(self.encoded, static_argnums=(3, 4))
        self._call = jax.jit(self.called)

    def merged(self, weights):
        return nnx.merge(self.graph, with_parameters(self.state, weights))

    def encoded(self, weights, source, length, slots, dtype):
        return self.merged(weights).encode(source, length, slots, dtype)

    def called(self, weights, *arguments):
        return self.merged(weights)(*arguments)

    def encode(self, source, length=None, dtype="float32"):
        length = int32(*[source.shape[-1]] * len(source)) if length is None else length
        found = self._encode(self.weights, source, length, CONTEXT, dtype)
        return jax.tree.map(np.asarray, found)

    def __call__(self, *arguments):
        """Return the logits and the cache after tokens, their start and length, and a cache."""
        logits, cache = self._call(self.weights, *arguments)
        return np.asarray(logits), jax.tree.map(np.asarray, cache)

    def logits(self, source, tokens, dtype="float32"):
        """Return the logits [V] after the tokens of one row."""
        cache = self.encode(source, None, dtype)
        result = self(tokens[None], int32(0), int32(len(tokens)), cache)[0][0]
        return result


@cache
def model(family, dtype="float32"):
    read = config(CONFIGS[family])
    random = np.random.default_rng(0)
    leaves = flat_parameters(nnx.state(model_registry.make_decoder(read)))
    exact = {
        name: random.standard_normal(leaf.shape, dtype=np.float32) * np.float32(0.3)
        for name, leaf in leaves.items()
    }
    return Model(model_registry.make_decoder(read, dtype=dtype), exact)


def int32(*values):
    return np.array(values, np.int32)


def random_tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, 29, shape, dtype=np.int32)


def sources(family, rows, seed=0):
    if family == "t5":
        return random_tokens(seed + 20, rows, PLACES[family])
    random = np.random.default_rng([seed, 7])
    return random.uniform(-1, 1.5, (rows, 5, PLACES[family])).astype(np.float32)
