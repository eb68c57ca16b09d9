"""Run one example in a fresh process, from a bundle or by jax.jit; `benchmarks.studies.examples` starts it.

    python example_child.py EXAMPLE_DIRECTORY (BUNDLE | jit) CALLS OUTPUT.npz

Prints `FIRST` with the first result, and `LAST` with the median seconds of the calls after it. By jit the
functions of the example's modules run. Their names come from its manifest; `generate` is that of model.py.
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


def main() -> None:
    """Call the example CALLS times, and write its first result to OUTPUT."""
    directory, source, calls, output = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    sys.path.insert(0, str(directory))
    functions = jitted(directory) if source == "jit" else bundled(source)
    import use  # type: ignore[import-not-found]

    result = leaves(use.run(*functions))
    print("FIRST", flush=True)
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        leaves(use.run(*functions))
        seconds.append(time.perf_counter() - started)
    print("LAST", json.dumps({"call_seconds": sorted(seconds)[calls // 2]}), flush=True)
    np.savez(output, *result)


def bundled(path: str | Path) -> tuple[Callable[..., Any], ...]:
    """Return what the example's `run` takes: `call` of its bundle, and `generate` if it has a decoder."""
    from prejit.runtime import load

    bundle = load(path, on_mismatch="error")
    return (bundle.call,) if bundle.config.decoder is None else (bundle.call, bundle.generate)


def jitted(directory: Path) -> tuple[Callable[..., Any], ...]:
    """Return what `bundled` returns, by jax.jit."""
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


def leaves(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of a result, once they are there."""
    if isinstance(result, dict):
        return [leaf for _, part in sorted(result.items()) for leaf in leaves(part)]
    if isinstance(result, list | tuple):
        return [leaf for part in result for leaf in leaves(part)]
    return [] if result is None else [np.asarray(result)]


if __name__ == "__main__":
    main()
