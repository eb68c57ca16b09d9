"""Read the tensors of a file that torch.save wrote, without running what a pickle may contain.

    NAME/data.pkl     a pickle of a dict of tensors; each refers to a storage by its number
    NAME/data/N       the values of a storage, little-endian, not compressed
    NAME/byteorder    `little`, of newer files

A pickle names the functions that it calls. Only those four that make a dict of tensors are known here, and
they are our own. The format: torch/serialization.py and torch/_utils.py.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prejit.runtime.errors import CheckpointError

_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
}
_MOST_BYTES = 2**26
"""Maximum size of the pickle, which holds no values."""
_MOST_VALUES = 2**40
"""Maximum elements of a storage."""


class TorchTensor(NamedTuple):
    """A tensor of a file. It is a tuple, which a pickle cannot change.

    Attributes:
        path: the file.
        storage: name of the entry with its values.
        dtype: NumPy's name.
        start: elements before it in the storage.
        shape: its shape; its elements are in C order.
    """

    path: Path
    storage: str
    dtype: str
    start: int
    shape: tuple[int, ...]

    def read(self, part: slice | tuple[slice, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return the values, or those of a slice.

        Raises:
            CheckpointError: the file is damaged.
        """
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)
        count = prod(self.shape)
        try:
            with zipfile.ZipFile(self.path) as archive:
                entry = archive.getinfo(self.storage)
                if entry.compress_type != zipfile.ZIP_STORED:  # it may be far larger than the file
                    raise ValueError(f"{self.storage}: expected values that are not compressed")
                content = archive.read(entry)  # checks its CRC
            flat = np.frombuffer(
                content, dtype.newbyteorder("<"), count, self.start * dtype.itemsize
            )
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise _damaged(self.path, error) from error
        values = flat.reshape(self.shape)
        return values if part is None else values[part]


def torch_tensors(path: Path) -> dict[str, TorchTensor]:
    """Return the tensors of a file by name, without reading their values.

    Raises:
        CheckpointError: there is no file, it is damaged, or it holds anything but a dict of tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (entry,) = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            if entry.file_size > _MOST_BYTES:
                raise ValueError(
                    f"data.pkl has {entry.file_size} bytes, expected at most {_MOST_BYTES}"
                )
            root = entry.filename.removesuffix("data.pkl")
            order = f"{root}byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise ValueError("byteorder: expected little")
            found = _Unpickler(archive.read(entry), path, root).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: expected a file, found none") from error
    except Exception as error:  # an unpickler raises errors of any kind
        raise _damaged(path, error) from error
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(each, TorchTensor) for name, each in found.items()
    ):
        raise _damaged(path, "expected a dict of tensors")
    return dict(found)


def _damaged(path: Path, error: object) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected a dict of tensors that torch.save wrote, in the format of 1.6 or newer: {error}",
        hint="load it with torch.load(weights_only=True) and save it with safetensors.torch.save_file",
    )


class _Unpickler(pickle.Unpickler):
    """Makes TorchTensors. A name that is not of a dict of tensors is an error before anything runs."""

    def __init__(self, content: bytes, path: Path, root: str) -> None:
        super().__init__(io.BytesIO(content))
        self._path, self._root = path, root

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *others: data,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known[module, name]

    def persistent_load(self, saved: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = saved
        if kind != "storage" or dtype not in _DTYPES.values():
            raise pickle.UnpicklingError(f"it has a storage of {dtype!r:.40}")
        return f"{self._root}data/{key}", dtype

    def _tensor(
        self, storage: Any, start: Any, shape: Any, strides: Any, *others: Any
    ) -> TorchTensor:
        name, dtype = storage
        numbers = (start, *shape)
        known = all(type(each) is int and each >= 0 for each in numbers)
        if not known or start + prod(shape) > _MOST_VALUES:
            raise pickle.UnpicklingError(f"a tensor begins at {start!r:.20}, of {shape!r:.40}")
        expected, step = [], 1
        for size in reversed(shape):
            expected.append(step)
            step *= size
        if any(
            size > 1 and stride != wanted
            for size, stride, wanted in zip(shape, strides, reversed(expected), strict=True)
        ):
            raise pickle.UnpicklingError(f"a tensor of {tuple(shape)} is not contiguous")
        return TorchTensor(self._path, name, dtype, start, tuple(shape))
