"""Packing: from executables, weights and files to the blobs of a bundle, its requirements and its index.

`requirement_of` returns what a target needs of a machine, and `readable_until` for how long jax reads
its portable programs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from prejit.compiler.compile.compile_jobs import Compiled
from prejit.compiler.lowering.user.source_modules import sources_of
from prejit.compiler.lowering.user.trace_inputs import Present
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models.families.image_processing import MATCHING
from prejit.compiler.native.kernel_library import KernelLibrary, needed_glibc
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.executable_jobs import CompiledTarget, Submitted
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, PackedTarget
from prejit.compiler.pipeline.pack.model_layers import special_ids
from prejit.compiler.pipeline.pack.weights_layer import chunks_of
from prejit.compiler.pipeline.plan import Lowered, Plan
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.pipeline.target_tools import (
    ReadLibrary,
    TargetKernels,
    allowed_features,
    libraries_of,
)
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets.target_classes import CUDA
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.errors import BuildError
from prejit.runtime.format import constants
from prejit.runtime.format.bundle_schema import (
    Accuracy,
    Config,
    Decoder,
    Encoder,
    Images,
    Portable,
    ProductForm,
    ProgramEntry,
    Segment,
)
from prejit.runtime.format.checks.seldom_parts import MATCH
from prejit.runtime.format.names import (
    DRAFT,
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    PORTABLE_MEDIA_TYPE,
)
from prejit.runtime.format.release_limits import ReleaseLimits
from prejit.runtime.machine.fingerprint import (
    Requirement,
    effective_environment,
    effective_xla_flags,
)

MODEL_WEIGHTS = "model"
"""The name of a decoder's weight set. Those of an encoder begin with it and a colon."""
PROGRAM_WEIGHTS = "program"
"""Weight sets of [[program]] sections begin with this and a colon: a section may have the name `model`."""

Costs = Mapping[tuple[str, str], int]
"""Microseconds of one run, by program and target."""


@dataclass(frozen=True)
class PackedBundle:
    """A bundle that has still to be written: its index, and all other blobs, in memory or in files."""

    name: str
    index: bytes
    blobs: dict[str, bytes | Path]


def pack_targets(
    plan: Plan,
    targets: Sequence[CompiledTarget],
    layers: Iterable[PackedLayer],
    products: tuple[Product, ...],
    accuracy: Accuracy | None,
    costs: Costs,
    store: Store,
) -> tuple[PackedTarget, ...]:
    """Return the tables and layers of a bundle's targets. Their programs have no golden answers yet.

    `layers` are those that all targets share, `products` those of the programs that may call kernels.
    """
    lowered = {each.spec.name: each.lowered for each in targets[0].executables}
    frames = {name: program.portable for name, program in lowered.items()}
    frames |= {
        _symbolic(name): program.symbolic
        for name, program in lowered.items()
        if program.symbolic is not None
    }
    portable, portables = bundle_files.pack(
        PORTABLE_MEDIA_TYPE, "programs.stablehlo", frames, store
    )

    def packed(target: CompiledTarget) -> PackedTarget:
        compiled = {name: each.executable for name, each in target.results.items()}
        executables, segments = bundle_files.pack(
            EXECUTABLES_MEDIA_TYPE, "programs.xla", compiled, store
        )
        own = [executables]
        if target.library is not None:
            own.append(bundle_files.kernels_layer(target.library, store))
        own += map(bundle_files.library_layer, _libraries(plan, target))
        layers_of_target = (*own, *shared)
        programs = tuple(
            _with_sources(
                _program(each, segments, portables, costs.get((each.spec.name, target.tools.name))),
                sources(each),
            )
            for each in target.executables
        )
        config = _config(plan, target, programs, products, accuracy)
        chunks = chunks_of(layers_of_target, store)
        return PackedTarget(replace(config, chunks=chunks), layers_of_target)

    shared = (*layers, portable)
    present = cache(partial(Present, plan.manifest.directory))
    is_loaded = plan.manifest.path is None
    found = cache(lambda path, modules: sources_of(modules, present(*path), is_loaded=is_loaded))

    def sources(program: Submitted) -> Mapping[str, str | None]:
        lowered = program.lowered
        return found(lowered.search_path, lowered.modules) if lowered.modules else {}

    return tuple(map(packed, targets))


def pack_bundle(
    name: str, targets: Iterable[PackedTarget], slo: ReleaseLimits | None
) -> PackedBundle:
    """Return the files of a bundle, checked as `load` will check them. `slo`: the limits that it carries."""
    index, blobs = bundle_files.assemble(name, targets, bundle_files.DESCRIPTIONS, slo)
    bundle_files.check_readable(index, blobs)
    return PackedBundle(name, index, blobs)


def _symbolic(name: str) -> str:
    return f"{name} for any size"


