"""Lowering: from a planned program to StableHLO in the store. This step imports JAX and the user's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.compile.jobs import Source
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.calls import called
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.keys import UserWeights, native_key, own_lower_key
from prejit.compiler.pipeline.libraries import libraries_of
from prejit.compiler.pipeline.model import (
    ReadModel,
    cache_dtype,
    longest_context,
    longest_source,
)
from prejit.compiler.pipeline.plan import (
    Lowered,
    Native,
    Plan,
    PlannedProgram,
    TargetKernels,
    calls_kernels,
    choose_source,
    find_lowered,
    find_native,
)
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.store.key import Key
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format.arrays import DTYPES
from prejit.runtime.format.schema import Segment, handler_names
from prejit.runtime.machine.targets import Target

if TYPE_CHECKING:
    from prejit.compiler.lowering.program import LoweredProgram
    from prejit.compiler.lowering.user.finding import UserFunction
    from prejit.compiler.lowering.user.models import OwnModel
    from prejit.compiler.models.layers.config import DecoderConfig
    from prejit.compiler.models.layers.forms import Forms

_ZSTD_LEVEL = 10
"""Compression level of portable programs."""

Functions = Mapping[str, "UserFunction | LoweredProgram"]
"""The user's functions, and programs that were lowered elsewhere, by the name of their section."""


@dataclass(frozen=True)
class UserCode:
    """What a manifest names in modules of the user.

    Attributes:
        functions: the functions of [[program]] sections.
        model: the decoder of [model]; None: the manifest names none.
    """

    functions: Functions = field(default_factory=dict)
    model: OwnModel | None = None


def find_code(manifest: Manifest, *, out_in: bool = False) -> UserCode:
    """Import the functions and the decoder that a manifest names, and read their parameters.

    Args:
        manifest: the manifest.
        out_in: whether matrices of the decoder are stored (out, in), where it only multiplies with them.

    Raises:
        ManifestError: a module or an attribute does not exist, or raises an error; or the decoder is none.
        BuildError: the decoder's code raises an error.
        CheckpointError: parameters cannot be read.
    """
    if not (manifest.programs or manifest.has_own_model):
        return UserCode()  # and jax is not imported
    modules = UserModules(None if manifest.path is None else manifest.directory)
    own = _find_own_model(manifest, modules, out_in=out_in)
    return UserCode(_find_functions(manifest, modules), own)


def _find_functions(manifest: Manifest, modules: UserModules) -> Functions:
    from prejit.compiler.lowering.user.finding import find_function

    found = {}
    for program in manifest.programs:
        where = f"{manifest.where}: program {program.name!r}: params"
        parameters, nested = _parameters(manifest, program.params, where)
        file = manifest.resolve(str(program.fn)) if program.is_file else None
        with modules.in_use():
            found[program.name] = find_function(
                program, manifest.where, parameters, modules, nested, file
            )
    return found


def _find_own_model(manifest: Manifest, modules: UserModules, *, out_in: bool) -> OwnModel | None:
    if not manifest.has_own_model:
        return None
    from prejit.compiler.lowering.user.models import find_model

    assert manifest.model is not None
    where = f"{manifest.where}: model.params"
    parameters, nested = _parameters(manifest, manifest.model.params, where)
    with modules.in_use():
        return find_model(
            manifest.model, manifest.where, parameters, modules, nested, out_in=out_in
        )


