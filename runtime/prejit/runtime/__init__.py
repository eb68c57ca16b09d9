"""Load a bundle and run it.

    from prejit.runtime import load

    bundle = load("artifacts/demo")
    print(bundle.generate("def main(", max_new_tokens=64).text)

Names are imported when they are first used (PEP 562): `prejit --help` and `prejit explain` need no NumPy.

How to read the code, from the outside in: `loader.load` opens, checks and verifies a bundle and returns a
`bundle.Bundle`; its methods lead to `generation`, `encoding` and `programs`. Imports run one way, through the
rooms that runtime/README.md lists. prejit.server serves bundles to many callers, prejit.compiler makes them.
"""

from time import perf_counter

first_line = perf_counter()
"""When the first line of prejit ran in this process."""

from importlib import import_module  # noqa: E402 (the first line must be the first)
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.encoding.encoder import Encoded, EncodeStats
    from prejit.runtime.errors import (
        AnswerError,
        ClosedError,
        ContextError,
        DeadlineError,
        ExecutableError,
        FallbackWarning,
        MismatchError,
        PolicyError,
        PrejitError,
        PrejitWarning,
        QueueFullError,
        RejectError,
        StoreError,
        TruncationWarning,
        UntrustedError,
        UntrustedWarning,
        UsageError,
    )
    from prejit.runtime.fallback_reporting import fallback_counts
    from prejit.runtime.generation.continuous_batch import Batch
    from prejit.runtime.generation.finished_text import Result, Stats
    from prejit.runtime.generation.generate import Piece
    from prejit.runtime.generation.options import Defaults, Options, Request, Sampling
    from prejit.runtime.generation.rows import Token, Usage
    from prejit.runtime.generation.sampling_arguments import Logprob
    from prejit.runtime.generation.session import Session
    from prejit.runtime.generation.shared_prefix import Prefix
    from prejit.runtime.jitted.decorator import JitStats, jit
    from prejit.runtime.loader import load
    from prejit.runtime.machine.fingerprint import Fingerprint
    from prejit.runtime.programs.quarantine import CheckedAnswer
    from prejit.runtime.start_report import StartReport
    from prejit.runtime.verdict import Axis

_HOMES = {
    "bundle": ("Bundle",),
    "encoding.encoder": ("EncodeStats", "Encoded"),
    "errors": (
        *("AnswerError", "ClosedError", "ContextError", "DeadlineError", "ExecutableError"),
        "FallbackWarning",
        *("MismatchError", "PolicyError", "PrejitError", "PrejitWarning", "QueueFullError"),
        *("RejectError", "StoreError", "TruncationWarning", "UntrustedError", "UntrustedWarning"),
        "UsageError",
    ),
    "fallback_reporting": ("fallback_counts",),
    "generation.continuous_batch": ("Batch",),
    "generation.finished_text": ("Result", "Stats"),
    "generation.generate": ("Piece",),
    "generation.shared_prefix": ("Prefix",),
    "generation.options": ("Defaults", "Options", "Request", "Sampling"),
    "generation.rows": ("Token", "Usage"),
    "generation.sampling_arguments": ("Logprob",),
    "jitted.decorator": ("JitStats", "jit"),
    "loader": ("load",),
    "machine.fingerprint": ("Fingerprint",),
    "programs.quarantine": ("CheckedAnswer",),
    "generation.session": ("Session",),
    "start_report": ("StartReport",),
    "verdict": ("Axis",),
}

__all__ = [
    "AnswerError",
    "Axis",
    "Batch",
    "Bundle",
    "CheckedAnswer",
    "ClosedError",
    "ContextError",
    "DeadlineError",
    "Defaults",
    "EncodeStats",
    "Encoded",
    "ExecutableError",
    "FallbackWarning",
    "Fingerprint",
    "JitStats",
    "Logprob",
    "MismatchError",
    "Options",
    "Piece",
    "PolicyError",
    "Prefix",
    "PrejitError",
    "PrejitWarning",
    "QueueFullError",
    "RejectError",
    "Request",
    "Result",
    "Sampling",
    "Session",
    "StartReport",
    "Stats",
    "StoreError",
    "Token",
    "TruncationWarning",
    "UntrustedError",
    "UntrustedWarning",
    "UsageError",
    "Usage",
    "fallback_counts",
    "jit",
    "load",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            if name == "load":
                return _load()
            return getattr(import_module(f"prejit.runtime.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load() -> Any:
    """Return `load`, with NumPy and most of the modules that it needs imported."""
    started = perf_counter()
    start = import_module("prejit.runtime.device.quick_start")
    with start.collector_off():
        start.import_ahead()
        load = import_module("prejit.runtime.loader").load
    process = import_module("prejit.runtime.base.process_facts")
    process.imports.append(process.span("imports", started))
    return load
