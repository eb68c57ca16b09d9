"""The manifest's model: which files it has, and what they say once they are read.

`find_model` looks at names and hashes alone. `read_model` imports flax and transformers, so only the step
that has to lower or pack something calls it: a build that changes nothing never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.base.suggestions import no_such_path
from prejit.compiler.checkpoint.checkpoint import (
    Checkpoint,
    no_encoder,
    open_checkpoint,
    open_encoder,
)
from prejit.compiler.checkpoint.tensor_files import Reading, unwatched
from prejit.compiler.manifest.manifest import Encode, Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.families.image_processing import processing_files, sight_files
from prejit.compiler.models.families.sentence_layout import SentenceLayout, read_layout
from prejit.compiler.native.kernel_library import KERNELS_ARCHITECTURE
from prejit.compiler.targets.target_classes import Target
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError, ManifestError
from prejit.runtime.machine.kept_files import Receipts

if TYPE_CHECKING:
    from prejit.compiler.models.layers.row_adapters import AdapterStacks

_WITHOUT_KERNELS = ("copy", "draft-copy", "call")
"""The kinds of programs that call no kernels."""


@dataclass(frozen=True)
class ModelFiles:
    """A model directory.

    Attributes:
        layout: the modules of an encoder; None: a decoder.
        out_in: whether all matrices are stored (out, in), as kernels read them.
        configuration: the files that decide what the model computes, by name, each with its digest.
        adapters: directories of adapters, which are merged into its weights in this order.
        weights: the .gguf file that the manifest names; None: it names the directory.
        images: whether it reads images.
        groups: those of int4, which hold what was published in four bits.
        asked: what the manifest says of an encoder's results; empty: nothing.
        chosen: the dtypes of an encoder's matrices that differ from the manifest's, by their place in every
            layer; None: they have still to be measured.
    """

    directory: Path
    layout: SentenceLayout | None
    out_in: bool
    configuration: tuple[tuple[str, str], ...]
    adapters: tuple[Path, ...] = ()
    weights: Path | None = None
    images: bool = False
    groups: Groups = GROUPS_OF_32
    asked: str = ""
    chosen: tuple[tuple[str, str], ...] | None = ()

    @property
    def transformer(self) -> Path:
        """The directory of config.json and tokenizer.json; an encoder may keep them one level down."""
        return self.directory if self.layout is None else self.layout.transformer

    @property
    def matrices(self) -> str:
        """How matrices are stored, and what else the manifest says of them, as an ingredient of keys."""
        order = "out, in" if self.out_in else "each as XLA wants it"
        if self.groups != GROUPS_OF_32:
            order += f"; groups of {self.groups.size}{' with zero points' * self.groups.zeros}"
        chosen = (f"{name} in {dtype}" for name, dtype in self.chosen or ())
        return "; ".join(each for each in (order, self.asked, *chosen) if each)

    @property
    def chooses(self) -> bool:
        """True if a build may give matrices more bits than the manifest says: of an encoder of texts."""
        return self.layout is not None and not self.images


@dataclass(frozen=True)
class ModelSource:
    """A model that was read: shapes, no weights.

    Attributes:
        config: a decoder's configuration, read by transformers; an encoder's `EncoderSource`, or the
            `ImageSource` of one that reads images.
        shape: a decoder's `DecoderConfig`; an encoder's `EncoderConfig`; None: it reads images alone.
        module: the abstract flax module.
        adapters: the room for adapters that are kept apart from its weights; None: there is none.
        images: a `bundle_schema.Images`; None: it reads no images.
    """

    files: ModelFiles
    config: Any
    shape: Any
    module: Any
    adapters: AdapterStacks | None = None
    images: Any = None


def uses_kernels(manifest: Manifest) -> bool:
    """Return whether programs may call kernels: those of a model on one device."""
    return manifest.model is not None and manifest.mesh is None


def calls_kernels(manifest: Manifest, spec: ProgramSpec) -> bool:
    """Return whether a program has products or norms that kernels may compute."""
    return uses_kernels(manifest) and spec.kind not in _WITHOUT_KERNELS


def stores_out_in(manifest: Manifest, targets: tuple[Target, ...]) -> bool:
    """Return whether matrices are stored (out, in), as kernels read them."""
    return uses_kernels(manifest) and targets[0].architecture == KERNELS_ARCHITECTURE


def find_model(manifest: Manifest, targets: tuple[Target, ...], directory: Path) -> ModelFiles:
    """Return the files of the manifest's model. Reads no tensor and imports no JAX.

    All targets have the architecture of the build host, so no other target changes how matrices are stored.
    Without a compiler for kernels XLA reads the same weights. Beside a decoder of the user the directory is
    only that of its tokenizer.

    Raises:
        ManifestError: the directory of an adapter does not exist, or the model's has no config.json.
        CheckpointError: an encoder has a module or a setting that prejit does not build.
        StoreError: a file of the configuration cannot be read.
    """
    if manifest.has_own_model:
        return ModelFiles(directory, None, out_in=False, configuration=())
    layout = None if manifest.encode is None else read_layout(directory, manifest.encode)
    out_in = stores_out_in(manifest, targets)
    config = (directory if layout is None else layout.transformer) / "config.json"
    if not config.is_file():
        raise ManifestError(
            f"{manifest.where}: source: expected a directory in the Hugging Face layout, "
            f"found no {config}",
            hint="`hf download org/name --local-dir DIR` fetches one",
        )
    if layout is None:
        sight = sight_files(directory) if manifest.reads_images else ()
        deciding: tuple[Path, ...] = (config, *sight)
    else:
        processing: list[Path] = []
        if manifest.reads_images:  # padding is the tokenizer's
            tokenizer = directory / "tokenizer.json"
            processing = [*processing_files(directory), *([tokenizer] * tokenizer.is_file())]
        deciding = tuple(dict.fromkeys((*layout.files, config, *processing)))
    assert manifest.model is not None
    source = directory / Path(manifest.model.source or "").name
    weights = source if source.suffix == ".gguf" and source.is_file() else None
    files = ModelFiles(
        *(directory, layout, out_in, file_digests(directory, deciding)),
        adapters=_adapters(manifest),
        weights=weights,
        images=manifest.reads_images,
        asked="" if layout is None else _asked(manifest.encode),
    )
    if manifest.model.dtype != "int4":
        return files
    return replace(files, groups=open_weights(files).groups)


def _asked(encode: Encode | None) -> str:
    asked = () if encode is None else (encode.answers, *encode.heads)
    return ", ".join(str(each) for each in asked if each)


def _adapters(manifest: Manifest) -> tuple[Path, ...]:
    assert manifest.model is not None
    for place, name in enumerate(manifest.model.adapters):
        if not (manifest.directory / name).is_dir():
            raise ManifestError(
                f"{manifest.where}: model.adapters[{place}]: "
                f"{no_such_path('directory', name, manifest.directory)}",
                hint="`hf download org/name --local-dir DIR` fetches an adapter",
            )
    return tuple(map(manifest.resolve, manifest.model.adapters))


def open_weights(files: ModelFiles, reading: Reading = unwatched) -> Checkpoint:
    """Return the published weights; a tensor is read when it is used.

    `reading` is as of `open_checkpoint`.

    Raises:
        CheckpointError: files are missing.
    """
    if files.layout is None:
        opened = partial(open_checkpoint, weights=files.weights, images=files.images)
    elif files.weights is not None:
        raise no_encoder(files.weights)
    else:
        opened = partial(open_encoder, images=files.images, layout=files.layout)
    return opened(files.directory, out_in=files.out_in, adapters=files.adapters, reading=reading)


def file_digest(path: Path) -> str:
    """Return the digest of a file: from a receipt, if the file did not change since it was hashed."""
    receipts = Receipts(path)  # of this file alone: saving drops what it was not asked for
    digest = receipts.digest_of(path)
    receipts.save()
    return digest


def weight_digests(
    weights: Checkpoint, digest: Callable[[Path], str]
) -> tuple[tuple[str, str], ...]:
    """Return the files that decide the weights, each with its digest: those of the model, then of adapters.

    An adapter is named by its place, as two of the same content in another order may give other weights.
    """
    adapters = (
        (f"adapter {place // 2}: {file.name}", digest(file))
        for place, file in enumerate(weights.adapter_files)
    )
    return (*file_digests(weights.directory, weights.files, digest), *adapters)


def named_draft(files: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the files of a draft model under names that the model's own do not have."""
    return tuple((f"draft: {name}", digest) for name, digest in files)


