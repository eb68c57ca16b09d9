"""Checks of what few loads need: templates, libraries of a user, recorded files, encoders, drafts, meshes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prejit.runtime.base.files import is_digest
from prejit.runtime.base.typed_json import from_json
from prejit.runtime.errors import rejecting
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.format.bundle_schema import (
    Config,
    Decoder,
    Encoder,
    ImageManifest,
    Images,
    UserLibrary,
)
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.checks.encoder_interfaces import IMAGE_PREFILL, encoder_bucket_name
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.checks.program_interfaces import ENCODER_KINDS, is_rewindable
from prejit.runtime.format.mesh_splits import parse_sharding
from prejit.runtime.format.names import (
    DRAFT,
    LIBRARY_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
    handler_target,
)

HANDLER_NAME = re.compile(r"[\w.$-]{1,256}", re.ASCII)
"""The names of custom calls and of symbols that libraries of the user may have."""
MATCH = "model:match"
"""The weight set of the scale and the bias, sorted by name, of matches of images and texts."""
_LARGEST_IMAGE = 2**14
_HEX_DIGEST = re.compile("[0-9a-f]{64}")
_RECORDED_FILE = re.compile(r"[\w.-]{1,180}-[0-9a-f]{64}-cache")
"""The name of a recorded file. It becomes a name in a directory, so it must lead to no other place."""


@rejecting
def check_seldom_parts(config: Config, path: str) -> None:
    """7. Check the libraries, recorded files and encoder of a config that has some of them."""
    _check_libraries(config)
    _check_recorded(config)
    if config.encoder is not None:
        _check_encoder(config, config.encoder)
    if config.images is not None:
        _check_images(config, config.images)


def _check_libraries(config: Config) -> None:
    """Check that programs call handlers of the user's libraries that exist, each in one library."""
    calls = {name for program in config.programs for name in program.calls or ()}
    for program in config.programs:
        names = program.calls
        if names is not None and (not names or list(names) != sorted(set(names))):
            raise ValueError(
                f"{program.name}: calls: expected names, each once, sorted; found {names!r:.80}"
            )
    libraries = config.libraries
    if libraries is not None:
        if config.requirement.platform != "cpu":
            raise ValueError(
                f"expected libraries for cpu, found {config.requirement.platform!r:.80}"
            )
        digests = [library.digest for library in libraries]
        if not digests or digests != sorted(set(digests)) or not all(map(is_digest, digests)):
            raise ValueError(
                f"libraries: expected digests, each once, sorted; found {digests!r:.80}"
            )
    known = set[str]()
    for library in libraries or ():
        texts = (*library.handlers, *library.handlers.values())
        if not texts or not all(map(HANDLER_NAME.fullmatch, texts)):
            raise ValueError(
                f"libraries: handlers: expected names of handlers, found {library.handlers!r:.80}"
            )
        if twice := sorted(known & library.handlers.keys()):
            raise ValueError(f"libraries: expected each handler once, found {twice!r:.80}")
        if not calls & library.handlers.keys():
            raise ValueError(f"expected a program that calls {library.name!r:.80}, found none")
        known |= library.handlers.keys()
    if missing := sorted(calls - known):
        raise ValueError(
            f"expected libraries with the handlers that programs call, found no {missing!r:.80}"
        )


@rejecting
def check_library_layers(config: Config, manifest: ImageManifest, path: str) -> None:
    """7. Check that the libraries of a config are the layers of libraries of its manifest."""
    named = [library.digest for library in config.libraries or ()]
    found = sorted(at.digest for at in manifest.layers if at.mediaType == LIBRARY_MEDIA_TYPE)
    if named != found:
        raise ValueError(
            f"expected libraries {', '.join(named) or 'none'}, as the config; "
            f"found {', '.join(found) or 'no layer'}"
        )


def _check_recorded(config: Config) -> None:
    """Check that recorded files have safe names, each once, and that nothing else is in their target."""
    if config.recorded is None:
        return
    model = config.decoder or config.encoder or config.images
    if config.programs or config.weight_sets or model:
        raise ValueError("expected no programs beside recorded files, found some")
    files = [program.file for program in config.recorded]
    if not files or files != sorted(set(files)):
        raise ValueError("expected recorded files, each once, sorted by name")
    for program in config.recorded:
        where = f"{program.file!r:.80}"
        if not _RECORDED_FILE.fullmatch(program.file):
            raise ValueError(f"{where}: expected a file of jax's compilation cache")
        size = program.entry.raw_size
        if not 0 < size <= limits.MAX_PROGRAM_BYTES:
            raise ValueError(
                f"{where}: raw_size: expected 1 to {limits.MAX_PROGRAM_BYTES}, found {size}"
            )
        if not all(map(_HEX_DIGEST.fullmatch, program.ingredients.values())):
            raise ValueError(f"{where}: ingredients: expected digests of 64 hexadecimal digits")


