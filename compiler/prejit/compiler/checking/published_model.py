"""Compute the sizes of a published model by stored dtype, as a build would make it, without building.

Only config.json and the headers of the weights are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from prejit.compiler.base.json_file import read_json
from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.checkpoint.checkpoint import no_encoder, open_checkpoint, open_encoder
from prejit.compiler.models import config_file, image_config, model_registry
from prejit.compiler.models.families.decoders import TextDecoder
from prejit.compiler.models.families.encoder_table import ENCODERS
from prejit.compiler.models.families.family_table import DECODERS
from prejit.compiler.models.families.image_table import IMAGE_MODELS
from prejit.compiler.models.families.sentence_layout import read_layout
from prejit.compiler.models.layers.experts import ExpertMatrices
from prejit.compiler.models.layers.linear import Embedding
from prejit.compiler.models.parameters import flat_parameters

_BUILD_BYTES = 500_000_000
"""Private memory of the processes of a build beside the weight that it packs, on two CPUs. 1.24 and 8 billion
parameters in int8 and int4: 0.4 to 0.5 GB."""
_MODULES = "modules.json"
"""The file that a directory of sentence-transformers has."""


@dataclass(frozen=True)
class StoredSizes:
    """The sizes of a model whose matrices are stored in one dtype.

    Attributes:
        dtype: name of the dtype.
        weights_bytes: bytes of all parameters.
        read_bytes: bytes of the parameters that a decode step of one text reads: of a table of embeddings one
            row, and of a mixture the experts of one token.
        build_bytes: estimated private memory of a build at its peak: one weight is in memory at a time. Files
            that it reads, writes and maps need none.
    """

    dtype: str
    weights_bytes: int
    read_bytes: int
    build_bytes: int


@dataclass(frozen=True)
class PublishedModel:
    """A published model that a build accepts.

    Attributes:
        family: its model_type.
        section: the section of a manifest that builds it: `generate` or `encode`.
        parameters: numbers in all its tensors.
        tensors: number of its arrays; the matrices of all experts of a layer are one or two.
        positions: the maximum number of tokens of a text; 0: it reads images alone.
        cache_bytes: bytes that a token adds to a float32 KV cache; None: the model has none, or one about a
            source.
        sizes: its sizes by stored dtype.
        tokenizer: whether it has a tokenizer.json.
    """

    family: str
    section: str
    parameters: int
    tensors: int
    positions: int
    cache_bytes: int | None
    sizes: tuple[StoredSizes, ...]
    tokenizer: bool


def check_published(directory: Path, weights: Path | None) -> PublishedModel:
    """Return the sizes of a model in the Hugging Face layout.

    Raises:
        CheckpointError: a build refuses it: the family, a setting or a tensor is not supported, or tensors
            are missing. The error names each.
    """
    has_modules = (directory / _MODULES).is_file()
    folder = read_layout(directory).transformer if has_modules else directory
    content = read_json(folder / "config.json", "expected a directory in the Hugging Face layout")
    family = content.get("model_type") if isinstance(content, dict) else None
    is_decoder = family in DECODERS and not has_modules and not read_layout(directory).scores
    if weights is not None and not is_decoder:
        raise no_encoder(weights)
    if family in IMAGE_MODELS:
        pictures = image_config.load_images(directory)
        open_encoder(directory, images=True).names  # noqa: B018
        texts = image_config.describe_texts(pictures)
        modules = {dtype: image_config.make_images(pictures, dtype) for dtype in STORED_DTYPES}
        return _described("encode", str(family), texts.max_tokens if texts else 0, modules, folder)
    if family in ENCODERS and not is_decoder:
        source = config_file.load_encoder(directory)
        open_encoder(directory).names  # noqa: B018  # checks the tensors
        described = model_registry.describe_encoder(source)
        encoders = {dtype: model_registry.make_encoder(source, dtype) for dtype in STORED_DTYPES}
        return _described("encode", described.family, described.max_tokens, encoders, folder)
    config = config_file.load_config(directory)
    open_checkpoint(directory, weights=weights).names  # noqa: B018
    shape = model_registry.describe(config)
    decoders = {dtype: model_registry.make_decoder(config, dtype=dtype) for dtype in STORED_DTYPES}
    return _described("generate", shape.family, shape.max_positions, decoders, directory)


def _described(
    section: str, family: str, positions: int, modules: dict[str, Any], folder: Path
) -> PublishedModel:
    exact = flat_parameters(nnx.state(modules["float32"])).values()
    return PublishedModel(
        family,
        section,
        sum(math.prod(each.shape) for each in exact),
        len(exact),
        positions,
        _cache_bytes(modules["float32"]),
        tuple(_sizes(dtype, module) for dtype, module in modules.items()),
        (folder / "tokenizer.json").is_file(),
    )


def _cache_bytes(module: Any) -> int | None:
    if not hasattr(module, "make_cache"):
        return None

    def of(positions: int) -> int:
        return _bytes(jax.eval_shape(lambda: module.make_cache(1, positions, "float32")))

    return of(2) - of(1)


def _sizes(dtype: str, module: Any) -> StoredSizes:
    whole = _bytes(nnx.state(module))
    largest = max(_bytes(each) for each in jax.tree.leaves(nnx.state(module)))
    if dtype == "float32":  # a published matrix may have 16 bits, and is widened as a whole
        largest += largest // 2
    unread, parts = 0, dict(nnx.iter_modules(module))
    mixtures = (getattr(part, "mixture", None) for part in parts.values())
    chosen = next((each.routing.chosen for each in mixtures if each is not None), 0)
    has_head = any(path and path[-1] == "lm_head" for path in parts)
    # a table that is the head, too, is read whole; others are of positions or of layers
    tied = module.names.embedding if isinstance(module, TextDecoder) and not has_head else None
    for path, part in parts.items():
        if isinstance(part, ExpertMatrices):
            count = part.weight.shape[0]
            unread += _bytes(nnx.state(part)) * (count - chosen) // count
        elif isinstance(part, Embedding) and (has_head or (tied and path[-1] != tied)):
            rows = part.weight.shape[0]
            unread += _bytes(nnx.state(part)) * (rows - 1) // rows
    return StoredSizes(dtype, whole, whole - unread, _BUILD_BYTES + largest)


def _bytes(arrays: Any) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in jax.tree.leaves(arrays))
