"""The arrays that a function of the user takes and returns, or that its objects hold, as flat lists."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
)

from prejit.compiler.manifest.shape_string import KEY, MAX_SIZE, parse_shape
from prejit.runtime.base.wording import few
from prejit.runtime.device.jax_arrays import data_shape, is_key, is_weak, key_name, weakened
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import DTYPES, Array
from prejit.runtime.format.constants import (
    Constant,
    EncodedConstant,
    decode,
    encode,
    of_argument,
    same,
)
from prejit.runtime.format.limits import MAX_DIMENSIONS
from prejit.runtime.programs.fitted_arguments import halved
from prejit.runtime.programs.pytree import auxiliary, constant_values, kind_of_dict


@dataclasses.dataclass(frozen=True)
class Example:
    """A pytree as the user made it: a class may change its own parts whenever jax makes it anew."""

    value: Any
    shapes: list[Any]


def example_of(
    args: Any, bucket: Mapping[str, int], where: str, leaves: Sequence[Any] = ()
) -> Example:
    """Return a manifest's args at a bucket.

    Args:
        args: nested as the function takes them, with shape strings, arrays, jax.ShapeDtypeStruct and numbers
            as leaves.
        bucket: the size of each variable.
        where: the place of args in the manifest, for errors.
        leaves: what stands for the leaves of args; empty: they do themselves.

    Raises:
        ManifestError: a shape string has mistakes, a leaf is no array, or args is no dict, list or tuple.
    """
    if not isinstance(args, dict | list | tuple) or hasattr(args, "_fields"):
        raise ManifestError(
            f"{where}: expected a dict of arguments by name, or a list or tuple of those by position, found "
            f"{type(args).__name__}",
            hint="give [argument] for a single one",
        )
    found = tree_flatten_with_path(args)[0]
    shapes = [
        _shape_of(leaf, bucket, f"{where}{jax.tree_util.keystr(path)}")
        for (path, _), leaf in zip(found, leaves or [leaf for _, leaf in found], strict=True)
    ]
    return Example(args, shapes)


def _shape_of(leaf: Any, bucket: Mapping[str, int], where: str) -> Any:
    if isinstance(leaf, str):
        dtype, shape, weak = parse_shape(leaf, dict(bucket))
        if dtype == KEY:
            return jax.eval_shape(lambda: jnp.broadcast_to(jax.random.key(0), shape))
        if (narrow := jax.dtypes.canonicalize_dtype(dtype)) != jnp.dtype(dtype):
            raise ManifestError(
                f"{where}: expected a dtype of at most 32 bits, found {leaf!r}",
                hint=f"write {narrow}, as jax computes; calls may still pass {dtype}; or set "
                "JAX_ENABLE_X64=1 in the environment of the build",
            )
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), weak_type=weak)
    # First NumPy's scalars, some of whose classes are subclasses of Python's numbers.
    if isinstance(leaf, np.ndarray | np.generic):
        return jax.ShapeDtypeStruct(leaf.shape, _canonical(leaf))
    if isinstance(leaf, bool | int | float | complex):
        try:
            value = jnp.asarray(leaf)
        except OverflowError as error:
            raise ManifestError(f"{where}: expected a number that jax takes: {error}") from None
        return jax.ShapeDtypeStruct((), value.dtype, weak_type=value.weak_type)
    if isinstance(leaf, jax.Ref):
        raise ManifestError(
            f"{where}: expected an array, found a Ref, which a function changes in place",
            hint="take the array as an argument and return it anew: a bundle keeps no state between calls, "
            "and Bundle.bind does it for the caller",
        )
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(tuple(leaf.shape), _canonical(leaf), weak_type=weak)
    raise ManifestError(
        f"{where}: expected a shape string, an array or a number, found {type(leaf).__name__}",
        hint="give what is no array as `static`, or leave it out of the pytree",
    )


def narrowed(args: Any) -> tuple[str, ...]:
    """Return, in words, the arrays of args that jax takes for narrower ones: jax_enable_x64 is off."""
    return tuple(
        f"{jax.tree_util.keystr(path)} as {_canonical(leaf)} and not {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(args)
        if hasattr(leaf, "dtype") and _canonical(leaf) != leaf.dtype
    )


def narrow_parameter(value: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    """Return a parameter as jax.jit takes it: 64 bits become 32 unless jax_enable_x64 is set.

    Raises:
        ManifestError: integers would wrap, or numbers become infinite.
    """
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if dtype == value.dtype:
        return value
    narrow = halved(value, dtype)
    if narrow is None:
        raise ManifestError(
            f"{where}: expected {value.dtype} whose values are in the range of {dtype}, found others",
            hint="give values that 32 bits hold, or set JAX_ENABLE_X64=1 in the environment of the build",
        )
    return weakened(narrow) if is_weak(value) else narrow


def _canonical(leaf: Any) -> Any:
    """Return the dtype that jax gives an argument."""
    return leaf.dtype if is_key(leaf) else jax.dtypes.canonicalize_dtype(leaf.dtype)


Constants = Sequence[tuple[Constant, Any]]
"""Constants with the objects that they stand for."""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a pytree, and its constants with the objects that they stand for."""

    tree: trees.Tree
    arrays: tuple[Array, ...]
    constants: Constants = ()


