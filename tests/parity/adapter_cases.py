"""Small random models with adapters in PEFT's layout, the same wherever they are made. No JAX, no torch.

PEFT named the tensors: the record holds adapter_config.json, names and shapes beside the logits.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from .cases import Case, noise

STEPS = 8
"""Steps whose logits are recorded."""

REFERENCE = Path(__file__).parent / "adapter_reference.npz"


@dataclass(frozen=True)
class Adapted:
    """A model, and arguments of PEFT's LoraConfig, of each adapter in the order in which they are merged."""

    base: Case
    adapters: tuple[dict, ...]

    @property
    def name(self):
        return self.base.name

    @property
    def following(self):
        """Int32 [STEPS - 1]: the tokens after the prompt."""
        random = np.random.default_rng([self.base.seed, 1])
        return random.integers(0, self.base.config["vocab_size"], STEPS - 1, dtype=np.int32)

    def write(self, directory, recorded=None):
        """Writes the model into base/ and the adapters beside it, as recorded. Returns their directories."""
        self.base.write(directory / "base")
        made = []
        for place in range(len(self.adapters)):
            found = recorded[place] if recorded else json.loads(_recorded()[f"{self.name}/{place}"])
            made.append(directory / f"adapter-{place}")
            write_adapter(made[-1], found["config"], found["shapes"], self.base.seed + place)
        return tuple(made)


def write_adapter(directory, config, shapes, seed):
    """Writes an adapter as PEFT's save_pretrained would."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {name: _values(name, tuple(shape), seed) for name, shape in shapes.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _values(name, shape, seed):
    values = noise(seed, name, shape) * np.float32(0.1)
    return values + np.float32(name.endswith(("norm.weight", "lora_magnitude_vector")))


@cache
def _recorded():
    with np.load(REFERENCE) as recorded:
        return {key: str(recorded[key]) for key in recorded if "/" in key}


_SIZES = {
    **{"vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"rms_norm_eps": 1e-6, "head_dim": 4, "pad_token_id": 0},
}


def _base(family, kind, seed, **others):
    config = {"model_type": family, "architectures": [f"{kind}ForCausalLM"], **_SIZES, **others}
    return Case(f"{family}-{seed}", config, seed)


_GPT2 = {
    **{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 29},
    **{"n_positions": 128, "n_embd": 20, "n_head": 5, "n_layer": 2, "n_inner": None},
    "tie_word_embeddings": True,
}
_SCALED = {
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    **{"r": 3, "lora_alpha": 5, "use_rslora": True, "bias": "all", "task_type": "CAUSAL_LM"},
    "alpha_pattern": {"down_proj": 2.5},
    "rank_pattern": {"layers.0.self_attn.q_proj": 5, r"layers\.\d+\.mlp\.down_proj": 2},
}
_SAVED = {
    **{"r": 2, "target_modules": ["embed_tokens", "o_proj"]},
    "modules_to_save": ["lm_head", "norm"],
}
_DORA = {
    **{"target_modules": r".*\.(c_attn|c_proj|c_fc)", "fan_in_fan_out": True},
    **{"use_dora": True, "bias": "lora_only"},
}
_SECOND = {"r": 3, "target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}
_DROPPING = {"r": 3, "target_modules": "all-linear", "lora_dropout": 0.1}
_OF_ALL = {"r": 4, "target_modules": "all-linear", "use_dora": True}

CASES = (
    Adapted(_base("llama", "Llama", 71, attention_bias=True, tie_word_embeddings=True), (_SCALED,)),
    Adapted(_base("llama", "Llama", 72, tie_word_embeddings=False), (_SAVED,)),
    Adapted(Case("gpt2-73", _GPT2, 73), (_DORA, _SECOND)),
    Adapted(_base("phi3", "Phi3", 74, tie_word_embeddings=False), (_DROPPING,)),
    Adapted(_base("qwen3", "Qwen3", 75, tie_word_embeddings=True), (_OF_ALL,)),
)
"""Each kind of adapter on a family whose matrices are published in another way."""
