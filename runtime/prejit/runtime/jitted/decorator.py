"""`jit`: jax.jit that takes executables from a bundle where one fits the call, and else compiles."""

from __future__ import annotations

import os
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, final, overload

from prejit.runtime.base import arguments
from prejit.runtime.base.threads_and_forks import OneProcess, once
from prejit.runtime.bundle import Bundle
from prejit.runtime.device import _jax_parts, _jit_dispatch
from prejit.runtime.device.jax_arrays import is_jax_array
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.errors import AnswerError, FallbackWarning, MismatchError, UsageError
from prejit.runtime.fallback_reporting import count_axis
from prejit.runtime.jitted.jit_call import Parameters, state_misfit
from prejit.runtime.jitted.jit_program_choice import Fit, MissError, check_shardings, find, is_set
from prejit.runtime.jitted.returned import Returned, from_bundle, from_trace

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

_OPTIONS = ("in_shardings", "out_shardings", "keep_unused", "inline")
"""Further options of jax.jit that `jit` takes."""
_UNGUARDED = {None, "allow"}
"""Values of jax_transfer_guard that neither refuse nor log transfers."""


@dataclass(frozen=True, slots=True)
class JitStats:
    """Where the executables of a function of `jit` came from, so far.

    Attributes:
        loaded: the programs of the bundle that ran, in the order of their first calls.
        traced: those for which the function was traced, not compiled.
        compiled: why jax compiled the function, a reason for each difference from the bundle.
    """

    loaded: tuple[str, ...]
    traced: tuple[str, ...]
    compiled: tuple[str, ...]


class JitFunction(Protocol[P, R_co]):
    """The result of `jit`: a function of jax.jit (jax.stages.Wrapped) with statistics.

    Attributes:
        program_name: the name of its program in the bundle.
    """

    program_name: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function."""

    def stats(self) -> JitStats:
        """Return where its executables came from so far."""

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Trace the function, as jax.jit's `trace`: the bundle is not used."""

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Lower the function, as jax.jit's `lower`: the bundle is not used."""

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return the shapes of the results, as jax.jit's `eval_shape`."""

    def clear_cache(self) -> None:
        """Forget all signatures; the next calls look them up in the bundle again."""