def _parameters(
    manifest: Manifest, params: Any, where: str
) -> tuple[dict[str, Any] | None, Callable[[Mapping[str, Any]], Any] | None]:
    """Return parameters by flat name, and what makes a pytree of them again; None for nested dicts.

    Raises:
        ManifestError: two leaves of a pytree have the same name, or one is no array.
        CheckpointError: a file cannot be read.
    """
    if params is None:
        return None, None
    if isinstance(params, str | Path):
        return read_parameters(manifest.resolve(str(params))), None
    import jax
    import numpy as np

    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [".".join(map(_step, path)) or "params" for path, _ in leaves]
    for name in names:
        if names.count(name) > 1:
            raise ManifestError(
                f"{where}: expected different names of leaves, found {name!r} twice",
                hint="names are joined by dots: a key must not contain one",
            )
    values = {}
    for name, (_, leaf) in zip(names, leaves, strict=True):
        value = np.asarray(leaf)
        if str(value.dtype) not in DTYPES:
            raise ManifestError(
                f"{where}: {name}: expected an array of one of {', '.join(DTYPES)}, found {value.dtype}",
                hint="give a pytree of JAX or NumPy arrays",
            )
        # As jax.jit takes it: 64 bits become 32 unless jax_enable_x64 is set.
        values[name] = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)

    def nested(weights: Mapping[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(structure, [weights[name] for name in names])

    return values, nested


def _step(key: Any) -> str:
    """Return one step of the path to a leaf of a pytree: a key, an index or the name of a field."""
    return next(str(getattr(key, at)) for at in ("key", "idx", "name") if hasattr(key, at))


def weights_of(code: UserCode) -> UserWeights:
    """Return the parameters of the user's functions, by section."""
    values = {name: getattr(function, "values", None) for name, function in code.functions.items()}
    return {name: of for name, of in values.items() if of}


def lower(
    plan: Plan,
    program: PlannedProgram,
    model: ReadModel,
    code: UserCode,
    store: Store,
    progress: Progress,
) -> Lowered:
    """Return a program as portable StableHLO: what the plan found, or lowered now and kept in the store.

    Several builds that need the same program lower it once.

    Raises:
        BuildError, ManifestError, CheckpointError: the program cannot be lowered.
    """
    if program.lowered is not None:
        return program.lowered
    if program.key is None:
        with progress.phase(f"lowering {program.spec.name}"):
            return _lower_function(plan, program, code.functions, store)
    with progress.phase(f"lowering {program.spec.name}"), store.making(program.key):
        if (found := find_lowered(program.key, store)) is not None:
            return found  # another build has lowered it meanwhile
        lowered = _lower_model(plan, program, model, store)
        blobs = [lowered.portable.digest, lowered.portable.raw_digest]
        store.put(program.key, asdict(lowered), blobs=blobs)
        return lowered


def lower_own(plan: Plan, code: UserCode, store: Store, progress: Progress) -> Plan:
    """Return the plan with the programs of the user's decoder lowered; it has none: the plan as it is.

    Raises:
        BuildError: the decoder's code raises, or does not follow the protocol.
    """
    if code.model is None:
        return plan
    programs = []
    for program in plan.programs:
        if program.spec.kind != "call":
            with progress.phase(f"lowering {program.spec.name}"):
                lowered = _lower_own_model(plan, program, code.model, store)
            key = own_lower_key(plan.manifest, program.spec, lowered.portable.raw_digest)
            program = replace(program, key=key, lowered=lowered)
        programs.append(program)
    return replace(plan, programs=tuple(programs))


def source_of(
    plan: Plan,
    program: PlannedProgram,
    lowered: Lowered,
    kernels: TargetKernels | None,
    model: ReadModel,
    code: UserCode,
    store: Store,
) -> Source:
    """Return what a program is compiled from for a target: with kernels, if it has a use for them.

    Args:
        plan: the plan of the build.
        program: the program.
        lowered: its portable form.
        kernels: the target's kernels; None: it has none.
        model: reads the model.
        code: the user's decoder.
        store: keeps the programs with kernels.
    """
    if not calls_kernels(plan.manifest, program.spec):
        kernels = None
    return choose_source(lowered, kernels, partial(lower_native, plan, program, model, code, store))


def bind_libraries(
    plan: Plan, spec: ProgramSpec, source: Source, target: Target, store: Store
) -> Source:
    """Return what a function of the user is compiled from for a target, with the libraries that it calls.

    Raises:
        BuildError: it calls a handler on the target's platform that no library for the target has.
    """
    if not plan.libraries or spec.kind != "call":
        return source
    from prejit.runtime.device.portable import custom_calls

    where = f"{plan.manifest.where}: target {target.name}: program {spec.name}"
    program = store.read_blob(source.program)
    assert program is not None
    called = custom_calls(program, source.platforms, target.platform) & {*plan.handlers}
    names: dict[str, str] = {}
    for library in libraries_of(plan.libraries, target):
        names |= handler_names(library.described)
    for name in sorted(called):
        if name not in names:
            have = ", ".join(
                f"{each.described.name} for {each.architecture}"
                for each in plan.libraries
                if name in each.described.handlers
            )
            raise BuildError(
                f"{where}: it calls {name}: expected a [[library]] with this handler for "
                f"{target.platform} and {target.architecture}, found {have}",
                hint="libraries run on CPUs alone: leave the target out, or give the function another form "
                "there with jax.lax.platform_dependent"
                if target.platform != "cpu"
                else f"add a [[library]] that is built for {target.name}, or leave the target out",
            )
    return replace(source, calls=tuple(sorted((name, names[name]) for name in called)))


def products_of(plan: Plan, model: ReadModel, code: UserCode, store: Store) -> tuple[Product, ...]:
    """Return all products of the programs that may call kernels, sorted."""
    programs = (each for each in plan.programs if calls_kernels(plan.manifest, each.spec))
    return tuple(
        sorted(
            {
                product
                for program in programs
                for product, _ in lower_native(plan, program, model, code, store, {}).products
            }
        )
    )


def lower_native(
    plan: Plan,
    program: PlannedProgram,
    model: ReadModel,
    code: UserCode,
    store: Store,
    forms: Mapping[Product, str],
) -> Native:
    """Return a model's program with calls of kernels: from the store, or lowered now.

    Args:
        plan: the plan of the build.
        program: a program of the model.
        model: reads the model.
        code: the user's decoder.
        store: keeps the program.
        forms: the forms of products that are computed without a kernel.
    """
    assert program.key is not None
    key = native_key(program.key, forms)
    if (known := find_native(key, store)) is not None:
        return known
    with store.making(key):
        if (known := find_native(key, store)) is not None:
            return known  # another build has lowered it meanwhile
        return _lower_native(plan, program, key, model, code, store, forms)


def _lower_native(
    plan: Plan,
    program: PlannedProgram,
    key: Key,
    model: ReadModel,
    code: UserCode,
    store: Store,
    forms: Mapping[Product, str],
) -> Native:
    from prejit.compiler.lowering.decoder import lower_decoder
    from prejit.compiler.lowering.encoder import lower_encoder
    from prejit.compiler.models.layers.forms import Forms
    from prejit.compiler.models.parameters import parametrized

    chosen = Forms(forms)
    if code.model is not None:
        made = _lower_own_decoder(plan, program, code.model, chosen)
    elif plan.manifest.encode is not None:
        made = lower_encoder(model().module, program.spec, chosen)
    else:
        read = model()
        made = lower_decoder(
            parametrized(read.module),
            read.shape,
            program.spec,
            source=longest_source(plan.manifest),
            forms=chosen,
        )
    digest = store.put_blob(made.portable)
    native = Native(digest, tuple((each, chosen.form(each)) for each in sorted(chosen.met)))
    store.put(key, asdict(native), blobs=[digest])
    return native


def _lower_model(plan: Plan, program: PlannedProgram, model: ReadModel, store: Store) -> Lowered:
    read = model()
    if plan.manifest.encode is None:
        from prejit.compiler.lowering.decoder import MeshSplit, lower_decoder
        from prejit.compiler.models.parameters import parametrized
        from prejit.compiler.models.sharding import shardings

        mesh = plan.manifest.mesh
        made = lower_decoder(
            parametrized(read.module),
            read.shape,
            program.spec,
            source=longest_source(plan.manifest),
            split=None if mesh is None else MeshSplit(mesh, shardings(read.module, mesh)),
        )
        return replace(_put(made, store), decoder=dict(made.decoder))
    from prejit.compiler.lowering.encoder import lower_encoder

    made = lower_encoder(read.module, program.spec)
    return replace(
        _put(made, store),
        encoder=asdict(read.shape),
        weight_sets=dict(made.weight_sets),
        estimated_microseconds=made.estimated_microseconds,
    )


def _lower_own_model(plan: Plan, program: PlannedProgram, model: OwnModel, store: Store) -> Lowered:
    made = _lower_own_decoder(plan, program, model, None)
    return replace(_put(made, store), decoder=dict(made.decoder))


def _lower_own_decoder(
    plan: Plan, program: PlannedProgram, model: OwnModel, forms: Forms | None
) -> LoweredProgram:
    from prejit.compiler.lowering.decoder import lower_decoder
    from prejit.compiler.lowering.user.models import CHECK_MODEL

    manifest = plan.manifest
    what = f"{manifest.where}: program {program.spec.name}: cannot lower {model.label}"
    with model.modules.tracing(what, CHECK_MODEL):
        return lower_decoder(
            model.stored.model,
            own_shape(manifest, model),
            program.spec,
            source=longest_source(manifest),
            forms=forms,
        )


def own_shape(manifest: Manifest, model: OwnModel) -> DecoderConfig:
    """Return what lowering needs to know of a decoder of the user."""
    from prejit.compiler.models.layers.config import DecoderConfig

    longest = longest_context(manifest)
    assert longest is not None
    return DecoderConfig(
        model.label, model.vocab_size, cache_dtype(manifest), model.max_positions or longest
    )


def _lower_function(
    plan: Plan, program: PlannedProgram, functions: Functions, store: Store
) -> Lowered:
    from prejit.compiler.lowering.program import LoweredProgram
    from prejit.compiler.lowering.user.lower import lower_function

    manifest, spec = plan.manifest, program.spec
    section = _section(manifest.programs, spec.section)
    platforms = [target.platform for target in plan.targets]
    user = functions[section.name]
    if isinstance(user, LoweredProgram):
        return _put(user, store)
    return _put(
        lower_function(
            user, section, spec, manifest.where, platforms, manifest.mesh, plan.handlers
        ),
        store,
    )


def _section(programs: Sequence[Program], name: str) -> Program:
    return next(program for program in programs if program.name == name)


def _put(program: LoweredProgram, store: Store) -> Lowered:
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
    )


def _put_frame(raw: bytes, store: Store) -> Segment:
    frame = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(raw)
    return Segment(0, len(frame), store.put_blob(frame), len(raw), store.put_blob(raw))


def _stablehlo_version(portable: bytes) -> str:
    """Return the version in the header of a portable artifact (stablehlo/api/PortableApi.h)."""
    found: Any = re.search(rb"StableHLO_v(\d+\.\d+\.\d+)", portable[:256])
    return found[1].decode() if found else "0.0.0"
