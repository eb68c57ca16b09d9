"""Lower one matrix product in one form, to measure it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.lowering.export import export_program
from prejit.compiler.models.layers.kernel_calls import Operand, linear
from prejit.compiler.models.layers.linear import dot
from prejit.compiler.native.products import KERNEL, Product


def lower_product(product: Product, form: str) -> bytes:
    """Return a program for a CPU that computes a product in one form; its kernel calls are not bound yet.

    x [1, rows, inputs], matrix, scales if its dtype has them -> [1, rows, outputs], as models compute it for
    one sequence: kernels treat 32 positions of one sequence differently from 32 sequences that decode.
    """
    contracted = 0 if product.in_out else 1
    sizes = (product.outputs, product.inputs)

    def function(x: jax.Array, weight: jax.Array, *scale: jax.Array) -> jax.Array:
        if form == KERNEL:
            return linear(x, Operand(weight, *scale))
        y = dot(x, weight, contracted, form)
        return y * scale[0] if scale else y

    values = [
        jax.ShapeDtypeStruct((1, product.rows, product.inputs), jnp.float32),
        jax.ShapeDtypeStruct(sizes if contracted else sizes[::-1], jnp.dtype(product.dtype)),
    ]
    if STORED_DTYPES[product.dtype].has_scales:
        values.append(jax.ShapeDtypeStruct((product.outputs,), jnp.float32))
    return bytes(export_program(function, tuple(values), ("cpu",)).mlir_module_serialized)
