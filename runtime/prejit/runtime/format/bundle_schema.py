"""The bundle format: dataclasses for the files of a bundle, and the index's bytes. No JAX, no file access.

A bundle is an OCI image layout; docs/bundle-format.md describes it for a second implementation.

    oci-layout                    {"imageLayoutVersion":"1.0.0"}
    index.json                    the bundle's index, its targets, and what refers to them
    blobs/sha256/<digest>         the bundle's index: one descriptor for each target, its requirement in the
                                  annotations -> manifest -> config (the program table) + layers

Each layer has its own media type. Executables and portable programs are *packs*: zstd frames one after the
other, one frame for each program. The program table has the place of each frame.

All JSON but `index.json` is canonical (sorted keys, no spaces, ASCII, no floats). A reader rejects any other
spelling, so a bundle has exactly one. Other tools write `index.json`, too.
"""

from __future__ import annotations

from prejit.runtime.base.files import digest_of
from prejit.runtime.format.arrays import Golden, Mesh
from prejit.runtime.format.limits import MAX_SIZE
from prejit.runtime.machine.fingerprint import Requirement
from prejit.runtime.records import dataclass

CACHE_DTYPES = ("float32", "bfloat16", "int8")
"""The dtypes that a KV cache may have."""


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
    """A bundle's index: an OCI image index, one descriptor for each target in order of preference."""

    schemaVersion: int  # noqa: N815
    mediaType: str  # noqa: N815
    artifactType: str  # noqa: N815
    manifests: tuple[Descriptor, ...]
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """An OCI image manifest: everything that one target needs."""

    schemaVersion: int  # noqa: N815
    mediaType: str  # noqa: N815
    artifactType: str  # noqa: N815
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: dict[str, str]

    def layer(self, media_type: str) -> Descriptor:
        """Return the layer of a media type, which the manifest must have: checks 6 and 7."""
        return next(layer for layer in self.layers if layer.mediaType == media_type)

    def has_layer(self, media_type: str) -> bool:
        """Return whether there is a layer of that media type."""
        return any(layer.mediaType == media_type for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Segment:
    """One zstd frame in a pack.

    Attributes:
        offset, size: where the frame lies in the pack, in bytes.
        digest: digest of the frame as stored.
        raw_size, raw_digest: size and digest of the decompressed content.
    """

    offset: int
    size: int
    digest: str
    raw_size: int
    raw_digest: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a program needs on each device while it runs, in bytes, as the compiler reports it.

    Attributes:
        argument_bytes, output_bytes: size of weights and inputs, and of results.
        alias_bytes, temp_bytes: size of results in donated arguments, and of intermediate values.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def need_bytes(self) -> int:
        """Return the total that a device holds at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def described(self) -> str:
        """Return the parts as text."""
        results = self.output_bytes - self.alias_bytes
        sizes = {"arguments": self.argument_bytes, "results": results, "temporary": self.temp_bytes}
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())


@dataclass(frozen=True, slots=True)
class ProgramEntry:
    """One function at one bucket of shapes, compiled for one target.

    Attributes:
        name: unique in the bundle: `decode/b1-c128`, `prefill/b1-t16-c128`, `encode/b1-t16/layer`, `score`.
        kind: `prefill`, `decode`, `verify`, `copy` (of a decoder), `embed`, `layer`, `pool` (of an encoder),
            `image`, `call`; those of a draft model begin with `draft-`.
        bucket: the static sizes, by name.
        key: digest of everything the executable was made from (cache key).
        arguments, results: those after the weights, and the results, each as the text of an `Array`.
        executable, portable: its frames in the pack of executables, and in that of portable StableHLO.
        memory, golden: the memory that it needs, and its golden answer (None: it has none).
        weights: a key of `Config.weight_sets`, whose tensors are the first arguments; None: it has none.
        platforms: what its platform index chooses from, in order; None: it has no index, and is for all.
        cost_microseconds: time of one run, measured or estimated at build time; None: not known.
        kernels: True if the executable calls kernels, whose library is registered before it; else None.
        arguments_tree, results_tree: how a `call` nests them, as `trees.to_text` writes it; else None.
        static: the values of static arguments by name, each the JSON of a constant; None: it has none.
        pad: variables of the bucket that a caller may have less of; None: there are none.
        symbolic: frame in the portable pack of the program for any `open_sizes`; None: there is none.
        open_sizes: variables of the bucket that a call may give other sizes; the reader compiles for them.
        mask: name or position of the argument that is false for padding; a caller may leave it out.
        calls: the names by which it calls handlers of `Config.libraries`, sorted; None: it calls none.
        settings: jax's settings of its trace that were not defaults; None: the build did not trace it.
        state: constants that its function holds, by place (jit_call.py), as `static`; None: none.
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
    arguments_tree: str | None = None
    results_tree: str | None = None
    static: dict[str, str] | None = None
    mask: str | None = None
    pad: tuple[str, ...] | None = None
    symbolic: Segment | None = None
    open_sizes: tuple[str, ...] | None = None
    calls: tuple[str, ...] | None = None
    golden: Golden | None = None
    settings: dict[str, str] | None = None
    state: dict[str, str] | None = None

    @property
    def function(self) -> str:
        """The name without the bucket: what a caller names."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a large layer, which are verified one by one.

    Attributes:
        algorithm: the hash function of the digests: `blake3`.
        size: the number of bytes of each chunk; the last one may have fewer.
        digests: the digest of each chunk, as 64 hexadecimal digits, in order.
        verity: the fs-verity digest of the whole layer, as `sha256:<hex>`.
    """

    algorithm: str
    size: int
    digests: tuple[str, ...]
    verity: str

    @property
    def name(self) -> str:
        """Return the name of a receipt for a file that has these chunks."""
        return f"{self.algorithm}/{self.size}/{digest_of(''.join(self.digests).encode())}"

    def places(self, size: int) -> list[tuple[int, int, str]]:
        """Return start, end and digest of each chunk of a layer that has `size` bytes."""
        starts = range(0, size, self.size)
        return [
            (start, min(start + self.size, size), digest)
            for start, digest in zip(starts, self.digests, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The library of native kernels that a target's executables call: a layer of its own.

    Attributes:
        digest: digest of the layer. Its first 16 digits are part of the names that executables call.
        level: level of the x86-64 instructions that it uses without asking the CPU: `x86-64-v3`.
        compiler: the compiler that made it; for people.
        handlers: names of the kernels that it exports, without `prejit_`, sorted.
    """

    digest: str
    level: str
    compiler: str
    handlers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserLibrary:
    """A shared library of the user with FFI handlers that a target's programs call: a layer of its own.

    Attributes:
        digest: digest of the layer. Its first 16 digits are part of the names that executables call.
        name: name of its file on the build host; for people.
        handlers: for each name by which portable programs call a handler, the symbol in the library.
    """

    digest: str
    name: str
    handlers: dict[str, str]


@dataclass(frozen=True, slots=True)
class ProductForm:
    """How a target's executables compute a product with a matrix, and why; for people.

    Attributes:
        product: `int8 4 x 768 x 3072 (out,in)`: dtype of the matrix, rows x inputs x outputs, its storage.
        form: the chosen form: `kernel`, or one of XLA's.
        nanoseconds: measured time of one product, by form.
        measured_on: the CPU and other conditions of the measurement; None: nothing was measured.
        date: date of the measurement, YYYY-MM-DD.
        like: the product that was measured in its place; None: this product itself.
    """

    product: str
    form: str
    nanoseconds: dict[str, int]
    measured_on: str | None = None
    date: str | None = None
    like: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """A program that jax compiled while `prejit record` watched: one file of jax's compilation cache.

    Attributes:
        name, file: jax's names of the program, `jit_score`, and of the file.
        entry: the frame of the file's bytes in the pack of recorded files.
        ingredients: digests (hexadecimal) of what jax's key is made of, by name; empty: they were hidden.
        conditions: values behind some ingredients, by name, for people: `XLA flags`, `device kind`.
        arguments: the arguments, each as dtype and shape, such as `float32[8,128]`; None: not known.
        function: `package.module:attribute`, if the function can be imported by that name.
    """

    name: str
    file: str
    entry: Segment
    ingredients: dict[str, str]
    conditions: dict[str, str]
    arguments: tuple[str, ...] | None = None
    function: str | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """The properties of a decoder that generation needs.

    Attributes:
        family: the model_type in its config.json: `gpt2`, `llama`, `gemma2`; or the name of a user's model.
        vocab_size: number of logits for each token.
        cache_dtype: NumPy's name of the dtype of keys and values.
        max_positions: the longest context that the model was made for.
        eos_token_ids: generation stops at any of them.
        cache: the arrays of its cache, each as the text of an `Array` (kv_cache_arrays.py).
        bos_token_id: None where the model has none.
        source: what an encoder-decoder reads, as such a text; None: the model is another decoder.
        start_token_ids: with which a text begins if a request has no prompt; None: every request has one.
        adapters: the stacks of adapters, as texts of an `Array`; a path goes on with the matrices' names.
    """

    family: str
    vocab_size: int
    cache_dtype: str
    max_positions: int
    eos_token_ids: tuple[int, ...]
    cache: tuple[str, ...]
    bos_token_id: int | None = None
    source: str | None = None
    start_token_ids: tuple[int, ...] | None = None
    adapters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, "decoder", "vocab_size", "max_positions")
        if self.cache_dtype not in CACHE_DTYPES:
            known = " or ".join(CACHE_DTYPES)
            raise ValueError(
                f"decoder: cache_dtype: expected {known}, found {self.cache_dtype!r:.80}"
            )


@dataclass(frozen=True, slots=True)
class Encoder:
    """The properties of an encoder that encoding needs.

    Attributes:
        family: the model_type in its config.json: `bert`, `modernbert`, `qwen3`.
        vocab_size, max_tokens: number of tokens that it knows, and of a sentence, special ones included.
        width: size of an embedding, or number of scores.
        pooling, normalized: how tokens become one vector: `mean`, `cls`; and whether its length is 1.
        layers: weight sets of the layers, in order. A program of the kind `layer` runs with each in turn.
        scores: activation of a text's scores, `sigmoid` or `identity`; None: the model embeds.
        segments: True if a token of the second text of a pair is its id plus vocab_size; else None.
        prompts, default_prompt: texts to put before sentences, by name, and the name of the default.
        padding: the token that fills every sentence up to max_tokens, and counts; None: padding is not seen.
        template: the text of a pair: literal texts, and between each two of them the name of what stands
            there: `instruction`, `query` or `document`. None: a pair is as its tokenizer makes it.
        instruction: that of calls that give none; None: the template has no place for one.
        unread: the token that is cut off the end of a pair, as it takes no part; None: every token does.
        heads: what a pool program gives of each token: `sparse`, `multi_vector`; None: nothing.
        unweighted: tokens without a weight of `sparse`; None: there are no weights.
    """

    family: str
    vocab_size: int
    width: int
    max_tokens: int
    pooling: str
    normalized: bool
    layers: tuple[str, ...]
    scores: str | None = None
    segments: bool | None = None
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None
    padding: int | None = None
    template: tuple[str, ...] | None = None
    instruction: str | None = None
    unread: int | None = None
    heads: tuple[str, ...] | None = None
    unweighted: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, "encoder", "vocab_size", "width", "max_tokens")
        if not self.layers:
            raise ValueError("encoder: layers: expected at least one weight set, found none")


@dataclass(frozen=True, slots=True)
class Images:
    """The properties of what reads images, whose programs are of the kind `image`.

    Attributes:
        family, width: as of `Encoder`; with labels, the number of these.
        size: height and width of a program's pixels, uint8 [H, W, 3].
        resize, resample: height and width, or the shorter edge, before the middle is cut; Pillow's filter.
        scores: activation of labels, or of matches with texts: `softmax` or `sigmoid`; None: there are none.
        labels: names of what images show; None: the model embeds them.
        tokens, token_id: of a decoder whose prompts hold images: an image is so many tokens of this id.
        marks: the texts of the token before an image, of its tokens, and of the token behind it.
    """

    family: str
    width: int
    size: tuple[int, ...]
    resize: tuple[int, ...]
    resample: int
    scores: str | None = None
    labels: tuple[str, ...] | None = None
    tokens: int | None = None
    token_id: int | None = None
    marks: tuple[str, ...] | None = None


def _check_sizes(value: Decoder | Encoder, where: str, *names: str) -> None:
    for name in names:
        if not 0 < (found := getattr(value, name)) <= MAX_SIZE:
            raise ValueError(f"{where}: {name}: expected 1 to {MAX_SIZE}, found {found!r:.80}")


@dataclass(frozen=True, slots=True)
class Portable:
    """Versions of the portable programs.

    Attributes:
        jax, stablehlo: the versions of jax, which lowered them, and of StableHLO, their language.
        readable_until: a date, YYYY-MM-DD. Later jaxlibs do not promise to read them; None: not known.
    """

    jax: str
    stablehlo: str
    readable_until: str | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The loss of accuracy when weights or KV cache are not float32, measured when the bundle is built.

    The float32 model and the stored one read the same tokens, on a CPU. Fractions are in millionths.

    Attributes:
        weights: the dtypes of the stored matrices.
        text: the text that they read: the name of a file, `random` (tokens) or `random pictures`.
        tokens: number of tokens that were scored, or that an encoder read.
        float32_perplexity_millionths, perplexity_millionths: perplexity of the decoder in float32, and as
            stored. After random tokens, every next token counts by its probability in float32.
        logit_difference_millionths: the largest difference of a logit of the two decoders.
        top1_agreement_millionths: share of tokens for which both decoders predict the same next token.
        cosine_millionths: the lowest cosine similarity of an encoder's embedding to that of float32.
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
        format, bundle, target: the format of the bundle, and the names of both.
        requirement: the same as in the index's annotation.
        versions: versions of the packages that built the bundle: prejit, jax, jaxlib, stablehlo, ...
        programs: the program table.
        weight_sets: ordered names of tensors of the weights layer, by name of the set.
        decoder, encoder, images: None: the bundle holds none.
        mesh: the mesh that its programs run on; None: one device.
        weight_shardings: how tensors are split over the mesh, as in `Array`; each device has all others.
        portable: versions of the portable programs.
        accuracy: the loss of accuracy; None: everything is float32, or it was not measured.
        kernels: the native kernels that executables call; None: they call none.
        forms: how programs with kernels compute their products; None: there are no such programs.
        chunks: the chunks of large layers, by media type; None: there are none.
        recorded: files of jax's cache, sorted, of a target without programs of its own; None: there are none.
        libraries: the user's own libraries that programs call, sorted by digest; None: they call none.
        draft: a smaller decoder of the same tokens, whose guesses `decoder` verifies; None: there is none.
    """

    format: int
    bundle: str
    target: str
    requirement: Requirement
    versions: dict[str, str]
    programs: tuple[ProgramEntry, ...]
    weight_sets: dict[str, tuple[str, ...]]
    decoder: Decoder | None = None
    encoder: Encoder | None = None
    images: Images | None = None
    mesh: Mesh | None = None
    weight_shardings: dict[str, str] | None = None
    portable: Portable | None = None
    accuracy: Accuracy | None = None
    kernels: Kernels | None = None
    forms: tuple[ProductForm, ...] | None = None
    chunks: dict[str, Chunks] | None = None
    recorded: tuple[RecordedProgram, ...] | None = None
    libraries: tuple[UserLibrary, ...] | None = None
    draft: Decoder | None = None