def cache_dtype(manifest: Manifest) -> str:
    """Return the dtype of the KV cache; an encoder, which has none, computes in float32.

    By default it is no more exact than the weights, which round more than bfloat16 does. A model of the
    user's own may compute with the cache in a way that allows float32 alone.
    """
    generate, model = manifest.generate, manifest.model
    if generate is not None and generate.cache_dtype is not None:
        return generate.cache_dtype
    if generate is None or model is None or model.module is not None or model.dtype == "float32":
        return "float32"
    return "bfloat16"


def longest_context(manifest: Manifest) -> int | None:
    """Return a decoder's longest context, which chooses LongRoPE's factors for all its programs."""
    return None if manifest.generate is None else max(manifest.generate.context)


def longest_source(manifest: Manifest) -> int | None:
    """Return the number of places of the longest source of an encoder-decoder; None for other models."""
    return None if manifest.generate is None else max(manifest.generate.source, default=None)


def int4_text(manifest: Manifest, files: ModelFiles | None) -> Path | None:
    """Return the text that decides how matrices of a published model are rounded to int4; None: nothing."""
    model = manifest.model
    if model is None or model.evaluation is None or not may_round_to_int4(manifest, files):
        return None
    return manifest.resolve(model.evaluation)


def may_round_to_int4(manifest: Manifest, files: ModelFiles | None) -> bool:
    """Return whether a text may decide how matrices are rounded to int4.

    It decides none of encoders of images, nor of encoder-decoders.
    """
    model = manifest.model
    if model is None or model.dtype != "int4" or files is None:
        return False
    return (files.layout is None or files.chooses) and longest_source(manifest) is None