def arrays_of(
    example: Example, what: str, donated: tuple[Any, ...] = (), given: Constants = ()
) -> Arrays:
    """Return the arrays of a pytree.

    `what` is what the pytree is, for errors: `args`, `result`. `donated` are the first keys of the paths
    of donated arguments, and `given` the constants of the arguments, for results.

    Raises:
        BuildError: a bundle could not hold a dtype, a key of a dict, a size, as many dimensions, or a name.
    """
    found: list[tuple[Constant, Any]] = []
    tree = _tree(example.value, what, iter(example.shapes), _Noted(found, given))
    shapes = map(data_shape, example.shapes)
    arrays = []
    for path, shape in zip(trees.paths(tree), shapes, strict=True):
        if str(shape.dtype) not in DTYPES:
            raise BuildError(
                f"{what}{_spelled(path)}: expected one of {', '.join(DTYPES)}, found {shape.dtype}",
                hint="convert it to one of these dtypes, with .astype()",
            )
        if len(shape.shape) > MAX_DIMENSIONS:
            raise BuildError(
                f"{what}{_spelled(path)}: expected at most {MAX_DIMENSIONS} dimensions, found "
                f"{len(shape.shape)}",
                hint="reshape it: NumPy has no arrays of more dimensions",
            )
        if any(size > MAX_SIZE for size in shape.shape):
            raise BuildError(
                f"{what}{_spelled(path)}: expected sizes of at most {MAX_SIZE:,}, found "
                f"{shape.dtype}{list(shape.shape)}",
                hint="reshape it to more dimensions: XLA uses 32-bit indexes in places",
            )
        is_donated = bool(path) and path[0] in donated
        weak = bool(getattr(shape, "weak_type", False))
        arrays.append(Array(path, str(shape.dtype), tuple(shape.shape), is_donated, weak=weak))
    named = [tuple(map(str, array.path)) for array in arrays]
    for array, name in zip(arrays, named, strict=True):
        if named.count(name) > 1:
            raise BuildError(
                f"{what}: expected one array at {_spelled(array.path)}, found two",
                hint="give the parts of your own type different names",
            )
    try:
        trees.parse(trees.to_text(tree))
    except ValueError as error:
        raise BuildError(
            f"{what}: {error}",
            hint="classes in a bundle and their fields have names that Python's grammar allows, without "
            "leading underscores",
        ) from error
    return Arrays(tree, tuple(arrays), tuple(found))


@dataclasses.dataclass(frozen=True)
class _Noted:
    """The constants of a pytree so far, and those of the arguments, which results refer to."""

    found: list[tuple[Constant, Any]]
    given: Constants

    def node(self, node: trees.Node, value: Any) -> trees.Node:
        """Return the node of a value, whose constants refer to the arguments' where they are equal."""
        values = [*constant_values(node, value)]
        self.found.extend(values)
        kept = {id(constant): self._kept(constant, each) for constant, each in values}
        constants = tuple((name, kept.get(id(each), each)) for name, each in node.constants)
        aux: Any = node.aux if node.aux is None else kept.get(id(node.aux), node.aux)
        return dataclasses.replace(node, constants=constants, aux=aux)

    def _kept(self, constant: Constant, value: Any) -> Constant:
        with contextlib.suppress(LookupError):  # the bundle does not hold it
            decode(constant)
            return constant
        for other, each in self.given:
            with contextlib.suppress(Exception):  # of the code of its class
                if same(constant, other) and (each is value or bool(each == value)):
                    assert isinstance(constant, EncodedConstant)
                    return of_argument(constant)
        return constant


def _tree(value: Any, what: str, shapes: Iterator[Any], noted: _Noted) -> trees.Tree:
    """Return how a pytree is nested, whose leaves have these shapes."""
    if value is None:
        return trees.NONE
    parts, structure = tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if jax.tree_util.treedef_is_leaf(structure) and len(parts) == 1 and not parts[0][0]:
        shape = next(shapes)
        return trees.Leaf(key_name(shape) if is_key(shape) else "")
    keys = [path[0] for path, _ in parts]
    children = tuple(
        _tree(child, f"{what}{jax.tree_util.keystr(path)}", shapes, noted) for path, child in parts
    )
    kind = type(value)
    if kind in (list, tuple):
        sequence: trees.Kind = "list" if kind is list else "tuple"
        return trees.Node(sequence, tuple(range(len(children))), children)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_fields") and auxiliary(value) is None:
        return trees.Node("namedtuple", tuple(value._fields), children, name)
    if isinstance(value, dict) or (keys and all(isinstance(key, DictKey) for key in keys)):
        names = tuple(_dict_key(key, what) for key in keys)
        return noted.node(trees.Node("dict", names, children, aux=kind_of_dict(value)), value)
    if (keys or dataclasses.is_dataclass(value)) and all(isinstance(k, GetAttrKey) for k in keys):
        fields = tuple(key.name for key in keys if isinstance(key, GetAttrKey))
        if dataclasses.is_dataclass(value):
            return noted.node(
                trees.Node("record", fields, children, name, _constants(value, fields)), value
            )
        return noted.node(trees.Node("record", fields, children, name, aux=auxiliary(value)), value)
    places = tuple(_place(key, at) for at, key in enumerate(keys))
    return noted.node(trees.Node("node", places, children, name, aux=auxiliary(value)), value)


