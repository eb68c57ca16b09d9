"""Lowering: from a planned program to StableHLO in the store. This step imports JAX and the user's code."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import zstandard

from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import IMAGE, undrafted
from prejit.compiler.native.products import Product, called
from prejit.compiler.pipeline.executable_jobs import choose_source
from prejit.compiler.pipeline.model import (
    ModelSource,
    cache_dtype,
    calls_kernels,
    longest_context,
    longest_source,
)
from prejit.compiler.pipeline.plan import (
    Lowered,
    Native,
    Plan,
    PlannedProgram,
    StoredTrial,
    find_lowered,
    find_native,
)
from prejit.compiler.pipeline.result_keys import native_key, own_lower_key
from prejit.compiler.pipeline.target_tools import TargetKernels
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.wording import few
from prejit.runtime.errors import BuildError
from prejit.runtime.format.bundle_schema import Segment
from prejit.runtime.format.names import DRAFT

if TYPE_CHECKING:
    from prejit.compiler.lowering.export import LoweredProgram
    from prejit.compiler.lowering.user.own_decoder import OwnModel
    from prejit.compiler.models.layers.kernel_calls import Forms
    from prejit.compiler.models.layers.layer_config import DecoderConfig
    from prejit.compiler.models.parameters import Parametrized

_ZSTD_LEVEL = 10
"""Compression level of portable programs."""


def lower(space: Workspace, program: PlannedProgram) -> Lowered:
    """Return a program as portable StableHLO: what the plan found, or lowered now and kept in the store.

    Several builds that need the same program lower it once. What the plan found and turns out to be damaged
    is lowered again; traces of functions were checked when they were found.
    """
    plan, store, progress, name = space.plan, space.store, space.progress, program.spec.name
    if program.lowered is not None and (
        not is_lowered_again(plan, program) or _is_whole(program.lowered, store)
    ):
        return program.lowered
    if program.key is None:
        made = _timed(space, program, lower_function)
        section = program.spec.section
        first = next(each for each in plan.programs if each.spec.section == section)
        if made.narrowed and name == first.spec.name:
            progress.note(
                f"{section} is built with {few(made.narrowed)}: jax_enable_x64 is off, and calls "
                "convert alike"
            )
        unknown = [at for at, text in (made.state or {}).items() if '["unknown",' in text]
        if unknown and name == first.spec.name:
            progress.note(_incomparable(section, unknown))
        return put_lowered(made, store)
    with progress.phase(f"lowering {name}"), store.making(program.key):
        if (found := find_lowered(program.key, store)) is not None:
            return found  # another build has lowered it meanwhile
        if program.key in store.last_keys(program.key.kind, program.key.name):
            progress.note(lowered_again(name))
        lowered = _lower_model(space, program)
        blobs = [lowered.portable.digest, lowered.portable.raw_digest]
        store.put(program.key, asdict(lowered), blobs=blobs)
        return lowered


def _timed(
    space: Workspace,
    program: PlannedProgram,
    trace: Callable[[Workspace, PlannedProgram], LoweredProgram],
) -> LoweredProgram:
    """Trace a program of the user's code, and note the CPU time."""
    with space.progress.phase(f"lowering {program.spec.name}"):
        started = time.process_time()
        made = trace(space, program)
        space.code().seconds[program.spec.name] = time.process_time() - started
    return made


def is_lowered_again(plan: Plan, program: PlannedProgram) -> bool:
    """Return whether a program can be lowered again if the store loses it: it is of a published model."""
    return program.key is not None and not plan.manifest.has_own_model


def has_lost_native(program: PlannedProgram, store: Store) -> bool:
    """Return whether the store had a model's program with kernels, and has lost it."""
    if program.key is None:
        return False
    wanted = {*program.key.ingredients}
    last = store.last_keys("native", program.key.name)
    return any(wanted <= {*key.ingredients} and store.get(key) is None for key in last)


def lowered_again(name: str) -> str:
    """Return what people read when the store has lost a program."""
    return f"{name} was damaged or deleted in the build cache and is lowered again"


def _incomparable(section: str, places: Sequence[str]) -> str:
    """Return what people read of values that a function holds and no other process can compare."""
    return (
        f"{section}: no process can compare what its function holds as {few(places)}: "
        "prejit.runtime.jit will not take it; Bundle.call does"
    )