def _program(
    executable: Submitted,
    executables: Mapping[str, Segment],
    portables: Mapping[str, Segment],
    cost: int | None,
) -> ProgramEntry:
    spec, lowered = executable.spec, executable.lowered
    return ProgramEntry(
        name=spec.name,
        kind=spec.kind,
        bucket=spec.bucket,
        key=executable.job.key.digest,
        arguments=lowered.arguments,
        results=lowered.results,
        executable=executables[spec.name],
        portable=portables[spec.name],
        memory=executable.compiled.memory,
        weights=next(iter(_weight_sets(spec.section, lowered)), None),
        platforms=lowered.platforms or None,
        cost_microseconds=cost,
        kernels=True if executable.job.source.kernels is not None else None,
        arguments_tree=lowered.arguments_tree,
        results_tree=lowered.results_tree,
        static={
            name: constants.dumps(constants.plain(constants.encode(value)))
            for name, value in spec.static.items()
        }
        or None,
        mask=spec.mask or None,
        pad=spec.pad or None,
        symbolic=portables.get(_symbolic(spec.name)),
        open_sizes=spec.open_sizes or None,
        calls=tuple(name for name, _ in executable.job.source.calls) or None,
        settings=lowered.settings,
        state=lowered.state,
    )


def _with_sources(entry: ProgramEntry, sources: Mapping[str, str | None]) -> ProgramEntry:
    """Return a program with the sources of its function in its state.

    They are those of this build, which may use a trace of an earlier one: a comment may have changed since.
    """
    texts = {at: json.dumps(text) for at, text in sources.items()}
    return replace(entry, state={**(entry.state or {}), **texts} or None)


def _config(
    plan: Plan,
    target: CompiledTarget,
    programs: tuple[ProgramEntry, ...],
    products: tuple[Product, ...],
    accuracy: Accuracy | None,
) -> Config:
    toolchain, library = target.tools.toolchain, target.library
    libraries = _libraries(plan, target)
    jax = versions("jax")["jax"]
    lowered = [(each.spec, each.lowered) for each in target.executables]
    newest = max((p.stablehlo for _, p in lowered), key=lambda v: tuple(map(int, v.split("."))))
    return Config(
        format=FORMAT_VERSION,
        bundle=plan.manifest.bundle.name,
        target=toolchain.target.name,
        requirement=requirement_of(plan.manifest, toolchain, target.results, library, libraries),
        versions={**versions("prejit"), **dict(toolchain.versions)},
        programs=programs,
        weight_sets={
            name: tensors
            for spec, program in lowered
            for name, tensors in _weight_sets(spec.section, program).items()
        }
        | _match(target.executables),
        decoder=_decoder(plan, target.executables),
        draft=_decoder(plan, target.executables, draft=True),
        encoder=_encoder(target.executables),
        images=_images(target.executables),
        mesh=plan.manifest.mesh,
        weight_shardings=_weight_shardings(lowered),
        portable=Portable(jax, newest, readable_until(jax)),
        forms=_forms(target.tools.kernels, products),
        accuracy=accuracy,
        kernels=None if library is None else library.described(),
        libraries=tuple(each.described for each in libraries) or None,
    )


def _libraries(plan: Plan, target: CompiledTarget) -> tuple[ReadLibrary, ...]:
    """Return the libraries of the user that a target's programs call, sorted by digest."""
    usable = libraries_of(plan.libraries, target.tools.toolchain.target)
    return tuple(each for each in usable if target.calls & each.described.handlers.keys())


def _weight_sets(section: str, program: Lowered) -> dict[str, tuple[str, ...]]:
    """Return the sets of tensors that a program runs with, by name; none where it has no weights."""
    if not program.weights:
        return {}
    if program.images is not None:
        return {f"{MODEL_WEIGHTS}:images": program.weights}
    if program.weight_sets:
        return {f"{MODEL_WEIGHTS}:{name}": names for name, names in program.weight_sets.items()}
    if not section:
        return {MODEL_WEIGHTS: program.weights}
    # A model's tensors have their published names; those of others begin with their section.
    tensors = tuple(f"{section}:{name}" for name in program.weights)
    of_draft = program.decoder is not None
    return {section if of_draft else f"{PROGRAM_WEIGHTS}:{section}": tensors}


def _weight_shardings(lowered: Iterable[tuple[ProgramSpec, Lowered]]) -> dict[str, str] | None:
    """Return the shardings of all tensors that a mesh splits, by their names in the weights layer."""
    found: dict[str, str] = {}
    for spec, program in lowered:
        for name, axes in program.weight_shardings.items():
            found[f"{spec.section}:{name}" if spec.section else name] = axes
    return found or None


