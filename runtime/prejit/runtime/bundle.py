"""The bundle format: what the files of a bundle say. No JAX, no file access.

A bundle is an OCI image layout; docs/bundle-format.md describes it for a second implementation.

    oci-layout                    {"imageLayoutVersion":"1.0.0"}
    index.json                    one descriptor for each target, its requirement in the annotations
    blobs/sha256/<digest>         manifest -> config (the program table) + layers

Layers are told apart by media type. Executables and portable programs are *packs*: zstd frames behind
each other, one frame a program, addressed by the program table.

All JSON here is canonical (sorted keys, no spaces, ASCII, no floats) and is read strictly: bytes that
differ in any way from what a writer writes are rejected, so no two spellings of one bundle exist.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import reprlib
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from prejit.runtime.errors import RejectError

FORMAT_VERSION = 4
"""Raised when a reader of the last version could no longer read what we write.

1 (2026-11-20): the first.
2 (2026-11-20): requirements of accelerators; portable programs for several platforms; meshes. A reader of
    2 reads 1 as it is: every new key may be missing.
3 (2026-11-20): decode runs several steps; more sampling inputs; programs of the kinds `verify` and `copy`;
    encoders (`embed`, `layer`, `pool`); chat templates. A reader of 3 reads 1 and 2: programs are called by
    the names of their arguments, and what an older program does not take cannot be asked for.
4 (2026-11-20): native kernels, a layer that executables may call; the requirement `glibc`. A reader of 4
    reads 1 to 3 as they are: every new key may be missing.
"""
READABLE_FORMATS = (1, 2, 3, 4)

OCI_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
INDEX_MEDIA_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_MEDIA_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.prejit.bundle.v1"
CONFIG_MEDIA_TYPE = "application/vnd.prejit.config.v1+json"
EXECUTABLES_MEDIA_TYPE = "application/vnd.prejit.executables.v1+zstd"
KERNELS_MEDIA_TYPE = "application/vnd.prejit.kernels.v1+elf"
"""A shared library with the native kernels that executables of a CPU target call."""
PORTABLE_MEDIA_TYPE = "application/vnd.prejit.stablehlo.v1+zstd"
WEIGHTS_MEDIA_TYPE = "application/vnd.prejit.weights.v1.safetensors"
TOKENIZER_MEDIA_TYPE = "application/vnd.prejit.tokenizer.v1+json"
CHAT_MEDIA_TYPE = "application/vnd.prejit.chat.v1+json"
"""A Chat: the model's template for conversations."""
GENERATION_MEDIA_TYPE = "application/vnd.prejit.generation-config.v1+json"
LICENSE_MEDIA_TYPE = "application/vnd.prejit.license.v1+text"
LAYER_MEDIA_TYPES = (
    EXECUTABLES_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
)

REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"
BUNDLE_NAME = "dev.prejit.name"
BUNDLE_FORMAT = "dev.prejit.format"
INDEX_DIGEST = "dev.prejit.index-digest"
REQUIREMENT = "dev.prejit.requirement"

# Caps on what is read before anything is trusted. Generous: 10,000 programs make a config of 10 MB.
MAX_INDEX_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 64 << 10
"""A manifest has some 3 kB."""
MAX_CONFIG_BYTES = 16 << 20
MAX_PROGRAM_BYTES = 1 << 30
"""One executable or portable program, decompressed."""
MAX_CHAT_BYTES = 4 << 20
"""Published templates have some 10 kB."""
MAX_JSON_ITEMS = 1 << 19
"""Keys, and lists and objects, of a config or a header of weights: 15,000 programs or 100,000 tensors."""
_SMALL_JSON_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 128 << 20
"""Published tokenizers have up to 35 MB."""
MAX_GENERATION_BYTES = 1 << 20
"""Published generation configs have some 200 bytes."""
MAX_KERNELS_BYTES = 64 << 20
"""Libraries of kernels have some 600 kB, most of it libstdc++."""
MAX_MESH_DEVICES = 1 << 12
"""XLA:CPU makes as many devices as it is told, each with threads of its own; of 2**14 it does not return."""
MAX_INTEGER = (1 << 63) - 1
"""Of any integer in a file."""
MAX_SIZE = (1 << 31) - 1
"""Of a model or a bucket: tokens and positions are int32."""
MAX_BATCH = 1 << 16
"""Of a model's program: what a reader keeps for each row on the host must fit into memory."""
CACHE_DTYPES = ("float32", "bfloat16")
GAP_PREFIX = ".gap"
"""safetensors allows no holes: bytes between aligned tensors are tensors of this name."""
WEIGHTS_ALIGNMENT_BYTES = 64
"""XLA takes a host buffer without a copy only at this alignment (xla/service/cpu/cpu_runtime)."""

