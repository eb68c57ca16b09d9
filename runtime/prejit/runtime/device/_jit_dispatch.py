"""jaxlib's C++ dispatch of jitted functions, jax's and ours: private parts, as in `_jaxlib`."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prejit.runtime.device._jaxlib import Aval, Avals, JaxlibArray, import_jaxlib

Missed = tuple[Any, Any, bool]
"""The return value of the function that jaxlib calls for a new signature: the results of the call, how to
dispatch later calls (None: call that function again), and False."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """jaxlib's C++ dispatch of a jitted function.

    It keeps an executable for each signature of a call: structure, shapes, dtypes and shardings of the
    arguments, static values, settings of jax. It calls a Python function for a signature that is new.

    Attributes:
        jax_miss: that function of jax, which traces and compiles.
    """

    jax_miss: Callable[..., Missed]
    _state: Mapping[str, Any]

    @classmethod
    def of(cls, jitted: Any) -> Dispatch | None:
        """Return the dispatch of what jax.jit returned; None: this version of jax has other parts."""
        try:
            from jax._src.interpreters.pxla import MeshExecutableFastpathData

            state = jitted.__getstate__()
            known = MeshExecutableFastpathData._fields == _PATH_FIELDS
            known = known and state.keys() >= _STATE_KEYS
            return cls(state["cache_miss"], state) if known else None
        except (AttributeError, ImportError, TypeError):
            return None

    @property
    def static(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The places and the names of static arguments, which jax completed."""
        return tuple(self._state["static_argnums"]), tuple(self._state["static_argnames"])

    @property
    def donated(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The places and the names of donated arguments, which jax completed."""
        key = self.options
        return tuple(key.donate_argnums or ()), tuple(key.donate_argnames or ())

    @property
    def options(self) -> Any:
        """jax's record of the options of jax.jit that decide an executable (JitGlobalCppCacheKeys)."""
        return self._state["global_cache_key"]

    def function(self, jitted: Any, miss: Callable[..., Missed]) -> Any:
        """Return a function as the jitted one that calls another function for a new signature."""
        _, _jax = import_jaxlib()
        state = self._state
        made = _jax.pjit(
            state["function_name"],
            state["fun"],
            miss,
            state["static_argnums"],
            state["static_argnames"],
            state["global_cache_key"],
            state["pytree_registry"],
            state["shard_arg_fallback"],
            _jax.PjitFunctionCache(capacity=_SIGNATURES),
        )
        vars(made).update(vars(jitted))  # `lower`, `trace` and `eval_shape` of its class need them
        return made

    def path(self, loaded: Any, given: Sequence[Any], result: Any, returned: Sequence[Any]) -> Any:
        """Return how jaxlib dispatches later calls to an executable.

        `given` and `returned` are the shardings of its arguments and results, `result` what the first call
        returned.
        """
        arrays, structure = self._state["pytree_registry"].flatten(result, None)
        return _Path(
            xla_executable=loaded,
            out_pytree_def=structure,
            in_shardings=list(given),
            out_shardings=list(returned),
            out_avals=[array.aval for array in arrays],
            out_committed=[array._committed for array in arrays],
            kept_var_bitvec=[True] * len(given),
            in_device_local_layouts=[None] * len(given),
            const_args=[],
        )


class _Results:
    """The results of a program on their way out of jaxlib's dispatch, and a function that nests them."""

    def __init__(self, arrays: list[Any], nest: Callable[[list[Any]], Any]) -> None:
        self.arrays = arrays
        self.nest = nest


@functools.cache
def _registry() -> Any:
    """Return a registry of pytrees that has Python's containers, OrderedDict and `_Results`."""
    registry = import_jaxlib()[1].pytree.PyTreeRegistry()
    registry.register_node(
        _Results,
        lambda results: (results.arrays, results.nest),
        lambda nest, arrays: nest(list(arrays)),
    )
    registry.register_node(
        OrderedDict,
        lambda given: (tuple(given.values()), tuple(given)),
        lambda keys, parts: OrderedDict(zip(keys, parts, strict=True)),
    )
    return registry


@functools.cache
def _has_jit_state() -> bool:
    """Give jaxlib's dispatch the settings that it lacks before `import jax`, which replaces them by its own.

    Raises:
        ValueError, TypeError, AttributeError: this jaxlib needs others.
    """
    _, _jax = import_jaxlib()
    probe = _jax.pjit(
        *("probe", lambda: None, lambda: (None, None, False), [], [], "probe", _registry()),
        *(lambda *_: None, _jax.PjitFunctionCache(capacity=1)),
    )
    try:
        probe()
    except ValueError:  # they are not set
        make, state = _jax.config.Config, _jax.jax_jit
        state.set_disable_jit_state(make("prejit_disable_jit", False))
        state.set_enable_x64_state(make("prejit_enable_x64", True))
        state.set_post_hook_state(make("prejit_post_hook", None))
        probe()
    return True


def cpu_function(
    call: Callable[..., Any], miss: Callable[..., Missed], put: Callable[[Any], JaxlibArray]
) -> Callable[..., Any] | None:
    """Return a function that jaxlib dispatches, without jax; None: this jaxlib cannot.

    Its arguments must be NumPy arrays in the machine's byte order, which jaxlib does not look at, and of at
    most 32 bits, because jaxlib takes float64 for float32 where jax_enable_x64 is off. `call` is what it does
    while jax.disable_jit holds, `miss` what it does for a new signature; `miss` returns `cpu_path` if jaxlib
    may dispatch later calls. `put` puts one array on the device.
    """
    _, _jax = import_jaxlib()
    try:
        _has_jit_state()
        cache = _jax.PjitFunctionCache(capacity=_SIGNATURES)
        function: Callable[..., Any] = _jax.pjit(
            *("call", call, miss, [], [], "prejit", _registry()),
            *(lambda array, *_: put(array), cache),
        )
        return function
    except (AttributeError, TypeError, ValueError):
        return None


def cpu_path(
    loaded: Any,
    constants: Sequence[JaxlibArray],
    argument_count: int,
    results: Avals,
    sharding: Any,
    nest: Callable[[list[JaxlibArray]], Any],
) -> Any:
    """Return how jaxlib dispatches later calls to an executable on one CPU device.

    `constants` are its first arguments, the weights; `nest` makes what the caller gets of the arrays.
    """
    _, structure = _registry().flatten(_Results([0] * len(results), nest), None)
    count = len(constants) + argument_count
    return _Path(
        xla_executable=loaded,
        out_pytree_def=structure,
        in_shardings=[sharding] * count,
        out_shardings=[sharding] * len(results),
        out_avals=[Aval(*aval) for aval in results],
        out_committed=[True] * len(results),
        kept_var_bitvec=[True] * count,
        in_device_local_layouts=[None] * count,
        const_args=list(constants),
    )


def flattened(values: Any) -> tuple[list[Any], Any] | None:
    """Return the leaves of arguments, in the order in which `cpu_function` passes them, and their structure.

    None: jaxlib cannot flatten them, such as a dict whose keys have no order, or what is nested too deeply.
    """
    try:
        found: tuple[list[Any], Any] = _registry().flatten(values, None)
    except (RecursionError, SystemError, ValueError, Warning):
        return None  # nanobind turns the first into the second
    return found


_SIGNATURES = 4096
"""Maximum number of signatures that the dispatch of one function keeps."""


class _Path(NamedTuple):
    """How jaxlib dispatches calls of a signature: the fields of jax's MeshExecutableFastpathData."""

    xla_executable: Any
    out_pytree_def: Any
    in_shardings: Sequence[Any]
    out_shardings: Sequence[Any]
    out_avals: Sequence[Any]
    out_committed: Sequence[bool]
    kept_var_bitvec: Sequence[bool]
    in_device_local_layouts: Sequence[Any]
    const_args: Sequence[Any]


_PATH_FIELDS = _Path._fields
_STATE_KEYS = {
    *("function_name", "fun", "cache_miss", "static_argnums", "static_argnames"),
    *("global_cache_key", "pytree_registry", "shard_arg_fallback"),
}
