"""The server side of prejit: load a bundle and run it.

    from prejit.runtime import load

    bundle = load("artifacts/demo")
    print(bundle.generate("def main(", max_new_tokens=64).text)

Names are imported when they are first wanted (PEP 562): `prejit --help` and `prejit explain` need no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prejit.runtime.batch import Batch
    from prejit.runtime.defaults import Defaults
    from prejit.runtime.encode import Encoded, EncodeStats
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
    from prejit.runtime.fingerprint import Axis, Fingerprint
    from prejit.runtime.generate import Piece, Result, Stats
    from prejit.runtime.kv_cache import Prefix
    from prejit.runtime.loaded import Bundle, Options, Session
    from prejit.runtime.loader import fallback_counts, load
    from prejit.runtime.request import Logprob, Request, Token, Usage
    from prejit.runtime.sampling import Sampling

_HOMES = {
    "batch": ("Batch",),
    "defaults": ("Defaults",),
    "encode": ("EncodeStats", "Encoded"),
    "errors": (
        *("ContextError", "FallbackWarning", "MismatchError", "PrejitError"),
        *("PrejitWarning", "RejectError", "StoreError", "TruncationWarning", "UsageError"),
    ),
    "fingerprint": ("Axis", "Fingerprint"),
    "generate": ("Piece", "Result", "Stats"),
    "kv_cache": ("Prefix",),
    "loaded": ("Bundle", "Options", "Session"),
    "loader": ("fallback_counts", "load"),
    "request": ("Logprob", "Request", "Token", "Usage"),
    "sampling": ("Sampling",),
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
                import_module("prejit.runtime.start").import_numpy()
            return getattr(import_module(f"prejit.runtime.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