PLATFORMS = ("cpu", "cuda", "tpu")
"""What portable programs may be lowered for."""

_V3 = (
    *("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr"),
    *("lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2"),
    *("ssse3", "xsave"),
)
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
KERNEL_LEVELS = {"x86-64-v2": (), "x86-64-v3": _V3, "x86-64-v4": _V4}
"""The levels of x86-64 that native kernels are built for, and the extensions, in LLVM's names, that the
requirement of a target with such kernels must have: those of the catalogue, which `load` has no time to read.
For v2 none: jaxlib's own wheels need AVX, so a machine that comes this far has all of v2."""

DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)
"""NumPy's and ml_dtypes' names of the element types that programs take and give.

jax has int1, uint1, float6_e2m3fn and float6_e3m2fn as well. XLA:CPU takes the first two for bool, and the
others end the process.
"""

KERNEL_PREFIX = "prejit_"
"""Of the names that a library exports its kernels by."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An OCI content descriptor.

    Attributes:
        mediaType, digest, size, artifactType, platform, annotations: as in the OCI image specification.
    """

    mediaType: str  # noqa: N815 (the name is OCI's)
    digest: str
    size: int
    artifactType: str | None = None  # noqa: N815
    platform: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """`index.json`: an OCI image index, one descriptor for each target in order of preference."""

    schemaVersion: int  # noqa: N815
    mediaType: str  # noqa: N815
    artifactType: str  # noqa: N815
    manifests: tuple[Descriptor, ...]
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True)
class Manifest:
    """An OCI image manifest: everything that one target needs."""

    schemaVersion: int  # noqa: N815
    mediaType: str  # noqa: N815
    artifactType: str  # noqa: N815
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: dict[str, str]

    def layer(self, media_type: str) -> Descriptor:
        """The layer of that media type; `verify.check_manifest` says which are always there."""
        return next(layer for layer in self.layers if layer.mediaType == media_type)

    def has_layer(self, media_type: str) -> bool:
        """Whether there is a layer of that media type."""
        return any(layer.mediaType == media_type for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Segment:
    """One zstd frame in a pack.

    Attributes:
        offset, size: where the frame lies in the pack, in bytes.
        digest: of the frame as stored.
        raw_size, raw_digest: of what it decompresses to.
    """

    offset: int
    size: int
    digest: str
    raw_size: int
    raw_digest: str


@dataclass(frozen=True, slots=True)
class Array:
    """One argument or result of a program: a leaf of its pytree.

    The program table holds it as text, in the manifest's own notation behind its path:

        ["cache",0,1] float32[1,12,128,64] donated @data,tensor,,

    so that a table of hundreds of programs is read in milliseconds; only programs that run are parsed.

    Attributes:
        path: where the leaf sits in the pytree, outermost key first; an integer is a place in a sequence.
        dtype: NumPy's name for it (`float32`, `bfloat16`, `int32`, ...).
        shape: in elements.
        donated: the program reuses the argument's memory; the caller must not touch it again.
        sharding: the mesh axis that splits each dimension, `""` for none; empty: no dimension is split.
    """

    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    donated: bool = False
    sharding: tuple[str, ...] = ()

    def __str__(self) -> str:
        path = json.dumps(self.path, separators=(",", ":"), ensure_ascii=True)
        shape = ",".join(map(str, self.shape))
        split = f" @{','.join(self.sharding)}" if self.sharding else ""
        return f"{path} {self.dtype}[{shape}]{' donated' if self.donated else ''}{split}"

    @classmethod
    def parse(cls, text: str) -> Array:
        """The inverse of `str`.

        Raises:
            ValueError: the text is not of that form.
        """
        array = None
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            path, end = json.JSONDecoder().raw_decode(text)
            match = re.fullmatch(
                r" ([a-z0-9_]+)\[((?:\d{1,10}(?:,\d{1,10})*)?)\]( donated)?(?: @([a-z,]+))?",
                text[end:],
            )
            if match is not None and all(type(key) in (str, int) for key in path):
                shape = tuple(map(int, match[2].split(","))) if match[2] else ()
                split = parse_sharding(match[4] or "", len(shape))
                if match[1] in DTYPES and max(shape, default=0) <= MAX_SIZE:
                    array = cls(tuple(path), match[1], shape, match[3] is not None, split)
        if array is None or str(array) != text:  # one spelling, as everywhere in the format
            raise ValueError(f"expected '[path] dtype[shape]', found {text[:80]!r:.80}")
        return array


def parse_sharding(text: str, dimensions: int) -> tuple[str, ...]:
    """A sharding as it is spelled: `data,tensor,,` for four dimensions; empty text: nothing is split.

    Raises:
        ValueError: an axis that no mesh has, or comes twice, or one too many or too few.
    """
    if not text:
        return ()
    axes = tuple(text.split(","))
    named = [axis for axis in axes if axis]
    known = set(named) <= set(MESH_AXES) and len(set(named)) == len(named)
    if len(axes) != dimensions or not named or not known:
        raise ValueError(
            f"expected a mesh axis or none for each of {dimensions} dimensions, {text!r:.80}"
        )
    return axes


@dataclass(frozen=True, slots=True)
class Mesh:
    """The devices that a program runs on, in rows and columns.

    Attributes:
        data: rows; each works on its own part of a batch.
        tensor: columns; each holds its own part of the weights and of the KV cache.
    """

    data: int
    tensor: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.tensor < 1:
            raise ValueError(
                f"mesh: expected sizes of 1 or more, found {self.data} x {self.tensor}"
            )

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.data * self.tensor


MESH_AXES = ("data", "tensor")
"""Names of the axes of a Mesh, rows first."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the compiler says a program needs while it runs, in bytes, on each device.

    Attributes:
        argument_bytes: weights and inputs.
        output_bytes: results.
        alias_bytes: of the results, what reuses donated arguments.
        temp_bytes: intermediate values.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def need_bytes(self) -> int:
        """All that is held at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def described(self) -> str:
        """The parts in words."""
        results = self.output_bytes - self.alias_bytes
        parts = (
            ("arguments", self.argument_bytes),
            ("results", results),
            ("temporary", self.temp_bytes),
        )
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts)


