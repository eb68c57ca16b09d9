"""The server side of prejit: load a bundle and run it.

    from prejit.runtime import load

    bundle = load("artifacts/demo")
    print(bundle.generate("def main(", max_new_tokens=64).text)

Names are imported when they are first wanted (PEP 562): `prejit --help` and `prejit explain` need no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.encoding.encoder import Encoded, EncodeStats
    from prejit.runtime.errors import (
        ContextError,
        FallbackWarning,
        MismatchError,
        PrejitError,
        PrejitWarning,
        RejectError,
        StoreError,
        TruncationWarning,
        UsageError,
    )
    from prejit.runtime.fallback import fallback_counts
    from prejit.runtime.generation.batch import Batch
    from prejit.runtime.generation.defaults import Defaults
    from prejit.runtime.generation.generate import Piece, Result, Stats
    from prejit.runtime.generation.kv_cache import Prefix
    from prejit.runtime.generation.request import Logprob, Request, Token, Usage
    from prejit.runtime.generation.sampling import Sampling
    from prejit.runtime.loader import load
    from prejit.runtime.machine.fingerprint import Fingerprint
    from prejit.runtime.options import Options
    from prejit.runtime.session import Session
    from prejit.runtime.verdict import Axis

_HOMES = {
    "bundle": ("Bundle",),
    "encoding.encoder": ("EncodeStats", "Encoded"),
    "errors": (
        *("ContextError", "FallbackWarning", "MismatchError", "PrejitError"),
        *("PrejitWarning", "RejectError", "StoreError", "TruncationWarning", "UsageError"),
    ),
    "fallback": ("fallback_counts",),
    "generation.batch": ("Batch",),
    "generation.defaults": ("Defaults",),
    "generation.generate": ("Piece", "Result", "Stats"),
    "generation.kv_cache": ("Prefix",),
    "generation.request": ("Logprob", "Request", "Token", "Usage"),
    "generation.sampling": ("Sampling",),
    "loader": ("load",),
    "machine.fingerprint": ("Fingerprint",),
    "options": ("Options",),
    "session": ("Session",),
    "verdict": ("Axis",),
}

__all__ = [
    "Axis",
    "Batch",
    "Bundle",
    "ContextError",
    "Defaults",
    "EncodeStats",
    "Encoded",
    "FallbackWarning",
    "Fingerprint",
    "Logprob",
    "MismatchError",
    "Options",
    "Piece",
    "Prefix",
    "PrejitError",
    "PrejitWarning",
    "RejectError",
    "Request",
    "Result",
    "Sampling",
    "Session",
    "Stats",
    "StoreError",
    "Token",
    "TruncationWarning",
    "UsageError",
    "Usage",
    "fallback_counts",
    "load",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            if name == "load":
                import_module("prejit.runtime.device.start").import_numpy()
            return getattr(import_module(f"prejit.runtime.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