def chooses_bits(manifest: Manifest, files: ModelFiles) -> bool:
    """Return whether a build measures which dtypes the matrices of an encoder have."""
    if manifest.model is None or not manifest.model.accuracy:
        return False
    return files.chooses and manifest.model.dtype in ("int8", "int4")


def read_model(manifest: Manifest, files: ModelFiles) -> ModelSource:
    """Read a model's configuration and make its abstract module.

    Raises:
        CheckpointError: the configuration cannot be read, or asks for what prejit does not build.
        ManifestError: the model does not take the adapters, or the cache, that the manifest asks for.
    """
    from prejit.compiler.models import config_file, image_config, model_registry

    assert manifest.model is not None
    dtype = manifest.model.dtype
    stored: dict[str, Any] = {"out_in": files.out_in, "groups": files.groups}
    if files.images and files.layout is not None:
        pictures = image_config.load_images(files.directory)
        module = image_config.make_images(pictures, dtype, **stored)
        texts = image_config.describe_texts(pictures)
        return ModelSource(
            files, pictures, texts, module, images=image_config.describe_images(pictures)
        )
    if files.layout is not None:
        source = config_file.load_encoder(files.directory, files.layout)
        encoder = model_registry.make_encoder(
            source, dtype, **stored, chosen=dict(files.chosen or ())
        )
        return ModelSource(files, source, model_registry.describe_encoder(source), encoder)
    config = config_file.load_config(files.directory, images=files.images)
    decoder = model_registry.make_decoder(config, longest_context(manifest), dtype, **stored)
    if cache_dtype(manifest) == "int8" and getattr(decoder, "keeps_latents", False):
        raise ManifestError(
            f"{manifest.where}: generate.cache_dtype: expected float32 or bfloat16, because a "
            f"{config.model_type} keeps latents in place of keys and values; found int8",
            hint='cache_dtype = "bfloat16": latents are small already',
        )
    room = None
    if (wanted := manifest.adapters) is not None:
        from prejit.compiler.models.decoder_matrices import make_room

        room = make_room(decoder, wanted.slots, wanted.rank, wanted.targets, manifest.where)
    shape = model_registry.describe(config, cache_dtype(manifest))
    images = None
    if files.images:
        from prejit.compiler.models import image_config

        images = image_config.describe_sight(config.sight, config.hidden_size)
    return ModelSource(files, config, shape, decoder, room, images)


def check_configuration(files: ModelFiles) -> None:
    """Check, once they were read, that the files of a configuration are those that keys have the digests of.

    Raises:
        CheckpointError: one changed since.
        StoreError: one is gone.
    """
    now = file_digests(files.directory, (files.directory / name for name, _ in files.configuration))
    if changed := [name for name, _ in {*files.configuration} - {*now}]:
        raise CheckpointError(
            f"{files.directory}: {few(sorted(changed), 8)}: it changed while the build read it",
            hint="build again when the file is whole",
        )


def file_digests(
    directory: Path, files: Iterable[Path], digest: Callable[[Path], str] = file_digest
) -> tuple[tuple[str, str], ...]:
    """Return files by their names in a directory, each with its digest."""
    return tuple((str(file.relative_to(directory)), digest(file)) for file in files)
