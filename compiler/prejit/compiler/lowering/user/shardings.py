"""How a mesh splits the arrays of a function of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

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
