"""A build, from the manifest to the bundle on disk. Each stage takes values and returns values.

    fetch         find or download the model directory           checkpoint.source
    plan          programs x targets, and what the store has     plan
    check         model, files, functions: mistakes come first   model, pack.model_layers, lowering
    environments  make the environments of pinned versions       targets.installing
    kernels       compile the C++ kernels of each CPU level      native.library
    forms         measure how products are computed fastest      measure.forms
    lower         trace programs to StableHLO                    lowering
    compile       StableHLO to executables, in workers           executables
    weights       round or quantize, and pack                    pack.weights
    accuracy      measure what the dtypes cost                   measure.accuracy
    costs         measure an encoder's programs                  measure.costs
    pack          tables and layers                              pack.contents
    golden        ask programs for their golden answers          measure.golden
    assemble      blobs and index                                pack.contents
    write         the OCI image layout                           here
    describe      attach the list of parts and the provenance    describe.attaching

Workers compile a program while the next one is lowered and while weights are packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from prejit.compiler.checkpoint.source import resolve_source
from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.native.form_choice import KnownForms
from prejit.compiler.native.library import KernelLibrary, NoKernels, build_kernels
from prejit.compiler.pipeline.describe.attaching import attach_descriptions
from prejit.compiler.pipeline.describe.provenance import build_provenance
from prejit.compiler.pipeline.executables import (
    Submitted,
    TargetTools,
    compiled_targets,
    submit,
    submit_known,
)
from prejit.compiler.pipeline.keys import versions
from prejit.compiler.pipeline.lowering import (
    UserCode,
    bind_libraries,
    find_code,
    lower,
    lower_own,
    own_shape,
    products_of,
    source_of,
    weights_of,
)
from prejit.compiler.pipeline.measure.accuracy import measure_accuracy
from prejit.compiler.pipeline.measure.costs import measure_costs
from prejit.compiler.pipeline.measure.forms import measure_missing, runs_here
from prejit.compiler.pipeline.measure.golden import with_golden_answers
from prejit.compiler.pipeline.model import (
    ModelSource,
    ReadModel,
    check_model,
    check_own_model,
    read_model,
    stores_out_in,
    uses_kernels,
)
from prejit.compiler.pipeline.pack.contents import PackedBundle, pack_bundle, pack_targets
from prejit.compiler.pipeline.pack.model_layers import read_layers
from prejit.compiler.pipeline.pack.weights import (
    Published,
    find_published,
    pack_weights,
)
from prejit.compiler.pipeline.plan import (
    Plan,
    PlannedProgram,
    find_toolchain,
    kernels_of,
    plan_build,
)
from prejit.compiler.pipeline.shards import Packing
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.targets.environments import spec_for
from prejit.compiler.targets.installing import make_environment
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import read_root
from prejit.runtime.format.schema import Accuracy
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.targets import Target
from prejit.runtime.store.receipts import Receipts


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        path: directory of the bundle.
        digest: digest of the bundle.
        compiled: number of programs x targets that were compiled now.
        cached: number of those that were in the store.
        written: whether the directory was changed.
        accuracy: what the dtypes of weights and cache cost; None: all are float32.
        packed_by: number of the shard that packed the bundle; None: the build had no shards.
        packed_here: whether the bundle is in `path`, and not in the directory of another shard.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool
    accuracy: Accuracy | None = None
    packed_by: int | None = None
    packed_here: bool = True


def build(
    manifest: Manifest,
    output: Path,
    *,
    store: Store,
    executor: Executor,
    progress: Progress,
    only: tuple[str, ...] = (),
    forms: Path | None = None,
    measure: bool | None = None,
    timeout_seconds: float = JOB_SECONDS,
    packing: Packing | None = None,
) -> Built:
    """Build the bundle of a manifest into `output/NAME`.

    Args:
        manifest: what to build.
        output: directory of bundles.
        store: keeps results.
        executor: compiles programs and forms of products. The build closes it once all is compiled.
        progress: shows every step.
        only: names of targets; empty: all targets of the manifest.
        forms: a table of measured forms, which goes before all others.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none; None: large ones that no table has.
        timeout_seconds: time limit of measuring one product, of measuring an encoder's programs for a target,
            and of asking all programs for their golden answers.
        packing: which shard of a build this is; None: the build has one machine.

    Raises:
        BuildError: a program does not compile, or its worker died or took too long. What was finished stays
            in the store.
        ManifestError, CheckpointError, StoreError, NetworkError: something that the build starts from is
            wrong, or cannot be read.
    """
    directory = _fetch(manifest)
    plan = plan_build(manifest, store, only=only, forms=forms, directory=directory)
    model: ReadModel = cache(partial(_read_model, plan))
    code = find_code(manifest, out_in=stores_out_in(manifest, plan.targets))
    layers = read_layers(plan, partial(_vocab_size, model, code), store, progress)
    published = find_published(plan)
    _check(plan, model, published, code)
    plan = lower_own(plan, code, store, progress)
    toolchains = [_make_toolchain(target, progress) for target in plan.targets]
    libraries = _build_kernels(plan, toolchains, store, progress)
    with executor:
        known = plan.forms
        if measure is not False:
            fresh = bool(measure)
            known = _measure_forms(
                plan,
                toolchains,
                libraries,
                model,
                code,
                store,
                executor,
                progress,
                fresh,
                timeout_seconds,
            )
        tools = [_tools(toolchain, libraries, known) for toolchain in toolchains]
        before = executor.compiled

        def submit_new(program: PlannedProgram) -> list[Submitted]:
            lowered = lower(plan, program, model, code, store, progress)
            found = []
            for each in tools:
                source = source_of(plan, program, lowered, each.kernels, model, code, store)
                source = bind_libraries(plan, program.spec, source, each.toolchain.target, store)
                found.append(submit(manifest, program.spec, lowered, source, each, executor))
            return found

        # First what the stores know: a shared one answers many questions at a time.
        ask = partial(submit_known, plan, tools=tools, store=store, executor=executor)
        ordered = plan.programs if packing is None else packing.shard.ordered(plan.programs)
        answers = list(store.map(ask, ordered))
        found = {
            program.spec.name: submit_new(program) if known is None else known
            for program, known in zip(ordered, answers, strict=True)
        }
        submitted = [each for program in plan.programs for each in found[program.spec.name]]
        weights_layer = cache(
            partial(
                pack_weights, plan, published, weights_of(code), code.model, model, store, progress
            )
        )
        if packing is None:
            weights_layer()  # while workers compile
        targets = compiled_targets(submitted, tools)
        compiled = executor.compiled - before
    if packing is not None:
        keys = to_json(sorted({each.job.key.digest for each in submitted}))
        if (other := packing.wait(digest_of(keys), progress)) is not None:
            return Built(
                output / manifest.bundle.name,
                other.digest,
                compiled,
                len(submitted) - compiled,
                False,
                packed_by=other.shard,
                packed_here=False,
            )
    weights = weights_layer()
    programs = [each.lowered.portable.raw_digest for each in targets[0].executables]
    accuracy = measure_accuracy(
        plan, published, weights, code.model, programs, model, store, progress
    )
    costs = measure_costs(manifest, targets, weights, store, progress, timeout_seconds)
    products = products_of(plan, model, code, store) if any(each.kernels for each in tools) else ()
    layers = layers if weights is None else (*layers, weights)
    packed = pack_targets(plan, targets, layers, products, accuracy, costs, store)
    packed = with_golden_answers(packed, store, progress, timeout_seconds)
    bundle = pack_bundle(manifest.bundle.name, packed)
    path, written = write(bundle, output, progress)
    digest = digest_of(bundle.index)
    attach_descriptions(path, digest, partial(build_provenance, plan, digest))
    if packing is not None:
        packing.finish(digest)
    shard = None if packing is None else packing.shard.number
    return Built(path, digest, compiled, len(submitted) - compiled, written, accuracy, shard)


def _fetch(manifest: Manifest) -> Path | None:
    if manifest.model is None or manifest.model.source is None:
        return None
    weights = not manifest.has_own_model
    return resolve_source(manifest.model.source, manifest.directory, weights=weights)


def _read_model(plan: Plan) -> ModelSource:
    assert plan.model is not None
    return read_model(plan.manifest, plan.model)


def _vocab_size(model: ReadModel, code: UserCode) -> int:
    size: int = model().shape.vocab_size if code.model is None else code.model.vocab_size
    return size


def _check(plan: Plan, model: ReadModel, published: Published | None, code: UserCode) -> None:
    """Check the model against the programs that have to be lowered; others were checked before."""
    if code.model is not None:
        check_own_model(plan.manifest, code.model, own_shape(plan.manifest, code.model), plan.specs)
    new = [each.spec for each in plan.programs if each.key is not None and each.lowered is None]
    if new and published is not None:
        check_model(plan.manifest, model(), published.checkpoint, new)


def _make_toolchain(target: Target, progress: Progress) -> Toolchain:
    """Return what compiles for a target; its environment is made first if it is not there."""
    if (found := find_toolchain(target)) is None:
        spec = spec_for(target, versions("jax")["jax"])
        assert spec is not None
        make_environment(spec, progress)
        found = find_toolchain(target)
        assert found is not None
    return found


def _build_kernels(
    plan: Plan, toolchains: list[Toolchain], store: Store, progress: Progress
) -> dict[str, KernelLibrary]:
    """Return the kernels of each target that has some, compiled now if the store has none."""
    if not uses_kernels(plan.manifest):
        return {}
    found = {each.target.name: build_kernels(each, store, progress) for each in toolchains}
    missing = [each for each in found.values() if isinstance(each, NoKernels)]
    for reason in dict.fromkeys(each.reason for each in missing if each.worth_telling):
        progress.note(reason)
    return {name: each for name, each in found.items() if isinstance(each, KernelLibrary)}


def _measure_forms(
    plan: Plan,
    toolchains: list[Toolchain],
    libraries: dict[str, KernelLibrary],
    model: ReadModel,
    code: UserCode,
    store: Store,
    executor: Executor,
    progress: Progress,
    fresh: bool,
    timeout_seconds: float,
) -> KnownForms:
    """Return the tables of measured forms, with what was missing measured for targets that run here."""
    known = plan.forms
    for toolchain in toolchains:
        library = libraries.get(toolchain.target.name)
        if library is None or not runs_here(toolchain, library):
            continue
        with progress.phase("looking for products"):
            products = products_of(plan, model, code, store)
        known = measure_missing(
            known,
            products,
            toolchain,
            library,
            store,
            executor,
            progress,
            fresh=fresh,
            timeout_seconds=timeout_seconds,
        )
    return known


def _tools(
    toolchain: Toolchain, libraries: dict[str, KernelLibrary], known: KnownForms
) -> TargetTools:
    library = libraries.get(toolchain.target.name)
    kernels = None if library is None else kernels_of(library, toolchain, known)
    return TargetTools(toolchain, kernels)


def write(bundle: PackedBundle, output: Path, progress: Progress) -> tuple[Path, bool]:
    """Write a bundle into `output/NAME`, unless it is there already.

    Returns:
        The directory, and whether it was changed.

    Raises:
        StoreError: the directory cannot be written.
    """
    path = output / bundle.name
    if is_current(path, bundle.index):
        return path, False
    with progress.phase(f"writing {path}"):
        write_layout(path, bundle.index, bundle.blobs, digest_of_file=Receipts(path).digest_of)
    return path, True


def is_current(path: Path, index: bytes) -> bool:
    """Return whether a directory holds exactly this bundle, undamaged."""
    try:
        with Layout(path) as layout:
            root = read_root(layout)
            if to_json(root.bundle) != index:  # another one, or a copy of some of its targets
                return False
            referrers(layout, root)  # raises an error if something that is attached is damaged
            targets = match(root, Fingerprint.current())
            check_blobs(
                layout, [read_manifest(layout, target) for target in targets], Receipts(path)
            )
    except (RejectError, StoreError):
        return False
    return True