@dataclass(frozen=True, slots=True)
class Program:
    """One function at one bucket of shapes, compiled for one target.

    Attributes:
        name: unique in the bundle: `decode/b1-c128`, `prefill/b1-t16-c128`, `encode/b1-t16/layer`, `score`.
        kind: `prefill`, `decode`, `verify`, `copy` (of a decoder), `embed`, `layer`, `pool` (of an encoder),
            `call`.
        bucket: the static sizes, by name.
        key: digest of everything the executable was made from (cache key).
        arguments: those that follow the weights, in order, each as `Array` prints itself.
        results: in order, likewise.
        executable: its frame in the executables pack.
        portable: its frame in the portable pack: StableHLO, a versioned portable artifact.
        memory: what the compiler expects it to need.
        weights: the tensors that come first among the arguments: a key of `Config.weight_sets`.
        platforms: that the portable program was lowered for, in the order of its platform index; None:
            for `cpu` alone, and there is no index.
        cost_microseconds: of one run, as measured or estimated at build time; None: not known.
        kernels: True where the executable calls native kernels, and wants their library registered before
            it is loaded; else None.
    """

    name: str
    kind: str
    bucket: dict[str, int]
    key: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    executable: Segment
    portable: Segment
    memory: Memory
    weights: str | None = None
    platforms: tuple[str, ...] | None = None
    cost_microseconds: int | None = None
    kernels: bool | None = None


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library of native kernels that a target's executables call: a layer of its own.

    Attributes:
        digest: of the layer. The first 16 of its digits are part of the names that executables call by.
        level: of the x86-64 instructions that it uses without asking the CPU: `x86-64-v3`.
        compiler: that made it; for people.
        handlers: what it exports, without `prejit_`; sorted.
    """

    digest: str
    level: str
    compiler: str
    handlers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProductForm:
    """How a target's executables compute a product with a matrix, and why; for people.

    Attributes:
        product: `int8 4 x 768 x 3072 (out,in)`: dtype of the matrix, rows x inputs x outputs, its storage.
        form: that it has: `kernel`, or one of XLA's.
        nanoseconds: of one product, by form, as measured.
        measured_on: a CPU and what else mattered; None: nothing was measured.
        date: of the measurement, YYYY-MM-DD.
        like: the product that was measured in its place; None: it was measured itself.
    """

    product: str
    form: str
    nanoseconds: dict[str, int]
    measured_on: str | None = None
    date: str | None = None
    like: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """What generation needs to know of a decoder.

    Attributes:
        family: the model_type that its config.json says: `gpt2`, `llama`, `gemma2`.
        vocab_size: logits a token.
        num_layers, num_kv_heads, head_size: the KV cache is num_layers x (keys, values), each
            [B, num_kv_heads, S, head_size].
        cache_dtype: NumPy's name.
        max_positions: the longest context that the model was made for.
        eos_token_ids: generation stops at any of them.
        bos_token_id: None where the model has none.
    """

    family: str
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    cache_dtype: str
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "num_layers", "num_kv_heads", "head_size", "max_positions")
        _check_sizes(self, "decoder", *sizes)
        if self.cache_dtype not in CACHE_DTYPES:
            known = " or ".join(CACHE_DTYPES)
            raise ValueError(
                f"decoder: cache_dtype: expected {known}, found {self.cache_dtype!r:.80}"
            )


@dataclass(frozen=True, slots=True)
class Encoder:
    """What encoding needs to know of an encoder.

    Attributes:
        family: the model_type that its config.json says: `bert`, `roberta`, `distilbert`.
        vocab_size: tokens that it knows.
        width: D, of an embedding.
        max_tokens: of a sentence, special tokens included.
        pooling: how tokens become one vector: `mean`, `cls`, `max`, ...
        normalized: whether embeddings have length 1.
        layers: weight sets of the layers, in order: a program of the kind `layer` is run with each in turn.
    """

    family: str
    vocab_size: int
    width: int
    max_tokens: int
    pooling: str
    normalized: bool
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_sizes(self, "encoder", "vocab_size", "width", "max_tokens")
        if not self.layers:
            raise ValueError("encoder: layers: expected at least one weight set, found none")


def _check_sizes(value: Decoder | Encoder, where: str, *names: str) -> None:
    for name in names:
        if not 0 < (found := getattr(value, name)) <= MAX_SIZE:
            raise ValueError(f"{where}: {name}: expected 1 to {MAX_SIZE}, found {found!r:.80}")


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat layer: how messages become a prompt.

    Attributes:
        templates: Jinja sources by name, as transformers reads them; that of `default` is taken where none is
            named.
        special_tokens: what templates know under the names `bos_token`, `eos_token` and so on.
    """

    templates: dict[str, str]
    special_tokens: dict[str, str]


