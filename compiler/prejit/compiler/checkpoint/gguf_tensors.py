"""Read the tensors of a GGUF file, by llama.cpp's package `gguf`, for a model that config.json describes.

The file says what it computes in less detail than config.json does (Llama 3's rope has no parameters there),
so what it says must not contradict config.json (gguf_config.py). Without one model_source.py makes it.
llama.cpp writes some tensors in another order or form, which is undone:

    llama, mistral  rows of q and k: the two halves of a head, which RoPE turns together, lie in turns
    gemma           scales of norms are 1 larger

Q4_0 is integers times a float16 scale for each 32 inputs: what int4 is here. Q4_1 and Q4_K are integers with
a scale and a minimum. Where the minimum of a group is 16,000 times its scale or more, its integers become 0.

`read_metadata` and `read_kinds` read a file before the package does, which makes an object for each element
that the file counts, even past its end:

    file     "GGUF", version u32, tensors u64, entries u64; entries; tensors
    entry    key, type u32, value
    text     bytes u64, UTF-8
    array    type u32, elements u64, elements
    tensor   name, dimensions u32, each u64, type u32, offset u64
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint.gguf_config import MODEL_TYPES, ROPE_FACTORS, check_agreement
from prejit.compiler.checkpoint.tensor_files import Reading, Tensor, unwatched
from prejit.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from prejit.compiler.models.published_integers import Integers

Values = np.ndarray[Any, Any]
_ARCHITECTURES = dict(
    sorted({"mistral": "llama", **{ours: theirs for theirs, ours in MODEL_TYPES.items()}}.items())
)
"""The architectures of llama.cpp that are read, by model_type."""
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 144}
"""Bytes of a block of each type whose integers int4 holds; of 32 elements, Q4_K's of 256."""
_WITH_MINIMUMS = (3, 12)
"""Numbers of Q4_1 and Q4_K in a file (ggml_type)."""
_MOST_SCALES = 16_000
"""A minimum of more scales than this, beyond the precision of float16, hides the integers of its group."""
_NUMBER_FORMATS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""The format of each type of numbers, for `struct`."""
_TEXT_TYPE, _ARRAY_TYPE = 8, 9
"""Numbers of the types of entries that are no numbers."""
_MOST_ELEMENTS = 1 << 22
"""Maximum elements of all arrays, entries and tensors of a file: vocabularies have some 500,000."""
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        kind: the type of its elements: `Q4_0`.
        data: its bytes [..., of a row], or floats.
        widen: returns elements as float32.
        rows: the place of each row in the file; None: in order.
        added: what was added to the values.
        before: is called before they are read.
    """

    kind: str
    data: Values
    widen: Callable[[Values], Values]
    rows: Values | None = None
    added: float = 0.0
    before: Callable[[], object] = lambda: None

    @property
    def form(self) -> str:
        """See PublishedInFewBits."""
        return "" if self.kind in ("F32", "F16", "BF16", "F64") else f"GGUF, {self.kind}"

    def read(self, part: slice | None = None) -> Values:
        """Return a slice of the first axis, float32."""
        values = self.widen(np.array(self._stored(slice(None) if part is None else part)))
        return values - np.float32(self.added) if self.added else values

    def integers(self) -> Integers | None:
        """See PublishedInFewBits."""
        from prejit.compiler.models.published_integers import Integers

        if self.kind not in _BLOCK_BYTES or self.data.ndim != 2:
            return None
        data = self._stored(slice(None))
        blocks = np.ascontiguousarray(data).reshape(len(data), -1, _BLOCK_BYTES[self.kind])
        if self.kind == "Q4_K":
            return Integers(*_of_q4_k(blocks))
        pairs = blocks[:, :, 2 if self.kind == "Q4_0" else 4 :]
        values = np.concatenate([pairs & 15, pairs >> 4], axis=2).astype(np.int8) - np.int8(8)
        scales, *minimums = np.moveaxis(_halves(blocks, 1 if self.kind == "Q4_0" else 2), -1, 0)
        if not minimums:
            return Integers(values.reshape(len(data), -1), scales)
        return Integers(*_with_zeros(values, scales, minimums[0]))

    def _stored(self, part: slice) -> Values:
        self.before()
        return self.data[part if self.rows is None else self.rows[part]]


def _halves(blocks: Values, count: int) -> Values:
    """Return the float16 numbers at the beginning of blocks: float32 [out, blocks, count]."""
    return np.ascontiguousarray(blocks[:, :, : 2 * count]).view("<f2").astype(np.float32)


