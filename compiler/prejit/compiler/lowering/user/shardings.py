"""How a mesh splits the arrays of a function of the user: as a manifest says, or as jax.jit was given it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import jax
from jax.sharding import AxisType, NamedSharding

from prejit.runtime.errors import ManifestError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.trees import branches, whole, without_references


@final
class Shardings:
    """The shardings of a [[program]] section, by place."""

    def __init__(self, given: Mapping[str, Sequence[str]], mesh: Mesh | None, where: str) -> None:
        """Keep them.

        `given` is the mesh axis of each dimension, by dotted path, and `where` the section, for
        errors.

        Raises:
            ManifestError: there are shardings and no mesh.
        """
        if given and mesh is None:
            raise ManifestError(
                f"{where}: shardings: expected a [mesh] beside them, found none",
                hint="add [mesh] with data and tensor",
            )
        self._given = given
        self._mesh = mesh
        self._where = where
        self._used: set[str] = set()

    def of(self, path: trees.Path, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the mesh axis of each dimension of an array, `""` for none; empty: it is not split.

        Raises:
            ManifestError: the array has fewer dimensions, or the mesh does not divide one.
        """
        steps = [str(step) for step in path]
        places = (".".join(steps[:length]) for length in range(len(steps), 0, -1))
        place = next((place for place in places if place in self._given), None)
        if place is None or self._mesh is None:
            return ()
        self._used.add(place)
        axes, at = tuple(self._given[place]), f"{self._where}: shardings: {place}"
        if len(axes) > len(shape):
            raise ManifestError(
                f"{at}: expected at most {len(shape)} axes for {'.'.join(steps)}, found {len(axes)}"
            )
        axes += ("",) * (len(shape) - len(axes))
        for axis, extent in zip(axes, shape, strict=True):
            if extent % (parts := self._mesh.parts(axis)):
                raise ManifestError(
                    f"{at}: expected {'.'.join(steps)} to have a multiple of {parts}, the mesh's {axis}, in "
                    f"each dimension that it splits; found {extent}"
                )
        return axes

    def check_all_used(self) -> None:
        """Refuse a place that is none of an array.

        Raises:
            ManifestError: there is one.
        """
        if unused := sorted(self._given.keys() - self._used):
            raise ManifestError(
                f"{self._where}: shardings: expected the dotted path of an argument, of params or of result, "
                f"found {unused[0]!r}"
            )


def split_results(
    shardings: Shardings,
    arguments: tuple[trees.Tree, tuple[Array, ...]],
    results: tuple[trees.Tree, tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Return results with their shardings: the manifest's, or those of the argument that they replace.

    A result with the structure, shapes and dtypes of an argument is split as that argument is, as the new
    state of a training step.
    """
    taken = [branch for branch in branches(*arguments) if any(a.sharding for a in branch.arrays)]
    results = without_references(results[0]), results[1]
    together = whole(*results)
    split: list[Array] = []
    for branch in [together] if any(map(together.holds_what, taken)) else branches(*results):
        same = next(filter(branch.holds_what, taken), None)
        for place, array in enumerate(branch.arrays):
            own = shardings.of(("result", *array.path), array.shape)
            inherited = () if same is None else same.arrays[place].sharding
            chosen = own or inherited
            split.append(replace(array, sharding=chosen if any(chosen) else ()))
    return tuple(split)


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
                steps = [jax.tree_util.keystr((key,), simple=True) for key in path]
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