def _decoder(
    plan: Plan, executables: Iterable[Submitted], *, draft: bool = False
) -> Decoder | None:
    """Return the decoder, or the draft model, which ends no text; None: there is none."""
    own = [each for each in executables if each.spec.kind.startswith(DRAFT) == draft]
    shapes = [e.lowered.decoder for e in own if e.lowered.decoder is not None]
    if not shapes:
        return None
    shape = {name: value for each in shapes for name, value in each.items()}  # some have adapters
    eos: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    bos = None
    if plan.model is not None and not draft:
        of_user = plan.manifest.has_own_model
        eos, bos, start = special_ids(plan.model.directory, shape["vocab_size"], own=of_user)
    return Decoder(
        **{name: _tupled(value) for name, value in shape.items()},
        eos_token_ids=eos,
        bos_token_id=bos,
        start_token_ids=start if shape.get("source") is not None and start else None,
    )


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _encoder(executables: Iterable[Submitted]) -> Encoder | None:
    for each in executables:
        if each.lowered.encoder is not None and each.spec.kind == "layer":
            return Encoder(**each.lowered.encoder, layers=tuple(_weight_sets("", each.lowered)))
    return None


def _images(executables: Iterable[Submitted]) -> Images | None:
    found = (each.lowered.images for each in executables)
    return next((images for images in found if images is not None), None)


def _match(executables: Iterable[Submitted]) -> dict[str, tuple[str, ...]]:
    """Return the weight set of what makes logits of images and texts, if a model reads both."""
    kinds = {each.spec.kind: each.lowered for each in executables}
    if "layer" not in kinds or (images := kinds.get("image")) is None or images.images is None:
        return {}
    return {MATCH: MATCHING[images.images.family]}


def _forms(
    kernels: TargetKernels | None, products: tuple[Product, ...]
) -> tuple[ProductForm, ...] | None:
    """Return the forms of products in a target's programs, and why they were chosen."""
    if kernels is None:
        return None
    found = []
    for product in products:
        choice = kernels.choose(product)
        why: tuple[Any, ...] = ({},)
        if (measured := choice.measured) is not None:
            why = (
                dict(measured.nanoseconds),
                f"{measured.conditions.level} on {measured.conditions}",
                measured.date,
                None if measured.product == product else str(measured.product),
            )
        found.append(ProductForm(str(product), choice.form, *why))
    return tuple(found) or None


def requirement_of(
    manifest: Manifest,
    toolchain: Toolchain,
    programs: Mapping[str, Compiled],
    library: KernelLibrary | None,
    own: Sequence[ReadLibrary] = (),
) -> Requirement:
    """Return what a target's executables need, from what the compiler found in them.

    `library` has the kernels that they call, `own` are the libraries of the user that they call. These may
    use all extensions of the target.

    Raises:
        BuildError: a program needs more memory than a device of the target has.
        StoreError: XLA_FLAGS names a file that cannot be read.
    """
    target = toolchain.target
    accelerated = target.platform != "cpu"
    needs = {name: program.memory.need_bytes for name, program in programs.items()}
    if accelerated and target.memory_bytes is not None:
        too_large = [name for name, need in needs.items() if need > target.memory_bytes]
        if too_large:
            listed = "".join(
                f"\n  {name}: needs {needs[name] / 1e9:.2f} GB: {programs[name].memory.described()}"
                for name in too_large
            )
            raise BuildError(
                f"{manifest.where}: target {target.name}: a device has "
                f"{target.memory_bytes / 1e9:.2f} GB, and {len(too_large)} of {len(programs)} "
                f"programs need more{listed}",
                hint="make [generate] batch or context smaller, split the model over a [mesh], "
                "or build for a larger device",
            )
    features = set[str]().union(*(program.cpu_features for program in programs.values()))
    features |= set(library.cpu_features if library else ())
    features |= set(allowed_features(target) if own else ())
    needed = target.requirement(
        toolchain.jaxlib,
        plugin=toolchain.plugin,
        cuda=CUDA if target.platform == "cuda" else None,
        cpu_features=tuple(sorted(features)),
        device_memory_bytes=max(needs.values()) if accelerated else None,
        xla_flags=effective_xla_flags(toolchain.xla_flags(os.environ)),
        environment=effective_environment(target.platform, os.environ),
    )
    found = (None if library is None else library.glibc, *(each.glibc for each in own))
    return replace(needed, glibc=needed_glibc(*found))


_RELEASED = {
    # version of jax: its release (the dates of the files in its wheels)
    "0.10.2": date(2026, 6, 17),
    "0.11.0": date(2026, 7, 16),
    "0.11.1": date(2026, 8, 17),
    "0.11.2": date(2026, 9, 17),
    "0.12.0": date(2026, 10, 16),
    "0.12.0.1": date(2026, 10, 20),
}
_WINDOW = timedelta(days=180)


def readable_until(jax: str) -> str | None:
    """Return the last day that jax promises to read what it lowered, YYYY-MM-DD; None: not known.

    "Exported artifacts can be compiled and executed by a compiler and a jaxlib up to 6 months newer" (jax,
    docs/export/export.md, "Compatibility guarantees"). It counts from the release, not from the day of
    the build, so that equal builds give equal bytes.
    """
    released = _RELEASED.get(jax)
    return None if released is None else (released + _WINDOW).isoformat()