def _of_q4_k(blocks: Values) -> tuple[Values, Values, Values]:
    """Return blocks of Q4_K, each 8 groups, whose scales and minimums are 6 bits times one of the block."""
    from gguf.quants import Q4_K

    rows = len(blocks)
    halves = _halves(blocks, 2)
    factors = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, :, 4:16]).reshape(-1, 12))
    scales, minimums = (
        (halves[:, :, at, None] * each.reshape(rows, -1, 8).astype(np.float32)).reshape(rows, -1)
        for at, each in enumerate(factors)
    )
    pairs = blocks[:, :, 16:].reshape(rows, -1, 4, 1, 32)
    values = np.concatenate([pairs & 15, pairs >> 4], axis=3).astype(np.int8) - np.int8(8)
    return _with_zeros(values.reshape(rows, -1, 32), scales, -minimums)


def _with_zeros(values: Values, scales: Values, minimums: Values) -> tuple[Values, Values, Values]:
    """Return integers [out, in], scales and zero points of groups [out, groups, 32] with minimums."""
    hides = np.abs(minimums) >= _MOST_SCALES * np.abs(scales)
    middle = minimums + np.float32(7.5) * scales
    zeros = np.where(hides, np.float32(-1), -8 - minimums / np.where(hides, 1, scales))
    values = np.where(hides[:, :, None], np.int8(0), values)
    return values.reshape(len(values), -1), np.where(hides, middle, scales), zeros


def gguf_groups(path: Path) -> Groups:
    """Return the groups that hold the integers of a file in int4; a damaged one is refused later."""
    try:
        kinds = read_kinds(path)
    except (ValueError, struct.error, CheckpointError):
        return GROUPS_OF_32
    return Groups(zeros=bool(kinds & set(_WITH_MINIMUMS)))


def read_gguf(path: Path, *, arrays: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata of a file, and its tensors by name as the package gguf reads them.

    `arrays` as of `read_metadata`.

    Raises:
        CheckpointError: the package is not installed, or the file is damaged.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path}: expected the package gguf, which reads it, found none",
            hint="pip install 'prejit-compiler[gguf]'",
        ) from error
    try:
        metadata = read_metadata(path, arrays=arrays)
        held = {each.name: each for each in gguf.GGUFReader(path).tensors}
    except CheckpointError:
        raise
    except Exception as error:  # the reader raises errors of many kinds
        raise CheckpointError(
            f"{path}: damaged or cut off: {type(error).__name__}: {error}",
            hint="fetch or write the file again",
        ) from error
    return metadata, held


def gguf_tensors(
    path: Path, config: Any, parameters: Iterable[str], reading: Reading = unwatched
) -> dict[str, Tensor]:
    """Return the tensors of a file by the names of parameters.

    A tensor without a parameter keeps its name.

    Raises:
        CheckpointError: the package is not installed, the file is damaged, or of another model.
    """
    architecture = _ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise CheckpointError(
            f"{path}: expected a model of {', '.join(map(shown, _ARCHITECTURES))}, as config.json gives "
            f"model_type; found {shown(config.model_type)}",
            hint="take the checkpoint in safetensors",
        )
    metadata, held = read_gguf(path)
    import gguf

    written = metadata.get("general.architecture")
    if written != architecture:
        raise CheckpointError(
            f"{path}: general.architecture: expected {shown(architecture)}, for model_type "
            f"{shown(config.model_type)} of config.json; found {shown(written)}",
            hint="config.json and the file must come from the same model",
        )
    check_agreement(path, metadata, config, held)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    result: dict[str, Tensor] = {}
    for name in parameters:
        theirs = names.get_name(name, (".weight", ".bias"))
        if theirs is not None and (tensor := held.pop(theirs, None)) is not None:
            result[name] = _tensor(path, tensor, name, config, reading)
    left = {name: each for name, each in held.items() if name not in ROPE_FACTORS}
    others = {name: _tensor(path, each, name, config, reading) for name, each in left.items()}
    return result | others


def _tensor(path: Path, tensor: Any, name: str, config: Any, reading: Reading) -> Tensor:
    import gguf

    shape = tuple(int(size) for size in reversed(tensor.shape))
    kind = gguf.GGMLQuantizationType(tensor.tensor_type)
    data = tensor.data
    rows = None
    module = name.removesuffix(".weight").removesuffix(".bias")
    if _ARCHITECTURES[config.model_type] == "llama" and module.endswith(("q_proj", "k_proj")):
        keys = module.endswith("k_proj")
        heads = config.num_key_value_heads if keys else config.num_attention_heads
        # The file has (half of the head, place in it) in turns: place, half.
        if shape[0] % (2 * heads) == 0:
            rows = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    is_norm = config.model_type.startswith("gemma") and name.endswith("norm.weight")
    widen, start = partial(_widened, path, name, kind), int(tensor.data_offset)
    before = partial(reading, path, start, start + int(tensor.n_bytes))
    found = GgufTensor(kind.name, data, widen, rows, float(is_norm), before)
    return Tensor(path, shape, "F32", found.read, found)


