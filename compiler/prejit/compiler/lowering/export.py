"""Export a function of arrays as a portable program (StableHLO) through jax.export, once for all targets.

The same portable program is compiled for every target, and by the runtime when it falls back. Weights are
arguments, never constants. Locations are stripped, so a program holds no paths of this machine: equal inputs
give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.native.kernel_names import KERNEL_CALLS
from prejit.runtime.format.arrays import MESH_AXES, Mesh
from prejit.runtime.machine.requirement import PLATFORMS


def export_program(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    platforms: tuple[str, ...] = PLATFORMS,
    calls: Sequence[str] = (),
    **options: Any,
) -> export.Exported:
    """Export a function for several platforms.

    Args:
        function: the function.
        values: its arguments, or their shapes.
        platforms: the platforms.
        calls: names of custom calls that the user's libraries serve.
        **options: options of jax.jit.
    """
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine
    jitted = jax.jit(function, keep_unused=True, **options)
    names = (*KERNEL_CALLS.values(), *calls)
    own_calls = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = export.export(jitted, platforms=platforms, disabled_checks=own_calls)
    return exported(*values)


def export_with(
    forms: Forms | None, function: Callable[..., Any], values: tuple[Any, ...], **options: Any
) -> export.Exported:
    """Export a function for a CPU with kernels; without forms do what `export_program` does."""
    if forms is None:
        return export_program(function, values, **options)
    # jax caches traces by function, and the forms are not among its arguments: the lambda is a new one.
    with using(forms):
        return export_program(lambda *inputs: function(*inputs), values, ("cpu",), **options)


def abstract_mesh(mesh: Mesh) -> AbstractMesh:
    """Return a mesh of devices that this machine need not have."""
    sizes = (mesh.data, mesh.tensor)
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def sharding_on(mesh: AbstractMesh, axes: Sequence[str]) -> NamedSharding:
    """Return the sharding of an array whose dimensions are split along these axes, `""` for none."""
    return NamedSharding(mesh, PartitionSpec(*(axis or None for axis in axes)))


def export_on(
    mesh: Mesh,
    function: Callable[..., Any],
    values: tuple[Any, ...],
    places: tuple[Any, ...],
    donated: tuple[int, ...],
) -> export.Exported:
    """Export a function for a mesh of devices that this machine need not have.

    Args:
        mesh: the devices.
        function: the function.
        values: the shapes of its arguments.
        places: for each argument the mesh axis that splits each dimension; for weights a dict by name.
        donated: the positions of donated arguments. The last result is split like the last of them; all
            other results are on every device.
    """
    abstract = abstract_mesh(mesh)

    def sharding(axes: Sequence[str] = ()) -> NamedSharding:
        return sharding_on(abstract, axes)

    shardings = tuple(
        {name: sharding(axes) for name, axes in place.items()}
        if isinstance(place, dict)
        else sharding(place)
        for place in places
    )
    with jax.sharding.use_abstract_mesh(abstract):
        results = jax.eval_shape(function, *values)
        out: Any = shardings[donated[-1]]
        if isinstance(results, tuple):
            out = (*[sharding()] * (len(results) - 1), out)
        return export_program(
            function,
            values,
            in_shardings=shardings,
            out_shardings=out,
            donate_argnums=donated,
        )
