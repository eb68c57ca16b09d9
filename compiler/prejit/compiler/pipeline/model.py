"""The manifest's model: which files it has, and what they say once they are read.

`find_model` looks at names and hashes alone. `read_model` imports flax and transformers, so only the step
that has to lower or pack something calls it: a build that changes nothing never does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prejit.compiler.checkpoint.checkpoint import Checkpoint, open_checkpoint, open_encoder
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.families.sentence_layout import SentenceLayout, read_layout
from prejit.compiler.native.library import KERNELS_ARCHITECTURE
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.errors import ManifestError
from prejit.runtime.machine.kept_files import Receipts

if TYPE_CHECKING:
    from prejit.compiler.lowering.cache import CacheLayout
    from prejit.compiler.lowering.user.own_decoder import OwnModel
    from prejit.compiler.models.layers.layer_config import DecoderConfig
    from prejit.compiler.models.parameters import Parametrized

MAX_PROGRAM_BYTES = 1 << 42
"""Largest size of a program's arrays in bytes, weights not counted: 4 TiB, more than any machine has. XLA is
slow or wrong far beyond it."""


@dataclass(frozen=True)
class ModelFiles:
    """A model directory.

    Attributes:
        directory: the directory.
        layout: the modules of an encoder; None: a decoder.
        out_in: whether all matrices are stored (out, in), as kernels read them.
        configuration: the files that decide what the model computes, by name, each with its digest.
    """

    directory: Path
    layout: SentenceLayout | None
    out_in: bool
    configuration: tuple[tuple[str, str], ...]

    @property
    def transformer(self) -> Path:
        """The directory of config.json and tokenizer.json; an encoder may keep them one level down."""
        return self.directory if self.layout is None else self.layout.transformer

    @property
    def matrices(self) -> str:
        """How matrices are stored, as an ingredient of keys."""
        return "out, in" if self.out_in else "each as XLA wants it"


@dataclass(frozen=True)
class ModelSource:
    """A model that was read: shapes, no weights.

    Attributes:
        files: its directory.
        config: a decoder's configuration, read by transformers; an encoder's `EncoderSource`.
        shape: a decoder's `DecoderConfig`; an encoder's `EncoderConfig`.
        module: the abstract flax module.
    """

    files: ModelFiles
    config: Any
    shape: Any
    module: Any


ReadModel = Callable[[], ModelSource]
"""Reads the model on the first call, and returns the same value on later ones."""


def uses_kernels(manifest: Manifest) -> bool:
    """Return whether programs may call kernels: those of a model on one device."""
    return manifest.model is not None and manifest.mesh is None


def stores_out_in(manifest: Manifest, targets: tuple[Target, ...]) -> bool:
    """Return whether matrices are stored (out, in), as kernels read them."""
    return uses_kernels(manifest) and targets[0].architecture == KERNELS_ARCHITECTURE


def find_model(manifest: Manifest, targets: tuple[Target, ...], directory: Path) -> ModelFiles:
    """Return the files of the manifest's model. Reads no tensor and imports no JAX.

    Args:
        manifest: the manifest.
        targets: the targets of the build. All have the architecture of the build host, so no other target
            changes how matrices are stored. Without a compiler for kernels XLA reads the same weights.
        directory: the model directory; beside a decoder of the user only that of its tokenizer.

    Raises:
        CheckpointError: an encoder has a module or a setting that prejit does not build.
        StoreError: a file of the configuration cannot be read.
    """
    if manifest.has_own_model:
        return ModelFiles(directory, None, out_in=False, configuration=())
    layout = None if manifest.encode is None else read_layout(directory)
    out_in = stores_out_in(manifest, targets)
    if layout is None:
        deciding: tuple[Path, ...] = (directory / "config.json",)
    else:
        deciding = tuple(dict.fromkeys((*layout.files, layout.transformer / "config.json")))
    return ModelFiles(directory, layout, out_in, file_digests(directory, deciding))


def open_weights(files: ModelFiles) -> Checkpoint:
    """Return the published weights; a tensor is read when it is used.

    Raises:
        CheckpointError: files are missing.
    """
    opened = open_checkpoint if files.layout is None else open_encoder
    return opened(files.directory, out_in=files.out_in)


def cache_dtype(manifest: Manifest) -> str:
    """Return the dtype of the KV cache; an encoder, which has none, computes in float32."""
    return "float32" if manifest.generate is None else manifest.generate.cache_dtype


def longest_context(manifest: Manifest) -> int | None:
    """Return a decoder's longest context, which chooses LongRoPE's factors for all its programs."""
    return None if manifest.generate is None else max(manifest.generate.context)


def longest_source(manifest: Manifest) -> int | None:
    """Return the number of places of the longest source of an encoder-decoder; None for other models."""
    return None if manifest.generate is None else max(manifest.generate.source, default=None)


def read_model(manifest: Manifest, files: ModelFiles) -> ModelSource:
    """Read a model's configuration and make its abstract module.

    Raises:
        CheckpointError: the configuration cannot be read, or asks for what prejit does not build.
    """
    from prejit.compiler.models import config_file, model_registry

    assert manifest.model is not None
    dtype = manifest.model.dtype
    if files.layout is not None:
        source = config_file.load_encoder(files.directory)
        encoder = model_registry.make_encoder(source, dtype, out_in=files.out_in)
        return ModelSource(files, source, model_registry.describe_encoder(source), encoder)
    config = config_file.load_config(files.directory)
    decoder = model_registry.make_decoder(
        config, longest_context(manifest), dtype, out_in=files.out_in
    )
    return ModelSource(
        files, config, model_registry.describe(config, cache_dtype(manifest)), decoder
    )


def check_model(
    manifest: Manifest, model: ModelSource, weights: Checkpoint, specs: Iterable[ProgramSpec]
) -> None:
    """Check in seconds what would fail after minutes: that programs can be made from a model.

    Args:
        manifest: the manifest.
        model: its model.
        weights: the published weights, which must fit the model.
        specs: the programs that have to be lowered.

    Raises:
        ManifestError: the model was made for smaller buckets, no machine has room for a program, or a mesh
            does not divide the model.
        CheckpointError: the weights do not fit config.json.
    """
    if manifest.encode is not None:
        longest = model.shape.max_tokens
        limit = f"{longest} tokens, which is what {model.files.directory} takes"
        for spec in specs:
            _check_longest(manifest, "encode.shapes", spec.bucket["length"], longest, limit)
            _check_room(manifest, spec, _encoder_bytes(model, spec))
    else:
        from prejit.compiler.models.parameters import parametrized

        config = model.files.directory / "config.json"
        _check_source(manifest, getattr(model.module, "source", None), f"{config} is of")
        limit = f"{model.shape.max_positions}, the positions that {config} gives the model"
        _check_decoder(manifest, parametrized(model.module), model.shape, specs, limit)
    if manifest.mesh is not None and manifest.encode is None:
        from prejit.compiler.models.sharding import check_mesh

        check_mesh(manifest.mesh, model.module, manifest.where, config)
    _ = weights.names  # raises an error that lists every tensor that does not fit


def check_own_model(
    manifest: Manifest, model: OwnModel, shape: DecoderConfig, specs: Iterable[ProgramSpec]
) -> None:
    """Check in seconds what would fail after minutes: that programs can be made from a user's decoder.

    Args:
        manifest: the manifest.
        model: its decoder.
        shape: what lowering needs to know of it.
        specs: the programs of the manifest.

    Raises:
        ManifestError: the decoder was made for smaller buckets, or no machine has room for a program, or it
            reads a source and the manifest gives no sizes of one.
        BuildError: its cache does not follow rows and positions, or its code raises.
    """
    from prejit.compiler.lowering.user.own_decoder import CHECK_MODEL, check_call

    limit = f"{shape.max_positions}, the max_positions of {model.label}"
    own = [spec for spec in specs if spec.kind != "call"]
    with model.modules.tracing(
        f"{manifest.where}: cannot make the cache of {model.label}", CHECK_MODEL
    ):
        bound = model.stored.model.bind(dict(model.stored.model.weights))
        source = bound.source if model.reads_source else None
        _check_source(manifest, source, f"{model.label} is")
        layout = _check_decoder(manifest, model.stored.model, shape, own, limit)
        smallest = own[0].bucket
        cache = layout.shapes(smallest["batch"], smallest["context"])
    with model.modules.tracing(f"{manifest.where}: cannot call {model.label}", CHECK_MODEL):
        check_call(model, cache, manifest.where)


def _check_source(manifest: Manifest, source: Callable[[int, int], Any] | None, what: str) -> None:
    """Check that the manifest has sizes of sources where the model reads one, and that it reads these.

    Args:
        manifest: the manifest.
        source: `EncoderDecoder.source` of the model; None: it is a decoder.
        what: the beginning of a sentence about the model, for errors.
    """
    assert manifest.generate is not None
    sizes = manifest.generate.source
    if source is not None and not sizes:
        raise ManifestError(
            f"{manifest.where}: generate.source: missing; {what} an encoder-decoder",
            hint="give the numbers of places that its encoder reads, such as source = [64, 512]",
        )
    if sizes and source is None:
        raise ManifestError(
            f"{manifest.where}: generate.source: expected none, because {what} a decoder that reads prompts "
            "alone",
            hint="remove it",
        )
    for size in sizes:
        try:
            assert source is not None
            source(1, size)
        except ManifestError as error:
            raise ManifestError(f"{manifest.where}: {error}", hint=error.hint) from None


def _check_decoder(
    manifest: Manifest,
    model: Parametrized,
    shape: DecoderConfig,
    specs: Iterable[ProgramSpec],
    limit: str,
) -> CacheLayout:
    """Check that a decoder was made for its buckets, and that a machine can have room for the programs.

    Returns:
        Its cache.
    """
    import jax.numpy as jnp

    from prejit.compiler.lowering.cache import POSITIONS, cache_layout

    specs = tuple(specs)
    for spec in specs:
        context = spec.bucket["context"]
        _check_longest(manifest, "generate.context", context, shape.max_positions, limit)
    layout = cache_layout(model, shape, longest_source(manifest))
    contexts = () if manifest.generate is None else manifest.generate.context
    if len(contexts) > 1 and not any(POSITIONS in array.variables for array in layout.arrays):
        raise ManifestError(
            f"{manifest.where}: generate.context: expected one size, because the cache of {shape.family} has "
            f"no positions and is as large for any; found {list(contexts)}",
            hint=f"give the longest text that you want to allow: context = [{max(contexts)}]",
        )
    for spec in specs:
        rows = spec.bucket["batch"]
        cache = sum(
            math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
            for array in layout.sized(rows, spec.bucket["context"])
        )
        # Logits after each token of a draft, biases, counts of tokens.
        others = 4 * rows * shape.vocab_size * (3 + spec.bucket.get("draft", 0))
        _check_room(manifest, spec, cache + others)
    return layout


def _check_longest(
    manifest: Manifest, section: str, found: int, longest: int | None, limit: str
) -> None:
    if longest is not None and found > longest:
        raise ManifestError(
            f"{manifest.where}: {section}: expected at most {limit}; found {found}",
            hint="give smaller sizes, or a model that was trained for longer texts",
        )


def _check_room(manifest: Manifest, spec: ProgramSpec, needed: int) -> None:
    """Check the size of a program's arguments and results in bytes, weights not counted."""
    if needed > MAX_PROGRAM_BYTES:
        section = "encode" if manifest.encode is not None else "generate"
        raise ManifestError(
            f"{manifest.where}: {section}: expected programs whose arrays take at most "
            f"{MAX_PROGRAM_BYTES >> 40} TiB, found {spec.name}, whose arrays take {needed >> 40} TiB",
            hint="give a smaller batch, or a smaller context",
        )


def _encoder_bytes(model: ModelSource, spec: ProgramSpec) -> int:
    config, length = model.config.config, spec.bucket["length"]
    heads = config.num_attention_heads * length
    size: int = 4 * spec.bucket["batch"] * length * (config.hidden_size + heads)
    return size


def file_digests(directory: Path, files: Iterable[Path]) -> tuple[tuple[str, str], ...]:
    """Return files by their names in a directory, each with its digest."""
    return tuple((str(file.relative_to(directory)), file_digest(file)) for file in files)


def file_digest(path: Path) -> str:
    """Return the digest of a file: from a receipt, if the file did not change since it was hashed."""
    receipts = Receipts(path)  # of this file alone: saving drops what it was not asked for
    digest = receipts.digest_of(path)
    receipts.save()
    return digest
