"""Split the parameters of a decoder over the devices of a mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from prejit.compiler.models.layers.layer_config import Split
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import Mesh


def shardings(module: Any, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Return the mesh axis that splits each dimension, for each parameter that is split, by name.

    The module is from `make_decoder`, and `check_mesh` accepts it.
    """
    found: dict[str, tuple[str, ...]] = {}
    rules: Split = module.mesh_split
    for path, part in nnx.iter_modules(module):
        name = ".".join(map(str, path))
        last = str(path[-1]) if path else ""
        if isinstance(part, Embedding):
            if last in rules.vocabulary and part.weight.shape[0] % mesh.tensor == 0:
                found[f"{name}.weight"] = ("tensor", "")
                if part.weight_scale is not None:
                    found[f"{name}.weight_scale"] = ("tensor",)
        elif isinstance(part, Linear):
            by_outputs = last in rules.outputs
            if last in rules.vocabulary:
                by_outputs = _extent(part, outputs=True) % mesh.tensor == 0
            if by_outputs or last in rules.inputs:
                first = by_outputs != part.in_out
                found[f"{name}.weight"] = ("tensor", "") if first else ("", "tensor")
            for key in ("bias", "weight_scale") if by_outputs else ():
                if getattr(part, key) is not None:
                    found[f"{name}.{key}"] = ("tensor",)
    return found


def check_mesh(mesh: Mesh, module: Any, at: str, config: Path) -> None:
    """Check that a decoder can be split over a mesh.

    The module is from `make_decoder`. `at` is the manifest and `config` the model's config.json, for
    errors.

    Raises:
        ManifestError: models of this family are not split, or `mesh.tensor` does not divide the heads or a
            matrix.
    """
    if not hasattr(module, "mesh_split"):
        raise ManifestError(
            f"{at}: mesh: expected none, because the family of {config} is not "
            f"split over devices; found data = {mesh.data}, tensor = {mesh.tensor}",
            hint="remove [mesh]: each device can run a bundle of its own",
        )
    keys = jax.tree.leaves(jax.eval_shape(lambda: module.make_cache(1, 1, "float32")))[0]
    sizes = {"key/value heads": keys.shape[1], **_split_sizes(module)}
    for name, size in sizes.items():
        if size % mesh.tensor:
            common = math.gcd(*sizes.values())
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ManifestError(
                f"{at}: mesh.tensor: expected a divisor of {size}, the {name} that {config} gives the "
                f"model; found {mesh.tensor}",
                hint=f"{' or '.join(map(str, fitting))} would fit",
            )


def _split_sizes(module: Any) -> dict[str, int]:
    """Return the size of the split dimension of each linear layer that is always split, by name."""
    rules: Split = module.mesh_split
    return {
        ".".join(map(str, path)): _extent(part, outputs=path[-1] in rules.outputs)
        for path, part in nnx.iter_modules(module)
        if isinstance(part, Linear) and path[-1] in (*rules.outputs, *rules.inputs)
    }


def _extent(part: Linear, *, outputs: bool) -> int:
    return part.weight.shape[1 if outputs == part.in_out else 0]