# Of `\d+(\.[0-9A-Za-z]+)*([.+-][0-9A-Za-z.]+)?`, spelled so that no text is tried in several ways.
_VERSION = r"\d+(?:\.[0-9A-Za-z.]+|(?:\.[0-9A-Za-z]+)*[+-][0-9A-Za-z.]+)?"
_AXIS_FORMS = {
    # field of Requirement and of Fingerprint: (what it looks like, an example)
    "platform": (r"[a-z]+", "cpu"),
    "architecture": (r"[a-z][a-z0-9_]*", "x86_64"),
    "cpu_features": (r"[a-z0-9.\-]+", "avx2"),
    "jaxlib": (_VERSION, "0.12.0.1"),
    "plugin": (rf"[a-z0-9\-]+ {_VERSION}", "libtpu 0.0.51"),
    "cuda": (_VERSION, "13.0"),
    "driver": (_VERSION, "580.65.06"),
    "device_kind": (r"[\x20-\x7e]+", "NVIDIA L4"),
    "compute_capability": (r"\d+\.\d+", "9.0"),
    "device_count": (r"[1-9]\d*", "8"),
    "topology": (r"[1-9]\d*(?:x[1-9]\d*)*", "2x2"),
    "device_memory_bytes": (r"\d+", "16000000000"),
    "xla_flags": (r"--\S+", "--xla_cpu_enable_fast_math=true"),
    "environment": (r"[A-Z][A-Z0-9_]*=.*", "NVIDIA_TF32_OVERRIDE=0"),
    "glibc": (r"\d+(?:\.\d+)+", "2.34"),
}


