"""Pytrees of arrays to the flat lists that programs take, and back.

jax.tree_util does this too, but it would import jax, which the runtime does not need. A program's own tree
(`format.trees`) leads: it tells which keys, fields and places to look for, so values of any class with these
attributes are taken, and no class of the user has to be imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prejit.runtime.errors import UsageError
from prejit.runtime.format import constants, trees
from prejit.runtime.format.constants import Constant, EncodedConstant, shown
from prejit.runtime.format.trees import Key, Leaf, Node, Path, Tree


class MisfitError(Exception):
    """A value does not have the structure that a program takes."""


def flatten(tree: Tree, value: Any, at: Path = ()) -> list[Any]:
    """Return the leaves of a value that has the structure of a tree.

    Lists and tuples are taken for each other. A record or named tuple is any object with its fields, a
    mapping of them, or a list in their order. A dict is a mapping, or a named tuple or dataclass whose fields
    are its keys; no list stands for it. A node is of a class with its name, or a list of its parts: those of
    other classes may come in another order. A dict has its keys in the order in which jax gives them to the
    function: those of an OrderedDict as they are, all others sorted. Keyword arguments have no order.

    Args:
        tree: what the program takes.
        value: what the caller gave.
        at: the place of the value, for errors.

    Raises:
        MisfitError: a part is missing, or there is one too many.
    """
    seen, structure, fitted = _seen(tree), None, False
    if seen is not None:
        with contextlib.suppress(Exception):  # of the code of a constant that is hashed or compared
            structure = _structure(value)
            fitted = structure in seen
    walk = _Walk([], compares=not fitted)
    _collect(tree, value, at, walk)
    if seen is not None and structure is not None and walk.is_registered and not fitted:
        with contextlib.suppress(Exception):
            seen.add(structure)
    return walk.found


@dataclasses.dataclass(slots=True)
class _Walk:
    """A walk through a value beside a tree.

    Attributes:
        found: the leaves so far.
        compares: whether constants are compared.
        is_registered: whether all that has constants so far is of classes that are registered with jax, whose
            structure holds these constants.
    """

    found: list[Any]
    compares: bool
    is_registered: bool = True


_trees: dict[int, tuple[Tree, set[Any] | None]] = {}
"""Trees by identity, with the structures of jax whose constants fitted them; None: a tree has no constants.
To compare constants takes milliseconds, to compare structures microseconds."""
_MOST_TREES = 10_000


def _seen(tree: Tree) -> set[Any] | None:
    known = _trees.get(id(tree))
    if known is None or known[0] is not tree:
        if len(_trees) >= _MOST_TREES:
            _trees.clear()
        known = _trees[id(tree)] = tree, set() if _has_constants(tree) else None
    return known[1]


def _has_constants(tree: Tree) -> bool:
    return isinstance(tree, Node) and (
        bool(tree.constants) or _is_compared(tree) or any(map(_has_constants, tree.children))
    )


def _structure(value: Any) -> Any:
    """Return jax's structure of a value; None: the process has not imported jax."""
    registry = _registry()
    return None if registry is None else registry.flatten(value)[1]


def _collect(tree: Tree, value: Any, at: Path, walk: _Walk) -> None:
    if isinstance(tree, Leaf):
        walk.found.append(_leaf(value, at))
        return
    if tree.kind == "none":
        if value is not None:
            raise MisfitError(f"unexpected {spell(at)}: expected None")
        return
    if tree.kind == "dict" and not (hasattr(value, "keys") or _fields(value)):
        found_instead = type(value).__name__
        raise MisfitError(f"expected {spell(at)} as a mapping, found {found_instead}")
    if tree.kind == "node" and type(value) not in (list, tuple):
        expected, found = tree.type.rpartition(":")[2], type(value).__qualname__
        if found != expected:
            raise MisfitError(f"expected {spell(at)} as {expected}, found {found}")
    if walk.compares and (tree.constants or _is_compared(tree)):
        if misfit := constants_misfit(tree, value, at):
            raise MisfitError(misfit)
        walk.is_registered = walk.is_registered and _one_level(value) is not None
    part_of = _parts(tree, value)
    for key, child in zip(tree.keys, tree.children, strict=True):
        try:
            part = part_of(key)
        except (KeyError, IndexError, AttributeError):
            missing = (*at, key, *next(trees.paths(child), ()))  # its first leaf
            is_none = ": expected None" * (child == trees.NONE)
            strays = (f", and unexpected {spell((*at, key))}" for key in _more_keys(tree, value))
            raise MisfitError(f"{spell(missing)} is missing{is_none}{next(strays, '')}") from None
        _collect(child, part, (*at, key), walk)
    for key in _more_keys(tree, value):
        raise MisfitError(f"unexpected {spell((*at, key))}")
    if tree.kind == "dict" and at and isinstance(value, Mapping):
        order = (*value,) if type(value) is OrderedDict else _sorted(tree.keys)
        if order != tree.keys:
            expected, found = (", ".join(map(repr, keys)) for keys in (tree.keys, order))
            raise MisfitError(
                f"expected the keys of {spell(at)} in the order {expected}, found {found}: jax keeps the "
                "order of an OrderedDict, and sorts the keys of a dict"
            )


