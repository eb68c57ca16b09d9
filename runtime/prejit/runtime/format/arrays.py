"""The arrays that programs take and return: shape, dtype, sharding; and golden answers, samples of them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping

from prejit.runtime.format.limits import MAX_DIMENSIONS, MAX_SIZE
from prejit.runtime.records import dataclass

DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)
"""NumPy's and ml_dtypes' names of the element types of arguments and results.

jax also has int1, uint1, float6_e2m3fn and float6_e3m2fn. XLA:CPU treats the first two as bool, and the
others end the process.
"""
PACKED = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
"""Dtypes of less than a byte. A device may hold several values in one byte; NumPy never does."""


@dataclass(frozen=True, slots=True)
class Array:
    """One argument or result of a program: a leaf of its pytree.

    The program table holds it as text: its path, then the notation of the manifest:

        ["cache",0,1] float32[1,12,128,64] donated @data,tensor,,
        ["tokens"] int32[8,128] ~batch,length
        ["rate"] weak float32[]

    A load parses only the texts of programs that run, because a table may have hundreds of programs.

    Attributes:
        path: the path of the leaf in the pytree, outermost key first; an integer is an index of a sequence.
        dtype: NumPy's name of the dtype (`float32`, `bfloat16`, `int32`, ...).
        shape: the shape, in elements.
        donated: whether the program reuses the argument's memory; the caller must not use it again.
        sharding: the mesh axis that splits each dimension, `""` for none, `a+b` for two; empty: none is.
        variables: the bucket variable that each dimension follows, `""` for none. A caller's array may have
            another size there. Empty: every dimension is fixed.
        weak: whether jax's type of it is weak, as that of a Python number: it does not decide the dtype of a
            result.
    """

    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    donated: bool = False
    sharding: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    weak: bool = False

    def __str__(self) -> str:
        path = json.dumps(self.path, separators=(",", ":"), ensure_ascii=True)
        shape = ",".join(map(str, self.shape))
        split = f" @{','.join(self.sharding)}" if self.sharding else ""
        padded = f" ~{','.join(self.variables)}" if self.variables else ""
        weak, donated = "weak " * self.weak, " donated" * self.donated
        return f"{path} {weak}{self.dtype}[{shape}]{donated}{split}{padded}"

    def shape_at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with these sizes in the dimensions that follow their variables."""
        if not self.variables:
            return self.shape
        axes = zip(self.variables, self.shape, strict=True)
        return tuple(sizes.get(variable, size) for variable, size in axes)

    @classmethod
    def parse(cls, text: str) -> Array:
        """Return the array that a text of the program table describes; the inverse of `str`.

        Raises:
            ValueError: the text has another form.
        """
        array = None
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            path, end = json.JSONDecoder().raw_decode(text)
            match = re.fullmatch(
                r" (weak )?([a-z0-9_]+)\[((?:\d{1,10}(?:,\d{1,10})*)?)\]( donated)?(?: @([A-Za-z0-9_+,]+))?"
                r"(?: ~([A-Za-z0-9_,]+))?",
                text[end:],
            )
            if match is not None and all(type(key) in (str, int) for key in path):
                shape = tuple(map(int, match[3].split(","))) if match[3] else ()
                split: tuple[str, ...] = ()
                if match[5]:  # a load without a mesh imports no more
                    from prejit.runtime.format.mesh_splits import parse_sharding

                    split = parse_sharding(match[5], len(shape))
                padded = tuple(match[6].split(",")) if match[6] else ()
                if (
                    match[2] in DTYPES
                    and max(shape, default=0) <= MAX_SIZE
                    and len(shape) <= MAX_DIMENSIONS
                    and len(padded) in (0, len(shape))
                    and (not padded or any(padded))
                ):
                    weak, donated = match[1] is not None, match[4] is not None
                    array = cls(tuple(path), match[2], shape, donated, split, padded, weak)
        if array is None or str(array) != text:  # an array has only one spelling
            raise ValueError(f"expected '[path] dtype[shape]', found {text[:80]!r:.80}")
        return array


