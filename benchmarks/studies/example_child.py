"""Run one example in a fresh process, from a bundle or by jax.jit; `benchmarks.studies.examples` starts it.

    python example_child.py EXAMPLE_DIRECTORY (BUNDLE | jit) CALLS OUTPUT.npz

Prints `FIRST` with the first result, and `LAST` with the median seconds of the calls after it. By jit the
functions of the example's modules run. Their names come from its manifest; `generate` is that of model.py.
The first result of a decoder of one's own is its first token, and a call is one of the 64 tokens after it.
"""

import importlib
import json
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

TOKENS = 64
"""How many tokens after the first one of a decoder are timed."""


def main() -> None:
    """Call the example CALLS times, and write its last result to OUTPUT."""
    directory, source, calls, output = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    sys.path.insert(0, str(directory))
    writes = is_decoder(directory)
    functions = jitted(directory) if source == "jit" else bundled(source, directory)
    import use  # type: ignore[import-not-found]

    def run(*count: int) -> tuple[list[np.ndarray[Any, Any]], float]:
        started = time.perf_counter()
        result = leaves(use.run(*functions, *count))
        return result, time.perf_counter() - started

    run(*(1,) * writes)
    print("FIRST", flush=True)
    seconds = []
    for _ in range(calls):
        if writes:
            _, first = run(1)
            result, whole = run(1 + TOKENS)
            seconds.append((whole - first) / TOKENS)
        else:
            result, whole = run()
            seconds.append(whole)
    print("LAST", json.dumps({"call_seconds": sorted(seconds)[calls // 2]}), flush=True)
    np.savez(output, *result)


def bundled(path: str | Path, directory: Path) -> tuple[Callable[..., Any], ...]:
    """Return what the example's `run` takes: `call` of its bundle, and `generate` if it has a model.

    A decoder of one's own only generates: from a prompt, a number of tokens.
    """
    from prejit.runtime import load

    bundle = load(path, on_mismatch="error")
    if is_decoder(directory):
        return (
            lambda prompt, count: list(bundle.generate(prompt, max_new_tokens=count).token_ids),
        )
    return (bundle.call,) if bundle.config.decoder is None else (bundle.call, bundle.generate)


def jitted(directory: Path) -> tuple[Callable[..., Any], ...]:
    """Return what `bundled` returns, by jax.jit."""
    if is_decoder(directory):
        return (jitted_decoder(directory),)
    import jax
    import model  # type: ignore[import-not-found]

    manifest = tomllib.loads((directory / "manifest.toml").read_text())
    functions = {}
    for program in manifest["program"]:
        module, _, attribute = program["function"].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if "flax" in sys.modules:
            from flax import nnx

            if isinstance(found, nnx.Module):
                graph, state = nnx.split(found)
                run = jax.jit(lambda state, *args, graph=graph: nnx.merge(graph, state)(*args))
                functions[program["name"]] = lambda *args, run=run, state=state: run(state, *args)
                continue
        if "equinox" in sys.modules:
            import equinox

            if isinstance(found, equinox.Module):
                functions[program["name"]] = cast(Any, equinox).filter_jit(found)
                continue
        functions[program["name"]] = jax.jit(found)

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        if "key" in kwargs:
            kwargs["key"] = jax.random.wrap_key_data(kwargs["key"])
        if name == "simulate":  # jax knows the model's own class
            kwargs["bodies"] = model.Bodies(*kwargs["bodies"])
        return functions[name](*args, **kwargs)

    return (call, model.generate) if "generate" in manifest else (call,)


def is_decoder(directory: Path) -> bool:
    """Return whether an example is a decoder: its `run` takes a function that generates, and a count."""
    manifest = tomllib.loads((directory / "manifest.toml").read_text())
    return "module" in manifest.get("model", {})


def jitted_decoder(directory: Path) -> Any:
    """Return a function that generates by jax.jit: one call for the prompt, then one for each token."""
    import jax
    import jax.numpy as jnp
    import model
    from flax import nnx

    manifest = tomllib.loads((directory / "manifest.toml").read_text())
    positions = manifest["generate"]["context"][0]
    graph, state = nnx.split(model.model)

    def step(state: Any, tokens: Any, start: Any, cache: Any) -> Any:
        length = jnp.full(1, tokens.shape[1], jnp.int32)
        logits, cache = nnx.merge(graph, state)(tokens, start, length, cache)
        return logits.argmax(-1).astype(jnp.int32), cache

    step = jax.jit(step, donate_argnums=3)

    def generate(prompt: Any, count: int) -> Any:
        cache = model.model.make_cache(1, positions, "float32")
        start, tokens = jnp.zeros(1, jnp.int32), jnp.array([prompt], jnp.int32)
        text = []
        for _ in range(count):
            token, cache = step(state, tokens, start, cache)
            start, tokens = start + tokens.shape[1], token[:, None]
            text.append(token)
        return np.concatenate(text).tolist()

    return generate


def leaves(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a result, once they are there."""
    if isinstance(result, dict):
        return [leaf for _, part in sorted(result.items()) for leaf in leaves(part)]
    if isinstance(result, list | tuple):
        return [leaf for part in result for leaf in leaves(part)]
    return [] if result is None else [np.asarray(result)]


if __name__ == "__main__":
    main()
