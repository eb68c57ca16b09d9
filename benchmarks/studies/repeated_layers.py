"""Compile and run the layers of a large decoder in three forms, with native kernels and int4 weights.

    python -m benchmarks.studies.repeated_layers             2 minutes, 5 GB of memory
    python -m benchmarks.studies.repeated_layers --small     a trial

    unrolled    each layer is traced and compiled: what a build does
    call        one function, called once a layer: traced once; XLA puts it in line and compiles each
    loop        one body that runs L times, over weights and a cache with a leading axis of layers

The layers are those of Llama 3.2 1B, 32 of them; all forms have the same weights and must return the same
hidden states. Times to trace and compile are CPU seconds. Steps of the three take turns; the least counts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from benchmarks.harness.models import llama_config
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import LLAMA_1B, LLAMA_TINY
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.kernel_calls import Forms, using
from prejit.compiler.models.parameters import flat_parameters, with_parameters
from prejit.compiler.native import products
from prejit.compiler.native.kernel_library import KernelLibrary, build_kernels
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import host_toolchain
from prejit.runtime.device import kernels

FORMS = ("unrolled", "call", "loop")
CONTEXT, STEPS, LAYERS = 128, 16, 32
Values = dict[str, Any]


def use_kernels(directory: Path) -> None:
    """Compile the kernels of this machine, and let programs of this process call them."""
    toolchain = host_toolchain(target("cpu-host"), versions("jax", "jaxlib"))
    store = DirectoryStore.open(directory)
    library = build_kernels(toolchain, store)
    assert isinstance(library, KernelLibrary), library
    content = store.read_blob(library.digest)
    assert content is not None
    opened = kernels.load(content)
    kernels.register(opened)
    for kernel, name in products.KERNEL_CALLS.items():
        start = name.partition(".")[0]
        called = next(each for each in opened if each.partition(".")[0] == start)
        products.KERNEL_CALLS[kernel] = called


def random_weights(state: nnx.State, layers: int) -> list[Values]:
    """Return values of the parameters of layers, by name."""
    random = np.random.default_rng(0)

    def value(of: Any) -> Any:
        if of.dtype == jnp.uint32:
            return jnp.asarray(random.integers(0, 2**32, of.shape, np.uint32))
        return jnp.full(of.shape, 0.004 if of.dtype == jnp.float16 else 1, of.dtype)

    named = flat_parameters(state)
    return [{name: value(of) for name, of in named.items()} for _ in range(layers)]


def program(form: str, block: nnx.Module, turning: rope.Rotary) -> Callable[..., Any]:
    """Return the layers in a form: a function of weights, x [B, T, D], start [B] and cache."""
    graph, state = nnx.split(block)

    def layer(weights: Values, x: Any, start: Any, cache: Any) -> Any:
        new = NewTokens(start, jnp.full_like(start, x.shape[1]), x.shape[1], False)
        turns = {turning: rope.turns(turning, new.positions)}
        return nnx.merge(graph, with_parameters(state, weights))(x, turns, new, cache, last=False)

    def in_turn(weights: list[Values], x: Any, start: Any, cache: list[Any]) -> Any:
        each, changed = jax.jit(layer) if form == "call" else layer, []
        for mine, kept in zip(weights, cache, strict=True):
            x, kept = each(mine, x, start, kept)
            changed.append(kept)
        return x, changed

    def looped(weights: Values, x: Any, start: Any, cache: Any) -> Any:
        def step(x: Any, of: Any) -> Any:
            return layer(of[0], x, start, of[1])

        return lax.scan(step, x, (weights, cache))

    return looped if form == "loop" else in_turn


def study(block: Any, width: int, layers: int, new: int) -> dict[str, dict[str, float]]:
    """Return the CPU seconds to trace and to compile each form, and the milliseconds of a step."""
    weights = random_weights(nnx.state(block), layers)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, new, width), np.float32))
    found: dict[str, dict[str, float]] = {}
    compiled, given, caches, results = {}, {}, {}, {}
    for form in FORMS:
        given[form], caches[form] = (
            weights,
            [block.make_cache(1, CONTEXT, "float32") for _ in range(layers)],
        )
        if form == "loop":
            stacked = [given[form], caches[form]]
            given[form], caches[form] = (
                jax.tree.map(lambda *each: jnp.stack(each), *one) for one in stacked
            )
        began = time.process_time()
        with using(Forms()):
            function = jax.jit(program(form, block, block.heads.rotary), donate_argnums=3)
            lowered = function.lower(given[form], x, jnp.zeros(1, jnp.int32), caches[form])
        traced = time.process_time()
        compiled[form] = lowered.compile()
        ended = time.process_time()
        found[form] = {"trace": traced - began, "compile": ended - traced, "step": float("inf")}
    for step in range(STEPS):
        start = jnp.full(1, step, jnp.int32)
        for form in FORMS:
            began = time.perf_counter()
            results[form], caches[form] = compiled[form](given[form], x, start, caches[form])
            results[form].block_until_ready()
            took = 1e3 * (time.perf_counter() - began)
            found[form]["step"] = min(found[form]["step"], took)
    for form in FORMS:
        np.testing.assert_array_equal(results[form], results["unrolled"])
    return found


def main() -> None:
    """Measure, and write the figures."""
    parser = option_parser()
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    use_two_cores()
    sizes = replace(LLAMA_TINY if small else LLAMA_1B, layers=4 if small else LAYERS)
    facts = begin(STEPS, layers=sizes.layers, width=sizes.width)
    with tempfile.TemporaryDirectory() as directory:
        use_kernels(Path(directory, "cache"))
        Path(directory, "config.json").write_text(json.dumps(llama_config(sizes)))
        config = config_file.load_config(Path(directory))
    block = model_registry.make_decoder(config, CONTEXT, "int4", out_in=True).model.layers[0]
    facts["found"] = {
        name: study(block, sizes.width, sizes.layers, new)
        for name, new in (("decode", 1), ("prefill of 32", 32))
    }
    rows = [
        (name, form, f"{of['trace']:.2f}", f"{of['compile']:.2f}", f"{of['step']:.1f}")
        for name, forms in facts["found"].items()
        for form, of in forms.items()
    ]
    head = ("program", "form", "trace, CPU seconds", "compile, CPU seconds", "step, ms")
    table = Table(f"{sizes.layers} layers of width {sizes.width} in int4", head, rows)
    publish(facts, "repeated-layers", "Layers that compile once", [table], is_trial=small)


if __name__ == "__main__":
    main()
