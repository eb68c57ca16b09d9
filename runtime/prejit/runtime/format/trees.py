"""The pytrees that programs of the user take and return, as one line of text.

A tree is canonical JSON. Its leaves, in order, are the arguments or results of the program:

    "*"                                                an array
    "key:fry"                                          the data of a random key of jax's implementation `fry`
    null                                               None
    ["list",[TREE,...]]    ["tuple",[TREE,...]]
    ["dict",[[KEY,TREE],...]]                          a key is text or an integer
    ["namedtuple","module:Name",[[FIELD,TREE],...]]     a field is a name, or _N for the N-th one, from 0
    ["record","module:Name",[[FIELD,TREE],...],[[FIELD,VALUE],...]]
    ["node","module:Name",[TREE,...]]                  any other type, whose parts have no names

A record is a dataclass, or another type whose parts are attributes; the second list has the constant fields
of a dataclass. A record or node of any other class that is registered with jax has one more element, its
auxiliary data. So has a mapping that is no dict: OrderedDict, or a tuple of its class and what else it
keeps. `constants` describes all.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from prejit.runtime.format import constants
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.constants import Constant, EncodedConstant, dumps
from prejit.runtime.format.limits import MAX_DEPTH

Key = str | int
Path = tuple[Key, ...]
"""The place of a leaf in a tree, outermost key first; an integer is a place in a sequence or a dict's key."""
Kind = Literal["none", "list", "tuple", "dict", "namedtuple", "record", "node"]

_TYPE = re.compile(r"[\w.<>]{1,512}:[\w.<>]{1,512}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array; with a `key`: the data of random keys of that implementation of jax (`fry`, `rbg`)."""

    key: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A container, or None.

    `keys` has keys, fields or places of its children. `type`: `module:Name` of a named tuple, record or node;
    else empty. `constants`: names and values of a dataclass's constant fields. `aux`: the auxiliary data of a
    class that is registered with jax; None: it is jax's own, or a dataclass.
    """

    kind: Kind
    keys: tuple[Key, ...] = ()
    children: tuple[Tree, ...] = ()
    type: str = ""
    constants: tuple[tuple[str, Constant], ...] = ()
    aux: EncodedConstant | None = None


Tree = Leaf | Node

NONE = Node("none")


def paths(tree: Tree, at: Path = ()) -> Iterator[Path]:
    """Yield the path of every leaf, in order."""
    if isinstance(tree, Leaf):
        yield at
        return
    for key, child in zip(tree.keys, tree.children, strict=True):
        yield from paths(child, (*at, key))


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Yield every leaf, in order."""
    if isinstance(tree, Leaf):
        yield tree
        return
    for child in tree.children:
        yield from leaves(child)


def to_text(tree: Tree) -> str:
    """Return the text of a tree."""
    return dumps(_plain(tree))


def parse(text: str) -> Tree:
    """Return the tree that a text describes; the inverse of `to_text`.

    Raises:
        ValueError: the text has another form, or is deeper than `MAX_DEPTH`.
    """
    try:
        plain = json.loads(text)
        tree = _tree(plain, 0)
        canonical = dumps(plain) == text
    except (TypeError, RecursionError) as error:
        raise ValueError(f"expected a tree, found {text!r:.80}") from error
    if not canonical:  # a tree has only one spelling
        raise ValueError(f"expected a tree as canonical JSON, found {text!r:.80}")
    return tree


def _plain(tree: Tree) -> Any:
    if isinstance(tree, Leaf):
        return f"key:{tree.key}" if tree.key else "*"
    children = [_plain(child) for child in tree.children]
    pairs = [list(pair) for pair in zip(tree.keys, children, strict=True)]
    aux = [] if tree.aux is None else [constants.plain(tree.aux)]
    match tree.kind:
        case "none":
            return None
        case "list" | "tuple":
            return [tree.kind, children]
        case "dict":
            return ["dict", pairs, *aux]
        case "namedtuple":
            return ["namedtuple", tree.type, pairs]
        case "record":
            fields = [[name, constants.plain(value)] for name, value in tree.constants]
            return ["record", tree.type, pairs, fields, *aux]
        case "node":
            return ["node", tree.type, children, *aux]


def _tree(plain: Any, depth: int) -> Tree:
    if depth > MAX_DEPTH:
        raise ValueError(f"expected a tree of at most {MAX_DEPTH} levels, found more")
    if plain is None:
        return NONE
    if isinstance(plain, str):
        if plain == "*":
            return Leaf()
        if re.fullmatch(r"key:[a-z0-9_]{1,64}", plain):
            return Leaf(plain[4:])
        raise ValueError(f"expected '*' or 'key:' and a name for a leaf, found {plain!r:.80}")
    match plain:
        case ["list" | "tuple" as kind, list(items)]:
            return _sequence(kind, "", items, depth)
        case ["node", str(type_), list(items), *aux]:
            return replace(_sequence("node", _type(type_), items, depth), aux=_aux(aux))
        case ["dict", list(pairs), *aux]:
            return replace(_named("dict", "", pairs, depth, ()), aux=_aux(aux))
        case ["namedtuple", str(type_), list(pairs)]:
            return _named("namedtuple", _type(type_), pairs, depth, ())
        case ["record", str(type_), list(pairs), list(fields), *aux]:
            kept = tuple((name, constants.parse(value)) for name, value in fields)
            return replace(_named("record", _type(type_), pairs, depth, kept), aux=_aux(aux))
        case _:
            raise ValueError(f"expected a node of a tree, found {plain!r:.80}")


def _sequence(kind: Kind, type_: str, items: list[Any], depth: int) -> Node:
    children = tuple(_tree(item, depth + 1) for item in items)
    return Node(kind, tuple(range(len(children))), children, type_)


def _named(
    kind: Kind, type_: str, pairs: list[Any], depth: int, fixed: tuple[tuple[str, Constant], ...]
) -> Node:
    keys = [key for key, _ in pairs]
    fields = [*keys, *(name for name, _ in fixed)]
    for place, key in enumerate(fields):
        if kind == "dict":
            allowed = type(key) in (str, int)
        else:
            # Readers make classes with these fields. namedtuple takes none that begin with an underscore,
            # but for those that it renames to their places itself.
            special = "_" if kind == "namedtuple" else "__"
            allowed = isinstance(key, str) and _is_name(key) and not key.startswith(special)
            allowed = allowed or (kind == "namedtuple" and key == f"_{place}")
        if not allowed:
            raise ValueError(f"expected keys of a {kind}, found {key!r:.80}")
    if len(set(map(str, fields))) != len(fields):
        raise ValueError(f"expected each key of a {kind} once, found one twice")
    children = tuple(_tree(item, depth + 1) for _, item in pairs)
    return Node(kind, tuple(keys), children, type_, fixed)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _type(text: str) -> str:
    name = text.rpartition(":")[2].rpartition(".")[2]
    if not _TYPE.fullmatch(text) or not _is_name(name):
        raise ValueError(f"expected a type as 'module:Name', found {text!r:.80}")
    return text


def _aux(found: list[Any]) -> EncodedConstant | None:
    """Return the auxiliary data of a node from the elements behind its parts."""
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"expected auxiliary data once, found {found!r:.80}")
    return constants.parse_described(found[0])