def check_sources(
    decoder: Decoder, found: set[tuple[int, ...]], batch: int, contexts: list[int]
) -> None:
    """Check that an encoder-decoder has programs that read sources: the same sizes for each context."""
    if decoder.source is not None and not found:
        raise ValueError("expected encode programs for the source of the decoder, found none")
    sources = sorted({size for _, _, size in found})
    expected = set[tuple[int, ...]]()
    # No more than there are programs, as above.
    for bucket in itertools.product([batch], contexts, sources):
        if bucket not in found:
            raise ValueError(
                f"encode of batch {batch}, context {bucket[1]} and source {bucket[2]}: expected one"
            )
        expected.add(bucket)
    for rows, context, size in sorted(found - expected):
        raise ValueError(
            f"encode of batch {rows}, context {context} and source {size}: expected none but for "
            f"batch {batch} and the contexts of decode programs"
        )


_HEADS = ((), ("multi_vector",), ("sparse",), ("multi_vector", "sparse"))


def _check_encoder(config: Config, encoder: Encoder) -> None:
    """Check that each bucket has three programs, and that layers differ only in their weights."""
    if encoder.scores not in (None, "sigmoid", "identity"):
        raise ValueError(
            f"encoder: scores: expected sigmoid or identity, found {encoder.scores!r:.80}"
        )
    if encoder.segments is not None and not (encoder.segments and encoder.scores):
        raise ValueError("encoder: segments: expected true, of a model that scores, or nothing")
    if encoder.default_prompt is not None and encoder.default_prompt not in (encoder.prompts or {}):
        raise ValueError(
            f"encoder: default_prompt: expected a name in prompts, found {encoder.default_prompt!r:.80}"
        )
    if encoder.padding is not None and not 0 <= encoder.padding < encoder.vocab_size:
        raise ValueError(f"encoder: padding: expected a token, found {encoder.padding!r:.80}")
    places = (encoder.template or ())[1::2]
    if (
        encoder.template is not None
        and (
            len(encoder.template) % 2 == 0
            or not {"query", "document"} <= {*places} <= {"instruction", "query", "document"}
        )
    ) or ("instruction" in places) != (encoder.instruction is not None):
        raise ValueError("encoder: template: expected texts, and between them names of texts")
    heads, unweighted = encoder.heads or (), encoder.unweighted
    if heads not in _HEADS or ("sparse" in heads) != (unweighted is not None):
        raise ValueError(f"encoder: heads: expected multi_vector and sparse, found {heads!r:.80}")
    buckets: dict[str, set[str]] = {kind: set() for kind in ENCODER_KINDS}
    layers = dict.fromkeys(encoder.layers)  # models may share weights between layers
    for program in config.programs:
        if program.kind not in ENCODER_KINDS:
            continue
        bucket = encoder_bucket_name(**program.bucket)
        if program.name != (expected := f"{bucket}/{program.kind}"):
            raise ValueError(f"{program.name!r:.80}: expected the name {expected!r}")
        if (sentences := program.bucket.get("sentences")) is not None and (
            program.bucket["batch"] > 1 or sentences > limits.MAX_BATCH or heads
        ):
            raise ValueError(
                f"{program.name}: expected 1 row of at most {limits.MAX_BATCH} sentences, and no heads"
            )
        buckets[program.kind].add(bucket)
        if program.kind == "layer" and program.weights not in layers:
            raise ValueError(f"{program.name}: expected a weight set of encoder.layers")
    every = set[str]().union(*buckets.values())
    if not every:
        raise ValueError("expected programs for the encoder, found none")
    for kind in ENCODER_KINDS:
        for bucket in sorted(every - buckets[kind]):
            raise ValueError(f"expected {bucket}/{kind}, found none")
    for name in layers:
        if name not in config.weight_sets:
            raise ValueError(f"encoder: layers: unknown weight set {name!r:.80}")
    counts = {len(config.weight_sets[name]) for name in layers}
    if len(counts) > 1:
        raise ValueError("encoder: layers: expected weight sets of as many tensors each")


