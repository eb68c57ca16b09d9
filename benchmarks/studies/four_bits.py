"""Accuracy of int8 and int4, also with x rounded as kernels do, and of llama.cpp's types in int4's matrices.

    python -m benchmarks.studies.four_bits MODEL TEXT [DECIDING_TEXT]

It prints the perplexity of the last 1,000 tokens of a text, and the mean KL divergence from float32. A text
that decides rounds int4 as `evaluation` does. Q4_0 and Q4_K are rounded by llama.cpp's own library, that of
the peers' environment under $PREJIT_BENCH_DIR.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from flax import nnx

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.models.int4_rounding import Rows
from prejit.compiler.models.parameters import flat_parameters, parametrized
from prejit.compiler.pipeline.measure import int4_inputs, model_comparison
from prejit.compiler.pipeline.model import ModelFiles, ModelSource

Values = np.ndarray[Any, Any]
TOKENS, WINDOW = 1000, 128


def ggml() -> ctypes.CDLL:
    """Open llama.cpp's library of numbers."""
    environment = Path(os.environ["PREJIT_BENCH_DIR"]) / "envs" / "llama.cpp"
    [library] = environment.glob("lib/python*/site-packages/llama_cpp/lib/libggml-base.so")
    return ctypes.CDLL(str(library))


def in_blocks(matrix: Values, kind: gguf.GGMLQuantizationType) -> Values:
    """Return a matrix as llama.cpp rounds it in blocks, row after row: float32, shaped as it was."""
    values, bytes_each = gguf.GGML_QUANT_SIZES[kind]
    inputs = max(matrix.shape[-1], values)  # blocks of narrow matrices go over their rows
    rows = np.ascontiguousarray(matrix, np.float32).reshape(-1, inputs)
    stored = np.zeros((len(rows), inputs // values * bytes_each), np.uint8)
    sizes = (ctypes.c_int64(each) for each in (0, len(rows), inputs))
    ggml().ggml_quantize_chunk(
        ctypes.c_int(kind),
        *(ctypes.c_void_p(each.ctypes.data) for each in (rows, stored)),
        *sizes,
        None,
    )
    found: Values = gguf.quants.dequantize(stored, kind).reshape(matrix.shape)
    return found


def log_softmax(logits: Values) -> Values:
    """Return the logarithms of probabilities."""
    shifted = logits - logits.max(-1, keepdims=True)
    found: Values = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def main(directory: Path, text: Path, deciding: Path | None = None) -> None:
    """Print the figures of a model."""
    config = config_file.load_config(directory)
    checkpoint = open_checkpoint(directory, out_in=True)
    make = partial(model_registry.make_decoder, config, out_in=True)
    exact = parametrized(make())
    tokens, begin = model_comparison.read_text(text, directory / "tokenizer.json")
    tokens, unread = tokens[-TOKENS:], max(0, len(begin) - 1)
    windows = [np.r_[begin, tokens[at : at + WINDOW]] for at in range(0, len(tokens), WINDOW)]

    def logits(weights: dict[str, Rows], imitated: str = "") -> Values:
        module = exact
        if imitated:
            quantizing.imitate(rounding := make(), make(dtype=imitated))
            module = parametrized(rounding)
        compared = model_comparison.ComparedModel(module, weights)
        found = model_comparison._logits(compared, windows)()
        return np.concatenate([each[unread:-1] for each in found]).astype(np.float64)

    def stored(
        dtype: str, words: dict[str, tuple[Values, Values]] | None = None
    ) -> dict[str, Rows]:
        module = make(dtype=dtype)
        reads = quantizing.readers(module, checkpoint.rows, words=words or {})
        names = flat_parameters(nnx.state(module))
        packed = {n: reads[n]() if n in reads else checkpoint.read(n) for n in names}
        return quantizing.widened(module, packed)

    def print_figures(name: str, found: Values) -> None:
        divergence = (np.exp(right) * (right - found)).sum(-1).mean()
        perplexity = np.exp(-found[places, follows].mean())
        print(f"{name:11}  perplexity {perplexity:.4f}  KL {divergence:.5f}", flush=True)

    follows = np.concatenate([each[unread + 1 :] for each in windows])
    places = np.arange(len(follows))
    right = log_softmax(logits({name: checkpoint.rows(name) for name in checkpoint.names}))
    print_figures("float32", right)
    int8, int4 = stored("int8"), stored("int4")
    print_figures("int8", log_softmax(logits(int8)))
    print_figures("int8, x too", log_softmax(logits(int8, "int8")))
    print_figures("int4", log_softmax(logits(int4)))
    print_figures("int4, x too", log_softmax(logits(int4, "int4")))
    module = make(dtype="int4")
    if deciding is not None:
        model = ModelSource(
            ModelFiles(directory, None, True, ()), config, model_registry.describe(config), module
        )
        rounded = int4_inputs.round_by(model, checkpoint, None, deciding)
        print(rounded.line)
        print_figures("int4, text", log_softmax(logits(stored("int4", dict(rounded.words)))))
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_K):
        matrices = quantizing.int4_matrices(module, checkpoint.rows)
        blocks = {name: in_blocks(checkpoint.read(name), kind) for name in matrices}
        print_figures(kind.name, log_softmax(logits({**int4, **blocks})))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
