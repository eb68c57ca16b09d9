"""Make the models of the benchmark: decoders with random weights, and manifests for them.

    python -m benchmarks.harness.models DIR NAME...     names: gpt2, llama-1b, llama-tiny, or
                                                        llama-3b and llama-8b, in shards; none: gpt2;
                                                        qwen3-600m, olmoe-part, lfm2-part:
                                                        family_models.py

    DIR/NAME/               Hugging Face layout: GPT-2's weights (in, out) as published, the others (out, in)
    DIR/gpt2.safetensors    GPT-2's weights (out, in) for its peers, every tensor 64-byte aligned

Speed depends on shapes only. With the usual initialization (0.02) a random model repeats one token forever,
which would hide a broken KV cache. Therefore the weights of the blocks are larger and the norms vary.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.harness.workload import (
    EPSILON,
    HEADS,
    LAYERS,
    LLAMA_1B,
    LLAMA_3B,
    LLAMA_8B,
    LLAMA_TINY,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    Llama,
    Sizes,
)

SEED = 5
"""Chosen so that the two best logits differ by at least 0.002 at every step of every row: JAX and prejit add
in another order, and a near tie would let their tokens part."""
SMALL = {"llama-1b": LLAMA_1B, "llama-tiny": LLAMA_TINY}
"""Models that are one file."""
LARGE = {"llama-3b": LLAMA_3B, "llama-8b": LLAMA_8B}
"""Models that are made in shards."""
LAYERS_OF_SHARD = 4
"""Layers in a shard of a large model."""

Weights = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
"""Shapes by the names of tensors, in the order in which a file holds them."""


def gpt2_weights() -> Weights:
    """Return random weights by their published names, matrices (in, out)."""
    return {name: _random(index, name, shape) for index, (name, shape) in enumerate(_gpt2_shapes())}


def _gpt2_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (VOCABULARY, WIDTH)
    yield "wpe.weight", (POSITIONS, WIDTH)
    for layer in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            yield f"h.{layer}.{norm}.weight", (WIDTH,)
            yield f"h.{layer}.{norm}.bias", (WIDTH,)
        for product, rows, columns in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            yield f"h.{layer}.{product}.weight", (rows, columns)
            yield f"h.{layer}.{product}.bias", (columns,)
    yield "ln_f.weight", (WIDTH,)
    yield "ln_f.bias", (WIDTH,)


def _random(index: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng([SEED, index]).standard_normal(shape, dtype=np.float32)
    if name.endswith("weight") and ("ln_" in name or "norm" in name):
        return 1 + np.float32(0.1) * values
    wide = len(shape) == 2 and name.startswith("h.")
    return values * np.float32(0.08 if wide else 0.02)


def write_safetensors(path: Path, tensors: Weights) -> None:
    """Write float32 tensors whose sizes are multiples of 64 bytes, each at a multiple of 64."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    arrays = (np.ascontiguousarray(tensor) for tensor in tensors.values())
    _write_tensors(path, "F32", shapes, arrays)


def write_repeating(path: Path, shapes: Shapes, scale: float) -> None:
    """Write tensors in bfloat16, matrices of a scale and norms. Values repeat, so that it is soon done."""
    matrices, norms = _pools(scale)
    values = (
        np.resize((norms if len(shape) == 1 else matrices)[97 * at :], shape)
        for at, shape in enumerate(shapes.values())
    )
    _write_tensors(path, "BF16", shapes, values)


