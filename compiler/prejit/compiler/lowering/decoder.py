"""Lower a decoder: encode, prefill, decode, verify and copy programs of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from prejit.compiler.lowering.export import LoweredProgram, export_on, export_program, export_with
from prejit.compiler.lowering.kv_cache_arrays import (
    CacheLayout,
    cache_layout,
    decoder_fields,
    padded_cache,
    source_array,
)
from prejit.compiler.lowering.sampling_programs import (
    Chosen,
    SamplingInputs,
    record,
    sample,
    sample_each,
    sampling_shapes,
)
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.families.decoders import PlacedImages
from prejit.compiler.models.layers import linear
from prejit.compiler.models.layers.attention import each_row
from prejit.compiler.models.layers.kernel_calls import Forms
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.row_adapters import AdapterStacks, RowAdapters, adapting
from prejit.compiler.models.parameters import Parametrized
from prejit.compiler.models.protocol import Cache
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.checks.encoder_interfaces import IMAGE_PREFILL
from prejit.runtime.format.names import ADAPTED

_STEPS = 16
"""Maximum steps of one decode call. With models that take 0.1 ms a step, dispatch is then a small part."""

_CACHE_SHARDING = ("data", "tensor", "", "")
"""The mesh axes that split keys and values [B, K, S, H]: rows and heads are split."""

Arrays = list[jax.Array]


@dataclass(frozen=True)
class MeshSplit:
    """How a decoder is split over several devices.

    Attributes:
        mesh: the devices, accepted by `check_mesh`.
        weights: the mesh axis that splits each dimension, for each weight that is split, by name.
    """

    mesh: Mesh
    weights: Mapping[str, tuple[str, ...]]


def lower_decoder(
    model: Parametrized,
    shape: DecoderConfig,
    spec: ProgramSpec,
    *,
    source: int | None = None,
    split: MeshSplit | None = None,
    forms: Forms | None = None,
    adapters: AdapterStacks | None = None,
    width: int | None = None,
) -> LoweredProgram:
    """Lower one of a decoder's programs at one bucket.

    Arguments and results, besides weights and the arrays of the cache:

        encode   source [B, ..., N, ...], length [B]                        -> (a new cache)
        prefill  tokens [B, T], start [B], length [B], sampling, history    -> chosen [B]
        image-prefill   as prefill, with embeddings [B, T, D], ends [B, T] before sampling (PlacedImages)
        decode   token [B], position [B], live [B], steps [], sampling, history*
                                              -> token [B], position [B], chosen [STEPS, B], history
        verify   tokens [B, T], start [B], length [B], sampling, history*
                                              -> chosen [T, B], accepted [B], history
        copy     (source: another cache), rows [B], (target*: this cache)   -> (target)

    Kinds that begin with "adapted-" take the adapter of each row [B] and the stacks of adapters
    (row_adapters.py) first, after the weights. `sampling` stands for the arrays of
    sampling_programs.SamplingInputs, `chosen` for those of its Chosen. The cache and arguments with a star
    are donated. On a mesh, weights and cache are split; everything else is on every device.

    Args:
        model: implements `protocol.DecoderModel`, or `protocol.EncoderDecoderModel` if there is a source.
        shape: the vocabulary, the longest context and the dtype of the cache.
        spec: the program and its bucket; on a mesh, `data` divides its batch.
        source: the number of places of the longest source; None: the model is no encoder-decoder.
        split: how the model is split over a mesh; None for one device.
        forms: the forms of products on a CPU with kernels; None for a portable program, for all platforms.
        adapters: the room for adapters; None: no kind of program has any.
        width: D, of a model whose prompts may hold images.
    """
    layout = cache_layout(model, shape, source)
    if spec.kind == "copy":
        return _lower_copy(layout, spec, split)
    if spec.kind == "encode":
        return _lower_encode(layout, spec, forms)
    batch, context = spec.bucket["batch"], spec.bucket["context"]
    is_adapted, kind = spec.kind.startswith(ADAPTED), spec.kind.removeprefix(ADAPTED)
    is_prefill = kind in ("prefill", IMAGE_PREFILL)
    programs = _DecoderFunctions(
        layout, context, split is not None and shape.vocab_size % split.mesh.tensor == 0
    )
    row, scalar = jax.ShapeDtypeStruct((batch,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    sampling = sampling_shapes(batch, shape.vocab_size)
    history = jax.ShapeDtypeStruct((batch, shape.vocab_size), jnp.int32)
    inputs: dict[str, jax.ShapeDtypeStruct]
    if kind == "decode":
        inputs = {"token": row, "position": row, "live": row, "steps": scalar}
    else:
        count = spec.bucket["prompt"] if is_prefill else spec.bucket["draft"] + 1
        tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
        inputs = {"tokens": tokens, "start": row, "length": row}
    if kind == IMAGE_PREFILL:
        size = (batch, spec.bucket["prompt"])
        inputs["embeddings"] = jax.ShapeDtypeStruct((*size, width or 0), jnp.float32)
        inputs["ends"] = jax.ShapeDtypeStruct(size, jnp.int32)
    function: Callable[..., Any] = getattr(programs, kind.replace("-", "_"))
    if is_adapted:
        assert adapters is not None
        stacks = {
            str(array.path[0]): jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype))
            for array in adapters.arrays
        }
        inputs = {"adapter": row, **stacks, **inputs}
        function = _adapted(function, tuple(stacks))
    weights, cache = dict(model.weights), layout.shapes(batch, context)
    values = (weights, *inputs.values(), sampling, history, cache)
    donated = (len(values) - 1,) if is_prefill else (len(values) - 2, len(values) - 1)
    named = {**inputs, **sampling._asdict(), "history": history}
    cache_arrays = _split_arrays(layout.sized(batch, context), split)
    arguments = [
        Array((name,), str(value.dtype), value.shape, name == "history" and not is_prefill)
        for name, value in named.items()
    ]
    if split is None:
        exported = export_with(forms, function, values, donate_argnums=donated)
    else:
        everywhere = [()] * (len(values) - 2)
        of_weights = {name: split.weights.get(name, ()) for name in weights}
        places = (of_weights, *everywhere, _CACHE_SHARDING)
        exported = export_on(split.mesh, function, values, places, donated)
    given = exported.out_avals[: -len(cache_arrays)]
    results = [
        Array((name,), str(value.dtype), value.shape)
        for name, value in zip(_RESULTS[kind], given, strict=True)
    ]
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(weights),
        (*arguments, *(replace(array, donated=True) for array in cache_arrays)),
        (*results, *cache_arrays),
        {} if split is None else split.weights,
        decoder=decoder_fields(layout, shape, adapters if is_adapted else None),
    )


def _adapted(function: Callable[..., Any], stacks: Sequence[str]) -> Callable[..., Any]:
    """Return a function of a decoder that takes the adapters of the rows after the weights."""

    def run(weights: Mapping[str, jax.Array], slots: jax.Array, *given: Any) -> Any:
        rows = RowAdapters(slots, dict(zip(stacks, given, strict=False)))
        with adapting(rows):
            return function(weights, *given[len(stacks) :])

    return run


_CHOSEN = ("tokens", "logprobs", "top_tokens", "top_logprobs")
_RESULTS = {
    "prefill": Chosen._fields,
    IMAGE_PREFILL: Chosen._fields,
    "decode": ("token", "position", *_CHOSEN, "history"),
    "verify": (*_CHOSEN, "accepted", "history"),
}
"""Names of the results of each program, in order, without the cache."""

_Decoding = tuple[jax.Array, jax.Array, jax.Array, Chosen, jax.Array, Cache]
"""State between two steps: number of steps done, token, position, tokens chosen so far, history, cache."""


@dataclass(frozen=True)
class _DecoderFunctions:
    """The functions of a decoder's programs.

    Attributes:
        layout: the model's cache.
        context: S, the number of positions of a row.
        splits_logits: whether a mesh splits the head by tokens.
    """

    layout: CacheLayout
    context: int
    splits_logits: bool

    def prefill(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        sampling: SamplingInputs,
        history: jax.Array,
        cache: Cache,
        **images: Any,
    ) -> tuple[Chosen, Cache]:
        """Write tokens into the cache and choose the token that follows them."""
        logits, cache = self._logits(weights, tokens, start, length, cache, **images)
        return sample(logits, sampling, history, start + length), cache

    def image_prefill(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        embeddings: jax.Array,
        ends: jax.Array,
        *others: Any,
    ) -> tuple[Chosen, Cache]:
        """Do what `prefill` does, with images among the tokens."""
        images = PlacedImages(embeddings, ends)
        return self.prefill(weights, tokens, start, length, *others, images=images)

    def decode(
        self,
        weights: Mapping[str, jax.Array],
        token: jax.Array,
        position: jax.Array,
        live: jax.Array,
        steps: jax.Array,
        sampling: SamplingInputs,
        history: jax.Array,
        cache: Cache,
    ) -> tuple[jax.Array, jax.Array, Chosen, jax.Array, Cache]:
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
        cache: Cache,
    ) -> tuple[Chosen, jax.Array, jax.Array, Cache]:
        """Check drafts of the tokens that follow a row's next token, in one pass.

        A draft is accepted if it equals the token that is chosen there. That holds for sampling too: the
        random numbers of a position do not depend on how it is reached. So the tokens equal those of decode
        step by step (the idea: Leviathan et al. 2023, arXiv 2211.17192; drafts by prompt lookup: Saxena
        2023). Rejected drafts stay in the cache behind the next start, where they are ignored. A state has
        no such place: there a second pass takes the tokens that were accepted.
        """
        logits, advanced = self._logits(weights, tokens, start, length, cache, every=True)
        chosen = sample_each(logits, sampling, tokens, history, start)
        places = jnp.arange(1, tokens.shape[1])[:, None]
        right = (places < length) & (tokens.T[1:] == chosen.token[:-1])
        right = jnp.concatenate([(length > 0)[None], right]).astype(jnp.int32)
        counts = jnp.cumprod(right, 0)  # 1 while all drafts so far are right
        for token, counted in zip(tokens.T, counts, strict=True):
            history = record(history, token, counted)
        accepted = jnp.sum(counts, 0, dtype=jnp.int32)
        if not self.layout.is_rewindable:
            _, advanced = self._logits(weights, tokens, start, accepted, cache)
        return chosen, accepted, history, advanced

    def _logits(
        self,
        weights: Mapping[str, jax.Array],
        tokens: jax.Array,
        start: jax.Array,
        length: jax.Array,
        cache: Cache,
        *,
        every: bool = False,
        **images: PlacedImages,
    ) -> tuple[jax.Array, Cache]:
        model = self.layout.model.bind(weights)
        cache = self.layout.fresh_rows(model, cache, start, length, self.context)
        rows = (linear.split(whole, "data") for whole in (tokens, start, length))
        logits, cache = model(*rows, cache, every=every, **images)
        # Choosing a token passes over the vocabulary many times. So all logits are gathered once, and every
        # device chooses for every row; nothing else is sent. Without the first split below, XLA would gather
        # the head's weights instead.
        if self.splits_logits:
            logits = linear.split(logits, "data", *[None] * (logits.ndim - 2), "tensor")
        return linear.split(linear.split(logits, "data")), cache


def _lower_encode(layout: CacheLayout, spec: ProgramSpec, forms: Forms | None) -> LoweredProgram:
    """Read sources: the cache of texts that are about them and have no token yet."""
    batch, context = spec.bucket["batch"], spec.bucket["context"]
    arrays = layout.sized(batch, context)

    def encode(
        weights: Mapping[str, jax.Array], source: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, ...]:
        cache = layout.model.bind(weights).encode(source, length, context, layout.dtype)
        return tuple(jax.tree.leaves(padded_cache(cache, arrays)))

    source = source_array(layout.model, spec.bucket["source"], batch)
    given = jax.ShapeDtypeStruct(source.shape, jnp.dtype(source.dtype))
    length = jax.ShapeDtypeStruct((batch,), jnp.int32)
    exported = export_with(forms, encode, (dict(layout.model.weights), given, length))
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        tuple(layout.model.weights),
        (replace(source, variables=()), Array(("length",), "int32", (batch,))),
        arrays,
    )


def _lower_copy(layout: CacheLayout, spec: ProgramSpec, split: MeshSplit | None) -> LoweredProgram:
    """Copy rows of a cache into a larger one, to grow the cache or to fill a slot."""
    bucket = spec.bucket
    sources = layout.sized(bucket["source_batch"], bucket["source_context"], "source")
    targets = layout.sized(bucket["batch"], bucket["context"], "target")
    rows = jax.ShapeDtypeStruct((bucket["batch"],), jnp.int32)

    def copy(sources: Arrays, rows: jax.Array, targets: Arrays) -> Arrays:
        def fill(row: int | jax.Array, targets: Arrays) -> Arrays:
            def take(targets: Arrays) -> Arrays:
                return [
                    _with_row(target, row, source, rows[row])
                    for source, target in zip(sources, targets, strict=True)
                ]

            return lax.cond(rows[row] >= 0, take, lambda same: same, targets)

        if split is not None:
            return each_row(bucket["batch"], fill, targets)
        # A loop compiles as fast for any batch: 0.14 s for 24 arrays, where 4 unrolled rows take 1.7 s.
        return lax.fori_loop(0, bucket["batch"], fill, targets)

    values = (_shapes_of(sources), rows, _shapes_of(targets))
    if split is None:
        exported = export_program(copy, values, donate_argnums=2)
    else:
        exported = export_on(split.mesh, copy, values, (_CACHE_SHARDING, (), _CACHE_SHARDING), (2,))
    sources, targets = _split_arrays(sources, split), _split_arrays(targets, split)
    donated = (replace(target, donated=True) for target in targets)
    return LoweredProgram(
        exported.mlir_module_serialized,
        exported.platforms,
        (),
        (*sources, Array(("rows",), "int32", rows.shape), *donated),
        targets,
    )


def _with_row(
    target: jax.Array, row: int | jax.Array, source: jax.Array, taken: jax.Array
) -> jax.Array:
    """Return an array with one row of another at the beginning of one of its rows."""
    origin = (0,) * (source.ndim - 1)
    content = lax.dynamic_slice(source, (taken, *origin), (1, *source.shape[1:]))
    return lax.dynamic_update_slice(target, content, (row, *origin))


def _shapes_of(arrays: tuple[Array, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype)) for each in arrays]


def _split_arrays(arrays: tuple[Array, ...], split: MeshSplit | None) -> tuple[Array, ...]:
    if split is None:
        return arrays
    return tuple(replace(each, sharding=_CACHE_SHARDING) for each in arrays)
