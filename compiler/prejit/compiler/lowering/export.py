"""Lowering: from a function of arrays to a portable program (StableHLO), once for all targets.

What is compiled for a target and what the runtime falls back to is the same portable program. Weights are
arguments, never constants. Nothing of this machine's paths is in it: equal inputs give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from prejit.compiler.models.layers.forms import Forms, using
from prejit.compiler.native.calls import KERNEL_CALLS
from prejit.runtime.format.arrays import MESH_AXES, Mesh
from prejit.runtime.machine.requirement import PLATFORMS


def export_program(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    platforms: tuple[str, ...] = PLATFORMS,
    **options: Any,
) -> export.Exported:
    """A function for several platforms; options are those of jax.jit."""
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine
    jitted = jax.jit(function, keep_unused=True, **options)
    own_calls = [export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS.values()]
    exported = export.export(jitted, platforms=platforms, disabled_checks=own_calls)
    return exported(*values)


def export_with(
    forms: Forms | None, function: Callable[..., Any], values: tuple[Any, ...], **options: Any
) -> export.Exported:
    """A function for a CPU with kernels; as _export, where there are none."""
    if forms is None:
        return export_program(function, values, **options)
    # What is traced is cached by the function: another one, as the forms are not among its arguments.
    with using(forms):
        return export_program(lambda *inputs: function(*inputs), values, ("cpu",), **options)


def export_on(
    mesh: Mesh,
    function: Callable[..., Any],
    values: tuple[Any, ...],
    places: tuple[Any, ...],
    donated: tuple[int, ...],
) -> export.Exported:
    """A function for a mesh that need not be there.

    Args:
        mesh: the devices.
        function: what is exported.
        values: the shapes of its arguments.
        places: the mesh axis that splits each dimension, of each argument; weights by their names.
        donated: which arguments are. The last of them is the last result too; all others are on every
            device.
    """
    sizes = (mesh.data, mesh.tensor)
    abstract = AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))

    def sharding(axes: Sequence[str] = ()) -> NamedSharding:
        return NamedSharding(abstract, PartitionSpec(*(axis or None for axis in axes)))

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
