"""Write and read the state of a bound program: a .safetensors file, or an orbax checkpoint directory.

The packages `safetensors` and `orbax-checkpoint` do it. Neither is needed for anything else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from prejit.runtime.base.written_files import write_file
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.programs import pytree

Arrays = Mapping[trees.Path, np.ndarray[Any, Any]]

_CODES = {
    **{"bool": "BOOL", "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"},
}
"""The dtypes that the package safetensors writes, and their names in the format."""


def write_state(path: str | os.PathLike[str], arrays: Arrays) -> None:
    """Write arrays by their paths. Errors as `Bound.save`."""
    at = Path(path)
    named = {pytree.dotted(place): array for place, array in arrays.items()}
    if at.suffix != ".safetensors":
        _write_orbax(at, named)
        return
    safetensors = _package("safetensors", at)
    for name, array in named.items():
        if str(array.dtype) not in _CODES:
            raise StoreError(
                f"{at}: {name}: expected a dtype of safetensors, found {array.dtype}",
                hint="save to a directory: orbax writes every dtype",
            )
    try:
        with tempfile.TemporaryDirectory(prefix=".prejit-", dir=at.parent) as directory:
            written = Path(directory, "state")
            _package("safetensors.numpy", at).save_file(named, written)
            write_file(at, written)
    except (OSError, safetensors.SafetensorError) as error:
        raise StoreError(f"{at}: cannot write the state: {error}") from error


def read_state(
    path: str | os.PathLike[str], expected: Mapping[trees.Path, Array]
) -> dict[trees.Path, np.ndarray[Any, Any]]:
    """Read arrays by their paths. Errors as `Bound.restore`."""
    at = Path(path)
    found = _read_orbax(at) if at.is_dir() else _read_safetensors(at)
    arrays = {}
    names = {pytree.dotted(place): array for place, array in expected.items()}
    missing, unexpected = names.keys() - found.keys(), found.keys() - names.keys()
    if missing or unexpected:
        what = f"no {min(missing)!r}" if missing else f"an unexpected {min(unexpected)!r}"
        raise StoreError(f"{at}: expected the state of this program, found {what}")
    for name, array in names.items():
        value = found[name]
        if (str(value.dtype), value.shape) != (array.dtype, array.shape):
            raise StoreError(
                f"{at}: {name}: expected {array.dtype}{list(array.shape)}, found "
                f"{value.dtype}{list(value.shape)}"
            )
        arrays[array.path] = value
    return arrays


def _read_safetensors(at: Path) -> dict[str, np.ndarray[Any, Any]]:
    safetensors = _package("safetensors", at)
    dtypes = {code: name for name, code in _CODES.items()}
    try:
        return {
            name: np.frombuffer(
                tensor["data"], dtype_of(dtypes.get(tensor["dtype"], "uint8"))
            ).reshape(tensor["shape"])
            for name, tensor in safetensors.deserialize(at.read_bytes())
        }
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise StoreError(f"{at}: cannot read the state: {error}") from error


def _write_orbax(at: Path, named: Mapping[str, np.ndarray[Any, Any]]) -> None:
    orbax = _package("orbax.checkpoint", at)
    try:
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(at.absolute(), dict(named))
    except Exception as error:  # orbax and tensorstore raise errors of many kinds
        raise StoreError(f"{at}: orbax cannot write the state: {error}") from error


def _read_orbax(at: Path) -> dict[str, np.ndarray[Any, Any]]:
    orbax = _package("orbax.checkpoint", at)
    try:
        with orbax.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(at.absolute())
    except Exception as error:
        raise StoreError(f"{at}: orbax cannot read the state: {error}") from error
    return {name: np.asarray(value) for name, value in restored.items()}


def _package(name: str, at: Path) -> ModuleType:
    """Import a package that only states need."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = "orbax-checkpoint" if name.startswith("orbax") else "safetensors"
        raise UsageError(
            f"{at}: expected the package {package}, found none", hint=f"pip install {package}"
        ) from error
