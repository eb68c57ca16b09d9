"""Find the program of a bundle that takes a call of a jitted function, or what differs from the closest.

The shardings that jax.jit was given are compared once the function is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prejit.runtime.base import arguments
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.device import jax_settings
from prejit.runtime.device.jax_arrays import DELETED, default_device, is_jax_array, misplaced
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.format import constants, trees
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.constants import Constant, EncodedConstant
from prejit.runtime.jitted.jit_call import JittedCall
from prejit.runtime.programs.fitted_arguments import instead
from prejit.runtime.programs.on_jax import JaxPrograms
from prejit.runtime.programs.placing import is_random_key
from prejit.runtime.programs.pytree import (
    constant_values,
    constants_misfit,
    field_names,
    kind_of_dict,
    spell,
)

AXES = ("settings", "weights", "structure", "static", "dtype", "shape", "donation", "device")
"""What a call and a program may differ in, in the order in which they are compared."""
_SHOWN = 3
"""Maximum number of programs whose difference a message shows."""


_ANOTHER = "another class of this name, such as one that a function made"
_DIFFERENT = object()
"""Stands for a constant that different objects of the arguments have: a result may hold any of them."""


class MissError(Exception):
    """No program takes a call.

    Attributes:
        axis: what differs, one word.
        reason: what differs, in words.
    """

    def __init__(self, axis: str, reason: str) -> None:
        super().__init__(reason)
        self.axis = axis
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Fit:
    """A program that takes a call.

    Attributes:
        program: its row of the program table.
        arrays: the arguments in the program's order, random keys as their data.
        order: the names of the call's arguments in the order that the program takes.
        committed: whether an argument is committed to its device, and so the results are.
        constants: the objects that constants of the program stand for, by their text.
    """

    program: ProgramEntry
    arrays: tuple[Any, ...]
    order: tuple[str, ...]
    committed: bool
    constants: Mapping[str, Any]


@dataclass(slots=True)
class _Leaves:
    """The result of a walk through the arguments of a call.

    Attributes:
        found: each leaf, with the program's.
        constants: the objects that constants of the program stand for, by their text.
    """

    found: list[tuple[trees.Leaf, Any]] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def note(self, constant: Constant, value: Any) -> None:
        """Keep the object that a constant stands for; of different ones that have one text, none."""
        if isinstance(constant, EncodedConstant):
            try:
                is_same = bool(self.constants.setdefault(constant.text, value) == value)
            except Exception:  # of the code of its class
                is_same = self.constants[constant.text] is value
            if not is_same:
                self.constants[constant.text] = _DIFFERENT


def find(programs: JaxPrograms, name: str, call: JittedCall, defaults: Mapping[str, Any]) -> Fit:
    """Return the first bucket of a program that takes a call.

    `defaults` are those of the function's parameters.

    Raises:
        MissError: there is no such program, or none of its buckets takes the call.
    """
    buckets = programs.buckets(name)
    if not buckets:
        known = programs.names()
        raise MissError(
            "program",
            f"the bundle has no program {name!r}{did_you_mean(name, known)}; its programs are: "
            + (", ".join(known) or "none"),
        )
    constants.forget_functions()  # this call has a new signature, for which jax would trace
    misses: list[MissError] = []
    for program in buckets:
        try:
            return _fit(programs, program, call, defaults)
        except MissError as miss:
            misses.append(miss)
    farthest = max(misses, key=lambda miss: AXES.index(miss.axis)).axis
    reasons = list(dict.fromkeys(miss.reason for miss in misses if miss.axis == farthest))
    more = f"; and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    raise MissError(farthest, "; ".join(reasons[:_SHOWN]) + more)


def _fit(
    programs: JaxPrograms, program: ProgramEntry, call: JittedCall, defaults: Mapping[str, Any]
) -> Fit:
    table = programs.programs
    if differing := jax_settings.differing(program.settings):
        raise MissError("settings", f"{program.name}: of jax's settings, {differing}")
    if program.weights is not None:
        raise MissError(
            "weights",
            f"{program.name} has its weights in the bundle, which only Bundle.call passes; build it "
            "without params, with the weights among its arguments",
        )
    root = table.arguments_tree(program.name)
    assert isinstance(root, trees.Node)
    order = _order(program.name, root, call)
    leaves = _Leaves()
    for name, child in zip(order, root.children, strict=True):
        _collect(child, call.arrays[name], (name,), leaves)
    _compare_static(program.name, table.static(program.name), call, defaults)
    names = [
        name for name, child in zip(order, root.children, strict=True) for _ in trees.leaves(child)
    ]
    expected = table.arguments(program.name)
    places = [(name, *array.path[1:]) for name, array in zip(names, expected, strict=True)]
    values = [_data(value) for _, value in leaves.found]
    types = [_type_of(at, value) for at, value in zip(places, values, strict=True)]
    committed = False
    for at, array, is_type in zip(places, expected, types, strict=True):
        if (is_type.dtype, is_type.weak_type) != (dtype_of(array.dtype), array.weak):
            raise MissError("dtype", _differs(at, array, is_type))
    for at, array, is_type in zip(places, expected, types, strict=True):
        if is_type.shape != array.shape:
            raise MissError("shape", _differs(at, array, is_type))
    for at, array in zip(places, expected, strict=True):
        if array.donated != (at[0] in call.donated):
            sides = ("donated", "kept") if array.donated else ("kept", "donated")
            raise MissError("donation", f"{spell(at)}: expected it {sides[0]}, found it {sides[1]}")
    for at, array, value in zip(places, expected, values, strict=True):
        if not is_jax_array(value):
            continue
        if value.is_deleted():
            _raise_as_jax(at, value)
        if programs.device.mesh is None:
            if misfit := misplaced(value, programs.device.first):
                raise MissError("device", f"{spell(at)}: {misfit}")
            committed |= bool(value.committed)
        elif value.committed:  # one that may move will be
            wanted = programs.device.sharding(array.sharding)
            axes: Any = getattr(getattr(value.sharding, "mesh", None), "axis_types", ())
            if any(kind.name != "Auto" for kind in axes):
                found = f"expected a mesh whose axes are of the type Auto, found {value.sharding}"
                raise MissError("device", f"{spell(at)}: {found}, by which jax types results")
            if not value.sharding.is_equivalent_to(wanted, value.ndim):
                text = f"expected it split as {wanted}, found {value.sharding}"
                raise MissError("device", f"{spell(at)}: {text}")
    on_one = programs.device.mesh is None
    if on_one and not committed and (default := default_device()) != programs.device.first:
        raise MissError(
            "device", f"expected {programs.device.first} as jax's device, found {default}"
        )
    for name, constant in table.static(program.name).items():
        if name in call.static:
            leaves.note(constant, call.static[name])
    known = {text: each for text, each in leaves.constants.items() if each is not _DIFFERENT}
    return Fit(program, tuple(values), order, committed, known)


def _order(program: str, root: trees.Node, call: JittedCall) -> tuple[str, ...]:
    """Return the names of a call's arguments in the order that a program takes."""
    if root.kind == "dict":
        keys = tuple(map(str, root.keys))
        if call.nameable and call.arrays.keys() == set(keys):
            return keys
        expected = f"the arguments {', '.join(keys) or 'none'}"
    else:
        if len(call.placed) == len(call.arrays) == len(root.keys):
            return call.placed
        expected = f"{len(root.keys)} arguments by position"
    found = ", ".join(call.arrays) or "none"
    raise MissError("structure", f"{program}: expected {expected}, found {found}")


