"""The limits by which a gate judges a release: those that its bundle carries, and those of the one before."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from prejit.runtime.base.typed_json import from_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format.bundle_schema import ImageManifest
from prejit.runtime.format.release_limits import DEFAULT_SHARES, SLO, ReleaseLimits


def limits_of(manifest: ImageManifest, path: str) -> ReleaseLimits:
    """Return the limits that a target's manifest carries.

    Args:
        manifest: the manifest.
        path: its file, for errors.

    Raises:
        RejectError: the annotation does not have the form that a build writes.
    """
    text = manifest.annotations.get(SLO, "{}")
    limits = from_json(ReleaseLimits, text.encode("ascii", "replace"), path)
    for name in DEFAULT_SHARES:
        try:
            limits.share(name)
        except ValueError as error:
            raise RejectError(path, f"{SLO}: {name}: {error}") from error
    return limits


def stricter(old: ReleaseLimits, new: ReleaseLimits) -> tuple[ReleaseLimits, tuple[str, ...]]:
    """Return the stricter limits of two releases, and the names of those that the new one loosens.

    A release is judged by the limits of the one before as well: it cannot loosen its own gate.
    """
    found: dict[str, Any] = {}
    loosened = []
    for name in (each.name for each in fields(ReleaseLimits)):
        was, now = _comparable(old, name), _comparable(new, name)
        is_stricter = now is not None and (was is None or now <= was)
        found[name] = getattr(new if is_stricter else old, name)
        if was is not None and not is_stricter:
            loosened.append(name)
    return ReleaseLimits(**found), tuple(loosened)


def _comparable(limits: ReleaseLimits, name: str) -> float | None:
    """Return a limit as a number: the smaller it is, the stricter. None: there is no limit."""
    if name in DEFAULT_SHARES:
        return limits.share(name)
    value: int | None = getattr(limits, name)
    return -value if name == "tokens_per_second" and value is not None else value


def described_limits(limits: ReleaseLimits) -> dict[str, int | str]:
    """Return the limits that hold, by name: those that are given, and the defaults."""
    given = {name: value for name, value in asdict(limits).items() if value is not None}
    return {**DEFAULT_SHARES, **given}
