"""Small models whose matrices are published in few bits, packed element by element. No JAX, no torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .cases import write_checkpoint

REFERENCE = Path(__file__).parent / "few_bits_reference.npz"
PROMPT, STEPS = 9, 12
"""Tokens of the prompt, and greedy ones after it."""

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 37},
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
MATRICES = {
    **{"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)},
    **{"self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64)},
    "mlp.down_proj": (64, 128),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


@dataclass(frozen=True)
class Packed:
    """A matrix in few bits, and the float32 values that it stands for."""

    tensors: dict
    values: np.ndarray


@dataclass(frozen=True)
class FewBits:
    """A Llama with packed matrices: its `quantization_config`, and the seed of weights and prompt."""

    name: str
    settings: dict
    seed: int

    @property
    def config(self):
        """Of config.json, without quantization."""
        return LLAMA

    @property
    def prompt(self):
        """Int32 [PROMPT]."""
        random = np.random.default_rng([self.seed, 0])
        return random.integers(0, LLAMA["vocab_size"], PROMPT, dtype=np.int32)

    def write(self, directory):
        """Writes the checkpoint in float32."""
        others, matrices = self.tensors()
        wide = {f"{name}.weight": each.values for name, each in matrices.items()}
        write_checkpoint(directory, LLAMA, others | wide)

    def write_packed(self, directory):
        """Writes the checkpoint in few bits, and returns its matrices."""
        others, matrices = self.tensors()
        packed = {
            f"{name}.{end}": np.ascontiguousarray(values)
            for name, each in matrices.items()
            for end, values in each.tensors.items()
        }
        config = LLAMA | {"quantization_config": self.settings}
        write_checkpoint(directory, config, others | packed)
        return matrices

    def tensors(self):
        """The tensors in float32, and the packed matrices."""
        random = np.random.default_rng(self.seed)
        others = {
            "model.norm.weight": random.uniform(0.5, 1.5, 64),
            "model.embed_tokens.weight": random.standard_normal((37, 64)),
            "lm_head.weight": random.standard_normal((37, 64)) / 4,
        }
        matrices = {}
        for layer in range(2):
            block = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                others[f"{block}.{norm}.weight"] = random.uniform(0.5, 1.5, 64)
            for name, (outputs, inputs) in MATRICES.items():
                pack = awq if self.settings["quant_method"] == "awq" else gptq
                matrices[f"{block}.{name}"] = pack(random, outputs, inputs, self.settings)
        return {name: values.astype(np.float32) for name, values in others.items()}, matrices


def cases():
    other = GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}
    return (
        FewBits("gptq", GPTQ, 1),
        FewBits("gptq-64", GPTQ | {"group_size": 64}, 2),
        FewBits("gptq-v2-order", other | {"desc_act": True}, 3),
        FewBits("gptq-8", GPTQ | {"bits": 8, "group_size": -1}, 4),
        FewBits("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, 5),
    )


def integers(random, outputs, inputs, settings):
    """Return integers [out, in], zero points [out, groups] and scales of a matrix, at random."""
    bits, size = settings["bits"], settings["group_size"]
    groups = 1 if size == -1 else inputs // size
    found = random.integers(0, 1 << bits, (outputs, inputs))
    zeros = np.full((outputs, groups), 1 << (bits - 1))
    if not settings.get("sym"):
        zeros = random.integers(1, 1 << bits, (outputs, groups))
    scales = random.uniform(0.2, 1.0, (outputs, groups)) / (1 << bits) / np.sqrt(inputs / 16)
    return found, zeros, scales.astype(np.float16)


def words(values, axis, bits, order=None):
    """Return integers in words of 32 bits along an axis, one element after the other."""
    values, each = np.moveaxis(values, axis, 0), 32 // bits
    found = np.zeros((-(-len(values) // each), *values.shape[1:]), np.uint32)
    for place, row in enumerate(values):
        at = place % each if order is None else order.index(place % each)
        found[place // each] |= row.astype(np.uint32) << np.uint32(bits * at)
    return np.moveaxis(found, 0, axis).view(np.int32)


def _values(found, zeros, scales, of_input):
    """Return what integers stand for; `of_input` are the groups of the inputs."""
    wide = np.zeros(found.shape, np.float32)
    for output, at in np.ndindex(wide.shape):
        group = of_input[at]
        number = int(found[output, at]) - int(zeros[output, group])
        wide[output, at] = np.float32(number) * np.float32(scales[output, group])
    return wide


def gptq(random, outputs, inputs, settings):
    """Return a matrix as AutoGPTQ and GPTQModel write it."""
    found, zeros, scales = integers(random, outputs, inputs, settings)
    bits, groups = settings["bits"], scales.shape[1]
    of_input = np.arange(inputs) // (inputs // groups)
    if settings["desc_act"]:
        of_input = random.permutation(of_input)
    wide = _values(found, zeros, scales, of_input)
    first = settings.get("checkpoint_format", "gptq") == "gptq"
    tensors = {
        "qweight": words(found.T, 0, bits),
        "qzeros": words(zeros.T - first, 1, bits),
        "scales": scales.T,
        "g_idx": of_input.astype(np.int32),
        "bias": np.zeros(outputs, np.float16),  # as AutoGPTQ writes for a matrix without one
    }
    return Packed(tensors, wide)


def awq(random, outputs, inputs, settings):
    """Return a matrix as AutoAWQ writes it."""
    found, zeros, scales = integers(random, outputs, inputs, settings)
    wide = _values(found, zeros, scales, np.arange(inputs) // settings["group_size"])
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        "qweight": words(found.T, 1, 4, order),
        "qzeros": words(zeros.T, 1, 4, order),
        "scales": scales.T,
    }
    return Packed(tensors, wide)
