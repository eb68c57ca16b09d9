"""What the dtypes of weights and KV cache cost in accuracy: both models read the same tokens."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.pipeline.keys import accuracy_key, measuring_key
from prejit.compiler.pipeline.model import ModelSource, ReadModel, cache_dtype, file_digest
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.pack.weights import Published
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.runtime.format.schema import Accuracy

_NONE = "none"
"""The value in a key for a missing file."""


def measure_accuracy(
    plan: Plan,
    published: Published | None,
    weights: PackedLayer | None,
    model: ReadModel,
    store: Store,
    progress: Progress,
) -> Accuracy | None:
    """Return what the dtypes of weights and KV cache cost: from the store, or measured now.

    Args:
        plan: the plan of the build.
        published: the weights of its model.
        weights: the weights as they were packed.
        model: reads the model.
        store: keeps the result.
        progress: shows that accuracy is measured.

    Returns:
        None where all is float32, or there is no model.
    """
    manifest, files = plan.manifest, plan.model
    if weights is None or published is None or manifest.model is None or files is None:
        return None
    if {manifest.model.dtype, cache_dtype(manifest)} == {"float32"}:
        return None
    text = None
    if manifest.model.evaluation is not None:
        text = manifest.resolve(manifest.model.evaluation)
    tokenizer = files.transformer / "tokenizer.json"
    key = accuracy_key(
        manifest,
        files,
        published.files,
        _NONE if text is None else f"{text.name} {file_digest(text)}",
        file_digest(tokenizer) if text is not None and tokenizer.is_file() else _NONE,
    )
    alone = store.making(measuring_key("accuracy", ("weights", weights.digest)))
    with progress.phase("measuring accuracy"), alone:
        if (known := store.get(key)) is not None:
            return Accuracy(**known)
        found = _measure(model(), published.checkpoint, weights, manifest.model.dtype, text)
        store.put(key, asdict(found))
        return found


def _measure(
    model: ModelSource, published: Checkpoint, weights: PackedLayer, dtype: str, text: Path | None
) -> Accuracy:
    """Compare the packed model with its float32 form, on a text or on what the model writes itself."""
    from prejit.compiler.models import registry
    from prejit.compiler.pipeline.measure import comparison

    assert isinstance(weights.content, Path)
    values = {name: published.read(name) for name in published.names}
    packed, out_in = comparison.mapped(weights.content), model.files.out_in
    tokenizer = model.files.transformer / "tokenizer.json"
    if model.files.layout is None:
        exact = comparison.ComparedModel(
            registry.make_decoder(model.config, out_in=out_in),
            values,
            registry.describe(model.config),
        )
        stored = comparison.ComparedModel(model.module, packed, model.shape)
        named = None if text is None else (text.name, *comparison.read_text(text, tokenizer))
        bos = getattr(model.config, "bos_token_id", None)
        bos = bos if isinstance(bos, int) and 0 <= bos < model.shape.vocab_size else 0
        return comparison.of_decoder(dtype, exact, stored, named, bos)
    exact = comparison.ComparedModel(registry.make_encoder(model.config, out_in=out_in), values)
    stored = comparison.ComparedModel(model.module, packed)
    vocab_size, max_tokens = model.shape.vocab_size, model.shape.max_tokens
    if text is None:
        name, sentences = comparison.RANDOM, comparison.random_sentences(vocab_size, max_tokens)
    else:
        name, sentences = text.name, comparison.read_sentences(text, tokenizer, max_tokens)
    return comparison.of_encoder(dtype, exact, stored, name, *sentences)
