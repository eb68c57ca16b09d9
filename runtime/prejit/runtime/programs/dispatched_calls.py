"""Calls that jaxlib's C++ dispatches: on NumPy arrays without jax, on those of jax by its own client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, final

import numpy as np

from prejit.runtime.device import _jax_parts, _jit_dispatch
from prejit.runtime.device.jax_arrays import default_device, misplaced
from prejit.runtime.device.transfer import DeviceArray, dtype_of, to_numpy
from prejit.runtime.errors import AnswerError, UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import PACKED
from prejit.runtime.programs.known_calls import ChosenBucket, Held
from prejit.runtime.programs.on_jax import JaxPrograms
from prejit.runtime.programs.pytree import ORDERED, has_registered_tuple, unflatten
from prejit.runtime.programs.user_programs import Calls

_PLAIN = ("list", "tuple", "dict", "none")
"""Kinds of containers that jax takes apart and makes again as they are."""


@final
class JaxDispatchedCalls:
    """The user's programs of a bundle, on arrays of the host program's jax. Safe to use from many threads.

    The first call of a signature loads the program on jax's client, where its arguments are. Later calls of
    it do not enter Python, and copy nothing between clients. A call that no such program takes as it is goes
    through `Calls`.

    Attributes:
        functions: what `function` has returned, by the name of the program.
    """

    def __init__(self, calls: Calls, programs: Callable[[], JaxPrograms]) -> None:
        """Dispatch nothing yet.

        `calls` runs programs that are not dispatched; `programs` returns those on jax's client.
        """
        self._calls = calls
        self._programs = programs
        self.functions: dict[str, Callable[..., Any] | None] = {}

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return what jaxlib dispatches for a program; None: this version of jax has other parts."""
        if name not in self.functions:
            import jax

            def call(*args: Any, **kwargs: Any) -> Any:
                return self._calls.call(name, args, kwargs)

            jitted = jax.jit(call)
            dispatch = _jit_dispatch.Dispatch.of(jitted)
            made = None
            if dispatch is not None:
                made = dispatch.function(jitted, partial(self._miss, name, dispatch))
            self.functions.setdefault(name, made)
        return self.functions[name]

    def _miss(
        self, name: str, dispatch: _jit_dispatch.Dispatch, /, *args: Any, **kwargs: Any
    ) -> _jit_dispatch.Missed:
        """Run a call whose signature is new, and return its results and how jaxlib dispatches later calls."""
        import jax

        inputs, structure = jax.tree.flatten((args, kwargs))
        program = None if _jax_parts.looks_for_nans() else self._program(name, inputs, structure)
        if program is None:
            return self._calls.call(name, args, kwargs), None, False
        on_jax = self._programs()
        try:
            executable, device = on_jax.executable(program), on_jax.device.first
        except AnswerError:  # `Calls` compiles its portable program, or says why not
            return self._calls.call(name, args, kwargs), None, False
        results = on_jax.programs.results(program)
        run = _jax_parts.runner_for_jax(
            executable.loaded,
            [(array.shape, dtype_of(array.dtype), array.weak) for array in results],
            device,
            any(array.committed for array in inputs),
        )
        arrays = run(inputs)
        value = unflatten(on_jax.programs.results_tree(program), iter(arrays))
        self._calls.finish()
        given, returned = ([on_jax.device.sharding(())] * len(each) for each in (inputs, results))
        return value, dispatch.path(executable.loaded, given, value, returned), False

    def _program(self, name: str, leaves: Sequence[Any], structure: Any) -> str | None:
        """Return the program that takes the arrays of a call as they are, in jaxlib's order; None: none.

        `leaves` and `structure` are those of positional and keyword arguments, as jax flattens them.
        """
        on_jax = self._programs()
        device = on_jax.device.first
        of_jax = _jax_parts.imported_array_class()
        if not all(type(array) is of_jax and not array.is_deleted() for array in leaves):
            return None
        if any(misplaced(array, device) for array in leaves):
            return None
        if not any(array.committed for array in leaves) and default_device() != device:
            return None
        # Their types stand for them: `Calls` would copy the arrays to look at them.
        stand_ins = [Held(array.dtype, array.shape, array.weak_type) for array in leaves]
        like, named = structure.unflatten(stand_ins)
        chosen = self._calls.choose_for(name, like, named)
        program, programs = chosen.program, self._calls.programs
        arrays = programs.arguments(program.name)
        kept = (
            program.weights is None
            and not chosen.sizes
            and len(leaves) == len(chosen.values)
            and all(one is other for one, other in zip(stand_ins, chosen.values, strict=True))
            and not any(array.donated for array in arrays)
            and not any(leaf.key for leaf in trees.leaves(programs.arguments_tree(program.name)))
            and any(program.name == each.name for each in on_jax.buckets(name))
            and _is_plain(programs.results_tree(program.name))
        )
        return program.name if kept else None


def _is_plain(tree: trees.Tree) -> bool:
    if isinstance(tree, trees.Leaf):
        return not tree.key
    # jax orders the parts of a dict by their keys, those of an OrderedDict as they came.
    keys: list[Any] = [*tree.keys]
    in_order = len({*map(type, keys)}) < 2 and keys == sorted(keys)
    is_kept = tree.kind != "dict" or tree.aux == ORDERED or in_order
    return tree.kind in _PLAIN and is_kept and all(map(_is_plain, tree.children))


