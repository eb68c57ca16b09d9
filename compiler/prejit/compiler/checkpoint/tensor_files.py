"""Read files of tensors one tensor at a time: safetensors, flax's msgpack, and orbax directories.

Formats: github.com/huggingface/safetensors; flax/serialization.py; orbax.checkpoint. Reading them runs no
code. torch's pickles are not read, but for small heads (models/torch_tensors.py).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from prejit.compiler.models.published_integers import PublishedInFewBits

Values = np.ndarray[Any, Any]
Reading = Callable[[Path, int, int], object]
"""It is called before a tensor is read: with its file, and where its bytes start and end."""
_SMALL_FLOATS = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}
"""The types of safetensors that it cannot give NumPy, with the names of ml_dtypes."""
_OF_HEADERS = (AttributeError, LookupError, TypeError, ValueError)
"""Errors of reading a header that safetensors has read: the file changed meanwhile."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
        path: the file.
        shape: the stored shape.
        dtype: the format's name for it.
        read: returns the values, or those of a slice of the first axis, or of a slice of each axis: a new
            array each time, or a view of memory that stays allocated.
        few_bits: the matrix, if it is made of several tensors (quantized_tensors.py).
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[..., Values]
    few_bits: PublishedInFewBits | None = None


def unwatched(path: Path, start: int, end: int) -> None:
    """Do nothing. It is the `Reading` of readers that nobody watches."""


def tensors(path: Path, reading: Reading = unwatched) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors or .msgpack file by name, without reading their values.

    Nobody watches a .msgpack file, which is read whole.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    return _msgpack(path) if path.suffix == ".msgpack" else _safetensors(path, reading)


def read_parameters(path: Path) -> dict[str, Values]:
    """Read parameters for a function of the user, by name; nested names are joined by dots.

    Args:
        path: a .safetensors file, or a checkpoint directory that orbax wrote (StandardCheckpointer,
            PyTreeCheckpointer, or one step of a CheckpointManager).

    Raises:
        CheckpointError: the path is neither, or cannot be read.
    """
    if path.is_dir():
        return _orbax(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: expected a .safetensors file or an orbax checkpoint directory, found "
            f"{'another file' if path.exists() else 'nothing'}",
            hint="safetensors.numpy.save_file writes any flat dict of arrays",
        )
    return {name: tensor.read() for name, tensor in tensors(path).items()}


def _safetensors(path: Path, reading: Reading) -> dict[str, Tensor]:
    import ml_dtypes  # noqa: F401 (safetensors slices bfloat16 only where numpy knows the dtype)
    from safetensors import SafetensorError, safe_open

    def read(name: str, part: slice | tuple[slice, ...] | None = None) -> Values:
        try:
            with safe_open(path, "np") as file:
                values: Values = (
                    file.get_tensor(name) if part is None else file.get_slice(name)[part]
                )
        except (OSError, SafetensorError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot read tensor {name!r}: {error}") from error
        return values

    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {
                name: Tensor(path, tuple(part.get_shape()), part.get_dtype(), partial(read, name))
                for name, part in slices.items()
            }
        places = _places(path)
        small = {name: tensor for name, tensor in found.items() if tensor.dtype in _SMALL_FLOATS}
        found |= {
            name: replace(tensor, read=partial(_small_floats, tensor, places[name][0]))
            for name, tensor in small.items()
        }
        return {
            name: replace(
                tensor, read=partial(_watched, partial(reading, path, *places[name]), tensor.read)
            )
            for name, tensor in found.items()
        }
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected a file, found none") from error
    except (OSError, SafetensorError, *_OF_HEADERS) as error:
        raise CheckpointError(
            f"{path}: damaged or cut off: {error}", hint="fetch or write the checkpoint again"
        ) from error


def _watched(before: Callable[[], object], read: Callable[..., Values], *part: Any) -> Values:
    before()
    return read(*part)


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each tensor starts and ends in a safetensors file that was opened without an error."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + size + start, 8 + size + end) for name, (start, end) in places.items()}


def _small_floats(tensor: Tensor, start: int, part: slice | None = None) -> Values:
    """Return values that safetensors cannot give NumPy."""
    dtype = np.dtype(_SMALL_FLOATS[tensor.dtype])
    try:
        mapped = np.memmap(tensor.path, dtype, "r", start, tensor.shape)
        return np.array(mapped if part is None else mapped[part])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.path}: cannot read a tensor: {error}") from error


def _msgpack(path: Path) -> dict[str, Tensor]:
    from flax import serialization, traverse_util

    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            restored = serialization.msgpack_restore(content)
        leaves = traverse_util.flatten_dict(restored, sep=".")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected a file, found none") from error
    except Exception as error:  # msgpack raises most of its errors as plain ValueError or Exception
        raise CheckpointError(
            f"{path}: damaged or cut off: {type(error).__name__}: {error}",
            hint="fetch or write the checkpoint again",
        ) from error

    def part_of(leaf: Values, part: slice | tuple[slice, ...] | None = None) -> Values:
        return leaf if part is None else leaf[part]

    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    return {
        name: Tensor(path, leaf.shape, str(leaf.dtype), partial(part_of, leaf))
        for name, leaf in arrays.items()
    }


def _orbax(path: Path) -> dict[str, Values]:
    found = next((at for at in (path, path / "default") if (at / "_METADATA").is_file()), None)
    if found is None:
        steps = [at.name for at in path.iterdir() if (at / "default" / "_METADATA").is_file()]
        raise CheckpointError(
            f"{path}: expected an orbax checkpoint directory, with _METADATA in it, found none",
            hint=f"give the directory of one step, such as {path / max(steps)}" if steps else None,
        )
    import jax
    from orbax.checkpoint import PyTreeCheckpointer, RestoreArgs

    found = found.absolute()
    try:
        with PyTreeCheckpointer() as checkpointer:
            stored = checkpointer.metadata(found).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: RestoreArgs(restore_type=np.ndarray), stored)
            restored = checkpointer.restore(found, restore_args=as_numpy)
    except Exception as error:  # orbax and tensorstore raise errors of many kinds
        raise CheckpointError(f"{path}: orbax cannot restore it: {error}") from error
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return _without_value({_joined(at): np.asarray(leaf) for at, leaf in leaves})


def _joined(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf: keys and indexes, joined by dots."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path)


def _without_value(named: Mapping[str, Values]) -> dict[str, Values]:
    """Remove `.value` from names of a flax nnx state, where it names the variable's content."""
    if all(name.endswith(".value") for name in named):
        return {name.removesuffix(".value"): values for name, values in named.items()}
    return dict(named)