def _compare_static(
    program: str, expected: Mapping[str, Constant], call: JittedCall, defaults: Mapping[str, Any]
) -> None:
    """Compare static values. One that the call or the program does not give is the parameter's default."""
    given = {**defaults, **call.static}
    for name in (*expected, *(call.static.keys() - expected.keys())):
        place = f"{program}: {name}: expected"
        if name not in given:
            raise MissError("static", f"{place} {constants.shown(expected[name])}, found none")
        if name not in expected and name not in defaults:
            raise MissError("static", f"{place} none, found {arguments.described(given[name])}")
        wanted = expected[name] if name in expected else constants.encode(defaults[name])
        if not constants.same(wanted, constants.encode(given[name])):
            found = instead(wanted, given[name])
            raise MissError("static", f"{place} {constants.shown(wanted)}, found {found}")


def _collect(tree: trees.Tree, value: Any, at: trees.Path, leaves: _Leaves) -> None:
    """Add the leaves of a value that is nested exactly as a tree says."""
    if isinstance(tree, trees.Leaf):
        if value is None or not _is_leaf(value):
            raise _misfit(at, "an array", value)
        if type(value).__name__ == "Ref":
            raise _misfit(at, "an array", "a Ref, which no program of a bundle changes in place")
        if (key := _key_name(value)) != tree.key:
            wanted = f"a random key of {tree.key}" if tree.key else "an array"
            raise _misfit(at, wanted, f"a random key of {key}" if key else value)
        leaves.found.append((tree, value))
        return
    if tree.kind == "none" or value is None:
        if tree.kind != "none" or value is not None:
            raise _misfit(at, _kind(tree), value)
        return
    parts = list(_parts(value))
    if not _is_kind(tree, value):
        is_another = _name_of(value) == tree.type
        raise _misfit(at, _kind(tree), _ANOTHER if is_another else value)
    if len(parts) != len(tree.children):
        raise _misfit(at, f"{len(tree.children)} parts", f"{len(parts)}")
    keys = tuple(key for key, _ in parts)
    is_keyed = tree.kind in ("dict", "record", "namedtuple")
    if is_keyed and (keys != tree.keys or [*map(type, keys)] != [*map(type, tree.keys)]):
        raise _misfit(at, f"the keys {_listed(tree.keys)}", _listed(keys))
    if misfit := constants_misfit(tree, value, at):
        raise MissError("structure", misfit)
    for constant, each in constant_values(tree, value):
        leaves.note(constant, each)
    if tree.kind == "record" and tree.aux is None:
        fields = {*tree.keys, *(name for name, _ in tree.constants)}
        found = field_names(type(value))
        if found != fields:
            raise _misfit(at, f"the fields {_listed((*fields,))}", _listed((*found,)))
    for place, child, (_, part) in zip(tree.keys, tree.children, parts, strict=True):
        _collect(child, part, (*at, place), leaves)


