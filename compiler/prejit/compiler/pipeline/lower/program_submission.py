"""Lower the programs of a build, and submit each to the executor at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from prejit.compiler.native.form_table import KnownForms
from prejit.compiler.native.kernel_library import KernelLibrary
from prejit.compiler.pipeline.build_interface import Services
from prejit.compiler.pipeline.executable_jobs import Submitted, job_of, submit, submit_known
from prejit.compiler.pipeline.lower.crew import Crew
from prejit.compiler.pipeline.lower.program_lowering import (
    has_lost_native,
    lower,
    lower_own,
    lowered_again,
    products_of,
    source_of,
)
from prejit.compiler.pipeline.measure.measured_speed import measure_missing, runs_here
from prejit.compiler.pipeline.model import uses_kernels
from prejit.compiler.pipeline.plan import PlannedProgram
from prejit.compiler.pipeline.target_tools import TargetTools, build_libraries, kernels_of
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.targets.toolchain import Toolchain


@final
class Submitting:
    """Lowers the programs of a build and submits them: in processes of their own, and here what is left.

    Attributes:
        space: the plan, with all that is known of each program.
        untraced: the same plan, without the traces that this process made.
        tools: what compiles for each target.
        found: the submitted programs by name.
    """

    def __init__(self, space: Workspace, crew: Crew | None, service: Services) -> None:
        """Lower nothing yet. Without a crew this process lowers all programs."""
        self.space = self.untraced = space
        self.tools: Sequence[TargetTools] = ()
        self.found: dict[str, list[Submitted]] = {}
        self._crew = crew
        self._apart = set[str]()  # names of the programs that other processes lowered
        self._service = service

    def run(self, toolchains: list[Toolchain]) -> None:
        """Lower all programs, and submit each to the executor as soon as it is lowered."""
        shard, store, plan = self._service.shard, self.space.store, self.space.plan
        self._service.progress.expect(len(plan.programs) * len(toolchains))
        libraries: dict[str, KernelLibrary] = {}
        if uses_kernels(plan.manifest):
            by = self._service.kernels_by
            libraries = build_libraries(toolchains, store, self._service.progress, by)
        known = plan.forms
        if self._service.measure is not False and libraries:
            # All products have to be known before the first program is compiled.
            self._lower_apart([each for each in plan.programs if each.lowered is None])
            self._lower_own()
            known = _measure_forms(self.space, toolchains, libraries, self._service)
        kernels = {
            each.target.name: kernels_of(libraries[each.target.name], each, known)
            for each in toolchains
            if each.target.name in libraries
        }
        self.tools = [TargetTools(each, kernels.get(each.target.name)) for each in toolchains]
        # First what the stores know: a shared one answers many questions at a time.
        programs = self.space.plan.programs
        ordered = programs if shard is None else shard.ordered(programs)
        submitted = store.map(self._submit_known, ordered)
        left = [each for each, is_known in zip(ordered, submitted, strict=True) if not is_known]
        self._lower_apart(left, submits=True)
        self._lower_own()
        here = {program.spec.name: program for program in self.space.plan.programs}
        for name in [each.spec.name for each in left]:
            if name not in self.found:
                self.found[name] = self._lower_here(here[name])

    def _submit_known(self, program: PlannedProgram) -> bool:
        """Submit a program if the store has what it is compiled from."""
        store, jobs = self.space.store, self._service.jobs
        known = submit_known(self.space.plan, program, tools=self.tools, store=store, jobs=jobs)
        if known is not None:
            self.found[program.spec.name] = known
        return known is not None

    def _lower_apart(self, programs: Sequence[PlannedProgram], *, submits: bool = False) -> None:
        """Lower programs in other processes, if there are some.

        What the store has lost is lowered here, which says so.
        """
        if self._crew is None:
            return
        apart = self._apart
        asked = [
            each
            for each in programs
            if (each.lowered is None or each.spec.name in apart)
            and not has_lost_native(each, self.space.store)
        ]
        then = self._submit_known if submits else None
        lowered = self._crew.lower(self.space.plan, asked, then, chosen=submits)
        new = {name: each for name, each in lowered.items() if name not in apart}
        self.space = self.space.with_plan(self.space.plan.with_programs(lowered))
        self.untraced = self.untraced.with_plan(self.untraced.plan.with_programs(new))
        apart |= lowered.keys()

    def _lower_own(self) -> None:
        """Lower the user's decoder here, as far as no other process did."""
        self.space = self.space.with_plan(lower_own(self.space))

    def _lower_here(self, program: PlannedProgram) -> list[Submitted]:
        space, spec = self.space, program.spec
        lowered = lower(space, program)
        found, lost = [], has_lost_native(program, space.store)
        for each in self.tools:
            source = source_of(space, program, lowered, each.kernels)
            if space.store.read_blob(source.program) is None:  # which deletes what is damaged
                lost = True
                source = source_of(space, program, lowered, each.kernels)
            job = job_of(space.plan, spec, source, each, space.store)
            found.append(submit(space.plan, spec, lowered, job, self._service.jobs))
        if lost:
            space.progress.note(lowered_again(f"{spec.name} with kernels"))
        return found


def _measure_forms(
    space: Workspace,
    toolchains: list[Toolchain],
    libraries: dict[str, KernelLibrary],
    service: Services,
) -> KnownForms:
    """Return the tables of measured forms, with what was missing measured for targets that run here."""
    known = space.plan.forms
    for toolchain in toolchains:
        library = libraries.get(toolchain.target.name)
        if library is None or not runs_here(toolchain, library):
            continue
        with service.progress.phase("looking for products"):
            products = products_of(space)
        known = measure_missing(known, products, toolchain, library, service)
    return known
