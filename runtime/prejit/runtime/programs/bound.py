"""A program whose state stays on the device from call to call: a training step, a simulation, a cache."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from os import PathLike
from typing import Any, final

import numpy as np

from prejit.runtime.device.dtypes import dtype_of
from prejit.runtime.device.transfer import DeviceArray, to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.branches import Branch, branches, candidates, how_to_name, whole
from prejit.runtime.format.schema import ProgramEntry
from prejit.runtime.programs import pytree
from prejit.runtime.programs.calls import Calls, ChosenBucket, Held, Pending, fit


@final
class Bound:
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
        self._taken: dict[str, list[Branch]] = {}
        self._given: dict[str, list[Branch]] = {}
        given: dict[trees.Key, Any] = dict(enumerate(args))
        given.update(kwargs)
        self._static = {str(key): given.pop(key) for key in calls.static_names(name) & given.keys()}
        if not given:
            raise UsageError(
                f"bind: expected an argument of {name!r} to keep, found none",
                hint=f"bundle.bind({name!r}, state=...)",
            )
        first = calls.buckets(name)[0]
        taken = {branch.key: branch for branch in self._arguments(first)}
        for key in given:
            if key not in taken:
                raise UsageError(
                    f"bind: {name!r} has no argument {key!r}",
                    hint=f"its arguments are: {', '.join(map(str, taken)) or 'none'}",
                )
        self._state = {key: taken[key] for key in given}
        self._placeholders = {
            key: [Held(dtype_of(array.dtype), array.shape) for array in branch.arrays]
            for key, branch in self._state.items()
        }
        self._slots = {p.name: self._slots_of(p) for p in calls.buckets(name)}
        self._held: dict[trees.Key, list[DeviceArray]] = {}
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
        return self.call_async(*args, **kwargs).result()

    def call_async(self, *args: Any, **kwargs: Any) -> Pending:
        """Run the program once without waiting for it. The next call may follow at once."""
        static = self._static
        if names := self._calls.static_names(self._name):
            static = {**static, **{key: kwargs.pop(key) for key in names & kwargs.keys()}}
        with self._lock:
            chosen = self._choose(static, args, kwargs)
            inputs: list[DeviceArray] = []
            arrays = self._calls.programs.arguments(chosen.program.name)
            for branch in self._arguments(chosen.program):
                if branch.key in self._state:
                    inputs += self._alive(branch.key)
                else:
                    inputs += map(self._copy, branch.of(arrays), branch.of(chosen.values))
            results = self._calls.run(chosen.program, inputs)
            slots = self._slots[chosen.program.name]
            for key, slot in slots.items():
                self._held[key] = slot.of(results)
        return self._pending(chosen, results, {slot.start for slot in slots.values()})

    def _pending(
        self, chosen: ChosenBucket, results: list[DeviceArray], kept: Collection[int]
    ) -> Pending:
        """Return those of the results that do not start at a place that is kept."""
        tree = self._calls.programs.results_tree(chosen.program.name)
        rest = [branch for branch in self._results(chosen.program) if branch.start not in kept]

        def value(branch: Branch) -> Any:
            return self._calls.nested(branch.tree, branch.of(results), chosen.convert)

        def rebuild() -> Any:
            if not rest:
                return None
            if len(rest) == 1:
                return value(rest[0])
            if isinstance(tree, trees.Node) and tree.kind in ("list", "tuple", "node"):
                return tuple(map(value, rest))
            return {branch.key: value(branch) for branch in rest}

        # The next call deletes the state.
        arrays = [array for branch in rest for array in branch.of(results)]
        return self._calls.pending(chosen, arrays, rebuild)

    def read(self) -> dict[trees.Key, Any]:
        """Return a copy of the state on the host, by the name of the argument.

        Raises:
            RejectError: the bundle is damaged.
        """
        self._calls.finish()
        with self._lock:
            return {
                key: self._calls.nested(branch.tree, self._alive(key), _copied)
                for key, branch in self._state.items()
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
        from prejit.runtime.programs.state_files import write_state

        self._calls.finish()
        with self._lock:
            arrays = {
                path: _copied(array)
                for key, branch in self._state.items()
                for path, array in zip(_paths(branch), self._alive(key), strict=True)
            }
        write_state(path, arrays)

    def restore(self, path: str | PathLike[str]) -> None:
        """Replace the state by one that `save` wrote.

        Raises:
            UsageError: the package that reads it is not installed.
            StoreError: it cannot be read, or it is another program's state; the state stays as it was.
        """
        from prejit.runtime.programs.state_files import read_state

        expected = {
            path: array
            for branch in self._state.values()
            for path, array in zip(_paths(branch), branch.arrays, strict=True)
        }
        found = read_state(path, expected)
        with self._lock:
            for key, branch in self._state.items():
                self._held[key] = [
                    self._calls.device.copy(found[at], array.sharding)
                    for at, array in zip(_paths(branch), branch.arrays, strict=True)
                ]

    def _choose(
        self, static: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ChosenBucket:
        """Return the bucket that takes these arguments beside the state, whose values are placeholders."""

        def flatten(tree: trees.Tree) -> list[Any]:
            assert isinstance(tree, trees.Node)
            others = [key for key in tree.keys if key not in self._state]
            given: dict[trees.Key, Any] = dict(zip(others, args, strict=False))
            if tree.kind == "dict":
                given = {key: value for key, value in kwargs.items()}
            found: list[Any] = []
            for key, child in zip(tree.keys, tree.children, strict=True):
                if key in self._state:
                    found += self._placeholders[key]
                elif key in given:
                    found += pytree.flatten(child, given.pop(key), (key,))
                else:
                    raise pytree.MisfitError(f"{pytree.spell((key,))} is missing")
            more = args if tree.kind == "dict" else (*args[len(others) :], *kwargs)
            for key in (*given, *range(len(more))):
                raise pytree.MisfitError(f"unexpected {pytree.spell((key,))}")
            return found

        return self._calls.choose(self._name, static, flatten)

    def _copy(self, array: Array, value: Any) -> DeviceArray:
        return self._calls.placed(array, value, copy=True)

    def _put(self, state: Mapping[trees.Key, Any]) -> None:
        """Copy values of the state to the device."""
        held = {}
        for key, value in state.items():
            if (branch := self._state.get(key)) is None:
                raise UsageError(
                    f"{key!r} is no part of the state of {self._name!r}",
                    hint=f"its parts are: {', '.join(map(str, self._state))}",
                )
            try:
                leaves = pytree.flatten(branch.tree, value, (key,))
            except pytree.MisfitError as misfit:
                raise UsageError(f"state of {self._name!r}: {misfit}") from None
            fitted = fit(branch.arrays, list(trees.leaves(branch.tree)), leaves)
            if isinstance(fitted, str):
                raise UsageError(f"state of {self._name!r}: {fitted}")
            values, smaller = fitted
            if smaller:
                raise UsageError(
                    f"state of {self._name!r}: expected the sizes of its bucket, found {smaller}"
                )
            held[key] = [
                self._copy(array, one)
                for one, array in zip(values, branch.arrays, strict=True)
                if not isinstance(one, Held)
            ]
        self._held |= held

    def _alive(self, key: trees.Key) -> list[DeviceArray]:
        """Return a part of the state on the device.

        Raises:
            UsageError: a program that failed has deleted it.
        """
        held = self._held[key]
        if any(array.is_deleted() for array in held):
            raise UsageError(
                f"the state {key!r} of {self._name!r} was donated to a call that failed",
                hint="set it again with `write` or `restore`",
            )
        return held

    def _slots_of(self, program: ProgramEntry) -> dict[trees.Key, Branch]:
        """Return the results that take the place of the state, by argument.

        It is the result of the same name, or else the only one with the same structure, shapes and dtypes.

        Raises:
            UsageError: there is none, or several may be meant.
        """
        results = {branch.key: branch for branch in self._results(program)}
        slots: dict[trees.Key, Branch] = {}
        taken = {branch.key: branch for branch in self._arguments(program)}
        for key, branch in self._state.items():
            if key not in taken or not branch.holds_what(taken[key]):
                raise UsageError(
                    f"bind: expected {key!r} to have the same structure, shapes and dtypes in all buckets "
                    f"of {self._name!r}, found others in {program.name}"
                )
            alike = [each for each, result in results.items() if branch.holds_what(result)]
            found = candidates(key, alike, taken)
            if not found:
                raise UsageError(
                    f"bind: {program.name} returns nothing with the structure, shapes and dtypes of {key!r}",
                    hint="keep an argument that the function returns anew",
                )
            if len(found) > 1:
                raise UsageError(
                    f"bind: expected one result of {program.name} that can be the next {key!r}, found "
                    f"{', '.join(map(repr, found))} with the same structure, shapes and dtypes",
                    hint=how_to_name(key),
                )
            slots[key] = results.pop(found[0])
        return slots

    def _arguments(self, program: ProgramEntry) -> list[Branch]:
        """Return the arguments of a program."""
        programs = self._calls.programs
        if (known := self._taken.get(program.name)) is None:
            tree = programs.arguments_tree(program.name)
            known = self._taken[program.name] = branches(tree, programs.arguments(program.name))
        return known

    def _results(self, program: ProgramEntry) -> list[Branch]:
        """Return the results of a program; all of them as one, if together they can be the state."""
        programs = self._calls.programs
        if (known := self._given.get(program.name)) is None:
            tree, arrays = programs.results_tree(program.name), programs.results(program.name)
            together = whole(tree, arrays)
            alone = any(map(together.holds_what, self._state.values()))
            known = self._given[program.name] = [together] if alone else branches(tree, arrays)
        return known


def _paths(branch: Branch) -> list[trees.Path]:
    return [array.path for array in branch.arrays]


def _copied(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return a copy of an array on the host, because the next call may write to the device's memory."""
    return np.array(to_numpy(array))
