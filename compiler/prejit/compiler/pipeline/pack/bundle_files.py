"""The bytes of a bundle's files: weights, packs of programs, manifests and the index."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.store.build_cache_key import Key
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import BuildError, RejectError
from prejit.runtime.format.bundle_schema import Config, Descriptor, ImageManifest, Segment
from prejit.runtime.format.checks.call_programs import check_programs
from prejit.runtime.format.checks.layers import (
    GAP_PREFIX,
    SAFETENSORS_DTYPES,
    WEIGHTS_ALIGNMENT_BYTES,
    check_weights,
)
from prejit.runtime.format.checks.oci import check_index, check_manifest, target_of
from prejit.runtime.format.checks.program_table import (
    check_chunks_layers,
    check_config,
    check_kernels_layer,
    check_packs,
    check_weight_sets,
)
from prejit.runtime.format.checks.seldom_parts import check_library_layers, check_recorded_layer
from prejit.runtime.format.index_writing import encode_index, oci_platform
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    ATTACHED_TYPES,
    BUNDLE_NAME,
    CONFIG_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    LIBRARY_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    PARTS_MEDIA_TYPE,
    REF_NAME,
    REQUIREMENT,
    STATEMENT_MEDIA_TYPE,
    TITLE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.release_limits import ReleaseLimits, limits_annotation

if TYPE_CHECKING:
    from prejit.compiler.native.kernel_library import KernelLibrary
    from prejit.compiler.pipeline.target_tools import ReadLibrary
    from prejit.compiler.store.cached_files import BlobWriter
    from prejit.compiler.store.store_interface import Store

_SAFETENSORS_NAMES = {numpy: name for name, (numpy, _) in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of the weights layer. The dtype is NumPy's or ml_dtypes' name.

    `read` returns the values, C-contiguous; it is called once, when they are written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class PackedLayer:
    """A blob of a bundle: in memory, or a file."""

    media_type: str
    digest: str
    size: int
    content: bytes | Path
    title: str

    def descriptor(self) -> Descriptor:
        """Return the layer's entry in a manifest."""
        return Descriptor(self.media_type, self.digest, self.size, annotations={TITLE: self.title})


