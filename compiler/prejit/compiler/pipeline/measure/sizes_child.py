"""The process that compares programs of varying sizes with their functions: `python -m` this module.

Stdin is a request, `SizesRequest` as JSON. Each line of stdout is one program:
`{"program": ..., "differences": [...]}`, or `"error"` in place of differences.

A program is served as `runtime.programs` serves it: the arguments are padded to the bucket and the results
cut, or the program with symbolic sizes gets those of the arguments. The function itself was lowered for these
very sizes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler.base.process_errors import error_text
from prejit.compiler.pipeline.plan import StoredTrial
from prejit.runtime.base.child_process import end_with_parent
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.device.device import Device, Executable
from prejit.runtime.device.portable import specialize
from prejit.runtime.device.transfer import DeviceArray, dtype_of, is_whole, to_numpy
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.blobs import Layer
from prejit.runtime.programs.fitted_arguments import fit, padded
from prejit.runtime.programs.golden_inputs import Values, call_input
from prejit.runtime.programs.mapped_weights import open_weights
from prejit.runtime.programs.pytree import spell

SEED = 1
"""The seed of the arguments."""

_PROGRAM_SECONDS = 30
"""CPU time limit of one program. A loop may never end with arguments that mean nothing."""
_ENOUGH_SECONDS = 3
"""CPU time of one program after which nothing more is tried, once padding and open sizes both were."""
_NUDGE = 2.0**-16
"""Where a result differs, the function is asked again, with arguments that differ by this share. A result
that moves as far says more about rounding than about sizes."""
_SIGNS = (0, 1, -1)
"""Each size is tried with numbers of both signs, with positive ones, and with negative ones: zeros of padding
are the least, or the greatest, of some."""
_FAR = (3, 1000)
"""Each size is also tried with numbers so far from zero, because code has thresholds beyond 1."""


@dataclass(frozen=True)
class Compared:
    """A program to compare.

    Attributes:
        portable, symbolic: the blobs of its StableHLO, for the bucket and for any size.
        weights: names of the tensors that come first among its arguments.
        arguments, results: the others, and the results, as `Array` prints them.
        mask: as in the program table; empty: there is none.
        pad: the variables that are padded.
        tolerance: exponent of one half.
        trials: the sizes, with the function at each.
    """

    name: str
    portable: str
    symbolic: str | None
    platforms: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    mask: str
    pad: tuple[str, ...]
    tolerance: int
    trials: tuple[StoredTrial, ...]


@dataclass(frozen=True)
class SizesRequest:
    """The request to this process: programs, the files of their blobs, and that of the weights layer."""

    files: dict[str, str]
    weights: str | None
    programs: tuple[Compared, ...]


@dataclass(frozen=True)
class SizeDifference:
    """A result that differs from the function's.

    Attributes:
        sizes: the sizes at which it differs most.
        expected, found: there, the function's value and the program's.
        share: the difference as a share of the tolerance.
    """

    result: str
    sizes: dict[str, int]
    padded: bool
    expected: str
    found: str
    share: float


def main() -> None:
    """Answer the request on stdin."""
    request = from_plain(SizesRequest, json.loads(sys.stdin.buffer.readline()))
    device = Device("cpu")
    weights: Mapping[str, Values] = {}
    if request.weights is not None:
        weights = open_weights(Layer.in_file(request.weights)).values

    def read(digest: str) -> bytes:
        return Path(request.files[digest]).read_bytes()

    for program in request.programs:
        answer: dict[str, Any] = {"program": program.name}
        signal.setitimer(signal.ITIMER_PROF, _PROGRAM_SECONDS)  # SIGPROF ends this process
        try:
            values = [device.put(weights[name]) for name in program.weights]
            answer["differences"] = list(map(asdict, _compare(program, read, device, values)))
        except Exception as error:
            answer["error"] = error_text(error)
        print(json.dumps(answer), flush=True)


def _compare(
    program: Compared, read: Callable[[str], bytes], device: Device, weights: Sequence[DeviceArray]
) -> list[SizeDifference]:
    """Return each result that differs, where it differs most."""
    arguments = [Array.parse(text) for text in program.arguments]
    results = [Array.parse(text) for text in program.results]
    bucket = cache(lambda: device.compile(read(program.portable), program.platforms))
    worst: dict[tuple[str, bool], SizeDifference] = {}
    tried = set[bool]()
    started = time.process_time()

    def is_enough(trial: StoredTrial) -> bool:
        return trial.padded in tried and time.process_time() - started > _ENOUGH_SECONDS

    def run(executable: Executable, values: Sequence[Any]) -> list[Values]:
        placed = [device.copy(np.asarray(value)) for value in values]
        return [to_numpy(result) for result in executable.run([*weights, *placed])]

    for trial in program.trials:
        if is_enough(trial):
            continue
        at_size = device.compile(read(trial.portable), ("cpu",))
        if trial.padded:
            serve = _padding(arguments, results, program.pad, bucket(), run)
        else:
            assert program.symbolic is not None
            shapes = [*(each.shape for each in weights)]
            shapes += [each.shape_at(trial.sizes) for each in arguments]
            portable, _ = specialize(read(program.symbolic), program.platforms, "cpu", shapes)
            serve = partial(run, device.compile(portable, ("cpu",)))
        for values in _inputs(arguments, trial, program.mask):
            if is_enough(trial):
                break
            tried.add(trial.padded)
            expected, found = run(at_size, values), serve(values)
            pairs = list(zip(results, expected, found, strict=True))
            if all(_share(e, f, e, program.tolerance)[0] <= 1 for _, e, f in pairs):
                continue
            again = run(at_size, [_nudged(value) for value in values])
            for (array, one, other), moved in zip(pairs, again, strict=True):
                share, wanted, given = _share(one, other, moved, program.tolerance)
                key = spell(array.path), trial.padded
                if share > 1 and (key not in worst or share > worst[key].share):
                    worst[key] = SizeDifference(
                        key[0], trial.sizes, trial.padded, wanted, given, share
                    )
    return list(worst.values())


def _padding(
    arguments: Sequence[Array],
    results: Sequence[Array],
    pad: Sequence[str],
    executable: Executable,
    run: Callable[[Executable, Sequence[Any]], list[Values]],
) -> Callable[[Sequence[Values]], list[Values]]:
    """Return what a bucket gives for smaller sizes: see `runtime.programs.user_programs`."""

    def serve(values: Sequence[Values]) -> list[Values]:
        fitted = fit(arguments, [trees.Leaf()] * len(arguments), values, pad)
        if isinstance(fitted, str):
            raise ValueError(fitted)
        sizes = fitted[1]
        whole = run(executable, list(map(padded, arguments, fitted[0])))
        return [
            value[tuple(slice(sizes.get(name)) for name in array.variables)]
            for array, value in zip(results, whole, strict=True)
        ]

    return serve


def _inputs(arguments: Sequence[Array], trial: StoredTrial, mask: str) -> Iterator[list[Values]]:
    """Yield arguments of several signs and magnitudes, booleans of both values and of one.

    Whole numbers are below every size: they may be places or lengths. Places are not below 0.
    """
    arrays = [replace(each, shape=each.shape_at(trial.sizes)) for each in arguments]
    values = [call_input(array, SEED, place, mask) for place, array in enumerate(arrays)]
    for far, sign in (*((False, sign) for sign in _SIGNS), (True, 1), (True, -1)):
        yield [
            value
            if (mask,) == tuple(map(str, array.path))
            else _of_sign(value, sign, far, min(trial.sizes.values()), trial.has_places)
            for array, value in zip(arrays, values, strict=True)
        ]


def _of_sign(value: Values, sign: int, far: bool, below: int, has_places: bool) -> Values:
    """Return a value with numbers of one sign, all far from zero if wanted; sign 0: of both signs.

    Booleans are all true, or all false.
    """
    dtype = value.dtype
    if dtype.kind == "b":
        return np.full_like(value, sign > 0) if sign else value
    if is_whole(dtype):
        if sign < 0 and not (has_places or dtype.name.startswith("uint")):
            return np.clip(-value.astype(np.int64), -2, -1).astype(dtype)
        most = max(0, min(2, below - 1))
        return np.clip(value.astype(np.int64), min(1, most) if sign else 0, most).astype(dtype)
    if not sign or dtype == dtype_of("float8_e8m0fnu"):
        return value
    if dtype.kind == "c":
        parts = (_of_sign(part, sign, far, below, has_places) for part in (value.real, value.imag))
        return (next(parts) + 1j * next(parts)).astype(dtype)
    size = np.abs(value.astype(np.float64))
    if far and dtype.itemsize > 1:  # float8 is too narrow
        size = _FAR[0] + size * (_FAR[1] - _FAR[0])
    return (sign * size).astype(dtype)


def _nudged(value: Values) -> Values:
    """Return a value with its numbers changed a little; whole numbers stay."""
    if is_whole(value.dtype):
        return value
    return (value * (1 + _NUDGE)).astype(value.dtype)


def _share(
    expected: Values, found: Values, moved: Values, tolerance: int
) -> tuple[float, str, str]:
    """Return the largest difference of a result as a share of what is allowed, and its two values.

    `moved` is what the function returns for slightly different arguments. The tolerance is an exponent of one
    half; whole numbers and booleans must be equal.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        one, other = (f"{each.dtype}{list(each.shape)}" for each in (expected, found))
        return np.inf, one, other
    if not expected.size:
        return 0.0, "", ""
    first, second, third = map(_as_doubles, (expected, found, moved))
    with np.errstate(all="ignore"):
        if is_whole(expected.dtype):
            allowed = np.where(first == third, 0.0, np.inf)
            second = np.where((expected == found).reshape(-1), first, second)  # beyond 2**53
        else:
            finite = np.abs(first[np.isfinite(first)])
            scale = finite.mean() if finite.size else 0.0
            allowed = 2.0**-tolerance * (scale + np.abs(first)) + np.abs(third - first)
        distance = np.abs(second - first)
        # Of a NaN or an infinity, the other must be the same, unless rounding decides whether there is one.
        odd = ~np.isfinite(first) | ~np.isfinite(second)
        same = (
            (first == second)
            | (np.isnan(first) & np.isnan(second))
            | (np.isfinite(first) != np.isfinite(third))
        )
        distance = np.where(odd, np.where(same, 0.0, np.inf), distance)
        shares = np.where(distance > allowed, distance / allowed, 0.0)
        shares = np.where(odd & ~same, np.inf, shares)
    at = int(shares.argmax())
    return float(shares[at]), f"{first[at]:.6g}", f"{second[at]:.6g}"


def _as_doubles(value: Values) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a result as a flat array of float64, of complex numbers both parts."""
    if value.dtype.kind == "c":
        value = np.stack([value.real, value.imag])
    return value.astype(np.float64).reshape(-1)


if __name__ == "__main__":
    end_with_parent()
    main()
