"""IREE on the programs of the JAX baseline, weights and cache as arrays of its device.

peers/iree_child.py generate DIRECTORY WEIGHTS     32 tokens in, 64 out
peers/iree_child.py prefill  DIRECTORY WEIGHTS     512 tokens in, again and again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import iree.runtime as iree
import numpy as np

from benchmarks.harness import workload

THREADS = 2


class Decoder:
    """Compiled programs with their weights."""

    def __init__(self, directory: str, weights: str, *names: str) -> None:
        """Load programs and copy the weights, a safetensors file, to the device.

        Args:
            directory: directory that iree_export.py wrote.
            weights: path of the weights.
            names: names of the programs.
        """
        iree.flags.parse_flags(f"--task_topology_group_count={THREADS}")
        config = iree.Config("local-task")
        self._device = config.device
        context = iree.SystemContext(config=config)
        self._programs = {}
        for name in names:
            path = str(Path(directory, f"{name}.vmfb"))
            context.add_vm_module(iree.VmModule.mmap(context.instance, path))
            function = name.removesuffix(str(workload.PREFILL_TOKENS))
            self._programs[name] = context.modules[f"jit_{function}"]["main"]
        content = np.memmap(weights, np.uint8, "r")
        start = 8 + int(content[:8].view(np.uint64)[0])
        header = json.loads(content[8:start].tobytes())
        self._weights = []
        for name in sorted(header.keys() - {"__metadata__"}):
            begin, end = header[name]["data_offsets"]
            values = content[start + begin : start + end].view(np.float32)
            self._weights.append(self._place(values.reshape(header[name]["shape"])))

    def _place(self, values: Any) -> Any:
        return iree.asdevicearray(self._device, values)

    def empty_cache(self, context: int) -> list[Any]:
        """Return zeros: keys and values of each layer in turn."""
        size = (1, workload.HEADS, context, workload.HEAD_SIZE)
        return [self._place(np.zeros(size, np.float32)) for _ in range(2 * workload.LAYERS)]

    def run(self, name: str, cache: list[Any], *values: Any) -> tuple[int, list[Any]]:
        """Run a program on its arguments and the cache; return the token and the new cache."""
        placed = [self._place(np.array(value, np.int32)) for value in values]
        token, *cache = self._programs[name](*self._weights, *placed, *cache)
        return int(token.to_host()[0]), cache


def generate(directory: str, weights: str) -> Iterator[int]:
    """Yield greedy tokens."""
    decoder = Decoder(directory, weights, "prefill", "decode")
    cache = decoder.empty_cache(workload.CONTEXT)
    prompt = workload.prompt_ids(workload.PROMPT_TOKENS)
    token, cache = decoder.run("prefill", cache, [prompt])
    yield token
    for position in range(len(prompt), len(prompt) + workload.NEW_TOKENS - 1):
        token, cache = decoder.run("decode", cache, [token], position)
        yield token


def prefill(directory: str, weights: str) -> dict[str, object]:
    """Measure prompts."""
    name = f"prefill{workload.PREFILL_TOKENS}"
    decoder = Decoder(directory, weights, name)
    cache = decoder.empty_cache(2 * workload.PREFILL_TOKENS)  # nothing of it is written in place
    return workload.prefill(lambda prompt: decoder.run(name, cache, [prompt])[0])


if __name__ == "__main__":
    job, directory, weights = sys.argv[1:]
    if job == "generate":
        workload.say_last(**workload.stream(generate(directory, weights)))
    else:
        workload.say_last(**prefill(directory, weights))
