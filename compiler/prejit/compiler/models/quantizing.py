"""Stored values of matrices in fewer bits than float32, in which everything else is stored and computed.

    float32     as published
    bfloat16    rounded to nearest, ties to even
    int8        symmetric, one float32 scale for each output (Dettmers et al. 2022, arXiv 2208.07339, section
                2.1, row-wise): w = q * scale, scale = max|w| / 127 over the inputs of an output
    int4        one float16 scale for each group of inputs of an output: of 32, or as the checkpoint was
                published; with zero points where it was published so: int4_rounding.py

The table of dtypes is base/stored_dtypes.py. Only the matrices of Linear, Embedding and ExpertMatrices are
stored so; norms, biases and routers stay float32. An embedding, and a head that is tied to it, has a scale
for each token. With int4 embeddings, heads and what `int4_rounding.fits` leaves out are int8.
published_integers.py keeps what was published in few bits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from prejit.compiler.base.stored_dtypes import (
    GROUPS_OF_32,
    STORED_DTYPES,
    Groups,
    StoredDtype,
    stored_as,
)
from prejit.compiler.models import int4_rounding, published_integers
from prejit.compiler.models.int4_rounding import Rows
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.layers.experts import ExpertMatrices
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.runtime.errors import CheckpointError

Values = np.ndarray[Any, Any]

MATRICES = Linear | Embedding | ExpertMatrices
"""The layers whose matrices are stored in fewer bits."""
_SCALE = "_scale"
_BLOCK_ELEMENTS = 1 << 20
"""Elements that are in memory in float32 at a time: 4 MB. An embedding may have a billion bytes."""


@dataclass(frozen=True)
class Widened:
    """A stored matrix whose rows are float32.

    Attributes:
        values: the matrix as it is stored.
        scale: the scale of each output; None: `values` are the values themselves.
        contracted: the axis of the inputs.
    """

    values: Values
    scale: Values | None
    contracted: int

    @property
    def shape(self) -> tuple[int, ...]:
        """See Rows."""
        return self.values.shape

    def __getitem__(self, part: slice, /) -> Values:
        """See Rows."""
        wide = self.values[part].astype(np.float32)
        if self.scale is None:
            return wide
        scale = self.scale[part] if self.contracted else self.scale
        wide *= np.expand_dims(scale, self.contracted)
        return wide


def blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of the first axis with about a million elements each."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    return (slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows))


def place_of(name: str) -> str:
    """Return the place of a matrix in every layer: `layers.*.up.weight` for `layers.3.up.weight`."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def store(
    module: nnx.Module,
    dtype: str,
    groups: Groups = GROUPS_OF_32,
    chosen: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Change the matrices of an abstract module from float32 to a stored dtype.

    Args:
        module: the module; its matrices are float32.
        dtype: a name in STORED_DTYPES. With int8 each `weight` gets a `weight_scale`, float32 [out]; with
            int4 words and scales as in layers/int4_words.py.
        groups: those of int4.
        chosen: other dtypes, by the place of a matrix in every layer.
    """
    tokens = getattr(module, "vocab_size", None)
    for path, part in nnx.iter_modules(module):
        if not isinstance(part, MATRICES):
            continue
        wanted_here = STORED_DTYPES[chosen.get(place_of(_name(path)), dtype)]
        stored, shape = _dtype_of(part, wanted_here, tokens), part.weight.shape
        if not stored.is_narrow:
            continue
        outputs = tuple(n for axis, n in enumerate(shape) if axis != part.contracted)
        scales: tuple[tuple[int, ...], Any] = outputs, jnp.float32
        if stored.words is not None and not isinstance(part, Embedding):
            experts = shape[:1] if isinstance(part, ExpertMatrices) else ()
            wanted = groups.of(part.inputs) if isinstance(part, Linear) else GROUPS_OF_32
            shape = (*experts, *int4_words.word_shape(part.inputs, part.outputs))
            scales = (
                (*experts, *int4_words.scale_shape(part.inputs, part.outputs, wanted)),
                jnp.float16,
            )
            if isinstance(part, ExpertMatrices) and part.is_mxfp4:
                scales = scales[0], jnp.bfloat16
        part.weight = nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(stored.words or stored.name)))
        if stored.has_scales:
            scale = nnx.Param(jax.ShapeDtypeStruct(*scales))
            part.weight_scale = nnx.data(scale)  # it was None, which flax holds as a constant


def _dtype_of(part: MATRICES, wanted: StoredDtype, tokens: int | None) -> StoredDtype:
    """Return the dtype of a matrix of a model with so many tokens."""
    if wanted.otherwise is None:
        return wanted
    if isinstance(part, ExpertMatrices):  # gate and up are whole tiles
        can = part.outputs % (2 * int4_words.TILE) == 0
    else:
        can = isinstance(part, Linear) and part.outputs != tokens
    fits = can and int4_rounding.fits(part.inputs, part.outputs)
    return wanted if fits else STORED_DTYPES[wanted.otherwise]


def readers(
    module: nnx.Module,
    read: Callable[[str], Rows],
    tell: Callable[[str, float], object] = lambda name, error: None,
    words: Mapping[str, tuple[Values, Values]] = MappingProxyType({}),
) -> dict[str, Callable[[], Values]]:
    """Return functions that give the stored values of each matrix that is not float32, by parameter name.

    Args:
        module: an abstract module, from `store`.
        read: returns the values of a parameter of the float32 module, finite float32.
        tell: called when a matrix that was published in few bits is made, with its name and the error of the
            stored values: the root of the sum of its squares, as a share of that of the published ones.
        words: words and scales of matrices that are rounded already.

    Returns:
        Functions that raise CheckpointError if the dtype cannot hold a value.
    """
    found: dict[str, Callable[[], Values]] = {}
    for name, part, stored in _narrow_parts(module):
        if name in words and stored.words is not None:
            found[name], found[name + _SCALE] = (
                partial(words[name].__getitem__, n) for n in (0, 1)
            )
            continue
        make = partial(_stored, name, part, stored, read, tell)
        if stored.has_scales:
            found[name], found[name + _SCALE] = in_turn(make)
        else:
            found[name] = partial(_first, make)
    return found


def int4_matrices(module: nnx.Module, read: Callable[[str], Rows]) -> dict[str, Groups]:
    """Return the matrices that are rounded to int4, and were not published in few bits, with their groups."""
    found: dict[str, Groups] = {}
    for name, part, stored in _narrow_parts(module):
        if stored.words is None or published_integers.has_few_bits(read(name)):
            continue
        if isinstance(part, ExpertMatrices):
            found |= {} if part.is_mxfp4 else {name: GROUPS_OF_32}
        elif part.weight_scale is not None:
            found[name] = int4_words.groups_of(part.weight.shape, part.weight_scale.shape)
    return found


def _stored(
    name: str,
    part: MATRICES,
    stored: StoredDtype,
    read: Callable[[str], Rows],
    tell: Callable[[str, float], object],
) -> tuple[Values, Values]:
    """Return the values and scales of a matrix; without scales both are the values."""
    rows = read(name)
    found = published_integers.integers_of(rows) if stored.has_scales else None
    if isinstance(part, ExpertMatrices) and stored.words is not None and part.is_mxfp4:
        tell(name, 0.0)
        return published_integers.kept_mxfp4(rows, name)
    if stored.words is not None:
        values, scales = _in_words(name, part, rows, found)
    elif found and (held := published_integers.kept(found, stored, part.contracted)) is not None:
        tell(name, 0.0)
        return held
    elif stored.has_scales:
        values, scales = quantized(rows, part.contracted, stored)
    else:
        values = scales = _rounded(rows, name)
    if published_integers.has_few_bits(rows):
        tell(name, _error(rows, _widened(part, stored, values, scales)))
    return values, scales


def _in_words(
    name: str, part: MATRICES, rows: Rows, found: published_integers.Integers | None
) -> tuple[Values, Values]:
    """Return the words and scales of a matrix, or of matrices of experts, as published if they hold that."""
    if isinstance(part, ExpertMatrices):
        kept = found and published_integers.kept_experts(found)
        return kept or int4_rounding.quantized_experts(rows, name)
    assert part.weight_scale is not None
    groups = int4_words.groups_of(part.weight.shape, part.weight_scale.shape)
    kept = found and published_integers.kept_in_words(found, groups)
    return kept or int4_rounding.quantized(rows, part.contracted, name, groups)


def _first(make: Callable[[], tuple[Values, Values]]) -> Values:
    return make()[0]


def _error(exact: Rows, found: Rows) -> float:
    """Return the root of the sum of squared differences, as a share of that of the exact values."""
    error = total = 0.0
    for part in blocks(exact.shape):
        values = exact[part]
        total += float(np.square(values, dtype=np.float64).sum())
        error += float(np.square(found[part] - values, dtype=np.float64).sum())
    return math.sqrt(error / total) if total else 0.0


def widened(module: nnx.Module, packed: Mapping[str, Values]) -> dict[str, Rows]:
    """Return stored parameters by the names of the float32 module, with rows in float32.

    The abstract module is from `store`; `packed` are its stored values by name.
    """
    found: dict[str, Rows] = dict(packed)
    for name, part, stored in _narrow_parts(module):
        scale = packed.get(name + _SCALE)
        found.pop(name + _SCALE, None)
        found[name] = _widened(part, stored, packed[name], scale)
    return found


def _widened(part: MATRICES, stored: StoredDtype, values: Values, scale: Values | None) -> Rows:
    """Return a stored matrix with rows in float32."""
    if stored.words is None:
        return Widened(values, scale if stored.has_scales else None, part.contracted)
    assert scale is not None
    assert not isinstance(part, Embedding)
    if isinstance(part, ExpertMatrices):
        return int4_rounding.WidenedExperts(values, scale, part.outputs)
    return int4_rounding.WidenedWords(values, scale, part.outputs, part.contracted)


def _narrow_parts(module: nnx.Module) -> Iterator[tuple[str, MATRICES, StoredDtype]]:
    """Yield the matrices of an abstract module that are not float32, each with its name and dtype."""
    for path, part in nnx.iter_modules(module):
        if isinstance(part, MATRICES):
            stored = stored_as(part.weight.dtype)
            if stored.is_narrow:
                yield _name(path), part, stored


def _name(path: Iterable[Any]) -> str:
    return ".".join(map(str, (*path, "weight")))


def imitate(exact: nnx.Module, stored: nnx.Module) -> None:
    """Let the products of a float32 module round x as the kernels of a stored one do."""
    narrow = {name: dtype.name for name, _, dtype in _narrow_parts(stored)}
    for path, part in nnx.iter_modules(exact):
        if isinstance(part, Linear | Embedding):
            part.imitated = narrow.get(_name(path), "")


def stored_dtypes(module: nnx.Module) -> dict[str, str]:
    """Return the stored dtypes of the matrices that are not float32, by name."""
    return {name: stored.name for name, _, stored in _narrow_parts(module)}


def described(module: nnx.Module) -> str:
    """Return the stored dtypes of a module's matrices: `int8`, or `24 int4 and 14 int8 (6.1 bits)`."""
    parts = [part for _, part in nnx.iter_modules(module) if isinstance(part, MATRICES)]
    counts = Counter(stored_as(part.weight.dtype).name for part in parts)
    if len(counts) < 2:
        return "".join(counts)
    bits = values = 0
    for part in parts:
        held = (part.weight, *([] if part.weight_scale is None else [part.weight_scale]))
        bits += sum(8 * math.prod(each.shape) * each.dtype.itemsize for each in held)
        sizes = part.weight.shape if isinstance(part, Embedding) else (part.inputs, part.outputs)
        values += math.prod(sizes)
    *most, last = (f"{counts[each]} {each}" for each in [*STORED_DTYPES][::-1] if counts[each])
    return f"{', '.join(most)} and {last} ({bits / values:.1f} bits)"


