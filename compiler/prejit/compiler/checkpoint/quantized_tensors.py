"""Read matrices that were published in few bits, as one tensor each: their values in float32, or integers.

    gptq    qweight int32 [in / n, out], n inputs in a word; qzeros [groups, out / n]; scales [groups, out];
            g_idx [in]: the group of each input, which may be in any order
    awq     qweight int32 [in, out / 8]; qzeros [groups, out / 8]; scales [groups, out]. A word holds the
            outputs 0, 2, 4, 6, 1, 3, 5, 7, the first in the lowest bits
    compressed-tensors
            weight_packed int32 [out, in / n]; weight_scale [out, groups] or [1]; weight_zero_point [out / n,
            groups], or int8 like the scales; weight_shape [2]. Or weight int8 or float8 [out, in], with
            scales of a tensor, outputs or blocks
    fp8     weight float8 [out, in]; weight_scale_inv: a factor for each block
    bitsandbytes
            weight uint8 [out * in / 2, 1], two indexes of a table in a byte, the first in the high bits; a
            factor for each block of elements, which may be in eight bits too. Or weight int8 and SCB [out]

The lowest bits of a word hold its first element. A value is (integer - zero point) * scale: each product is
exact in float32 for integers of 8 bits with scales of 16, and rounded once otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.checkpoint.tensor_files import Tensor
from prejit.compiler.models.quantization_settings import BITS, Quantization
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.checks.layers import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    from prejit.compiler.models.published_integers import Integers

Values = np.ndarray[Any, Any]
_WORD_BITS = 32
_AWQ_ORDER = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
"""The place in a word of each of its outputs."""
_OF_ACTIVATIONS = tuple(
    f"{name}_{what}"
    for name in ("input", "activation", "output", "q", "k", "v")
    for what in ("scale", "zero_point", "global_scale")
)
"""Ends of names of tensors that say how activations and caches are rounded, which are not rounded here."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (out, in) in few bits.

    Attributes:
        name: its name, for errors.
        path: its file.
        form: how it was published, in words.
        shape: outputs and inputs.
        values: returns what is multiplied by the scales, for a slice of outputs: integers or floats.
        scales: returns the scales, float32 [r, c].
        block: the outputs and the inputs that share a scale.
        zeros: returns the zero points [r, c], of the values' kind; None: they are 0.
        groups: returns the group of each input, an index of c; None: the inputs of a block lie beside each
            other.
    """

    name: str
    path: Path
    form: str
    shape: tuple[int, int]
    values: Callable[[slice], Values]
    scales: Callable[[], Values]
    block: tuple[int, int]
    zeros: Callable[[], Values] | None = None
    groups: Callable[[], Values] | None = None

    def read(self, part: slice | None = None) -> Values:
        """Return the values of a slice of outputs, float32."""
        part = slice(*(part or slice(None)).indices(self.shape[0])[:2])
        outputs = np.arange(part.start, max(part.start, part.stop))
        at = np.ix_(outputs // self.block[0], self._group_of_each())
        values = self.values(part)
        if self.zeros is not None:
            wide: Any = np.int16 if np.issubdtype(values.dtype, np.integer) else np.float32
            values = values.astype(wide) - self.zeros().astype(wide)[at]
        return values.astype(np.float32) * self.scales()[at]

    def integers(self) -> Integers | None:
        """Return the matrix as integers and scales; None: it is no such product."""
        from prejit.compiler.models.published_integers import Integers

        (outputs, inputs), (rows, columns) = self.shape, self.block
        values = self.values(slice(0, outputs))
        if not np.issubdtype(values.dtype, np.integer) or inputs % columns:
            return None
        groups = self._group_of_each()
        if not np.array_equal(groups, np.arange(inputs) // columns):
            return None
        each_output = np.arange(outputs) // rows
        zeros = None if self.zeros is None else self.zeros().astype(np.int16)[each_output]
        if values.dtype == np.uint8:  # of 4 or 8 bits, without a sign
            most = max(int(each.max(initial=0)) for each in (values, zeros) if each is not None)
            half = 8 if most < 16 else 128
            zeros = np.zeros((outputs, inputs // columns), np.int16) if zeros is None else zeros
            values, zeros = values.astype(np.int16) - half, zeros - half
        if values.min(initial=0) < -128 or values.max(initial=0) > 127:
            return None
        floats = None if zeros is None or not zeros.any() else zeros.astype(np.float32)
        return Integers(values.astype(np.int8), self.scales()[each_output], floats)

    def _group_of_each(self) -> Values:
        """Return the group of each input.

        Raises:
            CheckpointError: there is no such group.
        """
        inputs, columns = self.shape[1], self.block[1]
        if self.groups is None:
            return np.arange(inputs) // columns
        found = self.groups()
        count = -(-inputs // columns)
        if found.min(initial=0) < 0 or found.max(initial=0) >= count:
            raise CheckpointError(
                f"{self.path}: {self.name}: expected groups from 0 to {count - 1} in g_idx, found "
                f"{found.min()} to {found.max()}",
                hint="fetch or write the checkpoint again",
            )
        return found


def with_whole_matrices(
    published: Mapping[str, Tensor], settings: Quantization
) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors with each matrix in few bits as one tensor, `NAME.weight`, and problems."""
    found, problems = dict(published), list[str]()
    for key, make in _MAKERS[settings.method]:
        for name in published:
            if not name.endswith(f".{key}"):
                continue
            module = name.removesuffix(f".{key}")
            parts = _Parts(module, published, settings)
            try:
                matrix = make(parts)
            except _UnfitError as unfit:
                problems.append(str(unfit))
                matrix = None
            for used in parts.used:
                found.pop(used, None)
            if matrix is not None:
                found[f"{module}.weight"] = Tensor(
                    matrix.path, matrix.shape, "F32", matrix.read, matrix
                )
    if settings.method in ("compressed-tensors", "fp8"):
        for name in published:
            if name.endswith(_OF_ACTIVATIONS):
                found.pop(name, None)
    return found, problems


