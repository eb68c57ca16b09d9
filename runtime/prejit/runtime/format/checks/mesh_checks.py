"""Checks of what a mesh splits. No file access."""

from __future__ import annotations

from collections.abc import Mapping

from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.mesh_splits import parse_sharding


def check_mesh(config: Config) -> None:
    """Check the mesh of a config, and that the machines have its devices."""
    mesh, needed = config.mesh, config.requirement.device_count
    size = 1 if mesh is None else mesh.size
    if size > limits.MAX_MESH_DEVICES:
        raise ValueError(
            f"expected a mesh of at most {limits.MAX_MESH_DEVICES} devices, found {size}"
        )
    # A process makes as many CPU devices as it wants: only accelerators have to be counted.
    if needed != size and not (
        needed is None and (size == 1 or config.requirement.platform == "cpu")
    ):
        raise ValueError(f"expected device_count {size}, the size of the mesh; found {needed}")
    if config.weight_shardings is not None and mesh is None:
        raise ValueError("expected a mesh for weight_shardings, found none")


def check_split(sharding: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | None) -> None:
    """Check that a mesh splits an array evenly."""
    for axis, extent in zip(sharding, shape, strict=False):  # nothing split: no sharding
        parts = 0 if mesh is None else mesh.parts(axis)
        if axis and (not parts or extent % parts):
            found = parts or "no mesh with it"
            raise ValueError(f"expected a mesh whose {axis!r} divides {extent}, found {found}")


def check_weight_shardings(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a mesh splits tensors of the weights layer evenly."""
    for name, text in (config.weight_shardings or {}).items():
        if name not in shapes:
            raise ValueError(f"weight_shardings: no tensor {name!r:.80}")
        try:
            sharding = parse_sharding(text, len(shapes[name]))
            check_split(sharding, shapes[name], config.mesh)
        except ValueError as error:
            raise ValueError(f"weight_shardings: {name}: {error}") from error
        if not sharding:
            raise ValueError(f"weight_shardings: {name}: expected a mesh axis, found none")
