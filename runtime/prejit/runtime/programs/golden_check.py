"""Golden answers: run a program on the arguments of the recipe, and compare what it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.transfer import to_numpy
from prejit.runtime.format.arrays import Array, Golden
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.format.checks.program_interfaces import cache_arrays
from prejit.runtime.format.names import ADAPTABLE_KINDS, DRAFT
from prejit.runtime.programs.golden_inputs import Values, golden_inputs, plain_kind, words

if TYPE_CHECKING:
    from prejit.runtime.device.transfer import DeviceArray
    from prejit.runtime.programs.canary import Canary
    from prejit.runtime.programs.local_compiler import LocalCompiler

_MAX_SAMPLES = 16
"""Maximum number of samples of one result."""
_SAMPLES = 96
"""About how many samples a program with many results has in all; each result has at least two."""
_MAX_COMPARED = 512
"""Maximum number of results that are compared, evenly among all."""
_UNITS = 2
"""Units of the stored numbers are the tolerance divided by 2 to this power."""
_SAMPLED_FROM = 1 << 16
"""The number by which words that choose samples are told from those of arguments."""

_STEPS = ("tokens", "logprobs", "top_tokens", "top_logprobs")
"""Results of decode programs that have a row for each step. The recipe takes one step."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """The result of a program that is farthest from its golden answer.

    Attributes:
        result: its path in the program table.
        share: its difference, as a share of the tolerance; above 1 it is wrong.
        expected, found: what the golden answer has there, and what the program returned.
    """

    result: str
    share: float
    expected: str
    found: str

    def described(self) -> str:
        """Return the difference as text."""
        return f"{self.result}: expected {self.expected}, found {self.found}"


class Asked(Protocol):
    """The programs of a bundle: `ready_programs.Programs`, which asks them for answers."""

    config: Config
    device: Device
    canary: Canary | None
    table: dict[str, ProgramEntry]

    @property
    def are_loaded(self) -> bool: ...  # noqa: D102
    @property
    def compiler(self) -> LocalCompiler: ...  # noqa: D102
    def __getitem__(self, name: str) -> Executable: ...
    def arguments(self, name: str) -> tuple[Array, ...]: ...  # noqa: D102
    def load(self, program: ProgramEntry, device: Device) -> Executable: ...  # noqa: D102
    def obtained(self) -> Mapping[str, object]: ...  # noqa: D102
    def results(self, name: str) -> tuple[Array, ...]: ...  # noqa: D102
    def weights(self, name: str | None) -> list[DeviceArray]: ...  # noqa: D102


def golden_values(
    programs: Asked, program: ProgramEntry, executable: Executable, seed: int, *, nudge: float = 0.0
) -> list[Values]:
    """Return what a program returns for the arguments of the recipe of golden answers.

    `nudge`: add this share of itself to every argument that is no whole number.

    Raises:
        RejectError: the bundle is damaged.
    """
    model, device = programs.config.decoder or programs.config.encoder, programs.device
    arguments = programs.arguments(program.name)
    given = []
    values = golden_inputs(program, arguments, 0 if model is None else model.vocab_size, seed)
    for array, value in zip(arguments, values, strict=True):
        if nudge and array.dtype.startswith(("float", "bfloat", "complex")):
            value = (value * (1 + nudge)).astype(value.dtype)
        place = device.copy if array.donated else device.put
        given.append(place(value, array.sharding))
    # They may be on the way: all else is ready by then.
    weights = programs.weights(program.weights)
    return [to_numpy(result) for result in executable.run([*weights, *given])]


def samples_of(
    programs: Asked, program: ProgramEntry, values: Sequence[Values], seed: int
) -> list[Values | None]:
    """Return for each result of a program the elements that are compared; None: it is not compared.

    `values` are those of its results; `seed` is that of the recipe.
    """
    results, config = programs.results(program.name), programs.config
    decoder = config.draft if program.kind.startswith(DRAFT) else config.decoder
    kind = plain_kind(program)
    count = max(2, min(_MAX_SAMPLES, _SAMPLES // max(1, len(results))))
    every = -(-len(results) // _MAX_COMPARED)
    variables = {} if decoder is None else {a.path: a.variables for a in cache_arrays(decoder)}
    found: list[Values | None] = []
    for place, (array, value) in enumerate(zip(results, values, strict=True)):
        axes = variables.get(array.path, ())
        is_cache = kind in ADAPTABLE_KINDS and "context" in axes
        # Equally likely tokens may change places in a ranking, and a cache in int8 rounds what is near.
        is_free = program.kind != "call" and array.path[0] == "top_tokens"
        if place % every or value.size == 0 or is_free or (is_cache and value.dtype == np.int8):
            found.append(None)
            continue
        chosen = words(seed, _SAMPLED_FROM + place, min(count, value.size)).astype(np.int64)
        if kind == "decode" and array.path[0] in _STEPS:
            value = value[:1]
        value = value.reshape(value.shape or (1,))
        indices = np.unravel_index(chosen % value.size, value.shape)
        if is_cache:
            indices = _written(program, indices, axes.index("context"))
        found.append(value[indices])
    return found


def _written(program: ProgramEntry, indices: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """Return the indices of samples of a cache, moved to positions that the program writes."""
    sizes, kind = program.bucket, plain_kind(program)
    context = sizes["context"]
    if kind == "decode":
        first, count = context // 2, 1
    else:
        count = sizes["prompt"] if kind == "prefill" else sizes["draft"] + 1
        first = max(0, min(2, context - count))
    moved = first + indices[axis] % count
    return (*indices[:axis], moved, *indices[axis + 1 :])


def sampled(value: Values, samples: Values, tolerance: int) -> GoldenResult | None:
    """Return the golden values of one result; None: whole numbers of more digits than an answer has."""
    if value.dtype.kind in "biu" or value.dtype.name in ("int2", "int4", "uint2", "uint4"):
        whole = samples.astype(np.int64).tolist()
        return GoldenResult(None, 0, (*whole,)) if max(map(abs, whole)) < 10**18 else None
    mean, has_nan = _mean(value)
    exponent = max(-126, min(1023, math.frexp(mean)[1])) if mean else -20
    unit = 2.0 ** (exponent - tolerance - _UNITS)
    units = [_in_units(each, unit) for each in _reals(samples)]
    if (
        has_nan and "n" not in units and value.dtype.kind != "c"
    ):  # which may have the most samples already
        units.append("n")  # it is one of the others
    return GoldenResult(exponent, round(mean / unit), (*units,))


def compare(
    golden: Golden,
    results: Sequence[Array],
    values: Sequence[Values],
    samples: Sequence[Values | None],
) -> Deviation:
    """Return the largest difference between a golden answer and what a program returned.

    `samples` is what `samples_of` returned for the values.
    """
    worst = Deviation("", 0.0, "", "")
    expected = parse_results(golden.results)
    if len(expected) != len(results):
        return Deviation("results", math.inf, f"{len(expected)}", f"{len(results)}")
    for array, value, own, known in zip(results, values, samples, expected, strict=True):
        if known is None or own is None:
            continue
        for difference in _differences(known, value, own, golden.tolerance):
            if not difference[0] <= worst.share:
                worst = Deviation(str(array).partition(" ")[0], *difference)
    return worst


def _differences(
    known: GoldenResult, value: Values, samples: Values, tolerance: int
) -> list[tuple[float, str, str]]:
    """Return share of the tolerance, expected and found, of the mean and of each sample."""
    if known.exponent is None:
        whole = samples.astype(np.int64).tolist()
        return [
            (0.0 if one == other else math.inf, str(one), str(other))
            for one, other in zip(known.samples, whole, strict=False)
        ]
    unit = 2.0 ** (known.exponent - tolerance - _UNITS)
    mean, has_nan = _mean(value)
    if has_nan and "n" not in known.samples and value.dtype.kind != "c":
        return [(math.inf, "numbers", "nan")]
    pairs = zip((known.mean, *known.samples), (mean, *_reals(samples)), strict=False)
    return [_difference(one, other, unit, 2.0**known.exponent) for one, other in pairs]


def _difference(
    known: int | str, found: float, unit: float, scale: float
) -> tuple[float, str, str]:
    shown = f"{found:.6g}"
    if isinstance(known, str):
        same = known == _in_units(found, unit)
        return (0.0 if same else math.inf), {"n": "nan", "p": "inf", "m": "-inf"}[known], shown
    expected = known * unit
    if not math.isfinite(found):
        return math.inf, f"{expected:.6g}", shown
    allowed = unit * 2**_UNITS * (1 + abs(expected) / scale)
    return abs(found - expected) / allowed, f"{expected:.6g}", shown


def _in_units(value: float, unit: float) -> int | str:
    if math.isnan(value):
        return "n"
    if math.isinf(value):
        return "p" if value > 0 else "m"
    return max(-(10**17), min(10**17, round(value / unit)))


def _mean(value: Values) -> tuple[float, bool]:
    """Return the mean of the absolute values of all finite elements (0: none are), and if some are NaN."""
    if value.dtype.name in ("float32", "float64"):
        with np.errstate(over="ignore"):
            total = float(np.abs(value).sum(dtype=np.float64))
        if math.isfinite(total):
            return total / value.size, False
    plain = np.abs(np.asarray(_plain(value), np.float64))
    finite = plain[np.isfinite(plain)]
    mean = float((finite / max(1, finite.size)).sum())  # a sum of large ones is infinite
    return mean, bool(np.isnan(plain).any())


def _reals(samples: Values) -> list[float]:
    """Return samples as numbers; of complex ones the real parts, then the imaginary ones."""
    plain = _plain(samples)
    return [float(each) for each in np.asarray(plain, np.float64).reshape(-1)]


def _plain(value: Values) -> Values:
    if value.dtype.kind == "c":
        return np.concatenate([value.real.reshape(-1), value.imag.reshape(-1)])
    return value.astype(np.float64)


class GoldenResult(NamedTuple):
    """The golden values of one result.

    Attributes:
        exponent: of the scale; None: the values are whole numbers.
        mean: mean of the absolute values of all finite elements, in units; 0 for whole numbers.
        samples: the samples; numbers in units, or `n`, `p`, `m`. One more `n` stands for other elements.
    """

    exponent: int | None
    mean: int
    samples: tuple[int | str, ...]


def parse_results(text: str) -> tuple[GoldenResult | None, ...]:
    """Return the golden values of each result; None: it is not compared.

    The text is one for which `is_results` is true.
    """
    return tuple(map(_parse, text.split(" "))) if text else ()


def format_results(results: tuple[GoldenResult | None, ...]) -> str:
    """Return the text of golden values: the inverse of `parse_results`."""
    return " ".join(map(_format, results))


def _parse(word: str) -> GoldenResult | None:
    if word == "-":
        return None
    if word[0] == "=":
        return GoldenResult(None, 0, tuple(map(int, word[1:].split(","))))
    exponent, _, values = word.partition(":")
    mean, *samples = values.split(",")
    read = tuple(each if each in ("n", "p", "m") else int(each) for each in samples)
    return GoldenResult(int(exponent), int(mean), read)


def _format(sampled: GoldenResult | None) -> str:
    if sampled is None:
        return "-"
    samples = ",".join(map(str, sampled.samples))
    if sampled.exponent is None:
        return f"={samples}"
    return f"{sampled.exponent}:{sampled.mean}{',' if samples else ''}{samples}"