@functools.lru_cache(maxsize=4096)
def _sorted(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    return tuple(sorted(keys, key=lambda key: (isinstance(key, str), key)))


_OF_ARRAYS = ("__array__", "__array_interface__", "__dlpack__", "__jax_array__", "dtype")
"""Attributes of which an array of any library has one."""


def _leaf(value: Any, at: Path) -> Any:
    """Return what a caller gave for an array."""
    if value is None or isinstance(value, Mapping):
        raise MisfitError(f"{spell(at)} is missing")
    is_container = hasattr(value, "__len__") and not isinstance(value, str | bytes)
    if is_container and not any(hasattr(value, name) for name in _OF_ARRAYS):
        raise MisfitError(f"expected {spell(at)} as an array, found {type(value).__name__}")
    return value


def _parts(tree: Node, value: Any) -> Callable[[Key], Any]:
    """Return a function that gives a part of a value by its key, or raises an error of a missing part."""
    if (parts := _registered_parts(tree, value)) is not None:
        return lambda key: parts[tree.keys.index(key)]
    if isinstance(value, Mapping):
        return value.__getitem__
    if tree.kind == "dict" and not _fields(value):
        return lambda key: value[key]  # as flax.nnx.State, which is no Mapping
    if tree.kind in ("dict", "namedtuple", "record") and type(value) not in (list, tuple):
        return lambda key: getattr(value, str(key))
    if isinstance(value, list | tuple):
        return lambda key: value[tree.keys.index(key)]
    others = [*(_one_level(value) or ((), None))[0]]
    return lambda key: others[tree.keys.index(key)]


def _more_keys(tree: Node, value: Any) -> Iterator[Key]:
    """Yield the keys of parts that a value has and the tree has not. None is a part, as for jax."""
    if (parts := _registered_parts(tree, value)) is not None:
        yield from range(len(tree.keys), len(parts))
    elif isinstance(value, Mapping) or (tree.kind == "dict" and not _fields(value)):
        yield from sorted({*value.keys()} - {*tree.keys}, key=str)
    elif tree.kind == "dict":
        yield from (name for name in _fields(value) if name not in tree.keys)
    elif isinstance(value, list | tuple):
        yield from range(len(tree.keys), len(value))


def has_registered_tuple(value: Any) -> bool:
    """Return whether there is a named tuple, in Python's containers, whose class is registered with jax."""
    if isinstance(value, tuple) and hasattr(value, "_fields") and auxiliary(value) is not None:
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return any(map(has_registered_tuple, value))


def _registered_parts(tree: Node, value: Any) -> Sequence[Any] | None:
    """Return the parts of a value whose class is registered with jax, in place of a node; None: its is not.

    The class may be one of lists, whose registered parts are others than its items.
    """
    if tree.kind != "node" or type(value) in _OF_JAX or (level := _one_level(value)) is None:
        return None
    return [*level[0]]


def _fields(value: Any) -> tuple[str, ...]:
    """Return the names of the parts of a named tuple or dataclass; none of any other value."""
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return getattr(value, "_fields", ()) if isinstance(value, tuple) else ()


_OF_JAX = (list, tuple, dict, OrderedDict, defaultdict)
"""Classes that jax takes apart itself."""


ORDERED = constants.described(OrderedDict)
"""In place of auxiliary data: a dict of a tree is an OrderedDict."""

_DEFAULTS = '["tuple",[["name","collections:defaultdict"],'


def kind_of_dict(value: Any) -> EncodedConstant | None:
    """Return what tells a mapping from a dict: the class and what it keeps; None: it is a dict."""
    if type(value) is OrderedDict:
        return ORDERED
    if type(value) is defaultdict:
        return constants.described((defaultdict, value.default_factory))
    level = None if type(value) is dict else _one_level(value)
    return None if level is None else constants.described((type(value), level[1]))


def _is_compared(tree: Node) -> bool:
    """Return whether a tree has auxiliary data that an argument must have too."""
    return tree.aux is not None and not (
        tree.kind == "dict" and tree.aux.text.startswith((ORDERED.text, _DEFAULTS))
    )


def auxiliary(value: Any) -> EncodedConstant | None:
    """Return the auxiliary data of a value whose class is registered with jax; None: its class is not."""
    if type(value) in _OF_JAX or (level := _one_level(value)) is None:
        return None
    # That of a named tuple which is not registered is its class.
    is_named_tuple = hasattr(value, "_fields") and level[1] is type(value)
    return None if is_named_tuple else constants.described(level[1])


def constants_misfit(tree: Node, value: Any, at: Path) -> str:
    """Return why constants of a value are not those of a tree; empty if they are.

    A value of another class than the build's, such as a dict for a dataclass, may have no constants.
    """
    pairs = [
        ((*at, name), kept, constants.encode(getattr(value, name)))
        for name, kept in tree.constants
        if hasattr(value, name)
    ]
    if tree.aux is not None and _is_compared(tree) and (aux := auxiliary(value)) is not None:
        kind = kind_of_dict(value) if tree.kind == "dict" else aux
        pairs.append((at, tree.aux, kind))
    for place, kept, found in pairs:
        if not constants.same(kept, found):
            cause = ", which only the process that made it can compare"
            unknown = cause * (isinstance(found, EncodedConstant) and found.is_unknown)
            return f"{spell(place)}: expected {shown(kept)}, found {shown(found)}{unknown}"
    return ""


def constant_values(tree: Node, value: Any) -> Iterator[tuple[Constant, Any]]:
    """Yield each constant of a node with what a value has in its place."""
    for name, kept in tree.constants:
        if hasattr(value, name):
            yield kept, getattr(value, name)
    is_registered = tree.aux is not None and tree.kind != "dict"
    if is_registered and (level := _one_level(value)) is not None:
        yield tree.aux, level[1]


def _one_level(value: Any) -> tuple[Sequence[Any], Any] | None:
    """Return the parts and auxiliary data of a value whose class is registered with jax; None: it is not."""
    if (registry := _registry()) is not None:
        with contextlib.suppress(ValueError):  # not registered
            found: tuple[Sequence[Any], Any] | None = registry.flatten_one_level(value)
            return found
    return None


def _registry() -> Any:
    """Return jax's registry of pytrees; None: a process without jax has registered no class with it."""
    return getattr(getattr(sys.modules.get("jax"), "tree_util", None), "default_registry", None)


def unflatten(
    tree: Tree, leaves: Iterator[Any], types: Mapping[str, type[Any]] | None = None
) -> Any:
    """Return a value that has the structure of a tree.

    Args:
        tree: what the program returns.
        leaves: the values of its leaves, in order.
        types: classes of named tuples and records by `module:Name`. Others become named tuples and frozen
            dataclasses with the same name and fields; types whose parts have no names become tuples.

    Raises:
        UsageError: a class does not take what the bundle holds of it.
    """
    if isinstance(tree, Leaf):
        return next(leaves)
    children = [unflatten(child, leaves, types) for child in tree.children]
    match tree.kind:
        case "none":
            return None
        case "list":
            return children
        case "dict":
            is_dict = tree.aux != ORDERED and _sorted(tree.keys) == tree.keys
            return (dict if is_dict else OrderedDict)(zip(tree.keys, children, strict=True))
        case "namedtuple" | "record":
            fields = dict(zip(map(str, tree.keys), children, strict=True))
            known = (types or {}).get(tree.type)
            fields |= _decoded(tree, known)
            if known is None:
                return _substitute(tree.kind, tree.type, tuple(fields))(**fields)
            return _of_class(known, tree.type, fields, children)
        case _:
            return tuple(children)


def _of_class(
    class_: type[Any], type_: str, fields: Mapping[str, Any], children: Sequence[Any]
) -> Any:
    """Return an object of a class, as jax makes it where the class is registered with jax.

    Other classes are called with their fields.
    """
    try:
        if structure := _registered_structure(class_, fields, children):
            return structure.unflatten(children)
        own = getattr(class_, "__dataclass_fields__", {})
        taken = {name: value for name, value in fields.items() if name not in own or own[name].init}
        return class_(**taken)
    except Exception as error:
        raise UsageError(
            f"result {type_}: expected a class that takes {', '.join(fields)}, found that its call raises "
            f"{type(error).__name__}: {error}",
            hint=f"leave {type_} out of types: the result is then a class with these fields",
        ) from error


def _registered_structure(
    class_: type[Any], fields: Mapping[str, Any], children: Sequence[Any]
) -> Any:
    """Return jax's structure of an object with these fields; None: jax does not know its class.

    It is None too where jax finds other parts in it, as of a class that keeps more than its fields.
    """
    if (registry := _registry()) is not None:
        with contextlib.suppress(Exception):  # of the code of the class
            bare = bare_object(class_, fields)
            parts, structure = registry.flatten(bare, lambda part: part is not bare)
            if len(parts) == len(children) and all(map(operator.is_, parts, children)):
                return structure
    return None


def changes_itself(value: Any) -> bool:
    """Return whether a class of a value changes its own parts each time that jax makes it.

    A class that only converts them, as to arrays of jax, leaves what it has converted as it is.
    """
    if (registry := _registry()) is not None:
        with contextlib.suppress(Exception):  # of the code of the class
            leaves, structure = registry.flatten(value)
            once, first = registry.flatten(structure.unflatten(leaves))
            twice, second = registry.flatten(first.unflatten(once))
            return first != second or not all(map(operator.is_, once, twice))
    return False


def field_names(class_: type[Any]) -> set[str]:
    """Return the names of a dataclass's fields, without its class variables; none for another class."""
    return (
        {each.name for each in dataclasses.fields(class_)}
        if dataclasses.is_dataclass(class_)
        else set()
    )


def bare_object(class_: type[Any], fields: Mapping[str, Any]) -> Any:
    """Return an object of a class with these fields, without a call of the class's own code."""
    found = object.__new__(class_)
    for name, value in fields.items():
        object.__setattr__(found, name, value)
    return found


def _decoded(tree: Node, known: type[Any] | None) -> dict[str, Any]:
    """Return the constant fields of a record, as far as the bundle holds them."""
    found = {}
    fields = getattr(known, "__dataclass_fields__", {})
    for name, kept in tree.constants:
        try:
            found[name] = constants.decode(kept)
        except LookupError:
            if known is not None and (name not in fields or fields[name].init):
                raise UsageError(
                    f"result {tree.type}: the bundle does not hold the value of {name}: {shown(kept)}",
                    hint=f"leave {tree.type} out of types: the result is then a class with its other fields",
                ) from None
    return found


@functools.lru_cache(maxsize=4096)
def _substitute(kind: str, type_: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    """Return a class with the name and fields of one that this process does not know."""
    name = type_.rpartition(":")[2].rpartition(".")[2]
    if kind == "namedtuple":
        return namedtuple(name, fields, rename=True)
    return dataclasses.make_dataclass(name, fields, frozen=True, eq=False)


def by_path(tree: Tree, given: Mapping[Path, Any]) -> list[Any]:
    """Return the leaves of a tree from values by path. Raises MisfitError as `flatten`."""
    expected = list(trees.paths(tree))
    found = [_leaf(given.get(path), path) for path in expected]
    if unexpected := given.keys() - set(expected):
        raise MisfitError(f"unexpected {spell(min(unexpected, key=str))}")
    return found


def spell(path: Path) -> str:
    """Return a path as one writes it in Python: `params['dense'][0]`."""
    head, *rest = path or ("value",)
    return str(head) + "".join(f"[{key!r}]" for key in rest)


_NOT_IN_NAMES = re.compile(r"[/%.\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def dotted(path: Path) -> str:
    """Return a path as one name for files and command lines: `1.dense.kernel`. It is unique in its tree.

    Dots inside a key, and characters that file names or terminals do not take, are written as %XX; an empty
    key is written as %.
    """
    keys = (_NOT_IN_NAMES.sub(lambda match: f"%{ord(match[0]):02X}", str(key)) for key in path)
    return ".".join(key or "%" for key in keys)
