"""Export a function of arrays as a portable program (StableHLO) through jax.export, once for all targets.

The same portable program is compiled for every target, and by the runtime when it falls back. Weights are
arguments, never constants. Locations are stripped, so a program holds no paths of this machine: equal inputs
give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.models.layers.kernel_calls import Forms, Operand, linear, using
from prejit.compiler.models.layers.linear import dot
from prejit.compiler.native.products import KERNEL, KERNEL_CALLS, Product
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.machine.fingerprint import PLATFORMS


def export_program(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    platforms: tuple[str, ...] = PLATFORMS,
    calls: Sequence[str] = (),
    **options: Any,
) -> export.Exported:
    """Export a function for several platforms.

    `values` are its arguments or their shapes, `calls` names of custom calls that the user's libraries
    serve, and `options` those of jax.jit.
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
    sizes = mesh.sizes
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def sharding_on(mesh: AbstractMesh, axes: Sequence[str]) -> NamedSharding:
    """Return the sharding of an array whose dimensions are split so: `a+b` by two axes, `""` by none."""
    dimensions = (tuple(axis.split("+")) if axis else None for axis in axes)
    return NamedSharding(mesh, PartitionSpec(*dimensions))


def export_on(
    mesh: Mesh,
    function: Callable[..., Any],
    values: tuple[Any, ...],
    places: tuple[Any, ...],
    donated: tuple[int, ...],
) -> export.Exported:
    """Export a function for a mesh of devices that this machine need not have.

    `values` are the shapes of its arguments, and `places` the mesh axis that splits each dimension of
    each; for weights a dict by name. The last result is split like the last of the `donated` arguments,
    which are given by position; all other results are on every device.
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
            function, values, in_shardings=shardings, out_shardings=out, donate_argnums=donated
        )


Shapes = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of weights, by name."""


@dataclass(frozen=True)
class SizedTrial:
    """A function of the user at other sizes than a bucket's, to compare the program with.

    Attributes:
        sizes: the size of each variable that differs.
        padded: whether the bucket's program is padded to them; if not, the one with symbolic sizes has them.
        has_places: whether whole numbers may be places in arrays. One below 0 counts from the padding.
        portable: the function at these sizes as StableHLO for CPUs.
    """

    sizes: Mapping[str, int]
    padded: bool
    has_places: bool
    portable: bytes


@dataclass(frozen=True)
class LoweredProgram:
    """A program that can be compiled for any target.

    Attributes:
        portable: StableHLO as a versioned portable artifact (openxla/stablehlo, docs/vhlo.md).
        platforms: the platforms that it is lowered for, in the order of its platform index.
        weights: names of the tensors that come first among the arguments, in order.
        arguments: the other arguments, in order.
        results: the results, in order.
        symbolic: the same program for any size of some variables; None: there is none.
        arguments_tree, results_tree: how they are nested, as `trees.to_text` writes it; None for a model's.
        weight_shardings: the mesh axis that splits each dimension, for each weight that is split.
        weight_sets: every set of tensors that may come first, by the set's name. Empty means `weights` only.
        decoder: the fields of `bundle_schema.Decoder` that a decoder decides; empty for other programs.
        estimated_microseconds: estimated duration on a CPU, for targets that cannot be measured; 0 means no
            estimate.
        traced: the operations of a function of the user; None for other programs.
        settings: jax's settings that the trace depended on, where they were not jax's defaults; None: it was
            not traced here.
        state: the state of a function of the user, as `bundle_schema.ProgramEntry` has it.
        modules: names of the modules of the function and of what it holds, sorted; empty: `jit` does not
            take it.
        search_path: portable paths of the directories before and behind `sys.path` in which they were found.
        narrowed: the arguments that jax takes for narrower ones than the manifest gives, in words.
        trials: lowers the function at other sizes; empty: it has none, or they are not to be compared.
    """

    portable: bytes
    platforms: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    weight_shardings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weight_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    estimated_microseconds: int = 0
    arguments_tree: str | None = None
    results_tree: str | None = None
    symbolic: bytes | None = None
    decoder: Mapping[str, Any] = field(default_factory=dict)
    traced: ClosedJaxpr | None = None
    settings: dict[str, str] | None = None
    state: dict[str, str] | None = None
    modules: tuple[str, ...] = ()
    search_path: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    narrowed: tuple[str, ...] = ()
    trials: Callable[[], tuple[SizedTrial, ...]] = tuple


def lower_product(product: Product, form: str) -> bytes:
    """Return a program for a CPU that computes a product in one form; its kernel calls are not bound yet.

    x [1, rows, inputs], matrix, scales if its dtype has them -> [1, rows, outputs], as models compute it for
    one sequence: kernels treat 32 positions of one sequence differently from 32 sequences that decode.
    """
    contracted = 0 if product.in_out else 1
    sizes = (product.outputs, product.inputs)

    def function(x: jax.Array, weight: jax.Array, *scale: jax.Array) -> jax.Array:
        if form == KERNEL:
            return linear(x, Operand(weight, scale[0] if scale else None))
        y = dot(x, weight, contracted, form)
        return y * scale[0] if scale else y

    values = [
        jax.ShapeDtypeStruct((1, product.rows, product.inputs), jnp.float32),
        jax.ShapeDtypeStruct(sizes if contracted else sizes[::-1], jnp.dtype(product.dtype)),
    ]
    if STORED_DTYPES[product.dtype].has_scales:
        values.append(jax.ShapeDtypeStruct((product.outputs,), jnp.float32))
    return bytes(export_program(function, tuple(values), ("cpu",)).mlir_module_serialized)