def check_layer_shapes(
    config: Config, layers: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that the layers of an encoder have tensors of the same shapes."""
    for name in dict.fromkeys(layers):
        for first, other in zip(
            config.weight_sets[layers[0]], config.weight_sets[name], strict=True
        ):
            if shapes[first] != shapes[other]:
                raise ValueError(
                    f"{other}: expected the shape of {first}, found {list(shapes[other])}"
                )


def check_start_tokens(decoder: Decoder, start: Sequence[int]) -> None:
    """Check the tokens with which a text begins."""
    wrong = next((each for each in start if not 0 <= each < decoder.vocab_size), None)
    if wrong is not None or not start:
        raise ValueError(
            f"decoder: start_token_ids: expected token ids of 0 to {decoder.vocab_size - 1}, "
            f"found {'none' if wrong is None else wrong}"
        )


def _check_images(config: Config, images: Images) -> None:
    """Check an encoder of images, and that it has programs of the right names."""
    if not 0 < images.width <= limits.MAX_SIZE:
        raise ValueError(
            f"images: width: expected 1 to {limits.MAX_SIZE}, found {images.width!r:.80}"
        )
    for name, counts in (("size", (2,)), ("resize", (0, 1, 2))):
        sizes = getattr(images, name)
        if len(sizes) not in counts or not all(0 < size <= _LARGEST_IMAGE for size in sizes):
            raise ValueError(
                f"images: {name}: expected sizes of 1 to {_LARGEST_IMAGE}, found {sizes!r:.80}"
            )
    if not 0 <= images.resample <= 5:
        raise ValueError(f"images: resample: expected 0 to 5, found {images.resample!r:.80}")
    labels = images.labels
    if labels is not None and len(labels) != images.width:
        raise ValueError(f"images: labels: expected {images.width}, found {len(labels)}")
    needed = labels is not None or config.encoder is not None
    if (images.scores in ("softmax", "sigmoid")) != needed or (labels and config.encoder):
        raise ValueError(
            f"images: scores: expected softmax or sigmoid of labels or beside an encoder alone, found "
            f"{images.scores!r:.80}"
        )
    if config.encoder is not None and not 0 < len(config.weight_sets.get(MATCH, ())) <= 2:
        raise ValueError(f"images: expected the weight set {MATCH!r} of one or two tensors")
    _check_sight(config, images)
    own = [program for program in config.programs if program.kind == "image"]
    if not own:
        raise ValueError("expected programs for images, found none")
    for program in own:
        expected = f"images/b{program.bucket['batch']}"
        if program.name != expected:
            raise ValueError(f"{program.name!r:.80}: expected the name {expected!r}")


def _check_sight(config: Config, images: Images) -> None:
    """Check how the prompts of a decoder hold images, and that programs put any of them into a cache."""
    tokens, token_id, marks = images.tokens, images.token_id, images.marks
    if (decoder := config.decoder) is None:
        if any(program.kind == IMAGE_PREFILL for program in config.programs):
            raise ValueError(f"{IMAGE_PREFILL}: expected a decoder, found none")
        if (tokens, token_id, marks) != (None, None, None):
            raise ValueError("images: tokens: expected none without a decoder")
        return
    if tokens is None or tokens < 1 or images.width % tokens:
        raise ValueError(f"images: tokens: expected a divisor of width, found {tokens!r:.80}")
    if token_id is None or not 0 <= token_id < decoder.vocab_size:
        raise ValueError(f"images: token_id: expected one of the decoder's, found {token_id!r:.80}")
    if marks is None or len(marks) != 3 or not all(marks):
        raise ValueError(f"images: marks: expected three texts, found {marks!r:.80}")
    found = {kind: set[tuple[int, ...]]() for kind in ("decode", IMAGE_PREFILL)}
    for program in config.programs:
        if program.kind in found:
            names = ("context", "batch", "prompt")
            found[program.kind].add(tuple(program.bucket.get(name, 0) for name in names))
    smallest = min((batch for _, batch, _ in found["decode"]), default=0)
    for context, batch, prompt in found[IMAGE_PREFILL]:
        if batch != smallest or prompt > context:
            raise ValueError(
                f"{IMAGE_PREFILL}: expected batch {smallest}, and prompts up to the context"
            )
    for context in sorted({context for context, _, _ in found["decode"] if context > tokens}):
        if not any(c == context and tokens <= prompt for c, _, prompt in found[IMAGE_PREFILL]):
            raise ValueError(
                f"{IMAGE_PREFILL} of context {context}: expected one of {tokens} tokens"
            )


@rejecting
def check_library(content: bytes, library: UserLibrary, architecture: str, path: str) -> None:
    """9. Check the digest of a library of the user, its architecture, and that it exports its handlers."""
    check_digest(content, library.digest, path)
    try:
        found = read_shared_library(content)
    except ValueError as error:
        raise ValueError(f"expected a shared library: {error}") from error
    if found.architecture != architecture:
        raise ValueError(
            f"expected a library for {architecture}, found one for {found.architecture}"
        )
    if missing := sorted(set(library.handlers.values()) - set(found.exported)):
        raise ValueError(f"expected exports {', '.join(missing)}, found others")


@rejecting
def check_recorded_layer(config: Config, manifest: ImageManifest, path: str) -> None:
    """7. Check that a manifest has a layer of recorded files if its config lists some, and else none."""
    has_layer = manifest.has_layer(RECORDED_MEDIA_TYPE)
    if has_layer != (config.recorded is not None):
        raise ValueError(
            f"expected {'a' if config.recorded else 'no'} layer of recorded files, as the config"
        )


def handler_names(*libraries: UserLibrary) -> dict[str, str]:
    """Return the name that executables use for each name by which portable programs call a handler."""
    return {
        name: handler_target(symbol, library.digest)
        for library in libraries
        for name, symbol in library.handlers.items()
    }


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat layer: how messages become a prompt.

    `templates`: Jinja sources by name, as transformers reads them. `default` is used unless a request names
    another. `special_tokens`: texts that templates use under names such as `bos_token` and `eos_token`.
    """

    templates: dict[str, str]
    special_tokens: dict[str, str]


@rejecting
def check_chat(content: bytes, path: str) -> Chat:
    """11. Check that a chat layer is canonical and holds at least one template, and only Unicode.

    A template is parsed when it is first used, because Jinja is not part of the format.
    """
    chat = from_json(Chat, content, path)
    if not chat.templates:
        raise ValueError("expected at least one chat template, found none")
    for table in (chat.templates, chat.special_tokens):
        for name, text in table.items():
            try:
                f"{name}{text}".encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name!r:.80}: expected Unicode: {error.reason}") from error
            if not name:
                raise ValueError("expected a name for each template and token, found none")
    return chat


