"""Names in a bundle: format versions, media types, annotation keys, native kernels and their levels."""

from __future__ import annotations

FORMAT_VERSION = 1
"""The format that prejit writes and reads. It rises when a reader of this one cannot read a new bundle."""

OCI_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
INDEX_MEDIA_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_MEDIA_TYPE = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE = "application/vnd.prejit.bundle.v1"
CONFIG_MEDIA_TYPE = "application/vnd.prejit.config.v1+json"
EXECUTABLES_MEDIA_TYPE = "application/vnd.prejit.executables.v1+zstd"
KERNELS_MEDIA_TYPE = "application/vnd.prejit.kernels.v1+elf"
"""A shared library with the native kernels that executables of a CPU target call."""
LIBRARY_MEDIA_TYPE = "application/vnd.prejit.library.v1+elf"
"""A shared library of the user with FFI handlers that programs call. A target may have several."""
PORTABLE_MEDIA_TYPE = "application/vnd.prejit.stablehlo.v1+zstd"
WEIGHTS_MEDIA_TYPE = "application/vnd.prejit.weights.v1.safetensors"
TOKENIZER_MEDIA_TYPE = "application/vnd.prejit.tokenizer.v1+json"
CHAT_MEDIA_TYPE = "application/vnd.prejit.chat.v1+json"
"""A Chat: the model's template for conversations."""
GENERATION_MEDIA_TYPE = "application/vnd.prejit.generation-config.v1+json"
LICENSE_MEDIA_TYPE = "application/vnd.prejit.license.v1+text"
RECORDED_MEDIA_TYPE = "application/vnd.prejit.recorded.v1+zstd"
"""A pack with files of jax's compilation cache."""
EMPTY_MEDIA_TYPE = "application/vnd.oci.empty.v1+json"
"""OCI's config of a manifest that needs none: `{}`."""
PARTS_MEDIA_TYPE = "application/vnd.cyclonedx+json"
"""A list of parts (SBOM) that is attached to a bundle: CycloneDX."""
STATEMENT_MEDIA_TYPE = "application/vnd.in-toto+json"
"""An in-toto statement, such as the provenance that is attached to a bundle."""
SIGNATURE_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
"""A sigstore bundle: of the artifact that refers to a bundle, and of its only layer."""
LAYER_MEDIA_TYPES = (
    EXECUTABLES_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    LIBRARY_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
)

REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image.title"
BUNDLE_NAME = "dev.prejit.name"
BUNDLE_FORMAT = "dev.prejit.format"
REQUIREMENT = "dev.prejit.requirement"
ATTACHED_TYPES = "dev.prejit.attached"
"""The annotation of a target's manifest with the artifact types that the build attaches to the bundle."""

_V3 = (
    *("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr"),
    *("lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2"),
    *("ssse3", "xsave"),
)
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
KERNEL_LEVELS = {"x86-64-v2": (), "x86-64-v3": _V3, "x86-64-v4": _V4}
"""The levels of x86-64 that native kernels are built for. For each, the extensions, in LLVM's names, that the
requirement of a target with such kernels must list. They repeat the catalogue, which takes `load` too long to
read. v2 needs none listed: jaxlib's own wheels need AVX, so every machine that runs jaxlib has all of v2."""

KERNEL_PREFIX = "prejit_"
"""The prefix of the names under which a library exports its kernels."""


def kernel_target(kernel: str, library: str) -> str:
    """Return the name under which a program calls a kernel: `prejit_linear.0123456789abcdef`.

    Args:
        kernel: the kernel's name, such as `linear`.
        library: digest of the library that holds the kernel.
    """
    return handler_target(f"{KERNEL_PREFIX}{kernel}", library)


def handler_target(symbol: str, library: str) -> str:
    """Return the name under which XLA knows a handler of a library: `ScaleHandler.0123456789abcdef`.

    Args:
        symbol: the symbol that the library exports.
        library: digest of the library.
    """
    return f"{symbol}.{library.removeprefix('sha256:')[:16]}"


ADAPTED, ADAPTABLE_KINDS = "adapted-", ("prefill", "decode", "verify")
"""The beginning of the kinds whose rows may have adapters, and the kinds that exist with it, too."""
DRAFT = "draft-"
"""The beginning of the kinds of a draft model's programs."""