def _is_kind(tree: trees.Node, value: Any) -> bool:
    """Return whether a value is of the class of a node."""
    match tree.kind:
        case "list" | "tuple":
            return type(value) is (list if tree.kind == "list" else tuple)
        case "dict":
            is_mapping = isinstance(value, dict) or hasattr(value, "keys")
            return is_mapping and constants.same(tree.aux, kind_of_dict(value))
        case _:
            # Methods of a local class may close over anything.
            return _name_of(value) == tree.type and constants.imported(tree.type) is type(value)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a container and their keys, in jax's order."""
    import jax

    nested, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    for path, part in nested:
        if path:
            names = ("key", "name", "idx")  # of DictKey, GetAttrKey and SequenceKey
            yield next((getattr(path[0], n) for n in names if hasattr(path[0], n)), None), part


def _is_leaf(value: Any) -> bool:
    import jax

    return bool(jax.tree_util.all_leaves([value]))


def _key_name(value: Any) -> str:
    """Return jax's implementation of random keys; empty for any other value."""
    import jax

    return str(jax.random.key_impl(value)) if is_random_key(value) else ""


def _data(value: Any) -> Any:
    """Return the data of a random key, or another value as it is."""
    import jax

    return jax.random.key_data(value) if is_random_key(value) else value


def _type_of(at: trees.Path, value: Any) -> Any:
    """Return jax's type of an argument, as its dtypes are set."""
    import jax

    try:
        return jax.typeof(value)
    except (TypeError, OverflowError) as error:
        raise MissError("dtype", f"{spell(at)}: expected what jax takes: {error}") from None


