"""Calls of a user's program on jax's arrays that jaxlib's C++ dispatches, on jax's own client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from prejit.runtime.device import _jax_parts, _jit_dispatch
from prejit.runtime.device.jax_arrays import default_device, misplaced
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.errors import AnswerError
from prejit.runtime.format import trees
from prejit.runtime.programs.known_calls import Held
from prejit.runtime.programs.on_jax import JaxPrograms
from prejit.runtime.programs.pytree import ORDERED, unflatten
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
