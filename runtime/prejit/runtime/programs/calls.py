"""Call a user's program with a pytree of arrays: choose the bucket by shapes, run it, rebuild the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.device.device import Device
from prejit.runtime.device.dtypes import dtype_of
from prejit.runtime.device.transfer import aligned_zeros, is_jax_array, to_jax, to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.schema import ProgramEntry
from prejit.runtime.programs import pytree
from prejit.runtime.programs.ready import Programs


def flatten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[pytree.Path, Any]:
    """Return the arrays in the arguments of a call by their paths.

    Args:
        name: of the program, for errors.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        UsageError: they are nested too deeply.
    """
    try:
        return {**dict(pytree.leaves(args)), **dict(pytree.leaves(kwargs))}
    except RecursionError:
        raise UsageError(
            f"{name:.80}: expected arguments nested less deeply than Python's recursion limit"
        ) from None


def call_leaves(
    programs: Programs, device: Device, name: str, given: Mapping[pytree.Path, Any]
) -> Any:
    """Run a program on arrays given by their paths. Results and errors as `Bundle.call`."""
    arguments.text("name", name)
    if not isinstance(given, Mapping) or not all(isinstance(path, tuple) for path in given):
        arguments.refuse("given", "a mapping of paths to arrays", given)
    values = {path: _as_numpy(path, value) for path, value in given.items()}
    program = _bucket_for(programs, name, values)
    expected = programs.arguments(program.name)
    paths = [result.path for result in programs.results(program.name)]
    inputs = [device.put(values[array.path], array.sharding) for array in expected]
    results = programs[program.name].run([*programs.weights(program.weights), *inputs])
    convert = to_jax if any(map(is_jax_array, given.values())) else to_numpy
    return pytree.unflatten(paths, [convert(result) for result in results])


def runner_with_zeros(
    programs: Programs, device: Device, program: ProgramEntry
) -> Callable[[], object]:
    """Return a function that runs a program on zeros and waits for its first result."""
    inputs = [
        device.put(aligned_zeros(array.shape, dtype_of(array.dtype)), array.sharding)
        for array in programs.arguments(program.name)
    ]
    executable = programs[program.name]
    weights = programs.weights(program.weights)
    return lambda: to_numpy(executable.run([*weights, *inputs])[0])


def _bucket_for(programs: Programs, name: str, values: Mapping[pytree.Path, Any]) -> ProgramEntry:
    """Return the bucket of a program that takes these arrays."""
    callable_programs = [p for p in programs.table.values() if p.kind == "call"]
    buckets = [p for p in callable_programs if p.name.partition("/")[0] == name]
    if not buckets:
        names = {program.name.partition("/")[0] for program in callable_programs}
        raise UsageError(
            f"{programs.bundle}: no program {name!r}",
            hint=f"its programs are: {', '.join(sorted(names)) or 'none'}",
        )
    complaints = []
    for program in buckets:
        complaint = _complaint(programs.arguments(program.name), values)
        if complaint is None:
            return program
        complaints.append(f"{program.name}: {complaint}")
    raise UsageError(
        f"no bucket of {name!r} takes these arguments: {'; '.join(complaints)}",
        hint="pass arrays of these shapes and dtypes, or add a bucket to the manifest",
    )


def _complaint(expected: Sequence[Array], values: Mapping[pytree.Path, Any]) -> str | None:
    """Return why a program does not take these arrays, or None if it does."""
    for array in expected:
        value = values.get(array.path)
        spelled = pytree.spell(array.path)
        if value is None:
            return f"{spelled} is missing"
        if value.shape != array.shape or value.dtype != dtype_of(array.dtype):
            shapes = f"{array.dtype}{list(array.shape)}, found {value.dtype}{list(value.shape)}"
            return f"{spelled}: expected {shapes}"
    if unknown := values.keys() - {array.path for array in expected}:
        return f"unexpected {pytree.spell(min(unknown, key=str))}"
    return None


def _as_numpy(path: pytree.Path, value: Any) -> Any:
    try:
        if is_jax_array(value) or hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
            return np.asarray(value)
        return np.from_dlpack(value)
    except Exception as error:  # a deleted buffer, another device: whatever the library raises
        raise UsageError(
            f"{pytree.spell(path)}: expected an array that NumPy or DLPack reads, found "
            f"{type(value).__name__}: {error}"
        ) from error