def _place(key: Any, at: int) -> int:
    """Return the place of a child: the one that its key has, or the one where it stands."""
    match key:
        case FlattenedIndexKey(key=place) | SequenceKey(idx=place):
            return int(place)
    return at


def _dict_key(key: Any, what: str) -> trees.Key:
    if type(key.key) not in (str, int):
        raise BuildError(
            f"{what}: expected dicts whose keys are texts or integers, found the key {key.key!r}",
            hint="use a list in its place, or a dict whose keys are texts",
        )
    return key.key


def _constants(value: Any, fields: tuple[str, ...]) -> tuple[tuple[str, Constant], ...]:
    """Return the fields of a dataclass that are no part of the pytree."""
    names = (field.name for field in dataclasses.fields(value) if field.name not in fields)
    return tuple((name, encode(getattr(value, name, None))) for name in names)


def _spelled(path: trees.Path) -> str:
    return "".join(f"[{key!r}]" for key in path)


Bind = Callable[[Mapping[str, Any]], Any]

ALL_BUT_RANDOM_STATE = (
    "save and give nnx.state(model, nnx.Not(nnx.RngState)): nnx.Param alone leaves out what BatchNorm and "
    "others keep beside their parameters"
)
"""The hint of errors about params that lack a part of a module of flax.nnx."""

NO_RANDOM_STATE = (
    "random state is no parameter, and the module keeps its own: save and give "
    "nnx.state(model, nnx.Not(nnx.RngState)), or the last part of nnx.split(model, nnx.RngState, ...)"
)
"""The hint of errors about params that hold random state, as of flax.nnx.Dropout."""


def dotted(path: Any) -> str:
    """Return the path to a leaf of a pytree as one name."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def check_different(names: Sequence[str], where: str, what: str) -> None:
    """Check that dotted names of leaves differ.

    Raises:
        ManifestError: two are the same.
    """
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise ManifestError(
            f"{where}: expected different names of {what}, found {name!r} twice",
            hint="names are joined by dots: a key must not contain one",
        )


def arrays_in(tree: Any, where: str) -> tuple[dict[str, Any], Bind]:
    """Return the arrays of a pytree by dotted name, and a function that puts others in their place.

    Leaves that are no arrays, such as activation functions, and random keys stay what they are.

    Raises:
        ManifestError: two arrays have the same name.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = [(dotted(path) if _is_array(leaf) else None, leaf) for path, leaf in leaves]
    check_different([name for name, _ in named if name is not None], where, "arrays")

    def bind(values: Mapping[str, Any]) -> Any:
        parts = [leaf if name is None else values[name] for name, leaf in named]
        return jax.tree.unflatten(structure, parts)

    return {name: leaf for name, leaf in named if name is not None}, bind


def differing_names(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return in words, for errors, the names that only the object or only its params have; empty: none."""
    sides = (
        (sorted(own.keys() - given.keys()), "in the module alone"),
        (sorted(given.keys() - own.keys()), "in params alone"),
    )
    return "; ".join(
        f"{few(names, 8)} {'is' if len(names) == 1 else 'are'} {where}"
        for names, where in sides
        if names
    )


def check_fit(own: Mapping[str, Any], given: Mapping[str, Any], where: str, label: str) -> None:
    """Check that given arrays can replace an object's own ones of these names.

    Floating-point numbers may have another precision.

    Raises:
        ManifestError: one has another shape, or a dtype of another kind.
    """
    for name, value in given.items():
        leaf, dtype = own[name], jax.dtypes.canonicalize_dtype(own[name].dtype)
        same_kind = np.can_cast(value.dtype, dtype, "same_kind") or all(
            jnp.issubdtype(each, jnp.floating) for each in (value.dtype, dtype)
        )
        if tuple(value.shape) != tuple(leaf.shape) or not same_kind:
            raise ManifestError(
                f"{where}: {name}: expected {dtype}{[*leaf.shape]}, as in {label}; found "
                f"{value.dtype}{[*value.shape]}"
            )


def _is_array(leaf: Any) -> bool:
    held = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    return held and not is_key(leaf)
