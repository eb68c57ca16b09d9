"""Lower the programs of a build, and submit each to the executor at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from prejit.compiler.native.form_table import KnownForms
from prejit.compiler.native.library import KernelLibrary, NoKernels, build_kernels
from prejit.compiler.pipeline.executables import Submitted, submit, submit_known
from prejit.compiler.pipeline.lowerers.crew import Crew
from prejit.compiler.pipeline.lowering import (
    has_lost_native,
    lower,
    lower_own,
    lowered_again,
    products_of,
    source_of,
)
from prejit.compiler.pipeline.measure.measured_forms import measure_missing, runs_here
from prejit.compiler.pipeline.model import ReadModel, uses_kernels
from prejit.compiler.pipeline.plan import Plan, PlannedProgram, kernels_of
from prejit.compiler.pipeline.reuse import TargetTools, job_of
from prejit.compiler.pipeline.services import Services
from prejit.compiler.pipeline.user_code import ReadCode
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.compiler.targets.toolchain import Toolchain


@final
class Submitting:
    """Lowers the programs of a build and submits them: in processes of their own, and here what is left.

    Attributes:
        plan: the plan, with all that is known of each program.
        untraced: the same plan, without the traces that this process made.
        tools: what compiles for each target.
        found: the submitted programs by name.
    """

    def __init__(
        self, plan: Plan, model: ReadModel, code: ReadCode, crew: Crew | None, service: Services
    ) -> None:
        """Lower nothing yet.

        Args:
            plan: the plan of the build.
            model: reads its model.
            code: reads the user's code.
            crew: processes that lower; None: this one does.
            service: what all builds share.
        """
        self.plan = self.untraced = plan
        self.tools: Sequence[TargetTools] = ()
        self.found: dict[str, list[Submitted]] = {}
        self._model = model
        self._code = code
        self._crew = crew
        self._apart = set[str]()  # names of the programs that other processes lowered
        self._service = service

    def run(self, toolchains: list[Toolchain]) -> None:
        """Lower all programs, and submit each to the executor as soon as it is lowered.

        Raises:
            PrejitError: a program cannot be lowered.
        """
        store, progress, shard = self._service.store, self._service.progress, self._service.shard
        kernels_by = self._service.kernels_by
        libraries = _build_kernels(self.plan, toolchains, kernels_by, store, progress)
        known = self.plan.forms
        measures = self._service.measure is not False
        if measures and libraries:
            # All products have to be known before the first program is compiled.
            self._lower_apart([each for each in self.plan.programs if each.lowered is None])
            self._lower_own()
            known = _measure_forms(
                self.plan,
                toolchains,
                libraries,
                self._model,
                self._code,
                self._service,
            )
        self.tools = [_tools(toolchain, libraries, known) for toolchain in toolchains]
        # First what the stores know: a shared one answers many questions at a time.
        ordered = self.plan.programs if shard is None else shard.ordered(self.plan.programs)
        left = [
            program
            for program, is_known in zip(
                ordered, store.map(self._submit_known, ordered), strict=True
            )
            if not is_known
        ]
        self._lower_apart(left, submits=True)
        self._lower_own()
        here = {program.spec.name: program for program in self.plan.programs}
        for name in [each.spec.name for each in left]:
            if name not in self.found:
                self.found[name] = self._lower_here(here[name])

    def _submit_known(self, program: PlannedProgram) -> bool:
        """Submit a program if the store has what it is compiled from."""
        store, jobs = self._service.store, self._service.jobs
        known = submit_known(self.plan, program, tools=self.tools, store=store, jobs=jobs)
        if known is not None:
            self.found[program.spec.name] = known
        return known is not None

    def _lower_apart(self, programs: Sequence[PlannedProgram], *, submits: bool = False) -> None:
        """Lower programs in other processes, if there are some.

        What the store has lost is lowered here, which says so.
        """
        if self._crew is None:
            return
        store, apart = self._service.store, self._apart
        asked = [
            each
            for each in programs
            if (each.lowered is None or each.spec.name in apart)
            and not has_lost_native(each, store)
        ]
        then = self._submit_known if submits else None
        lowered = self._crew.lower(self.plan, asked, then, chosen=submits)
        self.plan = self.plan.with_programs(lowered)
        self.untraced = self.untraced.with_programs(
            {name: each for name, each in lowered.items() if name not in apart}
        )
        apart |= lowered.keys()

    def _lower_own(self) -> None:
        """Lower the user's decoder here, as far as no other process did."""
        service = self._service
        self.plan = lower_own(self.plan, self._code, service.store, service.progress)

    def _lower_here(self, program: PlannedProgram) -> list[Submitted]:
        """Lower a program in this process, and submit it."""
        plan, store, jobs = self.plan, self._service.store, self._service.jobs
        lowered = lower(plan, program, self._model, self._code, store, self._service.progress)
        progress = self._service.progress
        found, lost = [], has_lost_native(program, store)
        for each in self.tools:
            find = partial(
                source_of, plan, program, lowered, each.kernels, self._model, self._code, store
            )
            source = find()
            if store.read_blob(source.program) is None:  # which deletes what is damaged
                lost = True
                source = find()
            job = job_of(plan, program.spec, source, each, store)
            found.append(submit(plan, program.spec, lowered, job, jobs))
        if lost:
            progress.note(lowered_again(f"{program.spec.name} with kernels"))
        return found


def _build_kernels(
    plan: Plan,
    toolchains: list[Toolchain],
    kernels_by: Mapping[str, str] | None,
    store: Store,
    progress: Progress,
) -> dict[str, KernelLibrary]:
    """Return the kernels of each target that has some, compiled now if the store has none."""
    if not uses_kernels(plan.manifest):
        return {}
    found = {
        each.target.name: build_kernels(
            each,
            store,
            progress,
            first=None if kernels_by is None else kernels_by[each.target.name],
        )
        for each in toolchains
        if kernels_by is None or each.target.name in kernels_by
    }
    missing = [each for each in found.values() if isinstance(each, NoKernels)]
    for reason in dict.fromkeys(each.reason for each in missing if each.worth_telling):
        progress.note(reason)
    return {name: each for name, each in found.items() if isinstance(each, KernelLibrary)}


def _measure_forms(
    plan: Plan,
    toolchains: list[Toolchain],
    libraries: dict[str, KernelLibrary],
    model: ReadModel,
    code: ReadCode,
    service: Services,
) -> KnownForms:
    """Return the tables of measured forms, with what was missing measured for targets that run here."""
    known = plan.forms
    for toolchain in toolchains:
        library = libraries.get(toolchain.target.name)
        if library is None or not runs_here(toolchain, library):
            continue
        with service.progress.phase("looking for products"):
            products = products_of(plan, model, code, service.store)
        known = measure_missing(
            known,
            products,
            toolchain,
            library,
            service.store,
            service.executor,
            service.progress,
            fresh=bool(service.measure),
            quiet=service.jobs.wait,
            timeout_seconds=service.timeout_seconds,
        )
    return known


def _tools(
    toolchain: Toolchain, libraries: dict[str, KernelLibrary], known: KnownForms
) -> TargetTools:
    library = libraries.get(toolchain.target.name)
    kernels = None if library is None else kernels_of(library, toolchain, known)
    return TargetTools(toolchain, kernels)
