"""Texts of what jax has traced already: equal ones give the same program.

Unlike the texts of functions these are complete, because a jaxpr is all that jax lowers: what has no exact
text is an error.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from prejit.runtime.recorded.hook.kept_shardings import NotKeptError, sharding_json
from prejit.runtime.recorded.hook.plain_texts import digest_of, text_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), slice)
_CALLED = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Primitives that hold functions for transformations, and the parameter that is lowered."""


def jaxpr_text(jaxpr: Any) -> str:
    """Return a digest of a jaxpr with its constants.

    Raises:
        NotKeptError: it has effects, or a value whose text would not tell it from others.
    """
    return digest_of("\n".join(_lines(jaxpr)))


def _lines(closed: Any) -> Iterable[str]:
    jaxpr = closed.jaxpr if hasattr(closed, "jaxpr") else closed
    if jaxpr.effects:
        raise NotKeptError("it has effects")
    numbers: dict[Any, int] = {}

    def made(variables: Iterable[Any]) -> str:
        return ",".join(f"{numbers.setdefault(v, len(numbers))}:{_aval(v.aval)}" for v in variables)

    def used(atoms: Iterable[Any]) -> str:
        return ",".join(
            f"{value_text(atom.val)}:{_aval(atom.aval)}"
            if hasattr(atom, "val")
            else str(numbers[atom])
            for atom in atoms
        )

    yield f"{made(jaxpr.constvars)};{made(jaxpr.invars)};{value_text(getattr(closed, 'consts', ()))}"
    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        if primitive.name in _CALLED:
            params = {"": params[_CALLED[primitive.name]]}
        context = {
            name: getattr(equation.ctx, name, None)
            for name in type(equation.ctx).__slots__
            if name != "__weakref__"
        }
        rest = value_text([*sorted(params.items()), context])
        kind = f"{type(primitive).__module__}.{primitive.name}"
        yield f"{made(equation.outvars)}={kind}({used(equation.invars)}){rest}"
    yield used(jaxpr.outvars)
    debug = jaxpr.debug_info  # names of arguments and results are in the program
    yield value_text(
        [debug.safe_arg_names(len(jaxpr.invars)), debug.safe_result_paths(len(jaxpr.outvars))]
    )


def _aval(aval: Any) -> str:
    kind = type(aval).__name__
    if kind != "ShapedArray" or not aval.sharding.mesh.empty:
        raise NotKeptError(f"it uses {aval}")
    layout = getattr(aval, "layout", None)
    return f"{aval.str_short(short_dtypes=False)}{' weak' * bool(aval.weak_type)} {layout}"


def value_text(value: Any) -> str:
    """Return the exact text of a parameter of a primitive.

    Raises:
        NotKeptError: it has none.
    """
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if kind.__name__ == "PRNGImpl" and _is_known(value):
        return f"{name} {value.name}"
    if isinstance(value, (tuple, list)):
        return f"{name}[{', '.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return (
            f"{name}{{{', '.join(f'{value_text(k)}: {value_text(v)}' for k, v in value.items())}}}"
        )
    if isinstance(value, (set, frozenset)):
        return f"{name}{{{', '.join(sorted(map(value_text, value)))}}}"
    if hasattr(value, "eqns"):
        return jaxpr_text(value)
    if isinstance(value, np.dtype) or hasattr(value, "_rules"):  # NumPy's types, and jax's own
        return f"{name} {value!r}"
    if isinstance(value, (int, float, complex)) and hasattr(value, "dtype"):
        return f"{name} {value.dtype} {digest_of(np.asarray(value).tobytes())}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _array(value, name)
    if dataclasses.is_dataclass(value):
        held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return f"{name}{value_text(held)}"
    if name in ("jax._src.mesh.Mesh", "jax._src.mesh.AbstractMesh"):
        return text_of(value)
    if name == "jax._src.named_sharding.UnspecifiedValue":
        return name
    if isinstance(value, jax.sharding.NamedSharding) and value.mesh.empty:
        return f"{name} {value.spec} {value.memory_kind}"
    if isinstance(value, jax.sharding.Sharding):
        return str(sharding_json(value))
    if isinstance(value, jax.tree_util.PyTreeDef):
        return f"{name}{value_text(value.node_data())}{value_text(value.children())}"
    if kind.__module__ == "jax._src.flattree":
        return f"{name}{value_text(vars(value))}"
    raise NotKeptError(f"it holds a {name}")


def _is_known(implementation: Any) -> bool:
    """Return whether it is one of jax's own, of random numbers: they hold functions, and have names."""
    from jax.extend import random  # takes 20 ms, because it imports Pallas

    known = random.threefry_prng_impl, random.rbg_prng_impl, random.unsafe_rbg_prng_impl
    return any(implementation is each for each in known)


def _array(value: Any, name: str) -> str:
    content = np.asarray(value)  # an error for random keys
    if content.dtype == object:
        raise NotKeptError(f"it holds a {name} of objects")
    weak = " weak" * bool(getattr(value, "weak_type", False))
    return f"{name} {content.dtype}{list(content.shape)}{weak} {digest_of(content.tobytes())}"
