"""Check the model and the user's code before anything is lowered: mistakes come first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import IMAGE, ProgramSpec, undrafted
from prejit.compiler.pipeline.lower.program_lowering import decoding_part, own_shape
from prejit.compiler.pipeline.model import ModelSource, longest_source, open_weights
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.pipeline.published_files import ResultOfFiles, find_published
from prejit.compiler.pipeline.result_keys import weights_key
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Quiet
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.names import DRAFT

if TYPE_CHECKING:
    from prejit.compiler.lowering.kv_cache_arrays import CacheLayout
    from prejit.compiler.lowering.user.own_decoder import OwnModel
    from prejit.compiler.models.layers.layer_config import DecoderConfig
    from prejit.compiler.models.parameters import Parametrized

MAX_PROGRAM_BYTES = 1 << 42
"""Largest size of a program's arrays in bytes, weights not counted: 4 TiB, more than any machine has. XLA is
slow or wrong far beyond it."""


def check(space: Workspace, weights: Checkpoint | None) -> None:
    """Check the model and the user's code against the programs that have to be lowered.

    Others were checked before. All code is imported if any is, so that it finds the same modules each time.
    `weights` are those of a published model.
    """
    plan, manifest = space.plan, space.plan.manifest
    has_own = manifest.has_own_model
    is_traced = (has_own and plan.own is None) or any(
        each.lowered is None and (each.spec.kind == "call" or has_own) for each in plan.programs
    )
    if is_traced and (own := space.code().model):
        _check_own(manifest, own, own_shape(manifest, own), plan.specs)
    new = _new_specs(plan)
    drafts = [undrafted(each) for each in new if each.kind.startswith(DRAFT)]
    if weights is not None and len(new) > len(drafts):
        plain = [each for each in new if not each.kind.startswith(DRAFT)]
        _check_published(manifest, space.model(), weights, plain)
    if drafts and (of_draft := space.of_draft) is not None:
        _check_draft(space, of_draft, drafts)


def check_planned(plan: Plan, store: Store) -> None:
    """Check a plan as its build begins. Nothing is imported or read that the store has."""
    space, manifest = Workspace.of(plan, store, Quiet()), plan.manifest
    if plan.model is None or manifest.has_own_model:
        check(space, None)
        return
    published = find_published(manifest, plan.model, plan.draft)
    assert published is not None
    check(space, published.checkpoint)
    if not _new_specs(plan):
        # The build packs other weights, also where nothing is lowered.
        key_of = partial(
            weights_key, manifest, plan.model, user=space.parameters(), draft=plan.draft
        )
        if ResultOfFiles(store, key_of, published).find() is None:
            for each in (published, published.draft):
                if each is not None:
                    _ = each.checkpoint.names  # raises an error that lists all that does not fit


def _new_specs(plan: Plan) -> list[ProgramSpec]:
    """Return the programs of a published model that have to be lowered."""
    is_measured = plan.model is None or plan.model.chosen is not None
    return [
        each.spec
        for each in plan.programs
        if each.lowered is None
        and (each.key is not None or not (is_measured or each.spec.kind == "call"))
    ]


def _check_published(
    manifest: Manifest, model: ModelSource, weights: Checkpoint, specs: Iterable[ProgramSpec]
) -> None:
    """Check in seconds what would fail after minutes: that programs can be made from a model."""
    if manifest.encode is not None:
        _check_towers(manifest, model)
        if manifest.encode.packed and not getattr(model.module, "packs", False):
            raise ManifestError(
                f"{manifest.where}: encode.packed: expected a model that embeds texts, of bert, distilbert, "
                "electra, roberta, xlm-roberta or camembert; found "
                f"{_shown(model)}",
                hint="leave packed out, and give shapes such as [[1, 32], [8, 128]]",
            )
        longest = 0 if model.shape is None else model.shape.max_tokens
        limit = f"{longest} tokens, which is what {model.files.directory} takes"
        for spec in specs:
            if spec.kind == IMAGE:
                continue
            if "sentences" not in spec.bucket:
                _check_longest(manifest, "encode.shapes", spec.bucket["length"], longest, limit)
            _check_room(manifest, spec, _encoder_bytes(model, spec))
    else:
        config = model.files.directory / "config.json"
        _check_source(manifest, getattr(model.module, "source", None), f"{config} is of")
        limit = f"{model.shape.max_positions}, the positions that {config} gives the model"
        if model.images is not None:
            _check_images(manifest, model)
            specs = [spec for spec in specs if spec.kind != IMAGE]
        _check_decoder(manifest, decoding_part(model), model.shape, specs, limit)
    if manifest.mesh is not None and manifest.encode is None:
        from prejit.compiler.models.decoder_matrices import check_mesh

        check_mesh(manifest.mesh, model.module, manifest.where, config)
    _ = weights.names  # raises an error that lists every tensor that does not fit


def _check_draft(space: Workspace, of_draft: Workspace, specs: Iterable[ProgramSpec]) -> None:
    """Check that programs can be made from a draft model, and that it can guess for the model."""
    manifest, draft = of_draft.plan.manifest, of_draft.model()
    config = draft.files.directory / "config.json"
    found, wanted = draft.shape.vocab_size, space.vocab_size()
    if found != wanted:
        ours = space.model().files.directory / "config.json"
        raise ManifestError(
            f"{manifest.where}: draft.source: expected {wanted} logits, as {ours} has; "
            f"found {found} in {config}",
            hint="take a smaller model of the same family",
        )
    if getattr(draft.module, "source", None) is not None:
        raise ManifestError(
            f"{manifest.where}: draft.source: expected a decoder that reads prompts alone; {config} is of an "
            "encoder-decoder",
            hint="take a smaller decoder with the tokens of the model",
        )
    assert of_draft.plan.model is not None
    _check_published(manifest, draft, open_weights(of_draft.plan.model), specs)
    from prejit.compiler.lowering.kv_cache_arrays import cache_layout

    if not cache_layout(decoding_part(draft), draft.shape, None).is_rewindable:
        raise ManifestError(
            f"{manifest.where}: draft.source: expected a model that keeps keys and values alone, because it "
            f"must forget rejected guesses; {config} is of a {draft.shape.family}, which keeps a state",
            hint="take a transformer",
        )


def _shown(model: ModelSource) -> str:
    if model.shape is None:
        return "one that reads images"
    return f"{model.shape.family}{' that scores' if model.shape.scores else ''}"


def _check_own(
    manifest: Manifest, model: OwnModel, shape: DecoderConfig, specs: Iterable[ProgramSpec]
) -> None:
    """Check in seconds what would fail after minutes: that programs can be made from a user's decoder."""
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

    `source` is `EncoderDecoder.source` of the model (None: it is a decoder), `what` begins a sentence about
    it.
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
    """Check a decoder's buckets, and that a machine can have room for its programs. Return its cache."""
    import jax.numpy as jnp

    from prejit.compiler.lowering.kv_cache_arrays import POSITIONS, cache_layout

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