def check_axes(value: Requirement | Any) -> None:
    """Checks the form of every axis of a requirement or a fingerprint.

    Raises:
        ValueError: an axis has a value that nothing could mean.
    """
    for name, (form, example) in _AXIS_FORMS.items():
        found = getattr(value, name)
        for item in found if isinstance(found, tuple) else (found,):
            if item is not None and not re.fullmatch(form, str(item), re.ASCII):
                raise ValueError(f"{name}: expected the form of {example!r}, found {_shown(item)}")


@dataclass(frozen=True, slots=True)
class Requirement:
    """What an executable needs of a machine. Empty or None: does not matter.

    `fingerprint.compare` has the rule of each, with its reason.

    Attributes:
        platform: `cpu`, `cuda`, `tpu`.
        architecture: of the host: `x86_64`, `aarch64`.
        cpu_features: instruction-set extensions in LLVM's names.
        jaxlib: exact version; executables have no promise beyond it.
        plugin: name and exact version of the PJRT plugin, where it is not jaxlib itself.
        cuda: the lowest CUDA runtime, of the same major version.
        driver: the lowest driver.
        device_kind: as its driver names it.
        compute_capability: of a GPU.
        device_count: how many devices a program runs on.
        topology: of a TPU slice.
        device_memory_bytes: what the largest program needs of one device.
        xla_flags: of the build, those that change results or speed; sorted.
        environment: NAME=value likewise; sorted.
        glibc: the lowest that native kernels can be loaded with, where that is above jaxlib's own.
    """

    platform: str
    architecture: str
    cpu_features: tuple[str, ...]
    jaxlib: str
    plugin: str | None = None
    cuda: str | None = None
    driver: str | None = None
    device_kind: str | None = None
    compute_capability: str | None = None
    device_count: int | None = None
    topology: str | None = None
    device_memory_bytes: int | None = None
    xla_flags: tuple[str, ...] | None = None
    environment: tuple[str, ...] | None = None
    glibc: str | None = None

    def __post_init__(self) -> None:
        check_axes(self)


@dataclass(frozen=True, slots=True)
class Portable:
    """What is known of portable programs.

    Attributes:
        jax: the version that lowered them.
        stablehlo: the version of their form: a jaxlib that reads this one reads them.
        readable_until: a date, YYYY-MM-DD: later jaxlibs need not read them; None: not known.
    """

    jax: str
    stablehlo: str
    readable_until: str | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What it costs that weights or KV cache are not float32, measured when the bundle was built.

    Both models read the same tokens, on a CPU. Fractions are in millionths.

    Attributes:
        weights: the dtype that matrices are stored in.
        text: what they read: the name of a file, `sampled`: what the float32 decoder wrote itself, or
            `random`: tokens at random, for an encoder.
        tokens: how many were scored, or read by an encoder.
        float32_perplexity_millionths, perplexity_millionths: of a decoder in float32, and as it is stored.
        logit_difference_millionths: the largest, of a decoder.
        top1_agreement_millionths: share of tokens after which both decoders think the same one the likeliest.
        cosine_millionths: of an encoder: the least similarity of an embedding to that of float32.
    """

    weights: str
    text: str
    tokens: int
    float32_perplexity_millionths: int | None = None
    perplexity_millionths: int | None = None
    logit_difference_millionths: int | None = None
    top1_agreement_millionths: int | None = None
    cosine_millionths: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens: expected 1 or more, found {self.tokens}")
        one = 1_000_000
        ranges = {
            "float32_perplexity_millionths": (one, None),
            "perplexity_millionths": (one, None),
            "logit_difference_millionths": (0, None),
            "top1_agreement_millionths": (0, one),
            "cosine_millionths": (-one, one),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and (value < least or (most is not None and value > most)):
                limit = "or more" if most is None else f"to {most}"
                raise ValueError(f"{name}: expected {least} {limit}, found {value}")


@dataclass(frozen=True, slots=True)
class Config:
    """The config blob of a target's manifest: the program table.

    Attributes:
        format: FORMAT_VERSION of the writer.
        bundle: name of the bundle.
        target: name of the target.
        requirement: the same as in the index's annotation.
        versions: of what the bundle was built with: prejit, jax, jaxlib, stablehlo, ...
        programs: the program table.
        weight_sets: ordered names of tensors of the weights layer, by name of the set.
        decoder: None where the bundle holds no decoder.
        encoder: None where it holds no encoder.
        mesh: the devices that its programs run on; None: one.
        weight_shardings: how tensors are split over the mesh, spelled as in `Array`; those that are not
            here are on every device.
        portable: what wrote the portable programs, and how long they can be read.
        accuracy: what the dtypes cost; None: everything is float32, or nothing is known.
        kernels: the native kernels that executables call; None: they call none.
        forms: of the products in programs with kernels; None: there are none.
    """

    format: int
    bundle: str
    target: str
    requirement: Requirement
    versions: dict[str, str]
    programs: tuple[Program, ...]
    weight_sets: dict[str, tuple[str, ...]]
    decoder: Decoder | None = None
    encoder: Encoder | None = None
    mesh: Mesh | None = None
    weight_shardings: dict[str, str] | None = None
    portable: Portable | None = None
    accuracy: Accuracy | None = None
    kernels: Kernels | None = None
    forms: tuple[ProductForm, ...] | None = None


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """The OCI digest of bytes: `sha256:` and 64 hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def kernel_target(kernel: str, library: str) -> str:
    """The name of a custom call that a kernel answers: `prejit_linear.0123456789abcdef`.

    Args:
        kernel: its name, such as `linear`.
        library: digest of the library that holds it.
    """
    return f"{KERNEL_PREFIX}{kernel}.{library.removeprefix('sha256:')[:16]}"