class LostFramesError(BuildError):
    """The store has lost the compressed forms of programs, whose names are `names`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{', '.join(self.names)}: expected the compressed form in the build cache, found it damaged "
            "or missing",
            hint="build again: it is made anew",
        )


def layer(media_type: str, content: bytes, title: str) -> PackedLayer:
    """Return a layer of bytes in memory."""
    return PackedLayer(media_type, digest_of(content), len(content), content, title)


def kernels_layer(library: KernelLibrary, cache: Store) -> PackedLayer:
    """Return the layer of a library of kernels.

    Raises:
        BuildError: the store has lost it.
    """
    content = cache.read_blob(library.digest)
    if content is None:
        raise BuildError("the kernels are gone from the build cache", hint="build again")
    return layer(KERNELS_MEDIA_TYPE, content, "kernels.so")


def library_layer(library: ReadLibrary) -> PackedLayer:
    """Return the layer of a library of the user. Two libraries may have files of one name."""
    digest, name = library.described.digest, library.described.name
    title = f"{digest.removeprefix('sha256:')[:16]}-{name}"
    return PackedLayer(LIBRARY_MEDIA_TYPE, digest, len(library.content), library.content, title)


def write_weights(tensors: Iterable[PackedTensor], out: BlobWriter) -> None:
    """Write a safetensors file in which every tensor starts at a multiple of 64 bytes.

        8 bytes: size of the header | header: JSON, padded with spaces | tensors

    safetensors allows no holes, so a gap is a tensor of its own. Any reader of safetensors can read the file.
    One tensor is in memory at a time.

    Raises:
        BuildError: safetensors has no such dtype, or a tensor has other values than announced.
    """
    tensors = list(tensors)
    alignment = WEIGHTS_ALIGNMENT_BYTES
    header: dict[str, Any] = {}
    offset = 0
    for tensor in tensors:
        if gap := -offset % alignment:
            header[f"{GAP_PREFIX}{len(header)}"] = _entry("U8", (gap,), offset, offset + gap)
            offset += gap
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise BuildError(f"{tensor.name}: weights of {tensor.dtype} cannot be packed")
        name = _SAFETENSORS_NAMES[tensor.dtype]
        size = SAFETENSORS_DTYPES[name][1] * int(np.prod(tensor.shape, dtype=np.int64))
        header[tensor.name] = _entry(name, tensor.shape, offset, offset + size)
        offset += size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    encoded += b" " * (-(8 + len(encoded)) % alignment)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    data = out.size
    for tensor in tensors:
        out.write(bytes(-(out.size - data) % alignment))
        values = tensor.read()
        if values.shape != tensor.shape or values.dtype.name != tensor.dtype:
            raise BuildError(
                f"{tensor.name}: expected {tensor.dtype}{list(tensor.shape)}, "
                f"found {values.dtype}{list(values.shape)}"
            )
        out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def pack(
    media_type: str, title: str, frames: Mapping[str, Segment], cache: Store
) -> tuple[PackedLayer, dict[str, Segment]]:
    """Return a layer of zstd frames one behind the other, which is a file of the store.

    No more than one frame is in memory. The store keeps the layer, so that a build which changes nothing
    reads no frame. Equal frames are stored once.

    `frames` are by name of program, and their offsets are ignored. For the other arguments see
    `PackedLayer`.

    Returns:
        The layer, and the frames with their offsets.

    Raises:
        LostFramesError: the store has lost frames.
        BuildError: the store has lost the layer.
    """
    once = {frame.digest: frame for frame in frames.values()}
    offsets = dict(zip(once, accumulate((f.size for f in once.values()), initial=0), strict=False))
    key = Key("pack", title, (("frames", digest_of(to_json(list(once)))),))
    with cache.making(key):
        result = cache.get(key, verify=True)
        if result is None:
            lost = []
            with cache.blob_writer() as blob:
                for digest in once:
                    if (stored := cache.read_blob(digest)) is None:
                        lost.append(digest)
                    elif not lost:
                        blob.write(stored)
                if lost:
                    raise LostFramesError(
                        name for name, frame in frames.items() if frame.digest in lost
                    )
            result = {"digest": blob.digest, "size": blob.size}
            cache.put(key, result, blobs=[blob.digest])
    path = cache.blob_path(result["digest"])
    if path is None:
        raise BuildError(f"{title} is gone from the build cache", hint="build again")
    placed = {name: replace(frame, offset=offsets[frame.digest]) for name, frame in frames.items()}
    return PackedLayer(media_type, result["digest"], result["size"], path, title), placed


@dataclass(frozen=True)
class PackedTarget:
    """The part of a bundle for one target: the program table, and the layers in the order of its manifest."""

    config: Config
    layers: tuple[PackedLayer, ...]


DESCRIPTIONS = (PARTS_MEDIA_TYPE, STATEMENT_MEDIA_TYPE)
"""The artifact types that each build and each recording attaches to its bundle."""


def assemble(
    name: str,
    targets: Iterable[PackedTarget],
    attached: Iterable[str] = (),
    slo: ReleaseLimits | None = None,
) -> tuple[bytes, dict[str, bytes | Path]]:
    """Return the index of a bundle and its blobs by digest. Equal targets give equal bytes.

    `attached` are the artifact types that will be attached to the bundle, which `prejit verify` then expects;
    `slo` are the limits of a release that the bundle carries.
    """
    noted = limits_annotation(slo)
    if attached:
        noted[ATTACHED_TYPES] = ",".join(sorted(attached))
    blobs: dict[str, bytes | Path] = {}
    descriptors = []
    for target in targets:
        config = to_json(target.config)
        manifest = to_json(
            ImageManifest(
                2,
                MANIFEST_MEDIA_TYPE,
                ARTIFACT_TYPE,
                Descriptor(CONFIG_MEDIA_TYPE, digest_of(config), len(config)),
                tuple(layer.descriptor() for layer in target.layers),
                {BUNDLE_NAME: name, REF_NAME: target.config.target, **noted},
            )
        )
        blobs[digest_of(config)] = config
        blobs[digest_of(manifest)] = manifest
        blobs |= {layer.digest: layer.content for layer in target.layers}
        needs = target.config.requirement
        descriptors.append(
            Descriptor(
                MANIFEST_MEDIA_TYPE,
                digest_of(manifest),
                len(manifest),
                artifactType=ARTIFACT_TYPE,
                platform=oci_platform(needs.architecture),
                annotations={
                    REF_NAME: target.config.target,
                    REQUIREMENT: to_json(needs).decode("ascii"),
                },
            )
        )
    return encode_index(name, tuple(descriptors)), blobs


def check_readable(index: bytes, blobs: dict[str, bytes | Path]) -> None:
    """Check the tables of a bundle as `load` will, so that no build writes what no reader accepts.

    Every line is read, also those that `load` leaves until a program runs. No large layer is hashed.

    Raises:
        BuildError: a layer or a table is larger than readers accept, or contradicts itself.
    """
    path = "the bundle's index"
    try:
        read = check_index(index, path)
        for descriptor in read.manifests:
            target, needs = target_of(descriptor, path)
            content = blobs[descriptor.digest]
            assert isinstance(content, bytes)
            manifest = check_manifest(content, target)
            config = blobs[manifest.config.digest]
            assert isinstance(config, bytes)
            table = check_config(config, target, needs, target)
            check_kernels_layer(table, manifest, target)
            check_library_layers(table, manifest, target)
            check_chunks_layers(table, manifest, target)
            check_recorded_layer(table, manifest, target)
            check_packs(table, manifest, target)
            check_programs(table, target)
            shapes = {}
            if manifest.has_layer(WEIGHTS_MEDIA_TYPE):
                weights = blobs[manifest.layer(WEIGHTS_MEDIA_TYPE).digest]
                shapes = _shapes(weights, target)
            check_weight_sets(table, shapes, target)
    except RejectError as error:
        raise BuildError(f"no reader would take this bundle: {error}") from error


def _shapes(weights: bytes | Path, target: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a weights layer, whose header a reader must accept."""
    if isinstance(weights, bytes):
        found = check_weights(memoryview(weights), target)
    else:
        with (
            weights.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            found = check_weights(view, target)
    return {name: tensor.shape for name, tensor in found.items()}
