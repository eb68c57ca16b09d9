"""Find a model of the user by name, and check it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from prejit.compiler.checking.check_finding import TOLERANCE, Finding
from prejit.compiler.checking.kit import SOURCE_SIZE, check_model
from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.own_decoder import CHECK_MODEL, find_model
from prejit.compiler.manifest.manifest import Model
from prejit.runtime.errors import ManifestError, UsageError


def check_user_model(
    model: str,
    *,
    params: Path | None = None,
    against: str | None = None,
    tolerance: float = TOLERANCE,
    source_size: int = SOURCE_SIZE,
) -> list[Finding]:
    """Return the findings of all checks, computed on the CPU.

    Args:
        model: `package.module:attribute` of the model, in the current directory or installed.
        params: a .safetensors file or orbax directory with the values of its parameters; None: its own.
        against: `package.module:attribute` of a reference, as `kit.check_model` takes it, or None.
        tolerance: as in `kit.check_model`.
        source_size: as in `kit.check_model`.

    Raises:
        UsageError: the model or the reference does not exist, cannot be imported, or is none; or the
            parameters do not fit.
        CheckpointError: the parameters cannot be read.
        BuildError: making the model fails.
    """
    parameters = None if params is None else read_parameters(params)
    modules = UserModules(Path.cwd())
    try:
        found = find_model(
            Model(module=_name("MODEL", model), impure=True),
            "check-model",
            parameters,
            modules,
            _nested,
        )
        reference = None
        if against is not None:
            reference = modules.find(
                _name("--reference", against), "check-model: --reference", impure=True
            )
    except ManifestError as error:  # here is no manifest, and no other command to try
        hint = None if error.hint in (None, CHECK_MODEL) else _without_manifest(str(error.hint))
        raise UsageError(_without_manifest(str(error)), hint=hint) from error
    if not (reference is None or callable(reference)):
        raise UsageError(
            f"check-model: --reference: expected a function, found {type(reference).__name__} "
            f"{against!r}",
            hint="it takes tokens int32 [B, T] and returns logits [B, T, V]",
        )
    values = {name: read() for name, read in found.exact.values.items()}
    with modules.in_use(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return list(
            check_model(
                found.exact.model,
                values,
                against=reference,
                tolerance=tolerance,
                source_size=source_size,
                describe=modules.describe,
            )
        )


def _name(what: str, name: str) -> str:
    """Return a name of an object, `package.module:attribute`.

    Raises:
        UsageError: it has another form.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise UsageError(
            f"check-model: {what}: expected package.module:attribute, found {name!r}",
            hint="model:decoder is the object `decoder` of model.py in this directory",
        )
    return name


def _without_manifest(text: str) -> str:
    """Return an error's text with the command's names for what a manifest gives."""
    for name, here in (
        ("model.module: ", ""),
        ("model.params", "--params"),
        ("beside the manifest", "into this directory"),
    ):
        text = text.replace(name, here)
    return text


def _nested(weights: Mapping[str, Any]) -> Any:
    from flax import traverse_util

    return traverse_util.unflatten_dict(dict(weights), sep=".")
