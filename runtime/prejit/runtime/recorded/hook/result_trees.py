"""The trees of results of jitted functions as JSON, with the classes and values of the program that reads it.

A tree of jax has nodes of any registered class, with values of the class beside the children, such as the
function of a train state. Of these JSON has plain values and names; what the call was given, it refers to.
"""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from prejit.runtime.recorded.hook.jax_calls import JaxCall, NotKeptError

_DEPTH = 6
"""How deep values given with a call are looked for."""
_MAXIMUM_GIVEN = 5000


def given_values(call: JaxCall) -> list[Any]:
    """Return the values that a call was given beside arrays, in an order that all processes have.

    They are the classes and values of its trees, its static arguments, and what its function holds.
    """
    found: list[Any] = []
    for tree in call.structures:
        for node in _nodes(tree):
            found += _inside(node, _DEPTH)
    for value in (*call.static, call.function):
        found += _inside(value, _DEPTH)
        if len(found) > _MAXIMUM_GIVEN:
            break
    return found[:_MAXIMUM_GIVEN]


def _nodes(tree: Any) -> Iterator[Any]:
    data = tree.node_data()
    if data is None:
        return
    yield data
    for child in tree.children():
        yield from _nodes(child)


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield a value and what it holds, as far as its order is the same in all processes."""
    yield value
    if depth == 0:
        return
    held: list[Any] = []
    if isinstance(value, (tuple, list)):
        held = list(value)
    elif isinstance(value, dict):
        held = list(value.values())
    elif inspect.ismethod(value):
        held = [value.__func__, value.__self__]
    elif inspect.isfunction(value):
        for cell in value.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:
                continue
    elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        held = [value.func, value.args, value.keywords]
    for each in held:
        yield from _inside(each, depth - 1)


def tree_json(tree: Any, given: list[Any]) -> Any:
    """Return the tree of a call's results as JSON. `given` is what `given_values` returned.

    Raises:
        NotKeptError: it has a value that is neither plain, nor has a name, nor was given with the call.
    """
    data = tree.node_data()
    if data is None:
        return None
    kind, beside = data
    if kind is type(None):
        return "none"
    children = [tree_json(child, given) for child in tree.children()]
    return [_value_json(kind, given), _value_json(beside, given), children]


def tree_of(described: Any, given: list[Any]) -> Any:
    """Return the tree that `tree_json` described, in a process where `given` was given with the call.

    Raises:
        NotKeptError: the process has no such class or value.
    """
    import jax
    from jax.tree_util import PyTreeDef, default_registry

    if described is None:
        return jax.tree.structure(0)
    if described == "none":
        return jax.tree.structure(None)
    kind, beside, children = described
    data = (_value(kind, given), _value(beside, given))
    made = [tree_of(child, given) for child in children]
    return PyTreeDef.from_node_data_and_children(default_registry, data, made)


def _value_json(value: Any, given: list[Any]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return {"is": value}
    if type(value) is float:
        return {"float": value.hex()}
    for place, each in enumerate(given):
        if each is value:
            return {"given": place}
    if isinstance(value, enum.Enum):
        return {"member": [_value_json(type(value), given), value.name]}
    if type(value) in (tuple, list, frozenset, set):
        ordered = value if type(value) in (tuple, list) else sorted(value, key=repr)
        return {type(value).__name__: [_value_json(each, given) for each in ordered]}
    if type(value) is dict:
        pairs = [[_value_json(k, given), _value_json(v, given)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, type) or inspect.isroutine(value):
        name = [getattr(value, "__module__", None), getattr(value, "__qualname__", None)]
        if all(isinstance(each, str) for each in name) and _named(name) is value:
            return {"named": name}
    raise NotKeptError(f"its results hold a {type(value).__module__}.{type(value).__qualname__}")


def _value(described: Any, given: list[Any]) -> Any:
    ((kind, content),) = described.items()
    match kind:
        case "is":
            return content
        case "float":
            return float.fromhex(content)
        case "given":
            return given[content]
        case "member":
            return _value(content[0], given)[content[1]]
        case "tuple" | "list" | "frozenset" | "set":
            make = {"tuple": tuple, "list": list, "frozenset": frozenset, "set": set}[kind]
            return make(_value(each, given) for each in content)
        case "dict":
            return {_value(k, given): _value(v, given) for k, v in content}
        case "named":
            found = _named(content)
            if isinstance(found, type) or inspect.isroutine(found):
                return found
    raise NotKeptError(f"no value for {described}")


def _named(name: list[str]) -> Any:
    """Return what a module that is imported has by a name; None: it has none."""
    found: Any = sys.modules.get(name[0])
    for part in name[1].split("."):
        found = getattr(found, part, None)
    return found