@overload
def jit(
    fun: Callable[P, R],
    *,
    bundle: str | os.PathLike[str] | Bundle,
    name: str | None = None,
    on_miss: Literal["compile", "error"] = "compile",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> JitFunction[P, R]: ...


@overload
def jit(
    *,
    bundle: str | os.PathLike[str] | Bundle,
    name: str | None = None,
    on_miss: Literal["compile", "error"] = "compile",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    bundle: str | os.PathLike[str] | Bundle,
    name: str | None = None,
    on_miss: Literal["compile", "error"] = "compile",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Return a function like `jax.jit(fun)` that takes its executables from a bundle where they fit.

        @jit(bundle="artifacts/score")
        def score(params, x):
            ...

    The first call of a signature (structure, shapes, dtypes and places of the arguments, static values) looks
    for the program that fits. If none fits, jax compiles the function, and one FallbackWarning says what
    differs. Inside other transformations of jax (`grad`, `vmap`, `scan`) it is the jitted function alone.

    The bundle runs the function as it was built: build again after a change. A call does not fit if constants
    in its arguments, or in the function (closure, defaults, a method's object), are not those of the build.

    Args:
        fun: the function; None: return a decorator.
        bundle: a bundle of `load`, or its path, which the first call loads.
        name: of the program in the bundle; None: the function's own.
        on_miss: what a call does that no program fits. `compile`: jax compiles it. `error`: raise.
        static_argnums: as for jax.jit. A program fits if it was built with an equal value, such as a frozen
            dataclass with equal fields.
        static_argnames: the same, by name.
        donate_argnums: as for jax.jit. The program must donate the same arguments.
        donate_argnames: the same, by name.
        **options: in_shardings and out_shardings, which a program must have too, and keep_unused and inline,
            as for jax.jit.

    Raises:
        UsageError: an argument is wrong. At a call: no program fits, and on_miss is `error`.
        MismatchError: at a call: this machine matches no target of the bundle, and on_miss is `error`.
        RejectError: at a call: the bundle is damaged.
        StoreError: at a call: the bundle cannot be opened.
    """
    arguments.choice("on_miss", on_miss, ("compile", "error"))
    source = bundle if isinstance(bundle, Bundle) else arguments.path("bundle", bundle)
    if unknown := options.keys() - _OPTIONS:
        raise UsageError(
            f"jit: expected of jax.jit {', '.join(_OPTIONS)} and what is static or donated; found "
            f"{min(unknown)}",
            hint="a [[target]] of the manifest says for which device to compile, and its xla_flags how",
        )
    options |= {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
    }

    def wrap(function: Callable[..., Any]) -> Any:
        arguments.function("fun", function)
        program = name if name is not None else getattr(function, "__name__", None)
        if program is None:
            raise UsageError(
                f"name: expected the name of a program, because {arguments.described(function)} has none",
                hint="give the name that the build uses: jit(fun, bundle=..., name=...)",
            )
        arguments.text("name", program)
        return _Jitted(function, source, program, on_miss, options).function

    return wrap if fun is None else wrap(fun)


@final
class _Jitted(OneProcess):
    """A function of `jit`: what happens at the first call of each signature.

    Attributes:
        function: what the caller gets.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        bundle: str | os.PathLike[str] | Bundle,
        name: str,
        on_miss: str,
        options: Mapping[str, Any],
    ) -> None:
        import jax

        self._given = bundle
        self._fun = function
        self._name = name
        self._on_miss = on_miss
        self._parameters = Parameters(
            function,
            static=(options["static_argnums"], options["static_argnames"]),
            donated=(options["donate_argnums"], options["donate_argnames"]),
        )
        self._shardings = options.get("in_shardings"), options.get("out_shardings")
        self._jitted = jax.jit(function, **options)
        self._dispatch = _jit_dispatch.Dispatch.of(self._jitted)
        self._lock = threading.Lock()
        self._by_name: set[tuple[int | str, ...]] = set()
        """Forms of calls whose arrays come in another order than by name, in which the program takes them:
        the number of arguments by position, and the names of the others."""
        self._compared: set[Any] = set()
        """Programs and forms of calls that the function's state fits, where jaxlib keeps no signatures."""
        self._loaded: dict[str, None] = {}
        self._traced: dict[str, None] = {}
        self._compiled: dict[str, None] = {}
        self.function: Any
        if self._dispatch is not None:
            self.function = self._dispatch.function(self._jitted, self.miss)
        else:
            self.function = _Interpreted(self._jitted, self.miss)
        self.function.stats = self.stats
        self.function.program_name = name  # for `prejit.compiler.program`

    def __deepcopy__(self, memo: object) -> _Jitted:
        """Return itself: the copies of a function, such as of a trainer that holds it, share its programs."""
        return self

    def stats(self) -> JitStats:
        """Return where its executables came from so far."""
        with self._lock:
            return JitStats(tuple(self._loaded), tuple(self._traced), tuple(self._compiled))

    def miss(self, *args: Any, **kwargs: Any) -> _jit_dispatch.Missed:
        """Run a call whose signature is new, and return its results and how to dispatch later calls."""
        import jax

        form: tuple[int | str, ...] = (len(args), *kwargs)
        if form in self._by_name:
            return self.function(**self._parameters.named(args, kwargs)), None, False
        if _jax_parts.is_tracing() or any(
            isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))
        ):
            return self._miss_of_jax(args, kwargs)
        try:
            call = self._parameters.bind(args, kwargs)
        except TypeError:
            return self._miss_of_jax(args, kwargs)  # it says what is wrong
        bundle = self._bundle
        try:
            self._check_settings(bundle)
            fit = find(bundle.on_jax, self._name, call, self._parameters.defaults)
            if fit.order != call.order:
                # jaxlib passes arrays in the call's order. The same call in the program's order is another
                # signature.
                by_place = fit.order == call.placed
                ordered = call.by_place() if by_place else call.by_name()
                again = self._parameters.bind(*ordered)
                if (again.static.keys(), again.donated) != (call.static.keys(), call.donated):
                    raise MissError(
                        "structure",
                        f"expected the arrays in the order {', '.join(fit.order)}, found "
                        f"{', '.join(call.order)}; with places and names of static or donated arguments both "
                        "given, jax would take others as such in that order: give one of the two",
                    )
                if not by_place:
                    self._by_name.add(form)
                return self.function(*ordered[0], **ordered[1]), None, False
            if self._dispatch is not None or (fit.program.name, form) not in self._compared:
                if misfit := state_misfit(fit.program, self._fun, call.arrays):
                    raise MissError("state", misfit)
                self._compared.add((fit.program.name, form))
            returned = self._returned(bundle, fit, args, kwargs)
            check_shardings(bundle.on_jax, fit, call, self._shardings, returned.structure)
            try:
                bundle.on_jax.executable(fit.program.name)
            except AnswerError as error:  # known to compute wrong numbers on this machine
                raise MissError("canary", str(error)) from error
        except MissError as error:
            missed = error
        else:
            return self._run(bundle, fit, returned)
        # Not in the except block, or errors of the function would look as if they came of this one.
        self._report(bundle, missed)
        return self._miss_of_jax(args, kwargs)

    @once
    def _bundle(self) -> Bundle:
        """The bundle, loaded at the first call: importing a module with a decorated function is quick."""
        if isinstance(self._given, Bundle):
            return self._given
        from prejit.runtime.loader import load

        return load(self._given, on_mismatch="error" if self._on_miss == "error" else "jit")

    def _miss_of_jax(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _jit_dispatch.Missed:
        if self._dispatch is None:
            return self._jitted(*args, **kwargs), None, False
        return self._dispatch.jax_miss(*args, **kwargs)

    def _check_settings(self, bundle: Bundle) -> None:
        """Compare what holds for all calls."""
        import jax

        if not bundle.matched:
            reasons = "; or ".join(f"{each.target} ({each.reason()})" for each in bundle.verdicts)
            if self._on_miss == "error":
                raise MismatchError(
                    f"{bundle.name}: this machine matches none of the bundle's targets: {reasons}",
                    verdicts=bundle.verdicts,
                    hint='add a [[target]] for this machine and build again, or allow on_miss="compile"',
                )
            raise MissError("fingerprint", f"this machine matches none of the targets: {reasons}")
        if (mesh := bundle.config.mesh) is None:
            if not jax.sharding.get_abstract_mesh().empty:
                raise MissError(
                    "mesh", "jax.set_mesh has set a mesh, and its programs run on one device"
                )
        elif not is_set(mesh, set_mesh := jax.sharding.get_abstract_mesh()):
            raise MissError(
                "mesh",
                f"expected the axes {mesh} of the type Auto, found {set_mesh}, which jax.set_mesh has set",
            )
        elif (found := len(jax.devices(bundle.on_jax.platform))) < mesh.size:
            raise MissError("mesh", f"expected {mesh.size} devices for its mesh, found {found}")
        elif jax.process_count() > 1:
            raise MissError(
                "mesh", "several processes share jax's devices, which Bundle.call supports"
            )
        settings = {
            "jax_debug_nans": jax.config.jax_debug_nans,
            "jax_debug_infs": jax.config.jax_debug_infs,
            "jax_disable_most_optimizations": jax.config.read("jax_disable_most_optimizations"),
        }
        for setting, is_on in settings.items():
            if is_on:
                raise MissError("settings", f"{setting} is on, which executables cannot obey")

    def _returned(
        self, bundle: Bundle, fit: Fit, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Returned:
        """Return what the results are made into, by the bundle if it tells, else by tracing the function."""
        programs, name = bundle.on_jax.programs, fit.program.name
        tree = programs.results_tree(name)
        if (known := from_bundle(tree, fit.constants)) is not None:
            return known
        returned = from_trace(self._jitted.trace(*args, **kwargs), tree, programs.results(name))
        with self._lock:
            self._traced[name] = None
        return returned

    def _run(self, bundle: Bundle, fit: Fit, returned: Returned) -> _jit_dispatch.Missed:
        import jax
        import jax.numpy as jnp

        on_jax, name = bundle.on_jax, fit.program.name
        on_jax.programs.ask()
        executable, device = on_jax.executable(name), on_jax.device
        results = on_jax.programs.results(name)
        given = [device.sharding(array.sharding) for array in on_jax.programs.arguments(name)]
        if {
            jax.config.jax_transfer_guard,
            jax.config.jax_transfer_guard_host_to_device,
        } - _UNGUARDED:
            for value in fit.arrays:  # `device_put` is explicit, and jax.jit's transfers are not
                jnp.asarray(value)
        inputs = [
            value
            if is_jax_array(value) and (device.mesh is None or value.committed)
            else jax.device_put(value, sharding, may_alias=False)
            for value, sharding in zip(fit.arrays, given, strict=True)
        ]
        if device.mesh is None:
            avals = [(array.shape, dtype_of(array.dtype), array.weak) for array in results]
            run = _jax_parts.runner_for_jax(executable.loaded, avals, device.first, fit.committed)
        else:
            run = executable.run
        arrays = run(inputs)
        value = returned.value(arrays)
        on_jax.programs.verification.finish()
        on_jax.programs.answer()
        with self._lock:
            self._loaded[name] = None
        path = None
        if self._dispatch is not None:
            shardings = [device.sharding(array.sharding) for array in results]
            path = self._dispatch.path(executable.loaded, given, value, shardings)
        return value, path, False

    def _report(self, bundle: Bundle, miss: MissError) -> None:
        """Say once why jax compiles the function, and count it."""
        if self._on_miss == "error":
            raise UsageError(
                f"{bundle.name}: no program {self._name!r} takes this call: {miss.reason}",
                hint='build the bundle for such calls, or allow on_miss="compile"',
            )
        with self._lock:
            if miss.reason in self._compiled:
                return
            self._compiled[miss.reason] = None
        if miss.axis == "fingerprint":  # `load` has said and counted it
            return
        count_axis(miss.axis)
        warnings.warn(
            f"{bundle.name}: jax compiles {self._name!r} here, because no program of the bundle takes this "
            f"call: {miss.reason}",
            FallbackWarning,
            stacklevel=3,
        )


@final
class _Interpreted:
    """A function of `jit` on a jax without the parts that `_jit_dispatch.Dispatch` needs: no call is kept."""

    def __init__(self, jitted: Any, miss: Callable[..., _jit_dispatch.Missed]) -> None:
        self._jitted = jitted
        self._miss = miss
        vars(self).update(vars(jitted))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._miss(*args, **kwargs)[0]

    def __copy__(self) -> _Interpreted:
        return self

    def __deepcopy__(self, memo: object) -> _Interpreted:
        return self

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)