def is_digest(text: str) -> bool:
    """Whether text has the form of an OCI sha256 digest."""
    head, _, digits = text.partition(":")
    return head == "sha256" and len(digits) == 64 and not set(digits) - set("0123456789abcdef")


def to_json(value: Any) -> bytes:
    """Canonical JSON of a dataclass of this module or of plain data. Fields that are None are left out."""
    return _dumps(_plain(value))


def from_json(cls: type[T], content: bytes, path: str) -> T:
    """Reads canonical JSON as a dataclass of this module.

    Args:
        cls: the dataclass that the content must be.
        content: bytes as `to_json` writes them.
        path: the file that they came from, for errors.

    Raises:
        RejectError: not JSON, not canonical, a key missing, unknown or of another type.
    """
    # Of canonical JSON, where nothing stands between these; strings hold few of them.
    check_amount(content, (b'":',), (b":{", b",{", b"[{", b":[", b",[", b"[["), path)
    value, plain = _from_json(cls, content, path, None)
    if _dumps(plain) != content:
        raise RejectError(
            path, "expected canonical JSON (sorted keys, no spaces, no repeated keys)"
        )
    return value


def check_amount(
    content: bytes, keys: tuple[bytes, ...], containers: tuple[bytes, ...], path: str
) -> None:
    """Bounds what JSON takes as Python values: up to 30 bytes for each of its own, where it is all brackets.

    Args:
        content: JSON.
        keys: what every key has at least one of.
        containers: what every list and object has at least one of.
        path: the file, for errors.

    Raises:
        RejectError: it has more than any bundle.
    """
    if len(content) <= _SMALL_JSON_BYTES:
        return
    for what, marks in (("keys", keys), ("lists and objects", containers)):
        if (found := sum(map(content.count, marks))) > MAX_JSON_ITEMS:
            raise RejectError(path, f"expected at most {MAX_JSON_ITEMS} {what}, found {found}")


def from_any_json(cls: type[T], content: bytes, path: str) -> T:
    """Reads JSON as a dataclass, as `from_json`, but spelled as a person or their tools like it.

    Keys may come in any order, with white space between; no key may come twice.

    Raises:
        RejectError: not JSON, a key missing, unknown, repeated or of another type.
    """
    value, _ = _from_json(cls, content, path, each_key_once)
    return value


def _from_json(
    cls: type[T], content: bytes, path: str, pairs_hook: Callable[[Any], Any] | None
) -> tuple[T, Any]:
    try:
        plain = json.loads(content, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise RejectError(path, f"expected JSON: {error}") from error
    try:
        value: T = _reader(typing.cast(Any, cls))(plain, (None, "$"))
    except (TypeError, ValueError) as error:
        raise RejectError(path, str(error)) from error
    return value, plain


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs, for `object_pairs_hook`.

    Raises:
        ValueError: a key comes twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {_shown(twice)} comes twice")
    return found


_LIMITED = reprlib.Repr()
_LIMITED.maxlevel = 2
_LIMITED.maxstring = _LIMITED.maxlong = _LIMITED.maxother = 80


def _shown(value: Any) -> str:
    """A value in an error: short, however large or deep it is."""
    return f"{_LIMITED.repr(value):.80}"


def _dumps(plain: Any) -> bytes:
    text = json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        pairs = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


_Where = tuple["_Where | None", object]
"""Where in a JSON value: the place of what holds it, and the key or index there. Errors alone spell it."""


def _spell(where: _Where) -> str:
    parts = []
    at: _Where | None = where
    while at is not None:
        at, key = at
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).removeprefix(".")


