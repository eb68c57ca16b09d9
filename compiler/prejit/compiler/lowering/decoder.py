"""Lower a decoder: prefill, decode, verify and copy programs of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from prejit.compiler.lowering.export import export_on, export_program, export_with
from prejit.compiler.lowering.program import LoweredProgram, Shapes
from prejit.compiler.lowering.sampling import (
    Chosen,
    SamplingInputs,
    record,
    sample,
    sample_each,
    sampling_shapes,
)
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.layers import config, linear
from prejit.compiler.models.layers.forms import Forms
from prejit.compiler.models.layers.rows import each_row
from prejit.compiler.models.parameters import flat_parameters, with_parameters
from prejit.compiler.models.sharding import shardings
from prejit.runtime.format.arrays import Array, Mesh

_STEPS = 16
"""Maximum steps of one decode call. With models that take 0.1 ms a step, dispatch is then a small part."""

_CACHE_SHARDING = ("data", "tensor", "", "")
"""The mesh axes that split keys and values [B, K, S, H]: rows and heads are split."""


def lower_decoder(
    model: nnx.Module,
    shape: config.DecoderConfig,
    spec: ProgramSpec,
    mesh: Mesh | None = None,
    forms: Forms | None = None,
) -> LoweredProgram:
    """Lower one of a decoder's programs at one bucket.

    Arguments and results, besides weights and cache:

        prefill  tokens [B, T], start [B], length [B], sampling, history    -> chosen [B]
        decode   token [B], position [B], live [B], steps [], sampling, history*
                                              -> token [B], position [B], chosen [STEPS, B], history
        verify   tokens [B, T], start [B], length [B], sampling, history*
                                              -> chosen [T, B], accepted [B], history
        copy     source [b, K, s, H], target* [B, K, S, H], rows [B]        -> target

    `sampling` stands for the arrays of sampling.SamplingInputs, `chosen` for those of sampling.Chosen. The
    cache and arguments with a star are donated. On a mesh, weights and cache are split; everything else is on
    every device.

    Args:
        model: an abstract module; its parameters are the weights.
        shape: the sizes of the model.
        spec: the program and its bucket; on a mesh, `data` divides its batch.
        mesh: the devices, accepted by `check_mesh`; None for one device.
        forms: the forms of products on a CPU with kernels; None for a portable program, for all platforms.
    """
    if spec.kind == "copy":
        return _lower_copy(shape, spec, mesh)
    graph, state = nnx.split(model)
    weights: Shapes = flat_parameters(state)
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
    cache_sharding = () if mesh is None else _CACHE_SHARDING
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
    split = {} if mesh is None else shardings(model, mesh)
    if mesh is None:
        exported = export_with(forms, function, values, donate_argnums=donated)
    else:
        everywhere = [()] * (len(values) - 2)
        places = ({name: split.get(name, ()) for name in weights}, *everywhere, _CACHE_SHARDING)
        exported = export_on(mesh, function, values, places, donated)
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
"""Names of the results of each program, in order, without the cache."""

_Decoding = tuple[jax.Array, jax.Array, jax.Array, Chosen, jax.Array, config.KVCache]
"""State between two steps: number of steps done, token, position, tokens chosen so far, history, cache."""


@dataclass(frozen=True)
class _DecoderFunctions:
    """The functions of a decoder's programs.

    Attributes:
        graph: the graph of the model, from nnx.split.
        state: its state, from nnx.split.
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
        cache: config.KVCache,
    ) -> tuple[Chosen, config.KVCache]:
        """Write tokens into the cache and choose the token that follows them."""
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
        cache: config.KVCache,
    ) -> tuple[jax.Array, jax.Array, Chosen, jax.Array, config.KVCache]:
        """Choose several tokens, one after the other. A call costs its steps and one dispatch.

        With GPT-2-124M on two threads the loop itself costs nothing, for one step or eight.
        """

        def step(carry: _Decoding) -> _Decoding:
            done, token, position, chosen, history, cache = carry
            # Without this, XLA splits the loop's state by rows on a mesh, and gathers it again.
            token, position, all_live = map(linear.split, (token, position, live))
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
            whole = jax.tree.map(linear.split, (token, position, chosen, history))
            return done + 1, *whole, cache

        rows = jax.eval_shape(
            sample, jax.ShapeDtypeStruct(history.shape, jnp.float32), sampling, history, position
        )
        empty = jax.tree.map(lambda one: jnp.zeros((_STEPS, *one.shape), one.dtype), rows)
        _, token, position, chosen, history, cache = lax.while_loop(
            lambda carry: carry[0] < jnp.minimum(steps, _STEPS),
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
        cache: config.KVCache,
    ) -> tuple[Chosen, jax.Array, jax.Array, config.KVCache]:
        """Check drafts of the tokens that follow a row's next token, in one pass.

        A draft is accepted if it equals the token that is chosen there. That holds for sampling too: the
        random numbers of a position do not depend on how it is reached. So the tokens equal those of decode
        step by step (the idea: Leviathan et al. 2023, arXiv 2211.17192; drafts by prompt lookup: Saxena
        2023). Rejected drafts stay in the cache behind the next start, where they are ignored.
        """
        logits, cache = self._logits(weights, tokens, start, length, cache, every=True)
        chosen = sample_each(logits, sampling, tokens, history, start)
        places = jnp.arange(1, tokens.shape[1])[:, None]
        right = (places < length) & (tokens.T[1:] == chosen.token[:-1])
        right = jnp.concatenate([(length > 0)[None], right]).astype(jnp.int32)
        counts = jnp.cumprod(right, 0)  # 1 while all drafts so far are right
        for token, counted in zip(tokens.T, counts, strict=True):
            history = record(history, token, counted)
        return chosen, jnp.sum(counts, 0, dtype=jnp.int32), history, cache

    def _logits(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: config.KVCache,
        *,
        every: bool = False,
    ) -> tuple[jax.Array, config.KVCache]:
        module = nnx.merge(self.graph, with_parameters(self.state, weights))
        rows = (linear.split(whole, "data") for whole in (tokens, start, length))
        logits, cache = module(*rows, cache, every=every)
        # Choosing a token passes over the vocabulary many times. So all logits are gathered once, and every
        # device chooses for every row; nothing else is sent. Without the first split below, XLA would gather
        # the head's weights instead.
        if self.splits_logits:
            logits = linear.split(logits, "data", *[None] * (logits.ndim - 2), "tensor")
        return linear.split(linear.split(logits, "data")), cache


def _lower_copy(
    shape: config.DecoderConfig, spec: ProgramSpec, mesh: Mesh | None
) -> LoweredProgram:
    """Copy rows of a cache's array into a larger one, to grow the cache or to fill a slot."""
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
    split = () if mesh is None else _CACHE_SHARDING
    if mesh is None:
        exported = export_program(copy, values, donate_argnums=1)
    else:
        exported = export_on(mesh, copy, values, (_CACHE_SHARDING, _CACHE_SHARDING, ()), (1,))
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


def _key_value(shape: config.DecoderConfig, batch: int, context: int) -> jax.ShapeDtypeStruct:
    """Return the shape of the keys, or the values, of one layer."""
    size = (batch, shape.num_kv_heads, context, shape.head_size)
    return jax.ShapeDtypeStruct(size, jnp.dtype(shape.cache_dtype))
