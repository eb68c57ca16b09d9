"""Measure what the dtypes of weights and KV cache cost in accuracy: both models read the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.pipeline.model import (
    cache_dtype,
    file_digest,
    int4_text,
    longest_context,
    longest_source,
    may_round_to_int4,
)
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.pack.model_layers import special_ids
from prejit.compiler.pipeline.pack.weights_layer import RoundedByText
from prejit.compiler.pipeline.plan import bits_of, stored_bits
from prejit.compiler.pipeline.published_files import Published
from prejit.compiler.pipeline.result_keys import (
    accuracy_key,
    measuring_key,
    own_accuracy_key,
    weights_key,
)
from prejit.compiler.pipeline.workspace import Workspace
from prejit.runtime.format.bundle_schema import Accuracy

if TYPE_CHECKING:
    from flax import nnx

_NONE = "none"
"""The value in a key for a missing file."""


def measure_accuracy(
    space: Workspace,
    published: Published | None,
    weights: PackedLayer | None,
    programs: Iterable[str],
) -> Accuracy | None:
    """Return what the dtypes of weights and KV cache cost: from the store, or measured now.

    `weights` are as they were packed. `programs` are the digests of the portable programs, which hold what a
    decoder of the user computes.

    Returns:
        None where all is float32, there is no model, it is an encoder-decoder, or the manifest wants none.
    """
    plan, manifest, store = space.plan, space.plan.manifest, space.store
    files = plan.model
    if weights is None or manifest.model is None or longest_source(manifest) is not None:
        return None
    all_exact = {manifest.model.dtype, cache_dtype(manifest)} == {"float32"}
    if all_exact or not manifest.model.accuracy:
        return None
    text = None
    if manifest.model.evaluation is not None:
        text = manifest.resolve(manifest.model.evaluation)
    tokenizer = None if files is None else files.transformer / "tokenizer.json"
    texts = (
        _NONE if text is None else f"{text.name} {file_digest(text)}",
        file_digest(tokenizer)
        if text is not None and tokenizer is not None and tokenizer.is_file()
        else _NONE,
    )
    measure: Callable[[], Accuracy]
    if (own := plan.own) is not None:
        of_weights = weights_key(manifest, None, (), {}, own.parameters, own.orders).digest
        bos = None
        if files is not None:
            _, bos, _ = special_ids(files.directory, own.vocab_size, own=True)
        key = own_accuracy_key(manifest, of_weights, programs, *texts, bos or 0)
        measure = partial(_measure_own, space, weights, text, bos or 0)
    elif published is not None and files is not None:
        key = accuracy_key(manifest, files, published.files, *texts)
        measure = partial(_measure_published, space, published.checkpoint, weights, text)
    else:
        return None
    alone = store.making(measuring_key("accuracy", ("weights", weights.digest)))
    with space.progress.phase("measuring accuracy"), alone:
        if (known := store.get(key)) is not None:
            return Accuracy(**known)
        found = measure()
        if published is not None:
            published.check_unchanged()  # it was read again
        store.put(key, asdict(found))
        return found


def choose_bits(
    space: Workspace, published: Published
) -> tuple[tuple[tuple[str, str], ...], RoundedByText | None]:
    """Return the dtypes of an encoder's matrices, as `ModelFiles.chosen`: from the store, or measured now.

    Beside them, what `round_by_text` returned for it, which packing need not do again; None: nothing.
    """
    from prejit.compiler.pipeline.measure import encoder_bits

    manifest, files = space.plan.manifest, space.plan.model
    assert manifest.model is not None
    assert files is not None
    stored = stored_bits(manifest, files, published, space.store)
    with space.progress.phase("measuring matrices"), stored.making():
        found = bits_of(stored.find())  # another build may have measured them meanwhile
        if found is not None:
            return found, None
        checkpoint, text = published.checkpoint, manifest.model.evaluation
        rounded = round_by_text(space, checkpoint)
        chosen = encoder_bits.choose_for(
            space.model(),
            checkpoint,
            None if text is None else manifest.resolve(text),
            {} if rounded is None else {**rounded.words},
        )
        stored.put({"chosen": chosen})
        return tuple(sorted(chosen.items())), rounded


def round_by_text(
    space: Workspace, checkpoint: Checkpoint, earlier: RoundedByText | None = None
) -> RoundedByText | None:
    """Return the matrices in int4 that the evaluation text decides; None: there are none.

    `earlier` has what it decided before, of the same checkpoint.
    """
    manifest, files = space.plan.manifest, space.plan.model
    if not may_round_to_int4(manifest, files):
        return None
    from prejit.compiler.pipeline.measure import int4_inputs

    text = int4_text(manifest, files)
    words = {} if earlier is None else earlier.words
    return int4_inputs.round_by(space.model(), checkpoint, longest_context(manifest), text, words)


def _measure_own(space: Workspace, weights: PackedLayer, text: Path | None, bos: int) -> Accuracy:
    """Compare a decoder of the user as it is packed with itself as the user gave it."""
    from prejit.compiler.lowering.user.own_decoder import CHECK_MODEL
    from prejit.compiler.pipeline.measure import model_comparison

    manifest, files, own = space.plan.manifest, space.plan.model, space.code().model
    assert isinstance(weights.content, Path)
    assert manifest.model is not None
    assert own is not None
    exact = {name: read() for name, read in own.exact.values.items()}
    packed = model_comparison.mapped(weights.content)
    named = None
    if files is not None and text is not None:
        tokenizer = files.directory / "tokenizer.json"
        named = (text.name, *model_comparison.read_text(text, tokenizer))
    longest = own.max_positions or longest_context(manifest)
    assert longest is not None
    with own.modules.tracing(f"{manifest.where}: cannot run {own.label}", CHECK_MODEL):
        return model_comparison.of_decoder(
            manifest.model.dtype,
            model_comparison.ComparedModel(own.exact.model, exact),
            model_comparison.ComparedModel(
                own.stored.model,
                {name: packed[name] for name in own.stored.model.weights},
                cache_dtype(manifest),
            ),
            (own.vocab_size, longest),
            named,
            bos,
        )


def _measure_published(
    space: Workspace, published: Checkpoint, weights: PackedLayer, text: Path | None
) -> Accuracy:
    """Compare the packed model with its float32 form, on a text or on random tokens.

    Both are evaluated as the float32 model: one with the weights of the checkpoint, the other with those of
    the bundle, widened to float32, and with x rounded as its kernels do.
    """
    from prejit.compiler.models import image_config, model_registry, quantizing
    from prejit.compiler.models.parameters import Parametrized, parametrized
    from prejit.compiler.pipeline.measure import model_comparison

    assert isinstance(weights.content, Path)
    assert space.plan.manifest.model is not None
    model = space.model()
    dtype = space.plan.manifest.model.dtype
    if model.files.chooses:
        dtype = quantizing.described(model.module)
    values = {name: published.rows(name) for name in published.names}
    packed = quantizing.widened(model.module, model_comparison.mapped(weights.content))
    out_in, tokenizer = model.files.out_in, model.files.transformer / "tokenizer.json"

    def imitating(exact: nnx.Module) -> Parametrized:
        if out_in:  # else no kernels round x
            quantizing.imitate(exact, model.module)
        return parametrized(exact)

    if model.files.layout is None:
        vocab_size = model.shape.vocab_size
        longest = longest_context(space.plan.manifest)
        make = partial(model_registry.make_decoder, model.config, longest, out_in=out_in)
        named = None if text is None else (text.name, *model_comparison.read_text(text, tokenizer))
        bos = getattr(model.config, "bos_token_id", None)
        bos = bos if isinstance(bos, int) and 0 <= bos < vocab_size else 0
        return model_comparison.of_decoder(
            dtype,
            model_comparison.ComparedModel(parametrized(make()), values),
            model_comparison.ComparedModel(imitating(make()), packed, model.shape.cache_dtype),
            (vocab_size, model.shape.max_positions),
            named,
            bos,
        )
    if model.images is not None:
        make = partial(image_config.make_images, model.config, out_in=out_in)
        return model_comparison.of_images(
            dtype,
            model_comparison.ComparedModel(parametrized(make()), values),
            model_comparison.ComparedModel(imitating(make()), packed),
            model.images.size,
            scores=model.images.labels is not None,
        )
    make = partial(model_registry.make_encoder, model.config, out_in=out_in)
    vocab_size, max_tokens = model.shape.vocab_size, model.shape.max_tokens
    if text is None:
        name = model_comparison.RANDOM
        sentences = model_comparison.random_sentences(vocab_size, max_tokens)
    else:
        name, sentences = text.name, model_comparison.read_sentences(text, tokenizer, max_tokens)
    return model_comparison.of_encoder(
        dtype,
        model_comparison.ComparedModel(parametrized(make()), values),
        model_comparison.ComparedModel(imitating(make()), packed),
        name,
        *sentences,
        scores=model.shape.scores is not None,
    )