def parted(config: Config) -> tuple[Config, Config]:
    """Return the table without its draft model, and that of the draft model, whose kinds are plain.

    Raises:
        ValueError: the draft model cannot guess for the decoder.
    """
    drafts = [each for each in config.programs if each.kind.startswith(DRAFT)]
    decoder, draft = config.decoder, config.draft
    if draft is None or decoder is None:
        missing = "draft" if draft is None else "decoder"
        raise ValueError(f"expected {missing!r} in the config of a draft model, found none")
    if config.mesh is not None:
        raise ValueError("draft: expected none beside a mesh")
    if draft.source is not None or draft.adapters is not None or not is_rewindable(draft):
        raise ValueError("draft: expected a decoder of prompts whose cache has positions alone")
    if draft.vocab_size != decoder.vocab_size:
        raise ValueError(
            f"draft: expected the {decoder.vocab_size} tokens of the decoder, found {draft.vocab_size}"
        )
    kinds = {each.kind for each in config.programs}
    if "verify" not in kinds:
        raise ValueError("draft: expected programs that verify drafts, found none")
    contexts, own = (
        {each.bucket.get("context") for each in config.programs if each.kind == kind}
        for kind in ("decode", f"{DRAFT}decode")
    )
    if contexts != own:
        raise ValueError("draft: expected the contexts of the decoder, found others")
    left = tuple(each for each in config.programs if not each.kind.startswith(DRAFT))
    plain = tuple(replace(each, kind=each.kind.removeprefix(DRAFT)) for each in drafts)
    one = replace(config, decoder=draft, encoder=None, images=None, draft=None, programs=plain)
    return replace(config, draft=None, programs=left), one


def check_mesh(config: Config) -> None:
    """Check the mesh of a config, and that the machines have its devices."""
    mesh, needed = config.mesh, config.requirement.device_count
    size = 1 if mesh is None else mesh.size
    if size > limits.MAX_MESH_DEVICES:
        raise ValueError(
            f"expected a mesh of at most {limits.MAX_MESH_DEVICES} devices, found {size}"
        )
    # A process makes as many CPU devices as it wants: only accelerators have to be counted.
    if needed != size and not (
        needed is None and (size == 1 or config.requirement.platform == "cpu")
    ):
        raise ValueError(f"expected device_count {size}, the size of the mesh; found {needed}")
    if config.weight_shardings is not None and mesh is None:
        raise ValueError("expected a mesh for weight_shardings, found none")


def check_split(sharding: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | None) -> None:
    """Check that a mesh splits an array evenly."""
    for axis, extent in zip(sharding, shape, strict=False):  # nothing split: no sharding
        parts = 0 if mesh is None else mesh.parts(axis)
        if axis and (not parts or extent % parts):
            found = parts or "no mesh with it"
            raise ValueError(f"expected a mesh whose {axis!r} divides {extent}, found {found}")


def check_weight_shardings(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a mesh splits tensors of the weights layer evenly."""
    for name, text in (config.weight_shardings or {}).items():
        if name not in shapes:
            raise ValueError(f"weight_shardings: no tensor {name!r:.80}")
        try:
            sharding = parse_sharding(text, len(shapes[name]))
            check_split(sharding, shapes[name], config.mesh)
        except ValueError as error:
            raise ValueError(f"weight_shardings: {name}: {error}") from error
        if not sharding:
            raise ValueError(f"weight_shardings: {name}: expected a mesh axis, found none")