_DTYPES = frozenset(
    dtype_of(name)
    for name in (
        *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
        *("float16", "bfloat16", "float32", "complex64"),
    )
)
"""Dtypes of arguments that jaxlib's dispatch passes as they are."""
_CONTAINERS = (dict, tuple, list)
"""Containers whose first leaf is found without jaxlib."""


def _are_plain_numpy(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether all leaves are NumPy arrays of dtypes that jaxlib reads as NumPy does."""
    flat = _jit_dispatch.flattened((args, kwargs))
    return flat is not None and all(
        type(value) is np.ndarray and value.dtype in _DTYPES for value in flat[0]
    )


@final
class DispatchedCalls:
    """The user's programs of a bundle. Safe to use from many threads.

    The first call of a signature (structure, shapes and dtypes) is one of `Calls`. If all of its arguments
    are NumPy arrays, and the program takes them as they are, later calls of it do not enter Python before the
    program runs.
    """

    def __init__(self, calls: Calls, on_jax: JaxDispatchedCalls | None) -> None:
        """Dispatch nothing yet.

        `on_jax` is for arrays of jax; None: the bundle's programs do not fit jax's client.
        """
        self._calls = calls
        self._on_jax = on_jax
        self._functions: dict[str, Callable[..., Any] | None] = {}

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a program on nested arguments. Arguments, results and errors as `Bundle.call`."""
        try:
            function = self._functions[name]
        except (KeyError, TypeError):
            try:
                self._calls.choice.buckets(name)
            except UsageError as error:
                raise error from None  # the look-up in this class is nobody's error
            function = self._functions.setdefault(name, self._function(name))
        if function is None:
            return self._calls.call(name, args, kwargs)
        # Results are jax's if one argument is, so one leaf decides.
        leaf: Any = args or kwargs
        while (kind := type(leaf)) in _CONTAINERS and leaf:
            leaf = next(iter(leaf.values())) if kind is dict else leaf[0]
        if self._on_jax is not None and kind is _jax_parts.imported_array_class():
            on_jax = self._on_jax.functions.get(name) or self._on_jax.function(name)
            if on_jax is not None:
                return on_jax(*args, **kwargs)
        elif _are_plain_numpy(args, kwargs) and not _jax_parts.looks_for_nans():
            return function(*args, **kwargs)
        return self._calls.call(name, args, kwargs)

    def close(self) -> None:
        """Forget what jaxlib dispatches, which holds executables and weights."""
        self._functions.clear()
        if self._on_jax is not None:
            self._on_jax.functions.clear()

    def _function(self, name: str) -> Callable[..., Any] | None:
        """Return what jaxlib dispatches; None: the program cannot be dispatched."""
        calls, device = self._calls, self._calls.device
        if device.cpu_sharding is None or calls.choice.static_names(name):
            return None
        first = calls.choice.buckets(name)[0]
        if any(array.donated for array in calls.programs.arguments(first.name)):
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            return calls.call(name, args, kwargs)

        return _jit_dispatch.cpu_function(call, partial(self._miss, name), device.put)

    def _miss(self, name: str, /, *args: Any, **kwargs: Any) -> _jit_dispatch.Missed:
        """Run a call whose signature is new, and return its results and how jaxlib dispatches later calls."""
        chosen, result = self._calls.call_in_bucket(name, args, kwargs)
        flat = _jit_dispatch.flattened((args, kwargs))
        plain = flat is not None and self._is_plain(chosen, flat[0])
        plain = plain and not has_registered_tuple((args, kwargs))
        return result, self._path(chosen) if plain else None, False

    def _is_plain(self, chosen: ChosenBucket, given: Sequence[Any]) -> bool:
        """Return whether a program takes the arrays of a call as they are, in jaxlib's order."""
        programs = self._calls.programs
        arrays = programs.arguments(chosen.program.name)
        results = programs.results(chosen.program.name)
        return (
            not chosen.sizes
            and len(given) == len(chosen.values) == len({*map(id, given)})  # else it tells no order
            and all(map(is_, given, chosen.values))
            and not any(array.donated for array in arrays)
            and not any(array.dtype in PACKED for array in (*arrays, *results))
        )

    def _path(self, chosen: ChosenBucket) -> Any:
        programs, program = self._calls.programs, chosen.program
        results = programs.results(program.name)
        tree = programs.results_tree(program.name)

        def nest(arrays: list[DeviceArray]) -> Any:
            return self._calls.nested(tree, list(map(to_numpy, arrays)))

        def single(arrays: list[DeviceArray]) -> Any:
            return to_numpy(arrays[0])

        return _jit_dispatch.cpu_path(
            programs[program.name].loaded,
            programs.weights(program.weights),
            len(chosen.values),
            [(array.shape, dtype_of(array.dtype), array.weak) for array in results],
            self._calls.device.cpu_sharding,
            single if isinstance(tree, trees.Leaf) else nest,
        )
