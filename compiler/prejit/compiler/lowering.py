"""Lowering: from a function of arrays to a portable program (StableHLO), once for all targets.

What is compiled for a target and what the runtime falls back to is the same portable program. Weights are
arguments, never constants. Nothing of this machine's paths is in it: equal inputs give equal bytes.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, traverse_util
from jax import export, lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from prejit.compiler import models, traced
from prejit.compiler.kernel_calls import KERNEL_CALLS
from prejit.compiler.models.decoder import dot
from prejit.compiler.models.forms import Forms, Operand, linear, using
from prejit.compiler.models.rows import each_row
from prejit.compiler.products import KERNEL, Product
from prejit.compiler.sampling import (
    Chosen,
    SamplingInputs,
    record,
    sample,
    sample_each,
    sampling_shapes,
)
from prejit.compiler.shape_string import parse_shape
from prejit.compiler.specs import ProgramSpec
from prejit.runtime.bundle import DTYPES, MESH_AXES, Array, Mesh
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.target import PLATFORMS

if TYPE_CHECKING:
    from prejit.compiler import manifest
    from prejit.compiler.user_code import UserModules

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True)
class LoweredProgram:
    """A program that can be compiled for any target.

    Attributes:
        portable: StableHLO, a versioned portable artifact (openxla/stablehlo, docs/vhlo.md).
        platforms: that it was lowered for, in the order of its platform index.
        weights: names of the tensors that come first among the arguments, in order.
        arguments, results: the others, in order.
        weight_shardings: the mesh axis that splits each dimension, of those weights that are split.
        weight_sets: all tensors that may come first, set by set; empty: `weights` alone.
        estimated_microseconds: of a run on some CPU, for what cannot be measured; 0: nothing is said.
    """

    portable: bytes
    platforms: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    weight_shardings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weight_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    estimated_microseconds: int = 0


STEPS = 16
"""The most steps of one decode. Of models that take 0.1 ms a step, dispatch is then a small part."""
CACHE_SHARDING = ("data", "tensor", "", "")
"""Of keys and values [B, K, S, H] on a mesh: rows and heads are split."""


def check_mesh(
    mesh: Mesh, model: nnx.Module, shape: models.DecoderConfig, at: Path, config: Path
) -> None:
    """Checks that a model can be split over a mesh.

    Args:
        mesh: of the manifest.
        model: abstract.
        shape: of the model.
        at: the manifest, for errors.
        config: the model's config.json, for errors.

    Raises:
        ManifestError: `tensor` does not divide the heads or a matrix.
    """
    sizes = {"key/value heads": shape.num_kv_heads, **models.split_sizes(model)}
    for name, size in sizes.items():
        if size % mesh.tensor:
            common = math.gcd(*sizes.values())
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ManifestError(
                f"{at}: mesh.tensor: expected a divisor of {size}, the {name} that {config} gives the "
                f"model; found {mesh.tensor}",
                hint=f"{' or '.join(map(str, fitting))} would fit",
            )


def lower_decoder(
    model: nnx.Module,
    shape: models.DecoderConfig,
    spec: ProgramSpec,
    mesh: Mesh | None = None,
    forms: Forms | None = None,
) -> LoweredProgram:
    """Lowers one of a decoder's programs at one bucket.

    Arguments and results, beside weights and cache:

        prefill  tokens [B, T], start [B], length [B], sampling, history    -> chosen [B]
        decode   token [B], position [B], live [B], steps [], sampling, history*
                                              -> token [B], position [B], chosen [STEPS, B], history
        verify   tokens [B, T], start [B], length [B], sampling, history*
                                              -> chosen [T, B], accepted [B], history
        copy     source [b, K, s, H], target* [B, K, S, H], rows [B]        -> target

    `sampling` are the arrays of sampling.SamplingInputs and `chosen` those of sampling.Chosen. The cache,
    and what a star marks, is donated. On a mesh weights and cache are split; all else is on every device.

    Args:
        model: abstract; its parameters are the weights.
        shape: of the model.
        spec: the program and its bucket; on a mesh, `data` divides its batch.
        mesh: the devices that it runs on, which passed `check_mesh`; None: one.
        forms: for a CPU with kernels; None: a portable program, for all platforms.
    """
    if spec.kind == "copy":
        return _lower_copy(shape, spec, mesh)
    graph, state = nnx.split(model)
    weights: Shapes = models.flat_parameters(state)
    programs = _DecoderFunctions(
        graph, state, mesh is not None and shape.vocab_size % mesh.tensor == 0
    )
    batch = spec.bucket["batch"]
    key_value = _key_value(shape, batch, spec.bucket["context"])
    cache = tuple((key_value, key_value) for _ in range(shape.num_layers))
    row, scalar = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    sampling = sampling_shapes(batch, shape.vocab_size)
    history = jax.ShapeDtypeStruct((batch, shape.vocab_size), jnp.int32)
    inputs: dict[str, jax.ShapeDtypeStruct]
    if spec.kind == "decode":
        inputs = {"token": row, "position": row, "live": row, "steps": scalar}
    else:
        count = spec.bucket["prompt"] if spec.kind == "prefill" else spec.bucket["draft"] + 1
        tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
        inputs = {"tokens": tokens, "start": row, "length": row}
    function: Callable[..., Any] = getattr(programs, spec.kind)
    values = (weights, *inputs.values(), sampling, history, cache)
    donated = (len(values) - 1,) if spec.kind == "prefill" else (len(values) - 2, len(values) - 1)
    named = {**inputs, **sampling._asdict(), "history": history}
    cache_sharding = () if mesh is None else CACHE_SHARDING
    cache_arrays = tuple(
        Array(("cache", layer, name), shape.cache_dtype, key_value.shape, True, cache_sharding)
        for layer in range(shape.num_layers)
        for name in ("keys", "values")
    )
    kept = spec.kind == "prefill"
    arguments = [
        Array((name,), str(value.dtype), value.shape, name == "history" and not kept)
        for name, value in named.items()
    ]
    split = {} if mesh is None else models.shardings(model, mesh)
    if mesh is None:
        exported = _export_with(forms, function, values, donate_argnums=donated)
    else:
        everywhere = [()] * (len(values) - 2)
        places = ({name: split.get(name, ()) for name in weights}, *everywhere, CACHE_SHARDING)
        exported = _export_on(mesh, function, values, places, donated)
    given = exported.out_avals[: -len(cache_arrays)]
    results = [
        Array((name,), str(value.dtype), value.shape)
        for name, value in zip(_RESULTS[spec.kind], given, strict=True)
    ]
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(weights),
        (*arguments, *cache_arrays),
        (*results, *(replace(a, donated=False) for a in cache_arrays)),
        split,
    )


_CHOSEN = ("tokens", "logprobs", "top_tokens", "top_logprobs")
_RESULTS = {
    "prefill": Chosen._fields,
    "decode": ("token", "position", *_CHOSEN, "history"),
    "verify": (*_CHOSEN, "accepted", "history"),
}
"""What the programs give beside the cache, in order."""


_Decoding = tuple[jax.Array, jax.Array, jax.Array, Chosen, jax.Array, models.KVCache]
"""Between two steps: how many are done, token, position, chosen so far, history, cache."""


@dataclass(frozen=True)
class _DecoderFunctions:
    """The functions behind a decoder's programs.

    Attributes:
        graph, state: of the model, as nnx.split gives them.
        splits_logits: whether a mesh splits the head by tokens.
    """

    graph: Any
    state: Any
    splits_logits: bool

    def prefill(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        sampling: SamplingInputs,
        history: jax.Array,
        cache: models.KVCache,
    ) -> tuple[Chosen, models.KVCache]:
        """Puts tokens into the cache and chooses the one that follows them."""
        logits, cache = self._logits(weights, tokens, start, length, cache)
        return sample(logits, sampling, history, start + length), cache

    def decode(
        self,
        weights: Mapping[str, jax.Array],
        token: jax.Array,
        position: jax.Array,
        live: jax.Array,
        steps: jax.Array,
        sampling: SamplingInputs,
        history: jax.Array,
        cache: models.KVCache,
    ) -> tuple[jax.Array, jax.Array, Chosen, jax.Array, models.KVCache]:
        """Several tokens, one after the other: one call costs as much as its steps, and one dispatch.

        GPT-2-124M on two threads: the loop costs nothing, at one step or at eight.
        """

        def step(carry: _Decoding) -> _Decoding:
            done, token, position, chosen, history, cache = carry
            # Left to itself, a mesh would split all that the loop carries by rows, and gather it again.
            token, position, all_live = map(models.split, (token, position, live))
            history = record(history, token, all_live)
            logits, cache = self._logits(weights, token[:, None], position, live, cache)
            position = position + all_live
            new = sample(logits, sampling, history, position)
            token = jnp.where(all_live > 0, new.token, token)
            chosen = jax.tree.map(
                lambda all_steps, one: lax.dynamic_update_index_in_dim(all_steps, one, done, 0),
                chosen,
                new,
            )
            whole = jax.tree.map(models.split, (token, position, chosen, history))
            return done + 1, *whole, cache

        rows = jax.eval_shape(
            sample, jax.ShapeDtypeStruct(history.shape, jnp.float32), sampling, history, position
        )
        empty = jax.tree.map(lambda one: jnp.zeros((STEPS, *one.shape), one.dtype), rows)
        _, token, position, chosen, history, cache = lax.while_loop(
            lambda carry: carry[0] < jnp.minimum(steps, STEPS),
            step,
            (jnp.int32(0), token, position, empty, history, cache),
        )
        return token, position, chosen, history, cache

    def verify(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        sampling: SamplingInputs,
        history: jax.Array,
        cache: models.KVCache,
    ) -> tuple[Chosen, jax.Array, jax.Array, models.KVCache]:
        """One pass over a row's next token and drafts of those that follow it.

        A draft is right where it is what would have been chosen, by sampling as well: the random numbers of
        a position do not depend on how it is reached. So the tokens are those of decode, step by step
        (Leviathan et al. 2023, arXiv 2211.17192, gives the idea; drafts by prompt lookup: Saxena 2023).
        What wrong drafts leave in the cache lies behind the next start and counts for nothing.
        """
        logits, cache = self._logits(weights, tokens, start, length, cache, every=True)
        chosen = sample_each(logits, sampling, tokens, history, start)
        places = jnp.arange(1, tokens.shape[1])[:, None]
        right = (places < length) & (tokens.T[1:] == chosen.token[:-1])
        right = jnp.concatenate([(length > 0)[None], right]).astype(jnp.int32)
        counts = jnp.cumprod(right, 0)  # 1 as long as all drafts before were right, too
        for token, counted in zip(tokens.T, counts, strict=True):
            history = record(history, token, counted)
        return chosen, jnp.sum(counts, 0, dtype=jnp.int32), history, cache

    def _logits(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: models.KVCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, models.KVCache]:
        module = nnx.merge(self.graph, models.with_parameters(self.state, weights))
        rows = (models.split(whole, "data") for whole in (tokens, start, length))
        logits, cache = module(*rows, cache, every=every)
        # Choosing a token goes over the vocabulary many times: all logits are gathered once before it, and
        # every device chooses every row's, so that nothing else need be sent. Were they not said to be
        # split first, XLA would gather the head's weights instead.
        if self.splits_logits:
            logits = models.split(logits, "data", *[None] * (logits.ndim - 2), "tensor")
        return models.split(models.split(logits, "data")), cache


def _lower_copy(
    shape: models.DecoderConfig, spec: ProgramSpec, mesh: Mesh | None
) -> LoweredProgram:
    """Copies rows of one array of a cache into another that is larger: to grow it, or to fill a slot."""
    bucket = spec.bucket
    source = _key_value(shape, bucket["source_batch"], bucket["source_context"])
    target = _key_value(shape, bucket["batch"], bucket["context"])
    rows = jax.ShapeDtypeStruct((bucket["batch"],), jnp.int32)

    def copy(source: jax.Array, target: jax.Array, rows: jax.Array) -> jax.Array:
        def fill(row: int | jax.Array, target: jax.Array) -> jax.Array:
            def take(target: jax.Array) -> jax.Array:
                size = (1, *source.shape[1:])
                taken = lax.dynamic_slice(source, (rows[row], 0, 0, 0), size)
                return lax.dynamic_update_slice(target, taken, (row, 0, 0, 0))

            filled: jax.Array = lax.cond(rows[row] >= 0, take, lambda target: target, target)
            return filled

        return each_row(target.shape[0], fill, target)

    values = (source, target, rows)
    split = () if mesh is None else CACHE_SHARDING
    if mesh is None:
        exported = _export(copy, values, donate_argnums=1)
    else:
        exported = _export_on(mesh, copy, values, (CACHE_SHARDING, CACHE_SHARDING, ()), (1,))
    arguments = (
        Array(("source",), shape.cache_dtype, source.shape, False, split),
        Array(("target",), shape.cache_dtype, target.shape, True, split),
        Array(("rows",), "int32", rows.shape),
    )
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        (),
        arguments,
        (replace(arguments[1], donated=False),),
    )


def _key_value(shape: models.DecoderConfig, batch: int, context: int) -> jax.ShapeDtypeStruct:
    """The keys, or values, of one layer."""
    size = (batch, shape.num_kv_heads, context, shape.head_size)
    return jax.ShapeDtypeStruct(size, jnp.dtype(shape.cache_dtype))


def lower_encoder(
    model: models.SentenceEncoder, spec: ProgramSpec, forms: Forms | None = None
) -> LoweredProgram:
    """Lowers one of an encoder's three programs at one bucket.

        embed: weights, tokens [B, T]              -> hidden [B, T, D]
        layer: weights, length [B], hidden         -> hidden                 run once for each layer
        pool:  weights, length [B], hidden         -> embedding [B, D']

    In row b the first length[b] tokens are valid. A layer's `hidden` is donated.

    Args:
        model: abstract; its parameters are the weights.
        spec: kind `embed`, `layer` or `pool`, with its bucket.
        forms: as of lower_decoder.
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
    weights: Shapes = models.flat_parameters(state)
    tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
    length = jax.ShapeDtypeStruct((batch,), jnp.int32)
    width = transformer.embeddings.word_embeddings.weight.shape[1]
    hidden = jax.ShapeDtypeStruct((batch, count, width), jnp.float32)

    def function(weights: Mapping[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        module = nnx.merge(graph, models.with_parameters(state, weights))
        result: jax.Array = module(*inputs) if len(inputs) == 1 else module(*reversed(inputs))
        return result

    inputs = {"tokens": tokens} if spec.kind == "embed" else {"length": length, "hidden": hidden}
    donated = "hidden" if spec.kind == "layer" else ""
    values = (weights, *inputs.values())
    exported = _export_with(forms, function, values, donate_argnums=2 if donated else ())
    result = jax.eval_shape(function, *values)
    whole = [models.flat_parameters(nnx.split(part)[1]) for part in parts]
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
    """Microseconds at 100 operations a nanosecond and 20 bytes a nanosecond, on a CPU."""
    batch, count, width = hidden
    size = sum(math.prod(value.shape) for value in weights.values() if len(value.shape) > 1)
    operations = 0 if kind == "embed" else 2 * rows * size
    operations += 4 * batch * count * count * width if kind == "layer" else 0
    moved = 4 * (8 * batch * count * width + (0 if kind == "embed" else size))
    return 20 + operations // 100_000 + moved // 20_000


def lower_product(product: Product, form: str) -> bytes:
    """One form of a product, to be measured: a program for a CPU, its kernels without a library's name.

    x [1, rows, inputs], matrix, a factor for each output where it is int8 -> [1, rows, outputs], as models
    compute it for one sequence: kernels treat 32 positions of one unlike 32 sequences that decode.
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
    if product.dtype == "int8":
        values.append(jax.ShapeDtypeStruct((product.outputs,), jnp.float32))
    return bytes(_export(function, tuple(values), ("cpu",)).mlir_module_serialized)


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's, ready to be lowered.

    Attributes:
        function: takes a flat dict of weights, then the arguments of the manifest.
        weights: their shapes, by flat name; sorted.
        values: the weights themselves where they come from the object (a flax.nnx module).
        modules: among which it was found.
    """

    function: Callable[..., Any]
    weights: Shapes
    values: Mapping[str, np.ndarray[Any, Any]]
    modules: UserModules


def find_function(
    program: manifest.Program,
    at: Path,
    parameters: Mapping[str, np.ndarray[Any, Any]] | None,
    modules: UserModules,
) -> UserFunction:
    """Imports what `function` of a [[program]] names.

    That is a function, called as function(params, ...) where the manifest gives params, else as
    function(...); a flax.linen module, applied to params; or a flax.nnx module, whose parameters are its
    own unless the manifest gives params.

    Args:
        program: the section of the manifest.
        at: the manifest, for errors.
        parameters: flat, names joined by dots; None where the manifest gives none.
        modules: those beside the manifest.

    Raises:
        ManifestError: the module or the attribute is not there, raises, or is nothing that can be called.
    """
    found = modules.find(program.function, f"{at}: program {program.name!r}: function")
    values = dict(sorted((parameters or {}).items()))

    def nested(weights: Mapping[str, Any]) -> Any:
        return traverse_util.unflatten_dict(dict(weights), sep=".")

    if isinstance(found, type) and issubclass(found, nnx.Module | linen.Module):
        raise ManifestError(
            f"{at}: program {program.name!r}: function: expected a module, found the class "
            f"{program.function!r}",
            hint=f"make an instance beside it and name that: model = {found.__name__}(...)",
        )
    if isinstance(found, linen.Module):
        module = found

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            variables = nested(weights)
            variables = variables if "params" in variables else {"params": variables}
            return module.apply(variables, *args, **kwargs)

    elif isinstance(found, nnx.Module):
        graph, random, state = nnx.split(found, nnx.RngState, ...)
        own = models.flat_parameters(state)
        if parameters is not None and own.keys() != values.keys():
            differing = sorted(own.keys() ^ values.keys())
            raise ManifestError(
                f"{at}: program {program.name!r}: params: expected the names of {program.function}, "
                f"and {', '.join(differing[:8])} differ"
            )
        values = values or {name: np.asarray(leaf) for name, leaf in sorted(own.items())}

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            return nnx.merge(graph, random, models.with_parameters(state, weights))(*args, **kwargs)

    elif callable(found):
        called = found

        def function(weights: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            first = (nested(weights),) if parameters is not None else ()
            return called(*first, *args, **kwargs)

    else:
        raise ManifestError(
            f"{at}: program {program.name!r}: function: expected something to call, found "
            f"{type(found).__name__} {program.function!r}"
        )
    shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in values.items()}
    return UserFunction(function, shapes, values, modules)


def lower_function(
    user: UserFunction,
    program: manifest.Program,
    spec: ProgramSpec,
    at: Path,
    platforms: Sequence[str],
) -> LoweredProgram:
    """Lowers a function of the user's at one bucket: for every platform, if it can be.

    Args:
        user: the function.
        program: its section of the manifest.
        spec: the program.
        at: the manifest, for errors.
        platforms: those of the manifest's targets, for which it must be possible.

    Raises:
        BuildError: it cannot be traced or lowered; the cause says why.
    """
    shapes = _shapes(program.args, spec.bucket, f"{at}: program {program.name!r}: args")
    args, kwargs = ((), shapes) if isinstance(shapes, dict) else (tuple(shapes), {})

    def function(weights: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        return user.function(weights, *args, **kwargs)

    values = (user.weights, args, kwargs)
    what = f"{at}: program {spec.name}: cannot lower {program.function}"
    with user.modules.tracing(what):
        jaxpr = jax.jit(function, keep_unused=True).trace(*values).jaxpr
    _refuse_callbacks(jaxpr, what)
    wanted = tuple(name for name in PLATFORMS if name in platforms)
    with user.modules.tracing(what):
        exported, refused = _export_where_possible(function, values, wanted)
    if exported is None:
        raise _cannot_lower(jaxpr, refused, what)
    with user.modules.tracing(what):  # makes nodes of the user's own types
        results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(user.weights),
        _arrays(args or kwargs),
        _results(results, what),
    )


def _refuse_callbacks(function: ClosedJaxpr, what: str) -> None:
    """Refuses a function that calls Python while it runs, which a server does not have.

    Raises:
        BuildError: what it calls, and where.
    """
    calls = [
        f"{traced.CALLBACKS[name]}{f' at {place}' if place else ''}"
        for name, place in traced.find(function, *traced.CALLBACKS)
    ]
    if calls:
        raise BuildError(
            f"{what}: expected a function that runs without Python, found {', '.join(dict.fromkeys(calls))}",
            hint="a bundle holds compiled programs and no Python: take the call out, or return its "
            "arguments and do it after Bundle.call",
        )


def _export_where_possible(
    function: Callable[..., Any], values: tuple[Any, ...], wanted: tuple[str, ...]
) -> tuple[export.Exported | None, dict[str, Exception]]:
    """A function for all platforms, or for those of the targets; else each platform's error."""
    for platforms in (PLATFORMS, wanted):
        with contextlib.suppress(Exception):  # it calls what only some platforms have
            return _export(function, values, platforms), {}
    refused: dict[str, Exception] = {}
    for platform in wanted:
        try:
            _export(function, values, (platform,))
        except Exception as error:
            refused[platform] = error
    if not refused:  # each alone, but not together
        _export(function, values, wanted)
    return None, refused


def _cannot_lower(function: ClosedJaxpr, refused: Mapping[str, Exception], what: str) -> BuildError:
    """The error of a function that does not lower for some platforms of the manifest's targets."""
    platforms = " and ".join(refused)
    error = next(iter(refused.values()))
    hint = (
        f"leave the targets of {platforms} out, or give that platform a form of its own with "
        "jax.lax.platform_dependent"
    )
    if kernels := traced.find(function, traced.PALLAS):
        place = kernels[0][1]
        hint = (
            f"pallas_call{f' at {place}' if place else ''} has no kernel for {platforms}: leave its targets "
            "out, or pass interpret=True, which runs everywhere and is slow"
        )
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    unstable = re.search(
        r"compatibility guarantees.*?custom_call @([\w.$]+)", str(error), re.DOTALL
    )
    if unstable:
        reason = f"it calls {unstable[1]}, which jax may change with any version"
        hint = "a bundle holds a program that later versions can read: do without this function"
    return BuildError(f"{what} for {platforms}: {reason}", hint=hint)


def _export(
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


def _export_with(
    forms: Forms | None, function: Callable[..., Any], values: tuple[Any, ...], **options: Any
) -> export.Exported:
    """A function for a CPU with kernels; as _export, where there are none."""
    if forms is None:
        return _export(function, values, **options)
    # What is traced is cached by the function: another one, as the forms are not among its arguments.
    with using(forms):
        return _export(lambda *inputs: function(*inputs), values, ("cpu",), **options)


def _export_on(
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
        return _export(
            function,
            values,
            in_shardings=shardings,
            out_shardings=out,
            donate_argnums=donated,
        )


def _shapes(args: Any, bucket: Mapping[str, int], where: str) -> Any:
    """The pytree of shapes that a manifest's args mean at a bucket."""
    if isinstance(args, dict):
        return {name: _shapes(item, bucket, f"{where}.{name}") for name, item in args.items()}
    if isinstance(args, list | tuple):
        return [_shapes(item, bucket, f"{where}[{i}]") for i, item in enumerate(args)]
    dtype, shape = parse_shape(args, dict(bucket))
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ManifestError(
            f"{where}: expected a dtype of at most 32 bits, found {args!r}",
            hint="set JAX_ENABLE_X64=1 in the environment of the build",
        )
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _arrays(tree: Any) -> tuple[Array, ...]:
    """The leaves of a manifest's args."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(_array(path, leaf) for path, leaf in leaves)


def _array(path: tuple[Any, ...], leaf: Any) -> Array:
    return Array(tuple(map(_step, path)), str(leaf.dtype), tuple(leaf.shape))


def _results(tree: Any, what: str) -> tuple[Array, ...]:
    """The leaves of what a function returns.

    A bundle returns arrays in dicts with text as keys, and in tuples. Nodes of other types come back as
    one of these: lists, and types that have no names, as tuples; named tuples and dataclasses as dicts.

    Raises:
        BuildError: something would come back as another value, or not at all.
    """
    arrays: dict[tuple[str, ...], Array] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_empty)
    for path, leaf in leaves:
        at = f"result{jax.tree_util.keystr(path)}"
        for key in path:
            if isinstance(key, jax.tree_util.DictKey) and not isinstance(key.key, str):
                raise BuildError(
                    f"{what}: expected dicts with text as keys, found the key {key.key!r} at {at}",
                    hint="return a list in its place, or a dict whose keys are text",
                )
        if _is_empty(leaf):
            raise BuildError(
                f"{what}: expected an array at {at}, found {_spelled(leaf)}",
                hint="return arrays alone: leave it out, or return jax.tree.leaves of a structure that has "
                "such parts",
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise BuildError(
                f"{what}: expected an array at {at}, found a typed key, {leaf.str_short()}",
                hint="return jax.random.key_data(key); jax.random.wrap_key_data makes a key of it again",
            )
        if str(leaf.dtype) not in DTYPES:
            raise BuildError(
                f"{what}: expected one of {', '.join(DTYPES)} at {at}, found {leaf.dtype}",
                hint="return it as one of these dtypes, with .astype()",
            )
        array = _array(path, leaf)
        other = arrays.setdefault(tuple(map(str, array.path)), array)
        if other is not array:
            raise BuildError(
                f"{what}: expected one result at {at}, found two",
                hint="give the parts of your own type different names",
            )
    return tuple(arrays.values())


def _is_empty(node: Any) -> bool:
    return not jax.tree.leaves(node)


def _spelled(empty: Any) -> str:
    return "None" if empty is None else f"an empty {type(empty).__name__}"


def _step(key: Any) -> str | int:
    match key:
        case jax.tree_util.DictKey(key=name) | jax.tree_util.GetAttrKey(name=name):
            return str(name)
        case jax.tree_util.SequenceKey(idx=place) | jax.tree_util.FlattenedIndexKey(key=place):
            return int(place)
        case _:
            raise BuildError(f"expected a pytree of dicts and sequences, found the key {key!r}")