def _check_towers(manifest: Manifest, model: ModelSource) -> None:
    """Check that a manifest has texts if, and only if, a model that reads images reads texts too."""
    assert manifest.encode is not None
    if model.images is None:
        return
    shapes = manifest.encode.shapes
    if (model.shape is None) != (not shapes):
        wanted = "no shapes, as the model reads images alone" if shapes else "shapes of texts, too"
        raise ManifestError(
            f"{manifest.where}: encode.shapes: expected {wanted}; found {shown([*map(list, shapes)])}",
            hint="leave shapes out" if shapes else "such as shapes = [[1, 16], [8, 77]]",
        )
    if shapes and model.shape.padding is not None:
        length = model.shape.max_tokens
        wrong = [[*shape] for shape in shapes if shape[1] != length]
        if wrong:
            raise ManifestError(
                f"{manifest.where}: encode.shapes: expected texts of {length} tokens, to which this model "
                f"was trained to fill them up; found {shown(wrong[0])}",
                hint=f"such as shapes = [[1, {length}], [8, {length}]]",
            )


def _check_images(manifest: Manifest, model: ModelSource) -> None:
    """Check that each context which holds an image has a program that takes all its tokens at once."""
    assert manifest.generate is not None
    sizes, tokens = manifest.generate.images, model.images.tokens
    contexts = [context for context in manifest.generate.context if context > tokens]
    if not contexts:
        raise ManifestError(
            f"{manifest.where}: generate.context: expected one of more than {tokens}, the tokens of an "
            f"image; found {list(manifest.generate.context)}",
            hint="add a longer context",
        )
    if min(sizes) < tokens or min(sizes) > min(contexts):
        raise ManifestError(
            f"{manifest.where}: generate.images: expected sizes of at least {tokens}, the tokens of an "
            f"image, one of them at most {min(contexts)}, the shortest context for one; found {list(sizes)}",
            hint=f"such as images = [{min(contexts)}]",
        )


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
    config = config if model.images is None else config.text_config
    heads = config.num_attention_heads * length
    return 4 * spec.bucket["batch"] * length * (config.hidden_size + heads)
