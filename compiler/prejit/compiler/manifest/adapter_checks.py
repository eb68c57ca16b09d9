"""Rules of `[adapters]` in a manifest, and between it and other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.valid_values import MAX_RANK, MAX_SLOTS, KeyPath, expected


def adapter_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find what is wrong with adapters that are kept apart from the weights."""
    adapters, model, generate = (_table(data, name) for name in ("adapters", "model", "generate"))
    for name, most in (("slots", MAX_SLOTS), ("rank", MAX_RANK)):
        size = adapters.get(name)
        if type(size) is int and not 0 < size <= most:
            key = f"adapters.{name}"
            yield ("adapters", name), f"expected {expected(key)}; found {shown(size)}"
    if "adapters" not in data:
        return
    if "encode" in data:
        yield ("adapters",), "expected none beside [encode]: an encoder takes none"
    if "mesh" in data:
        yield ("adapters",), "expected none beside [mesh]: several devices take none"
    if "source" not in model:
        yield (
            ("adapters",),
            "expected a [model] with a source beside it, whose matrices they change",
        )
    if generate.get("source"):
        yield ("adapters",), "expected none beside generate.source: an encoder-decoder takes none"


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}