def _is_whole(lowered: Lowered, store: Store) -> bool:
    """Return whether the store has a program undamaged. What is damaged is deleted."""
    return all([store.read_blob(digest) is not None for digest in lowered.blobs])


def lower_own(space: Workspace) -> Plan:
    """Return the plan with the programs of the user's decoder: those that it found, or lowered now."""
    plan = space.plan
    if not plan.manifest.has_own_model:
        return plan
    programs = []
    for program in plan.programs:
        if program.spec.kind != "call" and program.lowered is None:
            made = _timed(space, program, lower_own_decoder)
            lowered = replace(put_lowered(made, space.store), decoder=dict(made.decoder))
            key = own_lower_key(plan.manifest, program.spec, lowered.portable.raw_digest)
            program = replace(program, key=key, lowered=lowered)
        programs.append(program)
    return replace(plan, programs=tuple(programs))


def source_of(
    space: Workspace, program: PlannedProgram, lowered: Lowered, kernels: TargetKernels | None
) -> Source:
    """Return what a program is compiled from for a target: with kernels, if it has a use for them."""
    native = partial(lower_native, space, program)
    return choose_source(space.plan.manifest, program.spec, lowered, kernels, native)


def products_of(space: Workspace) -> tuple[Product, ...]:
    """Return all products of the programs that may call kernels, sorted."""
    programs = (e for e in space.plan.programs if calls_kernels(space.plan.manifest, e.spec))
    return tuple(sorted({p for each in programs for p, _ in lower_native(space, each).products}))


def lower_native(
    space: Workspace, program: PlannedProgram, forms: Mapping[Product, str] | None = None
) -> Native:
    """Return a model's program with calls of kernels: from the store, or lowered now.

    `forms` has the products that are computed without a kernel.
    """
    assert program.key is not None
    key = native_key(program.key, forms or {})
    if (known := find_native(key, space.store)) is not None:
        return known
    with space.store.making(key):
        if (known := find_native(key, space.store)) is not None:
            return known  # another build has lowered it meanwhile
        return _lower_native(space, program, key, forms or {})


def _lower_native(
    space: Workspace, program: PlannedProgram, key: Key, forms: Mapping[Product, str]
) -> Native:
    from prejit.compiler.models.layers.kernel_calls import Forms

    chosen = Forms(forms)
    how = lower_own_decoder if space.plan.manifest.has_own_model else _lower_published
    made = how(space, program, chosen)
    digest = space.store.put_blob(made.portable)
    products = tuple((each, chosen.form(each)) for each in sorted(chosen.met))
    native = Native(digest, products, called(made.portable))
    space.store.put(key, asdict(native), blobs=[digest])
    return native


def _lower_model(space: Workspace, program: PlannedProgram) -> Lowered:
    made = _lower_published(space, program)
    lowered = put_lowered(made, space.store)
    if program.spec.kind == IMAGE:
        cost = made.estimated_microseconds
        return replace(lowered, images=space.model().images, estimated_microseconds=cost)
    if space.plan.manifest.encode is None:
        return replace(lowered, decoder=dict(made.decoder))
    return replace(
        lowered,
        encoder=asdict(space.model().shape),
        weight_sets=dict(made.weight_sets),
        estimated_microseconds=made.estimated_microseconds,
    )


def _lower_published(
    space: Workspace, program: PlannedProgram, forms: Forms | None = None
) -> LoweredProgram:
    """Lower a program of a published model; `forms` are those of its products with kernels."""
    from prejit.compiler.lowering.decoder import MeshSplit, lower_decoder
    from prejit.compiler.lowering.encoder_programs import lower_encoder, lower_images
    from prejit.compiler.models.decoder_matrices import shardings

    if program.spec.kind.startswith(DRAFT) and (of_draft := space.of_draft) is not None:
        return _lower_published(of_draft, replace(program, spec=undrafted(program.spec)), forms)
    read, manifest, mesh = space.model(), space.plan.manifest, space.plan.manifest.mesh
    if program.spec.kind == IMAGE:
        return lower_images(read.module, program.spec, read.images.size, forms)
    if manifest.encode is not None:
        return lower_encoder(read.module, program.spec, forms)
    return lower_decoder(
        decoding_part(read),
        read.shape,
        program.spec,
        source=longest_source(manifest),
        split=None if mesh is None else MeshSplit(mesh, shardings(read.module, mesh)),
        forms=forms,
        adapters=read.adapters,
        width=None if read.images is None else read.images.width // read.images.tokens,
    )


