"""Lowering: from a function of arrays to a portable program (StableHLO), once for all targets.

What is compiled for a target and what the runtime falls back to is the same portable program. Weights are
arguments, never constants. Nothing of this machine's paths is in it: equal inputs give equal bytes.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, traverse_util
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from prejit.compiler import manifest, models
from prejit.compiler.sampling import sample
from prejit.compiler.shape_string import parse_shape
from prejit.compiler.specs import ProgramSpec
from prejit.compiler.wording import nearest
from prejit.runtime.bundle import MESH_AXES, Array, Mesh
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.target import PLATFORMS

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
    """

    portable: bytes
    platforms: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    weight_shardings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


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
    model: nnx.Module, shape: models.DecoderConfig, spec: ProgramSpec, mesh: Mesh | None = None
) -> LoweredProgram:
    """Lowers prefill or decode of a decoder at one bucket.

        prefill: weights, tokens [B, T], start [B], length [B], sampling, cache -> token, position, cache
        decode:  weights, token [B], position [B],              sampling, cache -> token, position, cache

    The cache is donated. `position` is where the new token will stand: what the next decode takes. On a mesh
    weights and cache are split; tokens, positions and sampling are on every device.

    Args:
        model: abstract; its parameters are the weights.
        shape: of the model.
        spec: kind `prefill` or `decode`, with its bucket; on a mesh, `data` divides its batch.
        mesh: the devices that it runs on, which passed `check_mesh`; None: one.
    """
    graph, state = nnx.split(model)
    weights: Shapes = models.flat_parameters(state)
    batch, context = spec.bucket["batch"], spec.bucket["context"]
    key_value = jax.ShapeDtypeStruct(
        (batch, shape.num_kv_heads, context, shape.head_size), jnp.float32
    )
    cache = tuple((key_value, key_value) for _ in range(shape.num_layers))
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    sampling = {
        "temperature": jax.ShapeDtypeStruct((batch,), jnp.float32),
        "top_k": row,
        "top_p": jax.ShapeDtypeStruct((batch,), jnp.float32),
        "seed": jax.ShapeDtypeStruct((batch, 2), jnp.uint32),
    }

    def forward(
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        sampling: tuple[jax.Array, ...],
        cache: models.KVCache,
    ) -> tuple[jax.Array, jax.Array, models.KVCache]:
        module = nnx.merge(graph, models.with_parameters(state, weights))
        logits, cache = module(tokens, start, length, cache)
        # Choosing a token goes over the vocabulary many times: logits are gathered once before it. Were
        # they not said to be split first, XLA would gather the head's weights instead.
        if mesh is not None and shape.vocab_size % mesh.tensor == 0:
            logits = models.split(logits, "data", "tensor")
        logits = models.split(logits, "data")
        position = start + length
        temperature, top_k, top_p, seed = sampling
        token = sample(logits, temperature, top_k, top_p, seed, position)
        return token, position, cache

    def decode(
        weights: Mapping[str, jax.Array],
        token: jax.Array,
        position: jax.Array,
        sampling: tuple[jax.Array, ...],
        cache: models.KVCache,
    ) -> tuple[jax.Array, jax.Array, models.KVCache]:
        return forward(weights, token[:, None], position, jnp.ones_like(position), sampling, cache)

    function: Callable[..., Any]
    if spec.kind == "prefill":
        tokens = jax.ShapeDtypeStruct((batch, spec.bucket["prompt"]), jnp.int32)
        function, inputs = forward, {"tokens": tokens, "start": row, "length": row}
    else:
        function, inputs = decode, {"token": row, "position": row}
    values = (weights, *inputs.values(), tuple(sampling.values()), cache)
    split = {} if mesh is None else models.shardings(model, mesh)
    cache_sharding = () if mesh is None else CACHE_SHARDING
    if mesh is None:
        exported = _export(function, values, donate_argnums=len(values) - 1)
    else:
        exported = _export_on(mesh, function, values, split)
    arguments = [
        *(Array((name,), str(value.dtype), value.shape) for name, value in inputs.items()),
        *(Array((name,), str(value.dtype), value.shape) for name, value in sampling.items()),
        *(
            Array(("cache", layer, name), "float32", key_value.shape, True, cache_sharding)
            for layer in range(shape.num_layers)
            for name in ("keys", "values")
        ),
    ]
    results = [
        Array(("token",), "int32", row.shape),
        Array(("position",), "int32", row.shape),
        *(replace(a, donated=False) for a in arguments if a.donated),
    ]
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(weights),
        tuple(arguments),
        tuple(results),
        split,
    )


