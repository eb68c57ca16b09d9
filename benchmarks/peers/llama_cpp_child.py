"""llama.cpp through llama-cpp-python's low-level binding: how a Python user gets the most of it.

    peers/llama_cpp_child.py generate MODEL.gguf [BATCH TOKENS]    32 tokens in, 64 out
    peers/llama_cpp_child.py prefill  MODEL.gguf BATCH TOKENS      prompts, one after the other

In an environment with ik-llama-cpp-python it is that fork, whose functions have the same names.

Weights are mapped; the cache has 16 bits, with float32 weights 32, like that of all rows. llama.cpp pads its
context to 256 positions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.harness import workload

IS_FORK = find_spec("ik_llama_cpp") is not None
llama: Any = import_module("ik_llama_cpp._ctypes_api" if IS_FORK else "llama_cpp")
THREADS = workload.threads()
CONTEXT_MULTIPLE = 256
FLOAT32_CACHE, FLOAT16_CACHE = 0, 1  # GGML_TYPE_F32, GGML_TYPE_F16


class Decoder:
    """A model with one context, and a batch that every step fills again."""

    def __init__(self, path: str, batch: int, positions: int) -> None:
        """Load a model.

        Args:
            path: path of a GGUF file.
            batch: number of rows that run together.
            positions: longest text of a row in tokens.
        """
        if not IS_FORK:
            self._quiet = llama.llama_log_callback(lambda *_: None)  # kept: C calls it
            llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        # Its product for CPUs with AMX crashes on this model's q8_0 (llama-cpp-python 0.3.36, SIGSEGV in
        # ggml_backend_amx_mul_mat). Nothing else of these rows uses its extra buffer types on x86-64.
        options.use_extra_bufts = False
        self._model = llama.llama_model_load_from_file(path.encode(), options)
        assert self._model, path
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        sizes = llama.llama_context_default_params()
        sizes.n_ctx = batch * -(-positions // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
        sizes.n_batch = sizes.n_ubatch = max(workload.CHUNK_TOKENS, batch * workload.PROMPT_TOKENS)
        sizes.n_seq_max = batch
        sizes.n_threads = sizes.n_threads_batch = THREADS
        sizes.type_k = sizes.type_v = FLOAT32_CACHE if "f32" in path else FLOAT16_CACHE
        self._context = llama.llama_init_from_model(self._model, sizes)
        assert self._context, path
        self._most = sizes.n_batch
        self._batch = llama.llama_batch_init(self._most, 0, 1)

    def run(self, rows: list[list[int]], start: int) -> list[int]:
        """Run new tokens of each row at positions from `start`; return each row's most likely next one.

        The tokens of one row may be more than a batch of llama.cpp takes at once.
        """
        while len(rows) == 1 and len(rows[0]) > self._most:
            self.run([rows[0][: self._most]], start)
            rows, start = [rows[0][self._most :]], start + self._most
        batch, count = self._batch, 0
        ends = []
        for row, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[count], batch.pos[count] = token, start + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, row
                batch.logits[count] = offset == len(tokens) - 1
                count += 1
            ends.append(count - 1)
        batch.n_tokens = count
        status = llama.llama_decode(self._context, batch)
        assert status == 0, status
        return [int(self._logits(end).argmax()) for end in ends]

    def _logits(self, place: int) -> np.ndarray:
        pointer = llama.llama_get_logits_ith(self._context, place)
        return np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))

    def clear(self) -> None:
        """Clear the cache."""
        if IS_FORK:
            llama.llama_kv_cache_clear(self._context)
        else:
            llama.llama_memory_clear(llama.llama_get_memory(self._context), False)


def generate(path: str, batch: int, length: int) -> Iterator[int]:
    """Yield greedy tokens of the first row."""
    decoder = Decoder(path, batch, length + workload.NEW_TOKENS)
    tokens = decoder.run(workload.prompts(length, batch), 0)
    yield tokens[0]
    for step in range(workload.NEW_TOKENS - 1):
        tokens = decoder.run([[token] for token in tokens], length + step)
        yield tokens[0]


def prefill(path: str, length: int) -> dict[str, object]:
    """Measure prompts."""
    decoder = Decoder(path, 1, length)

    def first_token(prompt: list[int]) -> int:
        decoder.clear()
        return decoder.run([prompt], 0)[0]

    return workload.prefill(first_token, length)


if __name__ == "__main__":
    job, path, *size = sys.argv[1:]
    batch, length = map(int, size or (1, workload.PROMPT_TOKENS))
    if job == "generate":
        workload.say_last(**workload.stream(generate(path, batch, length), batch))
    else:
        workload.say_last(**prefill(path, length))
