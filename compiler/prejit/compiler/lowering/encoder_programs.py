"""Lower an encoder: embed, layer and pool programs of a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from prejit.compiler.lowering.export import LoweredProgram, Shapes, export_with
from prejit.compiler.manifest.specs import TYPICAL_TOKENS, ProgramSpec
from prejit.compiler.models.families import sentence
from prejit.compiler.models.families.image_models import ImageModel
from prejit.compiler.models.families.seeing_decoder import SeeingDecoder
from prejit.compiler.models.layers.kernel_calls import Forms
from prejit.compiler.models.parameters import (
    flat_parameters,
    parametrized,
    reduced,
    with_parameters,
)
from prejit.runtime.format.arrays import Array

_RESULTS = {"pool": "embedding"}
_GROUP_TOKENS = 1024
"""Maximum tokens of sentences that go through a layer together on a CPU.

What a layer computes on the way stays in a cache, and glibc's malloc keeps blocks below 32 MB: larger ones
are mapped and cleared for each layer. MiniLM's sizes in int8, 64 x 128 tokens, Zen 3: 2,846 ms of CPU
instead of 3,536, 4,400 page faults instead of 105,000, 200 MB instead of 218. `mallopt` would change the
process of the user.
"""


def lower_encoder(
    model: sentence.WholeEncoder, spec: ProgramSpec, forms: Forms | None
) -> LoweredProgram:
    """Lower one of an encoder's three programs at one bucket.

        embed: weights, tokens [B, T]              -> hidden [B, T, D]
        layer: weights, length [B], hidden         -> hidden                 runs once for each layer
        pool:  weights, length [B], hidden         -> embedding [B, D'], and what heads give of each token

    In row b the first length[b] tokens are valid. A layer's `hidden` is donated. In a packed bucket B is 1,
    and S sentences lie in the row: length is [S], `embed` takes it behind the tokens, embeddings are [S, D'].
    """
    batch, count = spec.bucket["batch"], spec.bucket["length"]
    sentences = spec.bucket.get("sentences")
    forms = forms and replace(forms, many_rows=True)
    runs = model.parts(spec.kind)
    names = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(model)}
    weights, function = _program(model, spec.kind, runs[0])
    if spec.kind == "layer" and sentences is None and forms is not None:  # for a CPU
        function = _in_groups(function, batch, count)
    inputs: dict[str, jax.ShapeDtypeStruct] = {
        "tokens": jax.ShapeDtypeStruct((batch, count), jnp.int32)
    }
    length = jax.ShapeDtypeStruct((sentences or batch,), jnp.int32)
    if sentences is not None:
        inputs["length"] = length
    if spec.kind != "embed":
        embedding, embed = _program(model, "embed", model.parts("embed")[0])
        embedded = jax.eval_shape(embed, embedding, *inputs.values())
        inputs = {"length": length, "hidden": embedded}
    donated = "hidden" if spec.kind == "layer" else ""
    values = (weights, *inputs.values())
    exported = export_with(forms, function, values, donate_argnums=2 if donated else ())
    found = jax.eval_shape(function, *values)
    results = found if isinstance(found, dict) else {_RESULTS.get(spec.kind, "hidden"): found}
    result = next(iter(results.values()))
    rows = length.shape[0] if spec.kind == "pool" else batch * count
    sets = [
        tuple(
            f"{names[id(parts[int(place)])]}.{name}"
            for place, _, name in (each.partition(".") for each in weights)
        )
        for parts in runs
    ]
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        sets[0],
        tuple(
            Array((name,), str(value.dtype), value.shape, name == donated)
            for name, value in inputs.items()
        ),
        tuple(Array((name,), "float32", tuple(each.shape)) for name, each in results.items()),
        weight_sets={
            spec.kind if len(sets) == 1 else f"{spec.kind}{place}": names
            for place, names in enumerate(sets)
        },
        estimated_microseconds=_estimate(
            spec.kind, weights, rows, (batch, count, result.shape[-1]), sentences or batch
        ),
    )


def lower_images(
    model: ImageModel | SeeingDecoder,
    spec: ProgramSpec,
    size: tuple[int, int],
    forms: Forms | None,
) -> LoweredProgram:
    """Lower the program of a model that reads images, at one batch.

    image: weights, pixels uint8 [B, H, W, 3]  -> embedding [B, D']
    """
    parts = tuple(f"{part}." for part in model.image_parts())
    reads = reduced(parametrized(model), lambda name: name.startswith(parts))
    weights = dict(reads.weights)

    def function(weights: Mapping[str, jax.Array], pixels: jax.Array) -> jax.Array:
        return reads.bind(weights).image(pixels)

    pixels = jax.ShapeDtypeStruct((spec.bucket["batch"], *size, 3), jnp.uint8)
    exported = export_with(forms and replace(forms, many_rows=True), function, (weights, pixels))
    result = jax.eval_shape(function, weights, pixels)
    largest = sum(math.prod(value.shape) for value in weights.values())
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(weights),
        (Array(("pixels",), "uint8", pixels.shape),),
        (Array(("embedding",), "float32", tuple(result.shape)),),
        estimated_microseconds=20 + spec.bucket["batch"] * largest // 500,
    )


def _program(
    model: sentence.WholeEncoder, kind: str, parts: sentence.Parts
) -> tuple[Shapes, Callable[..., jax.Array]]:
    """Return the weights of a program, and its function of values of these weights and of its inputs.

    The name of a weight begins with the number of its module among the parts, and a dot.
    """
    graphs, states = zip(*map(nnx.split, parts), strict=True)
    weights = {
        f"{place}.{name}": value
        for place, state in enumerate(states)
        for name, value in flat_parameters(state).items()
    }

    def function(weights: Mapping[str, jax.Array], *inputs: Any) -> jax.Array:
        if kind == "embed" and len(inputs) > 1:
            tokens, length = inputs
            inputs = (tokens, None, length)  # no segments
        bound = []
        for place, (graph, state) in enumerate(zip(graphs, states, strict=True)):
            values = {name: weights[f"{place}.{name}"] for name in flat_parameters(state)}
            bound.append(nnx.merge(graph, with_parameters(state, values)))
        return model.run(kind, bound, *inputs)

    return dict(sorted(weights.items())), function


def _in_groups(
    function: Callable[..., jax.Array], batch: int, count: int
) -> Callable[..., jax.Array]:
    """Return the function of a layer that takes a large batch in groups of sentences, one after the other."""
    most = max(1, _GROUP_TOKENS // count)
    size = max(each for each in range(1, most + 1) if batch % each == 0)
    if size == batch or size * count < _GROUP_TOKENS // 4:  # a prime batch
        return function

    def of_groups(weights: Any, length: jax.Array, hidden: jax.Array) -> jax.Array:
        groups = length.reshape(-1, size), hidden.reshape(-1, size, *hidden.shape[1:])
        done: jax.Array = jax.lax.map(lambda group: function(weights, *group), groups)
        return done.reshape(hidden.shape)

    return of_groups


def _estimate(
    kind: str, weights: Shapes, rows: int, hidden: tuple[int, ...], sentences: int
) -> int:
    """Return microseconds on a CPU that computes 100 operations and moves 20 bytes per nanosecond."""
    batch, count, width = hidden
    seen = count if sentences == batch else min(count, TYPICAL_TOKENS)
    size = sum(math.prod(value.shape) for value in weights.values() if len(value.shape) > 1)
    operations = 0 if kind == "embed" else 2 * rows * size
    operations += 4 * batch * count * seen * width if kind == "layer" else 0
    moved = 4 * (8 * batch * count * width + (0 if kind == "embed" else size))
    return 20 + operations // 100_000 + moved // 20_000
