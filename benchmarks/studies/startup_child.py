"""Time every part of a start and print the spans, which startup_profile.py draws.

    python -m benchmarks.studies.startup_child BUNDLE     32 tokens in, 1 out

The parts are timed from outside: this script wraps the import system's loaders and some functions of the
runtime. Clocks are CLOCK_MONOTONIC, which parent and child share.
"""

from __future__ import annotations

import time

_BEGUN = time.perf_counter_ns()

import functools  # noqa: E402  the clock comes first
import importlib.machinery  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

_Span = tuple[str, str, str, int, int]
"""A timed part: kind, name, thread, start and end in nanoseconds."""

_spans: list[_Span] = []

_VOCABULARY = 256
"""Token ids of the prompt are smaller than this: every model has them."""

FUNCTIONS = {
    "prejit.runtime.loader": {"load": "other"},
    "prejit.runtime.format.root": {"read_root": "bundle"},
    "prejit.runtime.format.opening": {
        "match": "bundle",
        "read_manifests": "bundle",
        "check_config_blob": "bundle",
    },
    "prejit.runtime.format.blobs": {"Blobs.__init__": "bundle", "Blobs.begin": "bundle"},
    "prejit.runtime.machine.fingerprint": {"Fingerprint.current": "bundle"},
    "prejit.runtime.programs.mapped_weights": {
        "open_weights": "weights",
        "Weights.wait": "weights",
    },
    "prejit.runtime.format.checks.program_table": {"check_weight_sets": "weights"},
    "prejit.runtime.format.checks.layers": {"unpack": "programs"},
    "prejit.runtime.device.device": {
        "Device.__init__": "first array",
        "Device._begin": "first array",
        "Device.load": "programs",
    },
    "prejit.runtime.device.transfer": {"to_numpy": "run"},
    "prejit.runtime.programs.ready": {"Programs.weights": "weights"},
    "prejit.runtime.generation.kv_cache": {"KVCache.__init__": "first array"},
    "prejit.runtime.generation.decoder_programs": {
        "DecoderPrograms.__init__": "bundle",
        "DecoderPrograms.run": "run",
    },
    "prejit.runtime.generation.sampling": {"place_sampling": "first array"},
    "prejit.runtime.text.tokenizer": {
        "Tokenizer.__init__": "tokenizer",
        "Tokenizer.encode": "tokenizer",
    },
}
"""Functions of the runtime that are timed, by module, with the kind that each counts as."""


def _timed(kind: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter_ns()
        try:
            return function(*args, **kwargs)
        finally:
            thread = threading.current_thread().name
            _spans.append((kind, name, thread, started, time.perf_counter_ns()))

    return run


def _wrap_functions(module: Any) -> None:
    for name, kind in FUNCTIONS.get(module.__name__, {}).items():
        owner: Any = module
        *path, leaf = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        found = owner.__dict__.get(leaf)
        if isinstance(found, classmethod):
            setattr(owner, leaf, classmethod(_timed(kind, name, found.__func__)))
        elif found is not None:  # a version of the runtime may have no such part
            setattr(owner, leaf, _timed(kind, name, found))


def _import_kind(name: str) -> str:
    package = name.partition(".")[0]
    if package in ("prejit", "numpy", "jaxlib", "jax"):
        return f"import {package}"
    return "import standard library" if package in sys.stdlib_module_names else "import others"


def _wrap_loader(loader: Any, method: str) -> None:
    original = loader.__dict__[method]

    def run(self: Any, subject: Any) -> Any:
        name = getattr(subject, "__name__", None) or subject.name
        started = time.perf_counter_ns()
        try:
            result = original(self, subject)
        finally:
            thread = threading.current_thread().name
            _spans.append((_import_kind(name), name, thread, started, time.perf_counter_ns()))
        if method == "exec_module":
            _wrap_functions(subject)
        return result

    setattr(loader, method, run)


def main() -> None:
    """Load the bundle, generate a token and print the spans."""
    source = importlib.machinery.SourceFileLoader
    basics = next(cls for cls in source.__mro__ if "exec_module" in cls.__dict__)
    extension = importlib.machinery.ExtensionFileLoader
    _wrap_loader(basics, "exec_module")
    _wrap_loader(extension, "exec_module")
    _wrap_loader(extension, "create_module")
    from benchmarks.harness import workload
    from prejit.runtime import load

    bundle = load(sys.argv[1], on_mismatch="error")
    ids = [i % _VOCABULARY for i in workload.prompt_ids(workload.PROMPT_TOKENS)]
    pieces = bundle.stream(ids, max_new_tokens=4, stop_token_ids=())
    next(pieces)
    ended = time.perf_counter_ns()
    spans, modules = list(_spans), len(sys.modules)
    workload.say_first()
    workload.say_last(begun=_BEGUN, ended=ended, spans=spans, modules=modules)


if __name__ == "__main__":
    main()