class _UnfitError(Exception):
    """The tensors of a matrix do not fit each other."""


class _Parts:
    """The tensors of a matrix."""

    def __init__(
        self, module: str, published: Mapping[str, Tensor], settings: Quantization
    ) -> None:
        self.module, self.settings, self.used = module, settings, list[str]()
        self._published = published

    def get(self, end: str, *dtypes: str) -> Tensor | None:
        """Return a tensor; None: there is none."""
        name = f"{self.module}.{end}"
        tensor = self._published.get(name)
        if tensor is None:
            return None
        self.used.append(name)
        if tensor.dtype not in dtypes:
            raise _UnfitError(f"{name} is {tensor.dtype}, expected {' or '.join(dtypes)}")
        return tensor

    def need(self, end: str, *dtypes: str) -> Tensor:
        """Return a tensor."""
        if (tensor := self.get(end, *dtypes)) is None:
            raise _UnfitError(f"missing {self.module}.{end}")
        return tensor

    def unfit(self, *tensors: Tensor, expected: str) -> _UnfitError:
        """Return the error for shapes that do not fit."""
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        return _UnfitError(f"the tensors of {self.module} are {shapes}, expected {expected}")

    def block(self, shape: tuple[int, int], scales: tuple[int, ...]) -> tuple[int, int]:
        """Return the outputs and inputs that share a scale."""
        if self.settings.method == "fp8":
            return self._whole_blocks(shape, scales)
        for block in (*self.settings.blocks, (0, 0)):
            sizes = tuple(map(_size_of_block, shape, scales, block))
            if len(scales) == 2 and all(sizes):
                return sizes[0], sizes[1]
        raise _UnfitError(
            f"the scales of {self.module} are {list(scales)}, expected a divisor of its shape "
            f"{list(shape)}, or that of one of the blocks {list(map(list, self.settings.blocks))}"
        )

    def _whole_blocks(self, shape: tuple[int, int], scales: tuple[int, ...]) -> tuple[int, int]:
        """Return the block of FP8, which config.json gives; none: a matrix has one scale."""
        rows, columns = next(iter(self.settings.blocks), shape)
        wanted = [-(-shape[0] // max(1, rows)), -(-shape[1] // max(1, columns))]
        if list(scales) != wanted or not all(shape):
            raise _UnfitError(
                f"the scales of {self.module} are {list(scales)}, expected {wanted} for its shape "
                f"{list(shape)}, by weight_block_size of config.json"
            )
        return min(rows, shape[0]), min(columns, shape[1])

    def form(self, bits: int, block: tuple[int, int], shape: tuple[int, int]) -> str:
        """Return in words how a matrix is published."""
        kind = f"{self.settings.label}, {bits} bits"
        if block[1] == shape[1]:
            return f"{kind}, one scale for {'all' if block[0] == shape[0] else 'each output'}"
        size = str(block[1]) if block[0] == 1 else f"{block[0]} x {block[1]}"
        return f"{kind}, groups of {size}"


def _size_of_block(size: int, count: int, given: int) -> int:
    """Return how many rows or columns a block has; the last block may have fewer. 0: no size fits."""
    if count == 1:
        return size
    if given and 0 < count == -(-size // given):
        return given
    return size // count if count and size % count == 0 else 0


_FLOATS = ("F32", "F16", "BF16")


def _gptq(parts: _Parts) -> QuantizedMatrix:
    words, zeros = parts.need("qweight", "I32"), parts.need("qzeros", "I32")
    scales = parts.need("scales", *_FLOATS)
    groups = parts.get("g_idx", "I32", "I64")
    bits = next((b for b in BITS if _are_gptq(words, zeros, scales, b)), None)
    if bits is None:
        expected = "[inputs / n, outputs], [groups, outputs / n], [groups, outputs] of 4 or 8 bits"
        raise parts.unfit(words, zeros, scales, expected=expected)
    shape = words.shape[1], words.shape[0] * _WORD_BITS // bits
    if groups is not None and groups.shape != shape[1:]:
        raise parts.unfit(groups, expected=f"[{shape[1]}] of g_idx")
    block = parts.block(shape, scales.shape[::-1])
    offset = np.uint32(parts.settings.zero_offset * (0xFFFFFFFF // ((1 << bits) - 1)))

    def values(part: slice) -> Values:
        return _unpacked(words.read((slice(None), part)).T, bits)

    def zero_points() -> Values:
        # GPTQModel adds the offset of all elements to the word: one that overflows carries into the next.
        found = zeros.read().view(np.uint32) + offset
        return _unpacked(found.view(np.int32), bits)[:, : shape[0]].T

    return QuantizedMatrix(
        *(parts.module, words.path, parts.form(bits, block, shape), shape, values),
        lambda: scales.read().T.astype(np.float32),
        block,
        zero_points,
        None if groups is None else groups.read,
    )


def _are_gptq(words: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> bool:
    """Return whether the shapes of a matrix are those of so many bits."""
    if not len(words.shape) == len(zeros.shape) == len(scales.shape) == 2:
        return False
    outputs, groups = words.shape[1], scales.shape[0]
    return scales.shape[1] == outputs and zeros.shape == (groups, _words(outputs, bits))


def _awq(parts: _Parts) -> QuantizedMatrix:
    bits, in_word = 4, 8
    words, zeros = parts.need("qweight", "I32"), parts.need("qzeros", "I32")
    scales = parts.need("scales", *_FLOATS)
    columns = words.shape[-1] if words.shape else 0
    groups = scales.shape[0] if scales.shape else 0
    wanted = (groups, columns), (groups, columns * in_word)
    if len(words.shape) != 2 or (zeros.shape, scales.shape) != wanted:
        expected = "[inputs, outputs / 8], [groups, outputs / 8], [groups, outputs]"
        raise parts.unfit(words, zeros, scales, expected=expected)
    shape = columns * in_word, words.shape[0]
    block = parts.block(shape, scales.shape[::-1])

    def in_order(packed: Values) -> Values:
        nibbles = _unpacked(packed, bits)
        in_words = nibbles.reshape(len(nibbles), packed.shape[1], in_word)
        return in_words[:, :, _AWQ_ORDER].reshape(nibbles.shape)

    def values(part: slice) -> Values:
        first, last = part.start // in_word, -(-part.stop // in_word)
        found = in_order(words.read((slice(None), slice(first, last))))
        start = part.start - first * in_word
        return found[:, start : start + max(0, part.stop - part.start)].T

    return QuantizedMatrix(
        *(parts.module, words.path, parts.form(bits, block, shape), shape, values),
        lambda: scales.read().T.astype(np.float32),
        block,
        lambda: in_order(zeros.read()).T,
    )


def _packed(parts: _Parts) -> QuantizedMatrix:
    words, sizes = parts.need("weight_packed", "I32"), parts.need("weight_shape", "I64", "I32")
    scales = parts.need("weight_scale", *_FLOATS)
    groups = parts.get("weight_g_idx", "I32", "I64")
    outputs, inputs = map(int, sizes.read()) if sizes.shape == (2,) else (0, 0)
    shape = outputs, inputs
    bits = next((b for b in BITS if words.shape == (outputs, _words(inputs, b))), None)
    if bits is None:
        raise parts.unfit(words, sizes, expected="[outputs, inputs / n] of 4 or 8 bits, [2]")
    if groups is not None and groups.shape != (inputs,):
        raise parts.unfit(groups, expected=f"[{inputs}] of weight_g_idx")
    least, of_scales = 1 << (bits - 1), _with_two_axes(scales.shape)
    zeros, zero_points = parts.get("weight_zero_point", "I32", "I8"), None
    if zeros is not None and zeros.dtype == "I8":
        zero_points = _like_scales(parts, zeros, scales)
    elif zeros is not None:
        wanted = (_words(of_scales[0], bits), *of_scales[1:])
        if _with_two_axes(zeros.shape) != wanted:
            raise parts.unfit(zeros, expected=f"{list(wanted)} of weight_zero_point")

        def zero_points() -> Values:
            found = _unpacked(_two_axes(zeros).T, bits)[:, : of_scales[0]].T
            return found.astype(np.int16) - least

    def values(part: slice) -> Values:
        return _unpacked(words.read(part), bits)[:, :inputs].astype(np.int16) - least

    block = parts.block(shape, of_scales)
    return QuantizedMatrix(
        *(parts.module, words.path, parts.form(bits, block, shape), shape, values),
        lambda: _two_axes(scales).astype(np.float32),
        block,
        zero_points,
        None if groups is None else groups.read,
    )


def _like_scales(parts: _Parts, zeros: Tensor, scales: Tensor) -> Callable[[], Values]:
    if zeros.shape != scales.shape:
        raise parts.unfit(zeros, expected=f"{list(scales.shape)} of weight_zero_point")
    return partial(_two_axes, zeros)


def _plain(scale: str, parts: _Parts) -> QuantizedMatrix | None:
    """Return a matrix of 8 bits, each an element of its tensor, whose scales have this name."""
    scales = parts.need(scale, *_FLOATS, "F8_E8M0")
    if f"{parts.module}.weight" not in parts._published:
        return None  # packed
    matrix = parts.need("weight", "F8_E4M3", "I8")
    if len(matrix.shape) != 2:
        raise parts.unfit(matrix, expected="[outputs, inputs]")
    shape = matrix.shape[0], matrix.shape[1]
    zeros = parts.get("weight_zero_point", "I8", matrix.dtype)
    zero_points = None if zeros is None else _like_scales(parts, zeros, scales)
    read = partial(_two_axes, scales)
    block = parts.block(shape, _with_two_axes(scales.shape))
    return QuantizedMatrix(
        *(parts.module, matrix.path, parts.form(8, block, shape), shape, matrix.read),
        lambda: read().astype(np.float32),
        block,
        zero_points,
    )


def _two_axes(tensor: Tensor) -> Values:
    """Return a tensor [], [1], [outputs] or [a, b] with two axes."""
    values = tensor.read()
    return values.reshape(_with_two_axes(values.shape))


def _with_two_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, *(1,) * (2 - len(shape)))


def _of_table(state: str, parts: _Parts) -> QuantizedMatrix:
    """Return a matrix of bitsandbytes in four bits, whose sizes are in a tensor of this name."""
    described = parts.need(state, "U8")
    # bnb_4bit_quant_storage: bytes may be stored as elements of floats, which mean nothing
    bytes_ = parts.need("weight", "U8", *_FLOATS)
    table = parts.need("weight.quant_map", "F32")
    stored = SAFETENSORS_DTYPES[bytes_.dtype][1]
    factors = parts.need("weight.absmax", "F32", "U8")
    nested = parts.get("weight.nested_absmax", "F32")
    nested_table = parts.get("weight.nested_quant_map", "F32")
    try:
        found = json.loads(described.read().tobytes())
        outputs, inputs = map(int, found["shape"])
        shape = outputs, inputs
        size, nested_size = int(found["blocksize"]), int(found.get("nested_blocksize", 1))
        offset = np.float32(float(found.get("nested_offset", 0)))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise _UnfitError(
            f"{parts.module}.{state} is not what bitsandbytes writes: {error}"
        ) from error
    elements = outputs * inputs
    nests = [each for each in (nested, nested_table) if each is not None]
    if (
        min(outputs, inputs, size, nested_size) < 1
        or max(size, nested_size) > 1 << 30
        or np.prod(bytes_.shape) * stored != -(-elements // 2)
        or factors.shape != (count := -(-elements // size),)
        or table.shape != (16,)
        or (factors.dtype == "U8")
        != ([each.shape for each in nests] == [(-(-count // nested_size),), (256,)])
    ):
        raise parts.unfit(bytes_, factors, table, *nests, expected=f"those of {list(shape)}")

    def values(part: slice) -> Values:
        first, last = part.start * inputs, max(part.start, part.stop) * inputs
        start, end = first // 2, -(-last // 2)
        held = bytes_.read(slice(start // stored, -(-end // stored)))
        begins = start % stored
        pairs = held.reshape(-1).view(np.uint8)[begins : begins + end - start]
        indexes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)[first % 2 :]
        scale = factors.read(slice(first // size, -(-last // size)))
        if nested is not None and nested_table is not None:
            at = (np.arange(len(scale)) + first // size) // nested_size
            scale = nested_table.read()[scale] * nested.read()[at] + offset
        wide = table.read()[indexes[: last - first]]
        wide *= scale[np.arange(first, last) // size - first // size]
        return wide.reshape(-1, inputs)

    return QuantizedMatrix(
        *(parts.module, bytes_.path, f"{parts.settings.label}, 4 bits, blocks of {size}", shape),
        values,
        lambda: np.ones((1, 1), np.float32),
        shape,
    )


def _by_rows(parts: _Parts) -> QuantizedMatrix:
    """Return a matrix of LLM.int8()."""
    largest, matrix = parts.need("SCB", "F32"), parts.need("weight", "I8")
    order = parts.get("weight_format", "U8")
    if order is not None and (found := order.read()).any():
        raise _UnfitError(f"{parts.module}.weight_format is {found.max()}, expected 0: rows")
    if len(matrix.shape) != 2 or largest.shape != matrix.shape[:1]:
        raise parts.unfit(matrix, largest, expected="[outputs, inputs], [outputs]")
    shape = matrix.shape[0], matrix.shape[1]
    block = (1, shape[1])
    return QuantizedMatrix(
        *(parts.module, matrix.path, parts.form(8, block, shape), shape, matrix.read),
        lambda: largest.read()[:, None] / np.float32(127),
        block,
    )


_STATE = "weight.quant_state.bitsandbytes__"
_MAKERS: Mapping[str, tuple[tuple[str, Callable[[_Parts], QuantizedMatrix | None]], ...]] = {
    "gptq": (("qweight", _gptq),),
    "awq": (("qweight", _awq),),
    "compressed-tensors": (
        ("weight_packed", _packed),
        ("weight_scale", partial(_plain, "weight_scale")),
    ),
    "fp8": (("weight_scale_inv", partial(_plain, "weight_scale_inv")),),
    "bitsandbytes": (
        ("SCB", _by_rows),
        (f"{_STATE}nf4", partial(_of_table, f"{_STATE}nf4")),
        (f"{_STATE}fp4", partial(_of_table, f"{_STATE}fp4")),
    ),
}
"""For each method the names that a matrix has, with the function that reads it."""


def _words(elements: int, bits: int) -> int:
    """Return the number of words of so many elements."""
    return -(-elements * bits // _WORD_BITS)


def _unpacked(words: Values, bits: int) -> Values:
    """Return the elements of int32 [a, b], of 4 or 8 bits each, the first in the lowest: uint8 [a, n * b]."""
    in_bytes = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return in_bytes
    shape = len(in_bytes), in_bytes.shape[1] * 2
    return np.stack([in_bytes & 15, in_bytes >> 4], axis=-1).reshape(shape)