@dataclass(frozen=True, slots=True)
class Mesh:
    """The devices that a program runs on, in rows and columns, or along axes of other names.

    Attributes:
        data: rows; each works on its own part of a batch.
        tensor: columns; each holds its own part of the weights and of the KV cache.
        axes: other axes in place of both, outermost first, such as `fsdp=2`; None: data and tensor.
    """

    data: int
    tensor: int
    axes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """Return a mesh with these axes, outermost first: `Mesh.of(fsdp=2, tp=4)`."""
        return cls(1, 1, tuple(f"{name}={size}" for name, size in sizes.items()))

    def __post_init__(self) -> None:
        axes = self.axes or (f"data={self.data}", f"tensor={self.tensor}")
        known = {axis.partition("=")[0] for axis in axes if _AXIS.fullmatch(axis)}
        both = self.axes is not None and (self.data, self.tensor) != (1, 1)
        if len(known) < len(axes) or self.axes == () or both:
            raise ValueError(f"mesh: expected each axis once, sizes of 1 or more, found {self!r}")

    def __str__(self) -> str:
        return " ".join(self.axes or (f"{self.data} x {self.tensor}",))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name, outermost first."""
        if self.axes is None:
            return {"data": self.data, "tensor": self.tensor}
        return {name: int(size) for name, _, size in (axis.partition("=") for axis in self.axes)}

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return math.prod(self.sizes.values())

    def parts(self, split: str) -> int:
        """Return into how many parts axes split a dimension: `fsdp`, `fsdp+tp`, or `""`; 0: it lacks one."""
        return math.prod(self.sizes.get(axis, 0) for axis in split.split("+") if axis)


_AXIS = re.compile(r"[A-Za-z_]\w{0,63}=[1-9]\d{0,9}", re.ASCII)
MESH_AXES = ("data", "tensor")
"""The names of the axes of a mesh of a decoder, rows first."""

RECIPE = 1
"""The version of the recipe by which arguments and samples are made (programs/golden_inputs.py). A reader
that does not have an entry's version compares nothing."""

TOLERANCES = range(1, 17)
"""The tolerances that an entry may have: results may differ by scale / 2 ** tolerance."""

_NUMBER = r"-?\d{1,18}"
_WORD = rf"(?:-|={_NUMBER}(?:,{_NUMBER}){{0,31}}|-?\d{{1,4}}:\d{{1,18}}(?:,(?:{_NUMBER}|[npm])){{0,32}})"
_RESULTS = re.compile(rf"(?:{_WORD}(?: {_WORD}){{0,32767}})?", re.ASCII)
"""The text of results has words, separated by spaces, one for each result of the program table, in order:

    -                        it is not compared
    =3,0,17                  whole numbers, bool included: samples, which must be equal
    -2:271,-54,n,1033        other numbers: the mean of the absolute values, then samples

The number before the colon is the exponent of the scale: 2 to its power is near the mean. What follows
are multiples of scale / 2 ** (tolerance + 2). `n` is NaN, `p` and `m` are infinities.
`programs.golden_check` chooses the elements.
"""
MAX_BYTES = 1 << 19
"""Maximum length of the results of one golden answer as text."""


def is_results(text: str) -> bool:
    """Return whether a text has the form of the results of a golden answer."""
    return len(text) <= MAX_BYTES and _RESULTS.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Golden:
    """The results of a program on the build host, for arguments that a seed makes.

    Attributes:
        recipe: version of the recipe of the arguments; readers ignore recipes that they do not have.
        seed: the seed.
        source: the target whose executable gave the answer; `portable`, if the build host runs none of the
            targets; `reference`, if a function of the manifest's [program.check] gave it.
        tolerance: results may differ from it by their scale / 2 ** tolerance; whole numbers may not.
        results: samples of the results, as text.
    """

    recipe: int
    seed: int
    source: str
    tolerance: int
    results: str

    def __post_init__(self) -> None:
        if not (self.recipe >= 1 and 0 <= self.seed < 1 << 32 and self.tolerance in TOLERANCES):
            raise ValueError(
                f"golden: expected a recipe from 1, a seed of 32 bits and a tolerance of 1 to "
                f"{TOLERANCES[-1]}; found {self.recipe}, {self.seed} and {self.tolerance}"
            )
        if not is_results(self.results):
            raise ValueError(f"golden: results: expected samples, found {self.results!r:.80}")
