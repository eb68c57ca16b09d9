"""Check the settings of files in the sentence-transformers layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

LAYOUT = "expected a directory in the sentence-transformers layout"
HINT = "write the model as a JAX function or flax module and compile it as a [[program]]"


def known_keys(file: Path, settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key that is not known, with its file, value and all known keys."""
    for key, value in settings.items():
        if key not in known:
            raise CheckpointError(
                f"{file}: {key}: expected one of {', '.join(known)}; found {key} with {shown(value)}"
                f"{did_you_mean(key, known)}",
                hint=HINT,
            )


def expect(file: Path, settings: Mapping[str, Any], key: str, allowed: Collection[Any]) -> None:
    """Refuse the value of a key, if the file has it, that is not allowed."""
    # In Python True equals 1, but a setting of 1 is not the boolean that is expected.
    if key in settings and not any(
        settings[key] == value and type(settings[key]) is type(value) for value in allowed
    ):
        raise CheckpointError(
            f"{file}: {key}: expected {' or '.join(map(shown, allowed))}; found {shown(settings[key])}",
            hint=HINT,
        )
