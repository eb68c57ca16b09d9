"""The manifest's model: which files it has, and what they say once they are read.

`find_model` looks at names and hashes alone. `read_model` imports flax and transformers, so only the step
that has to lower or pack something calls it: a build that changes nothing never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.checkpoint.checkpoint import Checkpoint, open_checkpoint, open_encoder
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.encoders.sentence_layout import SentenceLayout, read_layout
from prejit.compiler.native.library import KERNELS_ARCHITECTURE
from prejit.runtime.errors import ManifestError
from prejit.runtime.machine.targets import Target
from prejit.runtime.store.receipts import Receipts

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
    """Return whether programs may call kernels: those of a published model on one device."""
    return manifest.model is not None and not manifest.has_own_model and manifest.mesh is None


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
    out_in = uses_kernels(manifest) and targets[0].architecture == KERNELS_ARCHITECTURE
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


def read_model(manifest: Manifest, files: ModelFiles) -> ModelSource:
    """Read a model's configuration and make its abstract module.

    Raises:
        CheckpointError: the configuration cannot be read, or asks for what prejit does not build.
    """
    from prejit.compiler.models import config_file, registry

    assert manifest.model is not None
    dtype = manifest.model.dtype
    if files.layout is not None:
        source = config_file.load_encoder(files.directory)
        encoder = registry.make_encoder(source, dtype, out_in=files.out_in)
        return ModelSource(files, source, registry.describe_encoder(source), encoder)
    config = config_file.load_config(files.directory)
    decoder = registry.make_decoder(config, longest_context(manifest), dtype, out_in=files.out_in)
    return ModelSource(files, config, registry.describe(config, cache_dtype(manifest)), decoder)


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
    for spec in specs:
        _check_size(manifest, model, spec)
    if manifest.mesh is not None and manifest.encode is None:
        from prejit.compiler.models.sharding import check_mesh

        config = model.files.directory / "config.json"
        check_mesh(manifest.mesh, model.module, model.shape, manifest.where, config)
    _ = weights.names  # raises an error that lists every tensor that does not fit


def _check_size(manifest: Manifest, model: ModelSource, spec: ProgramSpec) -> None:
    """Check that the model was made for a bucket, and that a machine can have room for the program."""
    directory = model.files.directory
    if manifest.encode is not None:
        section, found, longest = "encode.shapes", spec.bucket["length"], model.shape.max_tokens
        limit = f"{longest} tokens, which is what {directory} takes"
    else:
        section, found = "generate.context", spec.bucket["context"]
        longest = model.shape.max_positions
        limit = f"{longest}, the positions that {directory / 'config.json'} gives the model"
    if longest is not None and found > longest:
        raise ManifestError(
            f"{manifest.where}: {section}: expected at most {limit}; found {found}",
            hint="give smaller sizes, or a model that was trained for longer texts",
        )
    needed = _array_bytes(manifest, model, spec)
    if needed > MAX_PROGRAM_BYTES:
        raise ManifestError(
            f"{manifest.where}: {section.partition('.')[0]}: expected programs whose arrays take at "
            f"most {MAX_PROGRAM_BYTES >> 40} TiB, found {spec.name}, whose arrays take "
            f"{needed >> 40} TiB",
            hint="give a smaller batch, or a smaller context",
        )


def _array_bytes(manifest: Manifest, model: ModelSource, spec: ProgramSpec) -> int:
    """Return the size of a program's arguments and results in bytes, weights not counted."""
    bucket, rows = spec.bucket, spec.bucket["batch"]
    if manifest.encode is not None:
        config = model.config.config
        tokens = rows * bucket["length"]
        return 4 * tokens * (config.hidden_size + config.num_attention_heads * bucket["length"])
    shape = model.shape
    heads = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size
    kv_cache = rows * bucket["context"] * heads * (2 if shape.cache_dtype == "bfloat16" else 4)
    # Logits after each token of a draft, biases, counts of tokens.
    return kv_cache + 4 * rows * shape.vocab_size * (3 + bucket.get("draft", 0))


def file_digests(directory: Path, files: Iterable[Path]) -> tuple[tuple[str, str], ...]:
    """Return files by their names in a directory, each with its digest."""
    return tuple((str(file.relative_to(directory)), file_digest(file)) for file in files)


def file_digest(path: Path) -> str:
    """Return the digest of a file: from a receipt, if the file did not change since it was hashed."""
    receipts = Receipts(path.parent)
    digest = receipts.digest_of(path)
    receipts.save()
    return digest
