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

from dataclasses import dataclass

from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.format.limits import MAX_SIZE
from prejit.runtime.format.names import (
    ARTIFACT_TYPE,
    BUNDLE_FORMAT,
    BUNDLE_NAME,
    FORMAT_VERSION,
    INDEX_DIGEST,
    INDEX_MEDIA_TYPE,
)
from prejit.runtime.machine.requirement import Requirement

CACHE_DTYPES = ("float32", "bfloat16")


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
