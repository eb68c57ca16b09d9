"""Methods of a bundle with programs of the user: call them, bind them, hand them to `jit` and engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.loaded_bundle import LoadedBundle

if TYPE_CHECKING:
    from prejit.runtime.format.trees import Path
    from prejit.runtime.programs.bound import Bound
    from prejit.runtime.programs.dispatched_calls import DispatchedCalls
    from prejit.runtime.programs.known_calls import ChosenBucket
    from prejit.runtime.programs.on_jax import JaxPrograms
    from prejit.runtime.programs.user_programs import Calls, Pending


class BundleCalls(LoadedBundle):
    """The methods of `Bundle` that run programs of the user."""

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program of the manifest's `[[program]]` sections.

        Args:
            name: the name of the program.
            *args: positional arguments, if the manifest has a list of them.
            **kwargs: keyword arguments, if the manifest has a table, and static arguments. Arguments are
                nested as the function takes them, of arrays that NumPy or DLPack reads and of numbers. Their
                shapes and the static arguments choose the bucket. Dtypes, weak types and constants, such as
                static fields of dataclasses, must be those of the build. Donated ones are copied first. NumPy
                arrays of 64 bits become 32, unless the build had jax_enable_x64 on.

        Returns:
            The results, nested as the function returned them: jax.Arrays if an argument was one, on the
            device where jax.jit would leave them, else NumPy arrays. Named tuples and dataclasses have their
            own class if it is one of `load`'s `types`, else one with the same fields. A random key is a key
            of jax, or its data as a NumPy array.

        Raises:
            UsageError: there is no such program, no bucket of it takes these arguments, jax's settings are
                not those of its trace, or arrays of jax are on several devices.
            RejectError: the program is damaged.
        """
        self._programs.ask()
        return self.dispatched.call(name, args, kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> Pending:
        """Run a program as `call` does, without waiting for it: `bundle.call_async(...).result()`.

        The arguments are copied.
        """
        self._programs.ask()
        return self.user_programs.call_async(name, args, kwargs)

    def call_on_device(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program as `call` does, and leave its results on the device, for other programs.

            noise = bundle.call_on_device("encode", text)
            image = bundle.call("decode", noise)

        Arguments that are not on the device yet are copied.

        Returns:
            The results, nested as the function returned them, whose arrays are `OnDevice`: any method of this
            bundle that runs programs takes them, and NumPy reads them.

        Raises:
            UsageError, RejectError: as `call`; or the arguments would be padded.
        """
        self._programs.ask()
        return self.user_programs.call_on_device(name, args, kwargs)

    def call_by_path(
        self, name: str, given: Mapping[Path, Any], static: Mapping[str, Any] | None = None
    ) -> tuple[ChosenBucket, dict[Path, Any]]:
        """Run a program as `call` does, with each array by its path.

        Returns:
            The bucket that ran, and its results by path.
        """
        self._programs.ask()
        return self.user_programs.call_by_path(name, given, {} if static is None else static)

    def bind(self, name: str, /, *args: Any, **kwargs: Any) -> Bound:
        """Return a program that keeps some of its arguments on the device, as the state of a training step.

            step = bundle.bind("train_step", state=state)
            for batch in batches:
                loss = step(batch=batch)
            state = step.read()["state"]

        Args:
            name: the name of the program.
            *args: the first arguments, if the manifest has a list of them. They are copied.
            **kwargs: arguments by name. Each must come back among the results: under the same name, or else
                as the only result with the same structure, shapes and dtypes that has not the name of another
                argument. Static arguments hold for all calls.

        Raises:
            UsageError: there is no such program or argument, or no result can take an argument's place, or
                several can.
        """
        from prejit.runtime.programs.bound import Bound

        self._programs.ask()
        return Bound(self.user_programs, name, args, kwargs)

    def runner_with_zeros(self, program: ProgramEntry) -> Callable[[], object]:
        """Return a function that runs a program of kind `call` on zeros and waits for it; for measuring."""
        from prejit.runtime.programs.watched_runs import runner_with_zeros

        return runner_with_zeros(self._programs, program.name)

    @once
    def dispatched(self) -> DispatchedCalls:
        """The quickest way to each program of the user, for `call` and for engines."""
        from prejit.runtime.programs.dispatched_calls import DispatchedCalls, JaxDispatchedCalls

        on_jax = None
        if self.matched and self.config.mesh is None:
            on_jax = JaxDispatchedCalls(self.user_programs, lambda: self.on_jax)
        return DispatchedCalls(self.user_programs, on_jax)

    @once
    def user_programs(self) -> Calls:
        """The programs of the user, by name."""
        from prejit.runtime.programs.user_programs import Calls

        return Calls(self._programs, self._types, compiles=self._compiles)

    @once
    def on_jax(self) -> JaxPrograms:
        """The programs of the user on jax's own client, for `prejit.runtime.jit`."""
        from prejit.runtime.programs.on_jax import JaxPrograms

        return JaxPrograms(self._programs)
