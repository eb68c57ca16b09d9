"""A program whose state stays on the device from call to call: a training step, a simulation, a cache.

Its state may be written to a .safetensors file, or to an orbax checkpoint directory, by the packages
`safetensors` and `orbax-checkpoint`. Neither is needed for anything else.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np

from prejit.runtime.base.threads_and_forks import OneProcess
from prejit.runtime.base.written_files import write_file
from prejit.runtime.device import _jax_parts, _jaxlib
from prejit.runtime.device.transfer import DeviceArray, dtype_of, to_numpy
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.trees import Branch
from prejit.runtime.programs import pytree
from prejit.runtime.programs.bucket_choice import are_on_device
from prejit.runtime.programs.fitted_arguments import fit, narrows
from prejit.runtime.programs.known_calls import Held
from prejit.runtime.programs.steps import Rest, State, Steps
from prejit.runtime.programs.user_programs import Calls, Pending

_Arrays = Mapping[trees.Path, np.ndarray[Any, Any]]

_CODES = {
    **{"bool": "BOOL", "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64"},
}
"""The dtypes that the package safetensors writes, and their names in the format."""


@final
class Bound(OneProcess):
    """A program that keeps some of its arguments, its state, on the device. Safe to use from many threads.

    Each call runs the program on the state, and the state among its results takes the place of the old one.
    Nothing of it passes through the host. If the manifest donates the state, it is updated in its own memory.
    """

    def __init__(
        self, calls: Calls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Put the state on the device. Use `Bundle.bind`."""
        self._calls = calls
        self._name = name
        self._lock = threading.Lock()
        given: dict[trees.Key, Any] = dict(enumerate(args))
        given.update(kwargs)
        static = {
            str(key): given.pop(key) for key in calls.choice.static_names(name) & given.keys()
        }
        if not given:
            raise UsageError(
                f"bind: expected an argument of {name!r} to keep, found none",
                hint=f"bundle.bind({name!r}, state=...)",
            )
        self._steps = Steps(calls, name, tuple(given), static)
        self._has_failed = False
        self._held: State = []
        self._put(given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program once, and return those of its results that are no state.

        Args:
            *args: the arguments that are not kept, in order, if the program takes a list.
            **kwargs: the arguments that are not kept, by name.

        Returns:
            A single result alone; several as a dict if the function names them, else as a tuple; None if the
            program returns only its state.

        Raises:
            UsageError, RejectError: as `Bundle.call`.
        """
        steps = self._steps
        alone = None if args or kwargs else steps.alone
        if alone is None or _jax_parts.trace_context() != alone.settings:
            route, rest, chosen = self._step(args, kwargs)
            result = steps.rebuild(route, rest, chosen)
            self._calls.finish()
            return result
        # As `_step` with fewer calls of Python, for which a tiny program would wait.
        route, chosen, _ = alone
        with self._lock:
            if self._has_failed:
                self._check_state()
            try:
                executable = self._calls.programs[chosen.program.name]
                results = executable.run(route.arguments(self._held))
            except BaseException:
                self._has_failed = True
                raise
            self._held = route.state(results)
        return steps.rebuild(route, route.rest(results), chosen) if route.returned else None

    def call_async(self, *args: Any, **kwargs: Any) -> Pending:
        """Run the program once without waiting for it. The next call may follow at once."""
        route, rest, chosen = self._step(args, kwargs)
        return self._calls.pending(chosen, rest, partial(self._steps.rebuild, route, rest, chosen))

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rest:
        """Run the program on the state, keep the next one, and return the rest."""
        with self._lock:
            if self._has_failed:
                self._check_state()
            try:
                self._held, rest = self._steps.run(self._held, args, kwargs)
            except BaseException:
                self._has_failed = True
                raise
        return rest

    def _check_state(self) -> None:
        """Check, after a program failed, that it has not deleted the state. Raises as `_alive`."""
        for key in self._steps.state:
            self._alive(key)
        self._has_failed = False

    def read(self) -> dict[trees.Key, Any]:
        """Return a copy of the state on the host, by the name of the argument.

        Raises:
            RejectError: the bundle is damaged.
        """
        self._calls.finish()
        with self._lock:
            return {
                key: self._calls.nested(branch.tree, list(map(_copied, self._alive(key))))
                for key, branch in self._steps.state.items()
            }

    def write(self, **state: Any) -> None:
        """Replace parts of the state.

        Raises:
            UsageError: a name is no part of it, or a value has another structure, shape or dtype.
        """
        with self._lock:
            self._put({key: value for key, value in state.items()})

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a .safetensors file, or else to a new directory as an orbax checkpoint.

        Raises:
            UsageError: the package that writes it is not installed.
            StoreError: it cannot be written. A file that was there stays as it was.
            RejectError: the bundle is damaged.
        """
        self._calls.finish()
        with self._lock:
            arrays = {
                path: _copied(array)
                for key, branch in self._steps.state.items()
                for path, array in zip(_paths(branch), self._alive(key), strict=True)
            }
        _write_state(path, arrays)

    def restore(self, path: str | PathLike[str]) -> None:
        """Replace the state by one that `save` wrote.

        Raises:
            UsageError: the package that reads it is not installed.
            StoreError: it cannot be read, or it is another program's state; the state stays as it was.
        """
        expected = {
            path: array
            for branch in self._steps.state.values()
            for path, array in zip(_paths(branch), branch.arrays, strict=True)
        }
        found = _read_state(path, expected)
        with self._lock:
            self._held = [
                self._calls.device.copy(found[path], array.sharding)
                for path, array in expected.items()
            ]

    def _put(self, state: Mapping[trees.Key, Any]) -> None:
        """Copy values of the state to the device."""
        held = [*self._held]
        for key, value in state.items():
            if (branch := self._steps.state.get(key)) is None:
                raise UsageError(
                    f"{key!r} is no part of the state of {self._name!r}",
                    hint=f"its parts are: {', '.join(map(str, self._steps.state))}",
                )
            if pytree.changes_itself(value):
                raise UsageError(
                    f"bind: expected {key!r} of classes that jax makes anew as they are, found one whose "
                    "own code changes its parts each time",
                    hint="give its arrays: a dict with the names of its fields will do",
                )
            try:
                leaves = pytree.flatten(branch.tree, value, (key,))
            except pytree.MisfitError as misfit:
                raise UsageError(f"state of {self._name!r}: {misfit}") from None
            narrow = narrows(self._calls.choice.buckets(self._name)[0])
            fitted = fit(branch.arrays, trees.leaves(branch.tree), leaves, narrows=narrow)
            if isinstance(fitted, str):
                raise UsageError(f"state of {self._name!r}: {fitted}")
            values, smaller = fitted
            if smaller:
                raise UsageError(
                    f"state of {self._name!r}: expected the sizes of its bucket, found {smaller}"
                )
            with _jaxlib.guarding(not are_on_device(leaves)):
                held[self._steps.places[key]] = [
                    self._calls.placed(array, one, copy=True)
                    for one, array in zip(values, branch.arrays, strict=True)
                    if not isinstance(one, Held)
                ]
        self._held = held

    def _alive(self, key: trees.Key) -> State:
        """Return a part of the state on the device."""
        held = self._held[self._steps.places[key]]
        if any(array.is_deleted() for array in held):
            raise UsageError(
                f"the state {key!r} of {self._name!r} was donated to a call that failed",
                hint="set it again with `write` or `restore`",
            )
        return held


def _paths(branch: Branch) -> list[trees.Path]:
    return [array.path for array in branch.arrays]


def _copied(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return a copy of an array on the host, because the next call may write to the device's memory."""
    return np.array(to_numpy(array))


def _write_state(path: str | PathLike[str], arrays: _Arrays) -> None:
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


def _read_state(
    path: str | PathLike[str], expected: Mapping[trees.Path, Array]
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
