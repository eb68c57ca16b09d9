"""Compare the shardings that jax.jit was given, and those of arrays, with those of a program on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.jitted.jit_call import JittedCall
from prejit.runtime.jitted.jit_program_choice import Fit, MissError
from prejit.runtime.programs.on_jax import JaxPrograms


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
