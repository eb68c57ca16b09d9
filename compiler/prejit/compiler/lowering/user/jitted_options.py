"""Read what jax.jit was given beside a function: shardings; the options that no program has are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import Mesh

Split = dict[str, tuple[str, ...]]
"""The mesh axis of each dimension, by the dotted path of an argument or of `result`."""


def jitted_split(options: Any, names: Sequence[str | int], where: str) -> tuple[Mesh | None, Split]:
    """Return the mesh of in_shardings and out_shardings, and the arrays that it splits.

    `options` is jax's record of what jax.jit was given (Dispatch.options), `names` those of the arguments.

    Raises:
        ManifestError: there are options that decide an executable and that a program has not, shardings of
            another class, on several meshes, or along axes whose type is not Auto.
    """
    refused = {
        "device": options.device,
        "backend": options.backend,
        "compiler_options": dict(options.compiler_options_kvs or ()),
        "layouts": [
            each for each in (*options.in_layouts_leaves, *options.out_layouts_leaves) if each
        ],
    }
    for option, value in refused.items():
        if value:
            raise ManifestError(
                f"{where}: expected jax.jit without {option}, found {value!r:.80}",
                hint="a [[target]] says for which device to compile, and its xla_flags how",
            )
    found: dict[str, NamedSharding] = {}
    for side in ("in", "out"):
        tree = getattr(options, f"{side}_shardings_treedef")
        leaves = getattr(options, f"{side}_shardings_leaves")
        for path, sharding in jax.tree.leaves_with_path(jax.tree.unflatten(tree, leaves)):
            if type(sharding).__name__ != "UnspecifiedValue":
                steps = [str(_step(key)) for key in path]
                for first in _first(side, steps, names):
                    found[".".join((first, *steps[side == "in" :]))] = sharding
    split = {place: _axes(sharding, f"{where}: {place}") for place, sharding in found.items()}
    meshes = {sharding.mesh for sharding in found.values()}
    if len(meshes) > 1:
        raise ManifestError(f"{where}: shardings: expected one mesh, found {len(meshes)}")
    if any(mesh.size == 1 for mesh in meshes):
        raise ManifestError(
            f"{where}: shardings: expected a mesh of several devices, found one of one device",
            hint="leave in_shardings and out_shardings out for one device",
        )
    mesh = next((Mesh.of(**each.shape) for each in meshes), None)
    # A result is whole if out_shardings has it so, also one that an argument's sharding would be for.
    is_result = {place: place.partition(".")[0] == "result" for place in split}
    return mesh, {place: axes for place, axes in split.items() if axes or is_result[place]}


def _first(side: str, steps: Sequence[str], names: Sequence[str | int]) -> Iterator[str]:
    """Yield the first steps of a place: those of all arguments that a sharding is for, or `result`."""
    if side == "out":
        yield "result"
    else:
        yield from map(str, names if not steps else [names[int(steps[0])]])


def _step(key: Any) -> Any:
    return next(getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name))


def _axes(sharding: Any, where: str) -> tuple[str, ...]:
    """Return the axes of each dimension that a sharding splits."""
    if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (None, "device"):
        raise ManifestError(
            f"{where}: expected a NamedSharding in the memory of devices, found {sharding}"
        )
    if {*sharding.mesh.axis_types} != {AxisType.Auto}:
        raise ManifestError(
            f"{where}: expected a mesh whose axes are of the type Auto, found {sharding.mesh}",
            hint="jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))",
        )
    axes = []
    for dimension in sharding.spec:
        named = (dimension,) if isinstance(dimension, str) else dimension or ()
        if not isinstance(named, tuple):
            raise ManifestError(f"{where}: expected names of axes, found {sharding.spec}")
        axes.append("+".join(named))
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)