def decoding_part(read: ModelSource) -> Parametrized:
    """Return a decoder without the parameters that read images alone."""
    from prejit.compiler.models.parameters import parametrized, reduced

    whole = parametrized(read.module)
    if read.images is None:
        return whole
    parts = tuple(f"{part}." for part in read.module.image_parts())
    return reduced(whole, lambda name: not name.startswith(parts))


def lower_own_decoder(
    space: Workspace, program: PlannedProgram, forms: Forms | None = None
) -> LoweredProgram:
    """Lower a program of the user's decoder; `forms` are those of its products with kernels."""
    from prejit.compiler.lowering.decoder import lower_decoder
    from prejit.compiler.lowering.user.nondeterminism import refusing_nondeterminism
    from prejit.compiler.lowering.user.own_decoder import CHECK_MODEL

    manifest, model = space.plan.manifest, space.code().model
    assert model is not None
    assert manifest.model is not None
    what = f"{manifest.where}: program {program.spec.name}: cannot lower {model.label}"
    pure = contextlib.nullcontext() if manifest.model.impure else refusing_nondeterminism(what)
    with model.modules.tracing(what, CHECK_MODEL), pure:
        return lower_decoder(
            model.stored.model,
            own_shape(manifest, model),
            program.spec,
            source=longest_source(manifest),
            forms=forms,
        )


def own_shape(manifest: Manifest, model: OwnModel) -> DecoderConfig:
    """Return what lowering needs to know of a decoder of the user."""
    from prejit.compiler.models.layers.layer_config import DecoderConfig

    longest = longest_context(manifest)
    assert longest is not None
    return DecoderConfig(
        model.label, model.vocab_size, cache_dtype(manifest), model.max_positions or longest
    )


def lower_function(space: Workspace, program: PlannedProgram) -> LoweredProgram:
    """Trace and lower a function of the user at a bucket."""
    from prejit.compiler.lowering.export import LoweredProgram
    from prejit.compiler.lowering.user.function_lowering import (
        lower_function as lower_user_function,
    )

    plan, manifest, spec = space.plan, space.plan.manifest, program.spec
    section = manifest.section(spec.section)
    platforms = [target.platform for target in plan.targets]
    user = space.code().functions[section.name]
    if isinstance(user, LoweredProgram):
        return user
    return lower_user_function(
        user, section, spec, manifest.where, platforms, manifest.mesh, plan.handlers
    )


def put_lowered(program: LoweredProgram, store: Store) -> Lowered:
    """Put a program's StableHLO into the store: compressed for the bundle, and as it is for workers."""
    raw = program.portable
    if called(raw):
        raise BuildError(
            "expected a portable program that calls no kernels, found one that does",
            hint="no other machine could run it: report it to prejit's authors",
        )
    return Lowered(
        _put_frame(raw, store),
        program.platforms,
        _stablehlo_version(raw),
        program.weights,
        tuple(map(str, program.arguments)),
        tuple(map(str, program.results)),
        weight_shardings={name: ",".join(axes) for name, axes in program.weight_shardings.items()},
        arguments_tree=program.arguments_tree,
        results_tree=program.results_tree,
        symbolic=None if program.symbolic is None else _put_frame(program.symbolic, store),
        settings=program.settings,
        state=program.state,
        modules=program.modules,
        search_path=program.search_path,
        trials=tuple(
            StoredTrial({**each.sizes}, each.padded, each.has_places, store.put_blob(each.portable))
            for each in program.trials()
        ),
    )


def _put_frame(raw: bytes, store: Store) -> Segment:
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(raw)
    return Segment(0, len(frame), store.put_blob(frame), len(raw), store.put_blob(raw))


def _stablehlo_version(portable: bytes) -> str:
    """Return the version in the header of a portable artifact (stablehlo/api/PortableApi.h)."""
    found: Any = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", portable[:256])
    return found[1].decode() if found else "0.0.0"