@cache
def _annotation(text: str, module: str) -> Any:
    """A type annotation of a module, as `typing.get_type_hints` reads it, but each text once."""
    return eval(text, vars(sys.modules[module]))  # noqa: S307  it stands in our own source


@cache
def _reader(kind: Any) -> Callable[[Any, _Where], Any]:
    """What checks a JSON value against a type annotation of this module and builds it.

    Made once for each type: a program table has thousands of values of a dozen types.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(kind, [option for option in args if option is not type(None)])
    if origin is tuple:
        return _list_reader(args[0])
    if origin is dict:
        return _object_reader(args[1])
    if is_dataclass(kind):
        return _dataclass_reader(typing.cast(Any, kind))

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not kind:  # `type is`, not isinstance: True is no integer here
            raise TypeError(f"{_spell(where)}: expected {kind.__name__}, found {_shown(value)}")
        if kind is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError(
                f"{_spell(where)}: expected an integer of 64 bits, found {_shown(value)}"
            )
        return value

    return read


def _union_reader(kind: Any, options: list[Any]) -> Callable[[Any, _Where], Any]:
    def read(value: Any, where: _Where) -> Any:
        if value is None:
            raise TypeError(f"{_spell(where)}: expected a value, found null")
        for option in options:
            if not isinstance(option, type) or is_dataclass(option) or type(value) is option:
                return _reader(typing.cast(Any, option))(value, where)
        raise TypeError(f"{_spell(where)}: expected {kind}, found {_shown(value)}")

    return read


def _list_reader(item: Any) -> Callable[[Any, _Where], Any]:
    read_item = _reader(item)

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not list:
            raise TypeError(f"{_spell(where)}: expected a list, found {_shown(value)}")
        if item is str and all(type(one) is str for one in value):
            return tuple(value)
        return tuple(read_item(one, (where, i)) for i, one in enumerate(value))

    return read


def _object_reader(item: Any) -> Callable[[Any, _Where], Any]:
    read_item = _reader(item)

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{_spell(where)}: expected an object, found {_shown(value)}")
        return {key: read_item(one, (where, key)) for key, one in value.items()}

    return read


def _dataclass_reader(kind: Any) -> Callable[[Any, _Where], Any]:
    readers = {
        field.name: _reader(_annotation(typing.cast(str, field.type), kind.__module__))
        for field in fields(kind)
    }

    def read(value: Any, where: _Where) -> Any:
        if type(value) is not dict:
            raise TypeError(f"{_spell(where)}: expected an object, found {_shown(value)}")
        if unknown := value.keys() - readers.keys():
            raise TypeError(f"{_spell(where)}: unknown key {_shown(min(unknown))}")
        return kind(**{key: readers[key](one, (where, key)) for key, one in value.items()})

    return read


def encode_index(
    name: str, manifests: tuple[Descriptor, ...], written: int = FORMAT_VERSION
) -> bytes:
    """`index.json` of a bundle. It carries a digest of itself, so that a changed byte is noticed.

    The digest is that of the same index without its `dev.prejit.index-digest` annotation. It guards
    against damage, not against forgery: for that, sign the bundle's digest.
    """
    annotations = {BUNDLE_NAME: name, BUNDLE_FORMAT: str(written)}
    index = Index(2, INDEX_MEDIA_TYPE, ARTIFACT_TYPE, manifests, annotations)
    sealed = {**annotations, INDEX_DIGEST: digest_of(to_json(index))}
    return to_json(Index(2, INDEX_MEDIA_TYPE, ARTIFACT_TYPE, manifests, sealed))


def index_digest(index: Index) -> str:
    """What an index's `dev.prejit.index-digest` annotation must say."""
    open_annotations = {k: v for k, v in index.annotations.items() if k != INDEX_DIGEST}
    return digest_of(
        to_json(
            Index(
                index.schemaVersion,
                index.mediaType,
                index.artifactType,
                index.manifests,
                open_annotations,
            )
        )
    )
