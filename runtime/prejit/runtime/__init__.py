"""The server side of prejit: load a bundle and run it.

    from prejit.runtime import load

    bundle = load("artifacts/demo")
    print(bundle.generate("def main(", max_new_tokens=64).text)

Names are imported when they are first wanted (PEP 562): `prejit --help` and `prejit explain` need no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prejit.runtime.errors import (
        ContextError,
        FallbackWarning,
        MismatchError,
        PrejitError,
        PrejitWarning,
        RejectError,
        StoreError,
        UsageError,
    )
    from prejit.runtime.fingerprint import Axis, Fingerprint
    from prejit.runtime.generate import Piece, Result, Sampling, Stats
    from prejit.runtime.loaded import Bundle
    from prejit.runtime.loader import fallback_counts, load

_HOMES = {
    "errors": (
        *("ContextError", "FallbackWarning", "MismatchError", "PrejitError"),
        *("PrejitWarning", "RejectError", "StoreError", "UsageError"),
    ),
    "fingerprint": ("Axis", "Fingerprint"),
    "generate": ("Piece", "Result", "Sampling", "Stats"),
    "loaded": ("Bundle",),
    "loader": ("fallback_counts", "load"),
}

__all__ = [
    "Axis",
    "Bundle",
    "ContextError",
    "FallbackWarning",
    "Fingerprint",
    "MismatchError",
    "Piece",
    "PrejitError",
    "PrejitWarning",
    "RejectError",
    "Result",
    "Sampling",
    "Stats",
    "StoreError",
    "UsageError",
    "fallback_counts",
    "load",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"prejit.runtime.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