def _raise_as_jax(at: trees.Path, deleted: Any) -> None:
    """Raise jax's error for an array that was deleted, as a function of jax.jit does."""
    try:
        deleted.block_until_ready()
    except RuntimeError as error:
        error.add_note(f"the argument {spell(at)} was deleted or donated: {DELETED}")
        raise


def _differs(at: trees.Path, expected: Any, found: Any) -> str:
    return (
        f"{spell(at)}: expected {'weak ' * expected.weak}{expected.dtype}{list(expected.shape)}, "
        f"found {'weak ' * found.weak_type}{found.dtype}{list(found.shape)}"
    )


def _misfit(at: trees.Path, expected: str, found: Any) -> MissError:
    shown = found if isinstance(found, str) else arguments.described(found)
    return MissError("structure", f"{spell(at)}: expected {expected}, found {shown}")


def _kind(tree: trees.Node) -> str:
    if tree.kind == "none":
        return "None"
    of = f" of {tree.aux}" * (tree.kind == "dict" and tree.aux is not None)
    return f"a {tree.kind}{f' {tree.type}' if tree.type else of}"


def _listed(keys: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, keys)) or "none"


def is_set(mesh: Mesh, abstract: Any) -> bool:
    """Return whether the mesh that jax.set_mesh has set, if any, is that of a program.

    A function may read it.
    """
    types = {kind.name for kind in abstract.axis_types}
    return bool(abstract.empty) or (
        [*abstract.shape.items()] == [*mesh.sizes.items()] and types == {"Auto"}
    )


def check_shardings(
    programs: JaxPrograms, fit: Fit, call: JittedCall, given: tuple[Any, Any], results: Any
) -> None:
    """Compare in_shardings and out_shardings of jax.jit (None: none) with those of a program that fits.

    `results` is the structure of what the function returns.

    Raises:
        MissError: the program has others.
    """
    if given == (None, None):
        return
    import jax

    name, table = fit.program.name, programs.programs
    arguments = tuple(call.arrays[each] for each in fit.order)
    sides = (
        ("in_shardings", arguments, table.arguments(name)),
        ("out_shardings", jax.tree.unflatten(results, table.results(name)), table.results(name)),
    )
    for wanted, (side, value, arrays) in zip(given, sides, strict=True):
        if wanted is not None:
            _compare(programs, side, _leaves(side, wanted, value), arrays)


def _leaves(side: str, wanted: Any, value: Any) -> list[Any]:
    """Return a sharding, or False for none, for each leaf of a value, of a tree that has one for a part."""
    import jax

    def is_leaf(part: Any) -> bool:
        return part is None or isinstance(part, jax.sharding.Sharding)

    given = jax.tree.map(lambda each: each or False, wanted, is_leaf=is_leaf)
    try:
        found: list[Any] = jax.tree.leaves(jax.tree.broadcast(given, value))
    except ValueError as error:  # jax says it again
        raise MissError("device", f"{side}: {error}") from None
    return found


def _compare(
    programs: JaxPrograms, side: str, wanted: Sequence[Any], arrays: Sequence[Array]
) -> None:
    import jax

    for place, (sharding, array) in enumerate(zip(wanted, arrays, strict=True)):
        if not sharding:
            continue
        known = programs.device.sharding(array.sharding)
        is_equal = (
            isinstance(sharding, jax.sharding.NamedSharding)
            and sharding.mesh == getattr(known, "mesh", None)
            and known.is_equivalent_to(sharding, len(array.shape))
        )
        if not is_equal:
            raise MissError("device", f"{side}: {place}: expected {known}, found {sharding}")