_T = TypeVar("_T")


@dataclass(frozen=True)
class Branch:
    """An argument or a result of a program: one branch of its tree, by its name or its place.

    `start`: the place of its first array among all arrays of the program.
    """

    key: Key
    tree: Tree
    arrays: tuple[Array, ...]
    start: int

    @property
    def places(self) -> range:
        """The places of its arrays."""
        return range(self.start, self.start + len(self.arrays))

    def of(self, values: Sequence[_T]) -> list[_T]:
        """Return the branch's part of a list with a value for each argument or result."""
        return list(values[self.start : self.places.stop])

    def holds_what(self, other: Branch) -> bool:
        """Return whether another branch has the same structure, shapes and types."""
        return self.tree == other.tree and [(a.dtype, a.weak, a.shape) for a in self.arrays] == [
            (a.dtype, a.weak, a.shape) for a in other.arrays
        ]


def whole(tree: Tree, arrays: tuple[Array, ...]) -> Branch:
    """Return all arguments or results of a program as one branch."""
    return Branch("", tree, arrays, 0)


def branches(tree: Tree, arrays: tuple[Array, ...]) -> list[Branch]:
    """Return the arguments or results of a program; a single array is one by itself."""
    if isinstance(tree, Leaf):
        return [whole(tree, arrays)]
    found, start = [], 0
    for key, child in zip(tree.keys, tree.children, strict=True):
        count = sum(1 for _ in leaves(child))
        found.append(Branch(key, child, arrays[start : start + count], start))
        start += count
    return found


def candidates(key: Key, alike: Sequence[Key], arguments: Collection[Key]) -> list[Key]:
    """Return the results that may be the next value of an argument: one if there is no doubt.

    Args:
        key: the name or place of the argument.
        alike: names or places of the results with its structure, shapes and dtypes.
        arguments: names or places of all arguments. A result with the name of another one belongs to that.
    """
    if isinstance(key, str) and key in alike:
        return [key]
    return [each for each in alike if isinstance(each, int) or each not in arguments]


def how_to_name(key: Key) -> str:
    """Return a hint that says how a function tells the next value of an argument from other results."""
    if isinstance(key, str):
        return f"let the function return a dict whose key {key!r} is the next value of {key!r}"
    return (
        "give the arguments names (`args` as a table, or keyword arguments), and let the function return a "
        "dict whose key is the argument's name"
    )


def without_references(tree: Tree) -> Tree:
    """Return a tree of results with the constants of the arguments that its own ones refer to.

    So the next state of a training step has the structure of the state, whose optimizer no bundle holds.
    """
    if not isinstance(tree, Node):
        return tree
    aux: Any = _referred(tree.aux)
    return replace(
        tree,
        children=tuple(map(without_references, tree.children)),
        constants=tuple((name, _referred(constant)) for name, constant in tree.constants),
        aux=aux,
    )


def _referred(constant: Constant) -> Constant:
    if isinstance(constant, EncodedConstant):
        match json.loads(constant.text):
            case ["argument", value]:
                return EncodedConstant(dumps(value))
    return constant
