"""Call a user's program with a pytree of arrays: place them, run a bucket, rebuild the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.base.threads_and_forks import OneProcess
from prejit.runtime.device import _jax_parts, _jaxlib, jax_settings
from prejit.runtime.device.jax_arrays import OnDevice, weakened
from prejit.runtime.device.transfer import DeviceArray, dtype_of, to_numpy
from prejit.runtime.errors import UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.programs import pytree
from prejit.runtime.programs.bucket_choice import BucketChoice, Fitted, Flatten
from prejit.runtime.programs.fitted_arguments import EVERYTHING, Value, as_key, padded
from prejit.runtime.programs.known_calls import ChosenBucket, Held, KnownCalls
from prejit.runtime.programs.ready_programs import Programs


@final
class Pending(OneProcess):
    """Results of a program that may still run.

    Attributes:
        program: the bucket that runs: `score/batch8`.
        padding: the share of it that is padding, from 0 to 1.
    """

    def __init__(
        self, chosen: ChosenBucket, arrays: Sequence[DeviceArray], rebuild: Callable[[], Any]
    ) -> None:
        """Keep what the results are made of.

        `rebuild` waits for them and returns what the caller gets.
        """
        self.program = chosen.program.name
        self.padding = chosen.padding
        self._arrays = arrays
        self._rebuild = rebuild

    def done(self) -> bool:
        """Return whether `result` would not wait for the program."""
        return all(array.is_ready() for array in self._arrays)

    def result(self) -> Any:
        """Wait for the program, and return its results as `Bundle.call` does.

        Raises:
            RejectError: the bundle is damaged.
        """
        return self._rebuild()


@final
class Calls:
    """The user's programs of a bundle. Safe to use from many threads.

    Attributes:
        programs: the programs of a bundle.
        choice: chooses the bucket of a call.
        device: where they run.
        types: classes of results, by `module:Name`.
        has_finished: whether all bytes of the target are verified.
    """

    def __init__(
        self,
        programs: Programs,
        types: Mapping[str, type[Any]] | None = None,
        *,
        compiles: bool = True,
    ) -> None:
        """Keep what calls need.

        `compiles`: whether other sizes than those of the buckets may be compiled here.
        """
        self.programs = programs
        self.choice = BucketChoice(programs, compiles=compiles)
        self.device = programs.device
        self.types = types or {}
        self._agreed: dict[str, Any] = {}  # the last key of jax's traces that each program fitted
        self._known_calls = KnownCalls()
        self.has_finished = False

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a program on nested arguments. Arguments, results and errors as `Bundle.call`."""
        return self.call_in_bucket(name, args, kwargs)[1]

    def call_in_bucket(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[ChosenBucket, Any]:
        """Run a program as `call` does; return its bucket and its results."""
        chosen = self.choose_for(name, args, kwargs)
        # Reading a NumPy array waits for the program; an array of jax may be there before it is computed.
        copy = chosen.convert is not to_numpy
        results = self.run_checked(chosen, self.put(chosen, copy=copy))
        result = self.rebuild(chosen, results)
        self.finish()
        return chosen, result

    def call_async(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pending:
        """Run a program as `call` does, without waiting for it. The arguments are copied."""
        chosen = self.choose_for(name, args, kwargs)
        results = self.run_checked(chosen, self.put(chosen, copy=True))
        chosen = chosen.emptied()
        return self.pending(chosen, results, lambda: self.rebuild(chosen, results))

    def call_on_device(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a program as `call` does, and leave its results on the device. The arguments are copied."""
        chosen = self.choose_for(name, args, kwargs)
        results = self.run_checked(chosen, self.put(chosen, copy=True))
        arrays = self.programs.results(chosen.program.name)
        if chosen.sizes and any(array.variables for array in arrays):
            raise UsageError(
                f"{chosen.program.name}: expected the sizes of a bucket, found {dict(chosen.sizes)}",
                hint="results on the device are not cut: use `call`, or pass arrays of a bucket's sizes",
            )
        kept = [
            OnDevice(result, dtype_of(array.dtype), array.shape, array.sharding, self.device)
            for array, result in zip(arrays, results, strict=True)
        ]
        self.finish()
        return self.nested(self.programs.results_tree(chosen.program.name), kept)

    def call_by_path(
        self, name: str, given: Mapping[trees.Path, Any], static: Mapping[str, Any]
    ) -> tuple[ChosenBucket, dict[trees.Path, Any]]:
        """Run a program on arrays by path; return its bucket and its results by path. Errors as `call`."""
        if not isinstance(given, Mapping) or not all(isinstance(path, tuple) for path in given):
            arguments.refuse("given", "a mapping of paths to arrays", given)
        if not isinstance(static, Mapping):
            arguments.refuse("static", "a mapping of names to values", static)
        weak = {
            a.path for a in self.programs.arguments(self.choice.buckets(name)[0].name) if a.weak
        }
        self.check_settings(name)
        given = {path: weakened(value) if path in weak else value for path, value in given.items()}

        def choose(given: Any) -> ChosenBucket:
            return self.choice.choose(name, given[2], lambda tree: pytree.by_path(tree, given[1]))

        chosen = self._known_calls.choose((name, given, static), choose, has_static=bool(static))
        results = self.run_checked(chosen, self.put(chosen))
        arrays = self.programs.results(chosen.program.name)
        convert = self.cutter(chosen)
        values = {
            array.path: convert(array, result)
            for array, result in zip(arrays, results, strict=True)
        }
        self.finish()
        return chosen, values

    def put(self, chosen: ChosenBucket, *, copy: bool = False) -> list[DeviceArray]:
        """Return the arguments on the device.

        Donated ones are copied, so that the program does not write to the caller's memory.
        """
        arrays = self.programs.arguments(chosen.program.name)
        values = self.filled(chosen, arrays)
        with _jaxlib.guarding(not chosen.is_on_device):
            return [
                self.placed(array, value, copy=copy or array.donated)
                for array, value in zip(arrays, values, strict=True)
                if not isinstance(value, Held)
            ]

    def filled(self, chosen: ChosenBucket, arrays: Sequence[Array]) -> Sequence[Value]:
        """Return the arguments of a call for these arrays of its bucket, padded where they are smaller."""
        if not chosen.sizes:
            return chosen.values
        # The program is compared with its table before anything is as large as that says.
        _ = self.programs[chosen.program.name]
        return list(map(padded, arrays, chosen.values))

    def placed(self, array: Array, value: Value, *, copy: bool) -> DeviceArray:
        """Return an argument on the device. One that is donated must be copied."""
        if isinstance(value, OnDevice):
            stays = value.owner is self.device and value.sharding == array.sharding
            if stays and not array.donated:
                return value.array
            value = to_numpy(value.array)
        assert not isinstance(value, Held)  # the caller has the array
        return (self.device.copy if copy else self.device.put)(value, array.sharding)

    def run(self, program: ProgramEntry, inputs: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Run a program on arrays of its device. Donated ones are deleted."""
        if program.weights is not None:
            inputs = [*self.programs.weights(program.weights), *inputs]
        return self.programs[program.name].run(inputs)

    def run_checked(self, chosen: ChosenBucket, inputs: Sequence[DeviceArray]) -> list[DeviceArray]:
        """Run the program of a call as `run`; look at its results where jax is set to look for NaNs.

        Raises:
            FloatingPointError: there is one, or an infinity, in what does not belong to padding.
        """
        results = self.run(chosen.program, inputs)
        if _jax_parts.looks_for_nans():
            self.check_results(chosen, results)
        return results

    def check_results(self, chosen: ChosenBucket, results: Sequence[DeviceArray]) -> None:
        """Look for NaNs and infinities in results, as jax is set to.

        Raises:
            FloatingPointError: there is one in what does not belong to padding.
        """
        name = chosen.program.name
        pairs = zip(self.programs.results(name), results, strict=True)
        self.check_values(
            name, (to_numpy(result)[_within(chosen, array)] for array, result in pairs)
        )

    def check_values(self, name: str, values: Iterable[np.ndarray[Any, Any]]) -> None:
        """Look for NaNs and infinities in the results of a program without padding, as jax is set to.

        Raises:
            FloatingPointError: there is one.
        """
        for array, value in zip(self.programs.results(name), values, strict=True):
            jax_settings.check_values(f"{pytree.spell(array.path)} of {name}", value)

    def rebuild(self, chosen: ChosenBucket, results: Sequence[DeviceArray]) -> Any:
        """Return the results of a program, nested as the function returned them."""
        tree = self.programs.results_tree(chosen.program.name)
        if not chosen.sizes:
            return self.nested(tree, [*map(chosen.convert, results)])
        arrays = self.programs.results(chosen.program.name)
        return self.nested(tree, [*map(self.cutter(chosen), arrays, results)])

    @staticmethod
    def cutter(chosen: ChosenBucket) -> Callable[[Array, DeviceArray], Any]:
        """Return a function that converts a result and cuts what belongs to padding."""

        def cut(array: Array, result: DeviceArray) -> Any:
            if not (chosen.sizes and array.variables):
                return chosen.convert(result)
            value = to_numpy(result)[_within(chosen, array)]
            if chosen.convert is to_numpy:
                return value
            return chosen.convert(weakened(value) if array.weak else value)

        return cut

    def nested(self, tree: trees.Tree, values: Sequence[Any]) -> Any:
        """Return values, nested as a tree says."""
        if isinstance(tree, trees.Leaf) and len(values) == 1:  # most functions return one array
            return as_key(values[0], tree)
        leaves = trees.leaves(tree)
        keyed = (as_key(value, leaf) for leaf, value in zip(leaves, values, strict=True))
        return pytree.unflatten(tree, keyed, self.types)

    def pending(
        self, chosen: ChosenBucket, results: Sequence[DeviceArray], rebuild: Callable[[], Any]
    ) -> Pending:
        """Return results that the caller waits for later; `rebuild` makes what the caller gets."""

        def wait() -> Any:
            result = rebuild()
            self.finish()
            return result

        return Pending(chosen, results, wait)

    def choose_for(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ChosenBucket:
        """Return the bucket of a program that takes nested arguments. Errors as `choose`."""

        def choose(given: Any) -> ChosenBucket:
            return self.choice.choose(name, *self._given(*given))

        has_static = bool(self.choice.static_names(name))
        self.check_settings(name)
        return self._known_calls.choose((name, args, kwargs), choose, has_static=has_static)

    def check_settings(self, name: str) -> bool:
        """Compare the settings of the host program's jax, if it has imported it, with those of a trace.

        Returns:
            Whether jax is set to look for NaNs or infinities.

        Raises:
            UsageError: they differ, and so jax.jit would not give what the program gives; or as `buckets`.
        """
        context = _jax_parts.trace_context()
        if context is None:
            return False
        if context == self._agreed.get(name):
            return context[2]
        if differing := jax_settings.differing(self.choice.buckets(name)[0].settings):
            raise UsageError(
                f"{self.programs.bundle}: {name} was built with other settings of jax: {differing}",
                hint="set them as they were at the build, or build with these settings",
            )
        self._agreed[name] = context
        return context[2]

    def fitted(
        self, program: ProgramEntry, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Fitted | None:
        """Return nested arguments as a bucket takes them, not padded yet; None: it does not take them.

        The sizes of variables in `pad` may be smaller or larger than those of the bucket.
        """
        self.check_settings(program.function)
        static, flatten = self._given(program.function, args, kwargs)
        given = self.choice.leaves(program, flatten)
        found = self.choice.fit(program, static, given, program.pad or (), any_size=True)
        if isinstance(found, str):
            return None
        padded_sizes = {name: program.bucket[name] for name in program.pad or ()}
        return found._replace(sizes=padded_sizes | found.sizes)

    def _given(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Flatten]:
        """Return the static arguments of a call, and what flattens the others."""
        mask = self.choice.buckets(name)[0].mask
        static, others = _NO_STATIC, {**kwargs}
        if names := self.choice.static_names(name):
            static = {key: others.pop(key) for key in names & others.keys()}
        if mask is not None and mask.isdigit() and int(mask) == len(args):
            args = (*args, EVERYTHING)
        elif mask is not None and not mask.isdigit():
            others.setdefault(mask, EVERYTHING)

        def flatten(tree: trees.Tree) -> list[Any]:
            by_name = isinstance(tree, trees.Node) and tree.kind == "dict"
            for key in range(len(args)) if by_name else others:
                way = "name" if by_name else "position"
                raise pytree.MisfitError(
                    f"unexpected {pytree.spell((key,))}: its arguments are given by {way}"
                )
            return pytree.flatten(tree, others if by_name else args)

        return static, flatten

    def finish(self) -> None:
        """Wait until all bytes of the target are verified, before a caller gets a result.

        Raises:
            RejectError: the bundle is damaged.
        """
        if not self.has_finished:
            self.programs.verification.finish()
            self.programs.answer()
            self.has_finished = True


_NO_STATIC: Mapping[str, Any] = {}


def _within(chosen: ChosenBucket, array: Array) -> tuple[slice, ...]:
    """Return the part of a result that does not belong to padding."""
    return tuple(slice(chosen.sizes.get(name)) for name in array.variables)
