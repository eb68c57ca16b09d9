"""Lower an encoder: embed, layer and pool programs of a bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.lowering.export import LoweredProgram, Shapes, export_with
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.families import sentence
from prejit.compiler.models.layers.product_forms import Forms
from prejit.compiler.models.parameters import flat_parameters, with_parameters
from prejit.runtime.format.arrays import Array


def lower_encoder(
    model: sentence.PooledEncoder, spec: ProgramSpec, forms: Forms | None = None
) -> LoweredProgram:
    """Lower one of an encoder's three programs at one bucket.

        embed: weights, tokens [B, T]              -> hidden [B, T, D]
        layer: weights, length [B], hidden         -> hidden                 runs once for each layer
        pool:  weights, length [B], hidden         -> embedding [B, D']

    In row b the first length[b] tokens are valid. A layer's `hidden` is donated.

    Args:
        model: an abstract module; its parameters are the weights.
        spec: the program, of kind `embed`, `layer` or `pool`, with its bucket.
        forms: as in `lower_decoder`.
    """
    batch, count = spec.bucket["batch"], spec.bucket["length"]
    transformer = model.transformer
    stages = {
        "embed": [transformer.embeddings],
        "layer": list(transformer.layers),
        "pool": [model.sentence],
    }
    parts = stages[spec.kind]
    names = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(model)}
    graph, state = nnx.split(parts[0])
    weights: Shapes = flat_parameters(state)
    tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
    length = jax.ShapeDtypeStruct((batch,), jnp.int32)
    width = transformer.embeddings.word_embeddings.weight.shape[1]
    hidden = jax.ShapeDtypeStruct((batch, count, width), jnp.float32)

    def function(weights: Mapping[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        module = nnx.merge(graph, with_parameters(state, weights))
        result: jax.Array = module(*inputs) if len(inputs) == 1 else module(*reversed(inputs))
        return result

    inputs = {"tokens": tokens} if spec.kind == "embed" else {"length": length, "hidden": hidden}
    donated = "hidden" if spec.kind == "layer" else ""
    values = (weights, *inputs.values())
    exported = export_with(forms, function, values, donate_argnums=2 if donated else ())
    result = jax.eval_shape(function, *values)
    whole = [flat_parameters(nnx.split(part)[1]) for part in parts]
    rows = batch if spec.kind == "pool" else batch * count
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(f"{names[id(parts[0])]}.{name}" for name in weights),
        tuple(
            Array((name,), str(value.dtype), value.shape, name == donated)
            for name, value in inputs.items()
        ),
        (
            Array(
                ("embedding" if spec.kind == "pool" else "hidden",), "float32", tuple(result.shape)
            ),
        ),
        weight_sets={
            spec.kind if len(parts) == 1 else f"{spec.kind}{place}": tuple(
                f"{names[id(part)]}.{name}" for name in flat
            )
            for place, (part, flat) in enumerate(zip(parts, whole, strict=True))
        },
        estimated_microseconds=_estimate(spec.kind, weights, rows, hidden.shape),
    )


def _estimate(kind: str, weights: Shapes, rows: int, hidden: tuple[int, ...]) -> int:
    """Return microseconds on a CPU that computes 100 operations and moves 20 bytes per nanosecond."""
    batch, count, width = hidden
    size = sum(math.prod(value.shape) for value in weights.values() if len(value.shape) > 1)
    operations = 0 if kind == "embed" else 2 * rows * size
    operations += 4 * batch * count * count * width if kind == "layer" else 0
    moved = 4 * (8 * batch * count * width + (0 if kind == "embed" else size))
    return 20 + operations // 100_000 + moved // 20_000
