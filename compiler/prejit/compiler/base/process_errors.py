"""Errors as JSON and as text: what a process that works for a build answers in place of a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prejit.runtime.errors import (
    BuildError,
    CheckpointError,
    ManifestError,
    PrejitError,
    RejectError,
    StoreError,
    UsageError,
)

_KINDS: Mapping[str, type[PrejitError]] = {
    kind.code: kind for kind in (CheckpointError, ManifestError, StoreError, UsageError)
}
"""The errors, besides BuildError and RejectError, that a process answers."""


def plain_error(error: PrejitError) -> dict[str, Any]:
    """Return an error as JSON."""
    return {"code": error.code, "message": str(error), "hint": error.hint}


def error_text(error: Exception) -> str:
    """Return an error as text: prejit's own says all, XLA raises errors of many kinds."""
    return str(error) if isinstance(error, PrejitError) else f"{type(error).__name__}: {error}"


def error_of(plain: Mapping[str, Any]) -> PrejitError:
    """Return the error that `plain_error` turned into JSON."""
    code, message, hint = plain["code"], plain["message"], plain["hint"]
    if code == RejectError.code:
        path, _, text = message.partition(": ")
        return RejectError(path, text, hint=hint)
    return _KINDS.get(code, BuildError)(message, hint=hint)
