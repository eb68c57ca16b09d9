"""Where the values of a parameter come from: a tensor of the checkpoint, or several.

Mixtures of experts have their matrices in a parameter [E, outputs, inputs]. Checkpoints hold it as a matrix
of each expert, or (inputs, outputs) with the outputs of gate and up in turns, or in four bits: MXFP4 has
blocks of 32 elements of E2M1, two a byte, the first in the low bits, and an exponent of two for each block
(OCP Microscaling Formats 1.0, section 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from prejit.compiler.checkpoint.tensor_files import Tensor
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from prejit.compiler.models.layers.layer_config import Converted, Naming
    from prejit.compiler.models.published_integers import Integers

Values = np.ndarray[Any, Any]
FLOATS = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
SHOWN = 8
"""Names that an error shows of a kind."""
_BLOCK = 32
"""Elements of a block of MXFP4."""
_LARGEST_EXPONENT = 251
"""The largest exponent of a block whose numbers float32 holds, whatever they are."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = np.array([*_E2M1, *(-value for value in _E2M1)], np.float32)
"""The values of the sixteen elements."""


class ParameterSource(ABC):
    """The source of a parameter, whose rows are read when they are used (see `int4_rounding.Rows`)."""

    @property
    @abstractmethod
    def first(self) -> TensorSource:
        """Its tensor, or the first one of several."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""

    @abstractmethod
    def __getitem__(self, part: slice, /) -> Values:
        """Return a slice of the first axis, float32 and finite."""

    @property
    def published(self) -> str:
        """The name of its tensor, or of its first one."""
        return self.first.name

    def read(self) -> Values:
        """Return all values, float32 and finite."""
        return self[slice(None)]

    @property
    def form(self) -> str:
        """How it was published, if that was in few bits; else empty."""
        return ""

    def integers(self) -> Integers | None:
        """Return it as integers and scales; None: it is no such product."""
        return None


@dataclass(frozen=True)
class TensorSource(ParameterSource):
    """A tensor that is a parameter."""

    name: str
    tensor: Tensor
    transposed: bool = False

    @property
    def first(self) -> TensorSource:
        """See ParameterSource."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    def __getitem__(self, part: slice) -> Values:
        tensor = self.tensor
        return checked(tensor.read().T[part] if self.transposed else tensor.read(part), self)

    def read(self) -> Values:
        """See ParameterSource; a number has no axis to slice."""
        values = self.tensor.read()
        return checked(values.T if self.transposed else values, self)

    @property
    def form(self) -> str:
        """See ParameterSource."""
        return self.tensor.few_bits.form if self.tensor.few_bits else ""

    def integers(self) -> Integers | None:
        """See ParameterSource."""
        return self.tensor.few_bits.integers() if self.tensor.few_bits else None


