"""Small decoders with random weights, and bundles of them, for tests of the engine. No JAX."""

import hashlib
import json
from pathlib import Path

import pytest

from .manifests import write_manifest
from .parity.cases import Case

VOCABULARY = 48
LARGEST_CONTEXT = 72

_LLAMA = {
    **{"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def gpt2_config(**changes):
    config = {
        **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": VOCABULARY},
        **{"n_positions": LARGEST_CONTEXT, "n_embd": 24, "n_head": 3, "n_layer": 2},
        **{"n_inner": None, "activation_function": "gelu_new", "tie_word_embeddings": False},
    }
    return config | changes


_CONFIGS = {
    "gpt2": gpt2_config(),
    "llama": {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_LLAMA},
        **{"max_position_embeddings": 256, "hidden_act": "silu"},
    },
    # What a window must forget lies in the cache all the same, and so do other rows' leftovers.
    "mistral": {
        **{"model_type": "mistral", "architectures": ["MistralForCausalLM"], **_LLAMA},
        **{"hidden_act": "silu", "sliding_window": 7},
    },
    "gemma2": {
        **{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **_LLAMA},
        **{"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 6},
        **{"sliding_window": 11, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
    },
}


def write_random(family, directory):
    """A checkpoint whose greedy tokens are well apart: cases.py scales weights so that every part shows."""
    Case(family, _CONFIGS[family], seed=1).write(directory)
    return directory


def build(
    warm,
    source,
    directory,
    cache,
    *,
    draft_tokens=3,
    dtype="float32",
    cache_dtype="float32",
    forms=None,
    adapters=None,
    draft=None,
    quick=True,
    **buckets,
):
    """A bundle for this machine in a directory, compiled as far as a build cache does not have it."""
    more = f"draft_tokens = {draft_tokens}\ncache_dtype = {json.dumps(cache_dtype)}\n"
    more += "" if adapters is None else "[adapters]\nslots = {}\nrank = {}\n".format(*adapters)
    more += "" if draft is None else '[draft]\nsource = "{}"\ndtype = "{}"\n'.format(*draft)
    lines = f"dtype = {json.dumps(dtype)}\naccuracy = false"
    manifest = directory / "decoder.toml"
    write_manifest(manifest, source, name="decoder", model=lines, generate=more, **buckets)
    command = ("build", str(manifest), "-o", str(directory), "--cache", str(cache))
    if forms is not None:
        command += ("--no-measure", "--forms", str(forms))
    done = warm.prejit(*command, quick=quick)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return directory / "decoder"


@pytest.fixture(scope="session")
def make_decoder(tmp_path_factory, build_cache, warm, once):
    """Builds a decoder for this machine, of a family of this module (once a run) or of a directory."""

    def make(model, **buckets):
        if isinstance(model, Path):
            return build(warm, model, tmp_path_factory.mktemp("decoder"), build_cache, **buckets)
        digest = hashlib.sha256(json.dumps([model, buckets], sort_keys=True, default=str).encode())
        made = once(
            f"{model}-{digest.hexdigest()[:12]}",
            lambda at: build(warm, write_random(model, at / model), at, build_cache, **buckets),
        )
        return made / "decoder"

    return make


@pytest.fixture(scope="session")
def decoder_dir(make_decoder):
    """A GPT-2 of 48 tokens: every kind of program, two buckets of each size."""
    return make_decoder("gpt2", batch=(1, 3), prompt=(3, 10), context=(24, 72))


@pytest.fixture(scope="session")
def wide_dir(make_decoder):
    """The same with three batches."""
    return make_decoder("gpt2", batch=(1, 2, 4), prompt=(3, 10), context=(24, 72))
