"""The weights of a bundle: the layer that holds them, and what their dtypes cost in accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.pipeline import packaging
from prejit.compiler.pipeline.keys import (
    UserWeights,
    accuracy_key,
    measuring_key,
    weights_key,
)
from prejit.compiler.pipeline.model import (
    ModelSource,
    ReadModel,
    cache_dtype,
    file_digest,
    file_digests,
    open_weights,
)
from prejit.compiler.pipeline.packaging import Layer, Tensor
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.runtime.errors import BuildError
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.schema import Accuracy

_NONE = "none"
"""Stands in a key for a file that is not there."""


@dataclass(frozen=True)
class Published:
    """The published weights of a model.

    Attributes:
        checkpoint: the tensors; each is read when it is used.
        files: the files that decide them, by name, each with its digest.
    """

    checkpoint: Checkpoint
    files: tuple[tuple[str, str], ...]


def find_published(plan: Plan) -> Published | None:
    """Open the weights of the plan's model, and hash their files. None: the manifest has no model.

    Raises:
        CheckpointError: files are missing.
        StoreError: a file cannot be read.
    """
    if plan.model is None:
        return None
    checkpoint = open_weights(plan.model)
    return Published(checkpoint, file_digests(plan.model.directory, checkpoint.files))


def pack_weights(
    plan: Plan,
    published: Published | None,
    user: UserWeights,
    model: ReadModel,
    store: Store,
    progress: Progress,
) -> Layer | None:
    """Return the weights layer: from the store, or packed now. None: the bundle has no weights.

    Args:
        plan: the plan of the build.
        published: the weights of its model.
        user: the parameters of the user's functions.
        model: reads the model.
        store: keeps the layer.
        progress: shows that weights are packed.
    """
    if published is None and not user:
        return None
    with progress.phase("packing weights"):
        files = () if published is None else published.files
        key = weights_key(plan.manifest, plan.model, files, user)
        with store.making(key):
            result = store.get(key)
            if result is None:
                tensors = [
                    Tensor(f"{section}:{name}", str(v.dtype), v.shape, partial(np.asarray, v))
                    for section, values in user.items()
                    for name, v in values.items()
                ]
                if published is not None:
                    tensors = [*_tensors(model(), published.checkpoint.read), *tensors]
                with store.blob_writer() as blob:
                    packaging.write_weights(tensors, blob)
                result = {"digest": blob.digest, "size": blob.size}
                store.put(key, result, blobs=[blob.digest])
        path = store.blob_path(result["digest"])
    if path is None:
        raise BuildError("the weights are gone from the build cache", hint="build again")
    return Layer(WEIGHTS_MEDIA_TYPE, result["digest"], result["size"], path, "weights.safetensors")


def _tensors(model: ModelSource, read: Callable[[str], np.ndarray[Any, Any]]) -> list[Tensor]:
    """Return the model's parameters as they are packed: rounded or quantized when they are written.

    Args:
        model: the model.
        read: returns the published values of a parameter, float32.
    """
    from flax import nnx

    from prejit.compiler.models import precision, registry

    stored = precision.readers(model.module, read)
    return [
        Tensor(name, str(leaf.dtype), leaf.shape, stored.get(name) or partial(read, name))
        for name, leaf in registry.flat_parameters(nnx.state(model.module)).items()
    ]


def measure_accuracy(
    plan: Plan,
    published: Published | None,
    weights: Layer | None,
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
    model: ModelSource, published: Checkpoint, weights: Layer, dtype: str, text: Path | None
) -> Accuracy:
    """Compare the packed model with its float32 form, on a text or on what the model writes itself."""
    from prejit.compiler.models import registry
    from prejit.compiler.pipeline import accuracy

    assert isinstance(weights.content, Path)
    values = {name: published.read(name) for name in published.names}
    packed, out_in = accuracy.mapped(weights.content), model.files.out_in
    tokenizer = model.files.transformer / "tokenizer.json"
    if model.files.layout is None:
        exact = accuracy.Model(
            registry.decoder(model.config, out_in=out_in), values, registry.describe(model.config)
        )
        stored = accuracy.Model(model.module, packed, model.shape)
        named = None if text is None else (text.name, *accuracy.read_text(text, tokenizer))
        bos = getattr(model.config, "bos_token_id", None)
        bos = bos if isinstance(bos, int) and 0 <= bos < model.shape.vocab_size else 0
        return accuracy.of_decoder(dtype, exact, stored, named, bos)
    exact = accuracy.Model(registry.encoder(model.config, out_in=out_in), values)
    stored = accuracy.Model(model.module, packed)
    vocab_size, max_tokens = model.shape.vocab_size, model.shape.max_tokens
    if text is None:
        name, sentences = accuracy.RANDOM, accuracy.random_sentences(vocab_size, max_tokens)
    else:
        name, sentences = text.name, accuracy.read_sentences(text, tokenizer, max_tokens)
    return accuracy.of_encoder(dtype, exact, stored, name, *sentences)