@cache
def _pools(scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return values of matrices and of norms, as bfloat16."""
    some = np.random.default_rng(SEED).standard_normal((1 << 24) + 1, dtype=np.float32)
    return bfloat16_bits(scale * some), bfloat16_bits(1 + np.float32(0.1) * some)


def _write_tensors(path: Path, dtype: str, shapes: Shapes, arrays: Iterable[np.ndarray]) -> None:
    """Write a safetensors file with one tensor in memory at a time.

    Args:
        path: path of the file.
        dtype: name of the dtype in safetensors.
        shapes: shape by tensor. The bytes of each are a multiple of 64, so that each begins at one.
        arrays: contiguous arrays in that order.
    """
    header, offset, itemsize = {}, 0, {"F32": 4, "BF16": 2}[dtype]
    for name, shape in shapes.items():
        end = offset + itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the format allows spaces behind the header
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.data)


def llama_shapes(sizes: Llama) -> Shapes:
    """Return names and shapes (out, in) of a Llama."""
    shared = sizes.kv_heads * sizes.width // sizes.heads
    shapes: Shapes = {
        "model.embed_tokens.weight": (sizes.vocabulary, sizes.width),
        "model.norm.weight": (sizes.width,),
    }
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (sizes.width,)
        for name, outputs in (("q", sizes.width), ("k", shared), ("v", shared)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (outputs, sizes.width)
        shapes[f"{at}.self_attn.o_proj.weight"] = (sizes.width, sizes.width)
        for name in ("gate", "up"):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (sizes.inner, sizes.width)
        shapes[f"{at}.mlp.down_proj.weight"] = (sizes.width, sizes.inner)
    if not sizes.tied:
        shapes["lm_head.weight"] = (sizes.vocabulary, sizes.width)
    return shapes


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16 bits (uint16), rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_llama(directory: Path, name: str, sizes: Llama) -> None:
    """Make a Llama in bfloat16, as such models are published, unless it exists."""
    if (directory / name).is_dir():
        return
    shapes = llama_shapes(sizes)
    partial = begin(directory / name)
    values = (
        bfloat16_bits(_random(index, tensor, shape))
        for index, (tensor, shape) in enumerate(shapes.items())
    )
    _write_tensors(partial / "model.safetensors", "BF16", shapes, values)
    finish(partial, llama_config(sizes))


def make_large_llama(directory: Path, name: str, sizes: Llama) -> None:
    """Make a Llama in shards of four layers, unless it exists. Its values repeat, so that it is soon made."""
    if (directory / name).is_dir():
        return
    partial = begin(directory / name)
    shards: dict[str, Shapes] = {}
    for tensor, shape in llama_shapes(sizes).items():
        layer = tensor.removeprefix("model.layers.").partition(".")[0]
        place = int(layer) // LAYERS_OF_SHARD if layer.isdecimal() else "rest"
        shards.setdefault(f"model-{place}.safetensors", {})[tensor] = shape
    for file, shapes in shards.items():
        write_repeating(partial / file, shapes, 0.02)
    places = {tensor: file for file, shapes in shards.items() for tensor in shapes}
    index = json.dumps({"metadata": {}, "weight_map": places})
    (partial / "model.safetensors.index.json").write_text(index)
    finish(partial, llama_config(sizes))


def llama_config(sizes: Llama) -> dict[str, object]:
    """Return the config.json of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.width,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.width // sizes.heads,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": EPSILON,
        "tie_word_embeddings": sizes.tied,
        "dtype": "bfloat16",
        "bos_token_id": sizes.vocabulary - 2,
        "eos_token_id": sizes.vocabulary - 1,
    }


def make_gpt2(directory: Path) -> None:
    """Make GPT-2 unless it exists. Weights of another seed or recipe need another directory."""
    if (directory / "gpt2").is_dir():
        return
    weights = gpt2_weights()
    transposed = {n: w.T if n.startswith("h.") and w.ndim == 2 else w for n, w in weights.items()}
    write_safetensors(directory / "gpt2.safetensors", transposed)
    partial = begin(directory / "gpt2")
    write_safetensors(partial / "model.safetensors", weights)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_positions": POSITIONS,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": EPSILON,
        "tie_word_embeddings": True,
        "bos_token_id": VOCABULARY - 1,
        "eos_token_id": VOCABULARY - 1,
    }
    finish(partial, config)


def begin(directory: Path) -> Path:
    """Return an empty directory beside that of a model, in which the model is made."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(partial: Path, config: Mapping[str, object]) -> None:
    """Write config.json, and put the model into its place."""
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    os.replace(partial, partial.with_suffix(""))


def decoder_manifest(name: str, source: str, dtype: str, sizes: Sizes) -> str:
    """Return a manifest for this machine."""
    lines = "\n".join(f"{key} = {list(values)}" for key, values in sizes.items())
    return (
        f'[bundle]\nname = "{name}"\n\n[model]\nsource = "{source}"\ndtype = "{dtype}"\n\n'
        f'[generate]\n{lines}\n\n[[target]]\nname = "cpu-host"\n'
    )


def make(directory: Path, *names: str) -> None:
    """Make the models that are missing.

    Args:
        directory: directory of the benchmark.
        *names: names of models; none: GPT-2.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in names or ("gpt2",):
        if name == "gpt2":
            make_gpt2(directory)
        elif name in LARGE:
            make_large_llama(directory, name, LARGE[name])
        elif name in SMALL:
            make_llama(directory, name, SMALL[name])
        else:
            from benchmarks.harness import family_models  # it imports this module

            family_models.make(directory, name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), *sys.argv[2:])