def _widened(path: Path, name: str, kind: Any, values: Values) -> Values:
    """Return elements in float32.

    Raises:
        CheckpointError: the package does not read the type.
    """
    from gguf.quants import dequantize

    try:
        wide: Values = dequantize(values, kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: {name}: expected a type that the package gguf reads, found {kind.name}",
            hint="pip install --upgrade gguf, or take the model in another type",
        ) from error
    return wide.astype(np.float32, copy=False)


def read_metadata(path: Path, *, arrays: bool = False) -> dict[str, Any]:
    """Return the metadata of a file.

    Args:
        path: the file.
        arrays: whether to return all arrays; else texts, and more than 1024 numbers, are None.

    Raises: as `_read`.
    """
    return _read(path, arrays=arrays)[0]


def read_kinds(path: Path) -> set[int]:
    """Return the numbers of the types of a file's tensors.

    Raises: as `_read`.
    """
    return _read(path, arrays=False)[1]


def _read(path: Path, *, arrays: bool) -> tuple[dict[str, Any], set[int]]:
    """Return the metadata of a file, and the types of its tensors.

    Raises:
        CheckpointError: the file is one of several, or of another byte order.
        ValueError, struct.error: the file is damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        cursor = _Cursor(content, arrays)
        if cursor.bytes(4, "the file") != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = cursor.number("I")
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{path}: expected a little-endian file, found a big-endian one",
                hint="convert it: gguf-convert-endian FILE little",
            )
        if version not in (2, 3):
            raise ValueError(f"expected version 2 or 3 of GGUF, found {version}")
        tensors, entries = cursor.number("Q"), cursor.number("Q")
        cursor.count(entries, 13, "the metadata")
        found = {}
        for _ in range(entries):
            key = cursor.text("a key")
            found[key] = cursor.value(key)
        cursor.count(tensors, 24, "the tensors")
        kinds = set()
        for _ in range(tensors):
            name = cursor.text("a tensor")
            dimensions = cursor.number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(
                    f"{name}: expected up to {_MOST_DIMENSIONS} dimensions, found {dimensions}"
                )
            cursor.bytes(8 * dimensions, name)
            kinds.add(cursor.number("I"))
            cursor.bytes(8, name)
    if found.get("split.count", 0) not in (0, 1):
        raise CheckpointError(
            f"{path}: split.count: expected a whole model, found one of {shown(found['split.count'])} files",
            hint="join them: llama-gguf-split --merge FIRST_FILE WHOLE_FILE",
        )
    return found, kinds


class _Cursor:
    """A place in a file."""

    def __init__(self, content: mmap.mmap, arrays: bool) -> None:
        self._content, self._at, self._elements = content, 0, 0
        self._arrays = arrays

    def number(self, form: str) -> Any:
        """Return a number."""
        (value,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def bytes(self, size: int, name: str) -> bytes:
        """Return so many bytes."""
        self._fits(size, "bytes", name)
        self._at += size
        return self._content[self._at - size : self._at]

    def text(self, name: str) -> str:
        """Return a text."""
        return self.bytes(self.number("Q"), name).decode()

    def count(self, elements: int, least_bytes: int, name: str) -> None:
        """Check that the file can hold so many elements, each of some bytes."""
        self._fits(elements * least_bytes, "bytes", name)
        self._elements += elements
        if self._elements > _MOST_ELEMENTS:
            raise ValueError(
                f"{name}: expected up to {_MOST_ELEMENTS:,} elements, found {self._elements:,}"
            )

    def value(self, name: str) -> Any:
        """Return the value of an entry."""
        kind = self.number("I")
        if kind == _TEXT_TYPE:
            return self.text(name)
        if kind != _ARRAY_TYPE:
            return self.number(_number(kind, name))
        kind, elements = self.number("I"), self.number("Q")
        if kind == _TEXT_TYPE:
            self.count(elements, 8, name)
            if self._arrays:
                return [self.text(name) for _ in range(elements)]
            for _ in range(elements):
                self.bytes(self.number("Q"), name)
            return None
        form = _number(kind, name)
        size = struct.calcsize(f"<{form}")
        self.count(elements, size, name)
        content = self.bytes(elements * size, name)
        is_read = self._arrays or elements <= 1024
        return list(struct.unpack(f"<{elements}{form}", content)) if is_read else None

    def _fits(self, size: int, unit: str, name: str) -> None:
        left = len(self._content) - self._at
        if size > left:
            raise ValueError(f"{name}: expected up to {left:,} {unit}, found {size:,}")


def _number(kind: int, name: str) -> str:
    if kind not in _NUMBER_FORMATS:
        raise ValueError(f"{name}: expected a type of numbers or texts, found {kind}")
    return _NUMBER_FORMATS[kind]