@dataclass(frozen=True)
class UserFunction:
    """A function of the user's, ready to be lowered.

    Attributes:
        function: takes a flat dict of weights, then the arguments of the manifest.
        weights: their shapes, by flat name; sorted.
        values: the weights themselves where they come from the object (a flax.nnx module).
    """

    function: Callable[..., Any]
    weights: Shapes
    values: Mapping[str, np.ndarray[Any, Any]]


def find_function(
    program: manifest.Program,
    at: Path,
    parameters: Mapping[str, np.ndarray[Any, Any]] | None,
) -> UserFunction:
    """Imports what `function` of a [[program]] names.

    That is a function, called as function(params, ...) where the manifest gives params, else as
    function(...); a flax.linen module, applied to params; or a flax.nnx module, whose parameters are its
    own unless the manifest gives params.

    Args:
        program: the section of the manifest.
        at: the manifest, for errors; modules are looked for beside it first.
        parameters: flat, names joined by dots; None where the manifest gives none.

    Raises:
        ManifestError: the module or the attribute is not there, or is nothing that can be called.
    """
    found = _import(program, at)
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
    return UserFunction(function, shapes, values)


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
        at: the manifest, for errors and for modules beside it.
        platforms: those of the manifest's targets, for which it must be possible.

    Raises:
        BuildError: it cannot be traced or lowered; the cause says why.
    """
    shapes = _shapes(program.args, spec.bucket, f"{at}: program {program.name!r}: args")
    args, kwargs = ((), shapes) if isinstance(shapes, dict) else (tuple(shapes), {})

    def function(weights: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        return user.function(weights, *args, **kwargs)

    values = (user.weights, args, kwargs)
    try:
        try:
            exported = _export(function, values)
        except NotImplementedError:  # it calls what only some platforms have
            wanted = tuple(name for name in PLATFORMS if name in platforms)
            exported = _export(function, values, wanted)
        results = jax.eval_shape(function, user.weights, args, kwargs)
    except Exception as error:
        raise BuildError(
            f"{at}: program {spec.name}: cannot lower {program.function}: "
            f"{type(error).__name__}: {error}",
            hint="call it under jax.jit with these shapes to see where it fails",
        ) from error
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(user.weights),
        _arrays(args or kwargs),
        _arrays(results),
    )


def _export(
    function: Callable[..., Any],
    values: tuple[Any, ...],
    platforms: tuple[str, ...] = PLATFORMS,
    **options: Any,
) -> export.Exported:
    """A function for several platforms; options are those of jax.jit."""
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine
    jitted = jax.jit(function, keep_unused=True, **options)
    return export.export(jitted, platforms=platforms)(*values)


def _export_on(
    mesh: Mesh,
    function: Callable[..., Any],
    values: tuple[Any, ...],
    split: Mapping[str, tuple[str, ...]],
) -> export.Exported:
    """A decoder's function for a mesh that need not be there. The last of its values is the cache."""
    sizes = (mesh.data, mesh.tensor)
    abstract = AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes))

    def sharding(axes: Sequence[str] = ()) -> NamedSharding:
        return NamedSharding(abstract, PartitionSpec(*(axis or None for axis in axes)))

    weights, *inputs, _ = values
    everywhere, cache = sharding(), sharding(CACHE_SHARDING)
    shared = {name: sharding(split.get(name, ())) for name in weights}
    with jax.sharding.use_abstract_mesh(abstract):
        return _export(
            function,
            values,
            in_shardings=(shared, *(everywhere for _ in inputs), cache),
            out_shardings=(everywhere, everywhere, cache),
            donate_argnums=len(values) - 1,
        )


def _import(program: manifest.Program, at: Path) -> Any:
    module_name, _, attribute = program.function.partition(":")
    where = f"{at}: program {program.name!r}: function"
    if str(at.parent.absolute()) not in sys.path:
        sys.path.insert(0, str(at.parent.absolute()))
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ManifestError(
            f"{where}: cannot import {module_name!r}: {error}",
            hint="put the module beside the manifest, or install it into this environment",
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = nearest(name, tuple(vars(found)))
            raise ManifestError(
                f"{where}: {module_name!r} has no {attribute!r}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        found = getattr(found, name)
    return found


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
    """The leaves of a pytree. Nodes of the user's own types become dicts by attribute or tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(
        Array(tuple(map(_step, path)), str(leaf.dtype), tuple(leaf.shape)) for path, leaf in leaves
    )


def _step(key: Any) -> str | int:
    match key:
        case jax.tree_util.DictKey(key=name):
            return name if isinstance(name, int) else str(name)
        case jax.tree_util.SequenceKey(idx=place) | jax.tree_util.FlattenedIndexKey(key=place):
            return int(place)
        case jax.tree_util.GetAttrKey(name=name):
            return str(name)
        case _:
            raise BuildError(f"expected a pytree of dicts and sequences, found the key {key!r}")