def quantizing(
    read: Callable[[], Rows], contracted: int | tuple[int, ...], stored: StoredDtype
) -> tuple[Callable[[], Values], Callable[[], Values]]:
    """Return functions that return a matrix as integers, and its scales. See `quantized`, `in_turn`."""
    return in_turn(lambda: quantized(read(), contracted, stored))


def in_turn(
    make: Callable[[], tuple[Values, Values]],
) -> tuple[Callable[[], Values], Callable[[], Values]]:
    """Return functions that return each of two arrays, which are made at once.

    Making the first keeps the second for the call that follows, so that a matrix is read once.
    """
    kept: list[Values] = []

    def first() -> Values:
        found, second = make()
        kept[:] = [second]
        return found

    def second() -> Values:
        return kept.pop() if kept else make()[1]

    return first, second


def quantized(
    values: Rows, contracted: int | tuple[int, ...], stored: StoredDtype = STORED_DTYPES["int8"]
) -> tuple[Values, Values]:
    """Return a matrix as integers and scales.

    Args:
        values: float32 [a, b], finite; or of more axes. It is read by blocks of rows.
        contracted: the axis of the inputs, or the axes.
        stored: an integer dtype.

    Returns:
        Integers of the same shape, from -stored.largest to stored.largest, and float32 of the shape without
        the contracted axes: [out]. Their product differs from the values by at most half a scale (and
        rounding).
    """
    axes = (contracted,) if isinstance(contracted, int) else contracted
    largest = _largest(stored)
    integers = np.empty(values.shape, stored.name)
    scale = np.zeros([n for axis, n in enumerate(values.shape) if axis not in axes], np.float32)
    if 0 in axes:  # every row has a part in each scale
        for part in blocks(values.shape):
            np.maximum(scale, _peaks(values[part], axes), out=scale)
        scale = _factors(scale, stored)
    for part in blocks(values.shape):
        found = values[part]
        if 0 not in axes:
            scale[part] = _factors(_peaks(found, axes), stored)
        factors = np.expand_dims(scale if 0 in axes else scale[part], axes)
        integers[part] = np.clip(np.rint(found / factors), -largest, largest)
    return integers, scale


def _largest(stored: StoredDtype) -> int:
    assert stored.largest is not None, stored
    return stored.largest


def _peaks(values: Values, axes: tuple[int, ...]) -> Values:
    """Return the largest absolute value of each output."""
    return np.maximum(values.max(axis=axes, initial=0), -values.min(axis=axes, initial=0))


def _factors(peaks: Values, stored: StoredDtype) -> Values:
    # The minimum prevents a division by zero for an output whose weights are all zero or nearly zero.
    scale = peaks / np.float32(_largest(stored))
    return np.maximum(scale, np.finfo(np.float32).tiny, dtype=np.float32)


def _rounded(exact: Rows, name: str) -> Values:
    """Return the values as bfloat16, whose largest value is smaller than float32's."""
    values = np.empty(exact.shape, ml_dtypes.bfloat16)
    for part in blocks(exact.shape):
        with np.errstate(over="ignore"):
            values[part] = exact[part].astype(ml_dtypes.bfloat16)
        if not np.isfinite(values[part]).all():
            raise CheckpointError(
                f"{name}: expected values that bfloat16 can hold, found one that is larger",
                hint='build it with dtype = "float32"',
            )
    return values
