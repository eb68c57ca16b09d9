"""The result of a call: the structure and types that jax.jit would return."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prejit.runtime.device.jax_arrays import data_shape, is_key, key_name
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.constants import Constant, decode, dumps, imported, plain
from prejit.runtime.jitted.jit_program_choice import MissError
from prejit.runtime.programs.pytree import ORDERED, bare_object, field_names


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a function.

    Attributes:
        structure: jax's PyTreeDef.
        keys: for each leaf jax's implementation of random keys; empty: it is no key.
    """

    structure: Any
    keys: tuple[str, ...]

    def value(self, arrays: Sequence[Any]) -> Any:
        """Return what the function returns, of the arrays of a program's results."""
        import jax

        leaves = [
            jax.random.wrap_key_data(array, impl=key) if key else array
            for array, key in zip(arrays, self.keys, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


class _UnknownError(Exception):
    """The bundle does not tell everything of a class."""


def from_bundle(tree: trees.Tree, given: Mapping[str, Any]) -> Returned | None:
    """Return what a program's results tree says, without tracing the function; None: it does not say enough.

    Classes are those of the application, as far as it has imported them. `given` has the objects that
    constants of the arguments stand for, by their text.
    """
    try:
        structure = _structure(tree, given)
    except Exception:  # _UnknownError, or of the code of a class of the application
        return None
    return Returned(structure, tuple(leaf.key for leaf in trees.leaves(tree)))


def _structure(tree: trees.Tree, given: Mapping[str, Any]) -> Any:
    import jax

    if isinstance(tree, trees.Leaf):
        return jax.tree.structure(0)
    if tree.kind == "none":
        return jax.tree.structure(None)
    children = [_structure(child, given) for child in tree.children]
    if tree.kind == "node" or (tree.kind == "record" and tree.aux is not None):
        if tree.aux is None:
            raise _UnknownError
        data = _imported(tree.type), _constant(tree.aux, given)
    elif tree.kind == "dict" and tree.aux is not None and tree.aux != ORDERED:
        data = _constant(tree.aux, given)
        if data[0] is defaultdict:
            data = defaultdict, (data[1], [*tree.keys])
    else:
        parts = [jax.ShapeDtypeStruct((), "float32") for _ in children]
        found, level = jax.tree.flatten(_object(tree, parts, given))
        if len(found) != len(parts) or not all(map(operator.is_, found, parts)):
            raise _UnknownError  # a class that takes itself apart otherwise
        data = level.node_data()
    from prejit.runtime.recorded.hook.jax_calls import structure_of  # one array needs none of it

    return structure_of(*data, children)


def _object(tree: trees.Node, parts: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Return an object with these parts."""
    match tree.kind:
        case "list":
            return list(parts)
        case "tuple":
            return tuple(parts)
        case "dict":
            kind = dict if tree.aux is None else OrderedDict
            return kind(zip(tree.keys, parts, strict=True))
        case "namedtuple":
            return _imported(tree.type)(*parts)
        case "record":
            known = dict(zip(map(str, tree.keys), parts, strict=True))
            known |= {name: _constant(constant, given) for name, constant in tree.constants}
            class_ = _imported(tree.type)
            if field_names(class_) != known.keys():  # other constant fields, or no dataclass
                raise _UnknownError
            return bare_object(class_, known)
    raise _UnknownError


def _constant(constant: Constant, given: Mapping[str, Any]) -> Any:
    match plain(constant):
        case ["argument", value] if (text := dumps(value)) in given:
            return given[text]
    return decode(constant)


def _imported(type_: str) -> Any:
    """Return the class `module:Name` if the application has imported it. This imports nothing."""
    found = imported(type_)
    if not isinstance(found, type) or f"{found.__module__}:{found.__qualname__}" != type_:
        raise _UnknownError
    return found


def from_trace(traced: Any, tree: trees.Tree, arrays: Sequence[Array]) -> Returned:
    """Return what a traced function returns.

    `traced` is what `trace` of jax.jit returns; `tree` and `arrays` are the program's results.

    Raises:
        MissError: the program returns something else, because the function has changed since the build.
    """
    expected = [
        (leaf.key, dtype_of(array.dtype), array.weak, array.shape)
        for leaf, array in zip(trees.leaves(tree), arrays, strict=True)
    ]
    found = []
    for leaf in traced.jaxpr.out_avals:
        key, leaf = key_name(leaf) if is_key(leaf) else "", data_shape(leaf)
        found.append((key, leaf.dtype, leaf.weak_type, leaf.shape))
    if found != expected:
        sides = [
            ", ".join(f"{'weak ' * weak}{dtype}{list(shape)}" for _, dtype, weak, shape in side)
            or "none"
            for side in (expected, found)
        ]
        raise MissError(
            "results",
            f"expected a function that returns {sides[0]}, found one that returns {sides[1]}: it has "
            "changed since the build",
        )
    return Returned(traced.out_tree, tuple(key for key, *_ in found))