@dataclass(frozen=True)
class StackSource(ParameterSource):
    """A parameter that a checkpoint holds as matrices of each expert.

    Attributes:
        parts: the matrices of each expert, whose outputs are joined.
    """

    parts: tuple[tuple[TensorSource, ...], ...]

    @property
    def first(self) -> TensorSource:
        """See ParameterSource."""
        return self.parts[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        of_one = [part.shape for part in self.parts[0]]
        return (len(self.parts), sum(shape[0] for shape in of_one), *of_one[0][1:])

    def __getitem__(self, part: slice) -> Values:
        each = [[matrix.read() for matrix in expert] for expert in self.parts[part]]
        return np.stack([np.concatenate(matrices) for matrices in each])

    @property
    def form(self) -> str:
        """See ParameterSource."""
        return self.first.form

    def integers(self) -> Integers | None:
        """See ParameterSource."""
        from prejit.compiler.models.published_integers import joined

        return joined([[matrix.integers() for matrix in expert] for expert in self.parts])


@dataclass(frozen=True)
class ConvertedSource(ParameterSource):
    """A parameter that a checkpoint holds in another form.

    Attributes:
        name: the name of its first tensor.
        tensors: its tensors, each with experts as axis 0.
        rule: how they are stored.
    """

    name: str
    tensors: tuple[Tensor, ...]
    rule: Converted

    @property
    def first(self) -> TensorSource:
        """See ParameterSource."""
        return TensorSource(self.name, self.tensors[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        shape = self.tensors[0].shape
        if self.rule.form == "mxfp4":
            return (*shape[:2], shape[2] * _BLOCK)
        return (shape[0], *shape[:0:-1])

    def __getitem__(self, part: slice) -> Values:
        values = [tensor.read(part) for tensor in self.tensors]
        found = _widened(*values) if self.rule.form == "mxfp4" else values[0].swapaxes(1, -1)
        if self.rule.is_interleaved:
            found = np.concatenate([found[:, ::2], found[:, 1::2]], axis=1)
        return checked(found, self)

    @property
    def form(self) -> str:
        """See ParameterSource."""
        return "MXFP4, groups of 32" if self.rule.form == "mxfp4" else ""

    def mxfp4(self, expert: int) -> tuple[Values, Values] | None:
        """See PublishedAsMXFP4."""
        if self.rule.form != "mxfp4":
            return None
        part = slice(expert, expert + 1)
        blocks, exponents = (tensor.read(part)[0] for tensor in self.tensors)
        if exponents.max(initial=0) > _LARGEST_EXPONENT:
            self[part]  # it refuses numbers that float32 does not hold
        elements = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(len(blocks), -1)
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
        scales = scales.astype(ml_dtypes.bfloat16)
        if self.rule.is_interleaved:
            elements, scales = (np.concatenate([x[::2], x[1::2]]) for x in (elements, scales))
        return elements, scales


def _widened(blocks: Values, exponents: Values) -> Values:
    """Return elements uint8 [E, out, in / 32, 16] times their factors: float32 [E, out, in]."""
    elements = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1)
    elements = elements.reshape(*blocks.shape[:3], _BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # 255 stands for NaN, also beside zeros
        elements *= np.ldexp(np.float32(1), exponents[..., None].astype(np.int32) - 127)
    return elements.reshape(*blocks.shape[:2], -1)


def checked(values: Values, source: ParameterSource) -> Values:
    """Return values as C-contiguous float32.

    Raises:
        CheckpointError: some are NaN or infinite.
    """
    with np.errstate(over="ignore"):  # values beyond float32 are refused below
        values = np.asarray(values, np.float32, order="C")
    # A sum is not finite if a value is not. It costs half as much as isfinite and makes no array. The sum of
    # large values may also overflow, so the values decide.
    with np.errstate(over="ignore", invalid="ignore"):
        suspect = not np.isfinite(values.sum())
    if suspect and (count := values.size - int(np.isfinite(values).sum())):
        raise CheckpointError(
            f"{source.first.tensor.path}: {source.published}: expected numbers that float32 holds, found "
            f"{count} of {values.size} that are NaN or infinite",
            hint="take a checkpoint from before training failed: such a model writes nothing",
        )
    return values


def not_float(name: str, tensor: Tensor) -> list[str]:
    """Return the problems with a tensor's type."""
    if tensor.dtype in FLOATS:
        return []
    return [f"{name} is {tensor.dtype}, expected a float of 16 to 64 bits"]


def converted(
    published: Mapping[str, Tensor], naming: Naming
) -> tuple[dict[str, ConvertedSource], set[str], list[str]]:
    """Return parameters that a checkpoint holds in another form, the tensors that they take, and problems.

    The parameters have names as published, but for their ends.
    """
    found: dict[str, ConvertedSource] = {}
    taken: set[str] = set()
    problems: list[str] = []
    for rule in naming.converted:
        for first in published:
            if not first.endswith(rule.published[0]):
                continue
            block = first.removesuffix(rule.published[0])
            names = [block + end for end in rule.published]
            if missing := [name for name in names if name not in published]:
                problems.append(f"missing {few(missing, SHOWN)}")
                continue
            tensors = tuple(published[name] for name in names)
            taken |= set(names)
            if wrong := _unfit(names, tensors, rule):
                problems += wrong
                continue
            name = block + rule.name
            if name in found:
                problems.append(f"both {found[name].published} and {first} are given")
            found[name] = ConvertedSource(first, tensors, rule)
    return found, taken, problems


def _unfit(names: list[str], tensors: tuple[Tensor, ...], rule: Converted) -> list[str]:
    """Return the problems with the types and shapes of a parameter's tensors."""
    if rule.form != "mxfp4":
        rank = 3 if rule.form == "in out" else 2
        if len(tensors[0].shape) != rank:
            return [f"{names[0]} has {len(tensors[0].shape)} axes, expected {rank}"]
        return not_float(names[0], tensors[0])
    kinds = [
        f"{name} is {tensor.dtype}, expected U8"
        for name, tensor in zip(names, tensors, strict=True)
        if tensor.dtype != "U8"
    ]
    blocks, exponents = (tensor.shape for tensor in tensors)
    if len(blocks) != 4 or blocks[3] * 2 != _BLOCK or exponents != blocks[:3]:
        kinds.append(
            f"{names[0]} and {names[1]} are {list(blocks)} and {list(exponents)}, expected "
            "[experts, outputs, blocks, 16] and the same without the last axis"
        )
    return kinds


def piece_of(name: str, naming: Naming) -> tuple[str, int, int] | None:
    """Return the parameter that a matrix of an expert is a part of, its expert, and its place there."""
    for rule in naming.stacked:
        block, found, rest = name.partition(rule.experts)
        number, _, _ = rest.partition(".")
        suffix = rest.removeprefix(number)
        if found and number.isdecimal() and suffix in rule.parts:
            return block + rule.name, int(number), rule.parts.index(suffix)
    return None


def stacked(
    name: str, matrices: Mapping[tuple[int, int], TensorSource], naming: Naming
) -> tuple[StackSource | None, list[str]]:
    """Return matrices of experts as one source; None and the problems if they are not whole or differ."""
    rule = next(each for each in naming.stacked if name.endswith(each.name))
    prefix = name.removesuffix(rule.name) + rule.experts
    count = 1 + max(expert for expert, _ in matrices)
    places = [(expert, part) for expert in range(count) for part in range(len(rule.parts))]
    missing = [
        f"{prefix}{expert}{rule.parts[part]}"
        for expert, part in places
        if (expert, part) not in matrices
    ]
    if missing:
        return None, [f"missing {few(missing, SHOWN)}"]
    first = [matrices[0, part] for part in range(len(rule.parts))]
    other = [
        f"{matrices[place].published} (expected {list(first[place[1]].shape)}, "
        f"found {list(matrices[place].shape)})"
        for place in places
        if matrices[place].shape != first[place[1]].shape
        or matrices[place].shape[1:] != first[0].shape[1:]
    ]
    if other:
        return None, [f"of the wrong shape {few(other, SHOWN)}"]
    each = (tuple(matrices[e, part] for part in range(len(rule.parts))) for e in range(count))
    return StackSource(tuple(each)), []
