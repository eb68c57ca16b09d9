"""Write a decoder of the benchmark as a GGUF file. Runs in the environment of llama.cpp.

    peers/convert/gguf_file.py MODEL OUTPUT.gguf KIND     kinds: f32, bf16, q8_0, q4_0,
                                                          and q4_k_m of a bf16 file

MODEL is a directory of models.py. Norms, biases and GPT-2's positions stay float32, as llama.cpp's own
converter leaves them; q8_0 and q4_0 are its package's quantization (blocks of 32 with one scale each). With
q4_0 the embedding and the head are q8_0, as int8 in prejit's int4. The router of a mixture and the taps of a
hybrid stay float32. Tokens have meaningless names, because the benchmark uses ids.

Sources: the GGUF specification (ggml, docs/gguf.md); llama.cpp's convert_hf_to_gguf.py for names and for the
order of the rotary rows.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_FILE_TYPES = {"f32": 0, "bf16": 32, "q8_0": 7, "q4_0": 2}
_KEPT = ("position_embd.weight", "ffn_gate_inp.weight", "shortconv.conv.weight")
_HEADS = ("token_embd.weight", "output.weight")
_EXPERT = ".mlp.experts."
_TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""The matrices whose rows llama.cpp rotates, with the key of their heads."""


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a safetensors file as float32, one at a time."""
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int(content[:8].view(np.uint64)[0])
    for name, about in json.loads(content[8:start].tobytes()).items():
        begin, end = about["data_offsets"]
        raw = content[start + begin : start + end]
        if about["dtype"] == "BF16":
            flat = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            flat = raw.view(np.float32)
        yield name, flat.reshape(about["shape"])


def named(path: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield GGUF's name and the values of each tensor, experts of a layer as one."""
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[config["model_type"]]
    known = gguf.get_tensor_name_map(arch, config.get("n_layer") or config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in tensors(path):
        base, leaf = name.rsplit(".", 1)
        if _EXPERT in base:  # experts are in order
            before, _, after = base.partition(_EXPERT)
            base = f"{before}{_EXPERT}{after.partition('.')[2]}"
            stack = stacks.setdefault(base, [])
            stack.append(values)
            if len(stack) < config["num_experts"]:
                continue
            values = np.stack(stacks.pop(base))
        elif base.endswith(".conv.conv"):
            values = values[:, 0]
        elif config["model_type"] == "llama" and (part := base.rpartition(".")[2]) in _TURNED:
            values = rotary_rows(values, config[_TURNED[part]])
        yield f"{known.get_name(base)}.{leaf}", values


def rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key weight (out, in) with adjacent pairs, as llama.cpp rotates them."""
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, 2, half, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def write(model: Path, output: Path, kind: str) -> None:
    """Write the file."""
    config = json.loads((model / "config.json").read_text())
    partial = output.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config["model_type"])
    writer.add_file_type(_FILE_TYPES[kind])
    _add_sizes(writer, config)
    _add_tokens(writer, config["vocab_size"])
    # GPT-2's weights (out, in) lie beside its directory.
    is_gpt2 = config["model_type"] == "gpt2"
    sources = [model.with_suffix(".safetensors")] if is_gpt2 else model.glob("*.safetensors")
    types = gguf.GGMLQuantizationType
    quantized = {"bf16": types.BF16, "q8_0": types.Q8_0, "q4_0": types.Q4_0}
    found = itertools.chain.from_iterable(named(source, config) for source in sorted(sources))
    for target, values in found:
        if kind == "f32" or values.ndim == 1 or target.endswith(_KEPT):
            writer.add_tensor(target, np.ascontiguousarray(values))
        else:
            form = types.Q8_0 if kind == "q4_0" and target in _HEADS else quantized[kind]
            writer.add_tensor(target, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, output)


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if "layer_types" in config:
        kinds = config["layer_types"]
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in kinds]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    if head := config.get("head_dim"):
        writer.add_key_length(head)
        writer.add_value_length(head)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Return a byte-level BPE vocabulary of the given size."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{place}" for place in range(count)])
    writer.add_token_types([gguf.TokenType.NORMAL] * (count - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(count - 1)
    writer.add_eos_token_id(count - 1)


def write_k_quant(source: str, output: str) -> None:
    """Quantize a file by llama.cpp itself: most matrices in Q4_K, some in Q6_K.

    Raises:
        SystemExit: llama.cpp failed, and said why.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    partial = output + ".partial"
    if llama_cpp.llama_model_quantize(source.encode(), partial.encode(), options):
        sys.exit(1)
    os.replace(partial, output)


if __name__ == "__main__":
    model, output, kind = sys.argv[1:]
    if kind == "q4_k_m":
        write_k_quant(model, output)
    else:
        write(Path(model), Path(output), kind)
