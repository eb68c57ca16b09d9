"""A process that lowers programs for a build: `python -P -m prejit.compiler.pipeline.lowerers.lowerer_child`.

Each line of stdin is a request, each line of stdout its answer (`messages`). The end of stdin ends the
process. What the user's code prints goes to stderr, as in a build.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, final

from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.native.library import KernelLibrary, find_kernels
from prejit.compiler.pipeline.early_checks import check, read_planned, vocab_size
from prejit.compiler.pipeline.lowerers.child_store import ChildStore
from prejit.compiler.pipeline.lowerers.lowerer_messages import (
    Checked,
    Done,
    Project,
    Work,
    manifest_digest,
    plain,
    plain_error,
)
from prejit.compiler.pipeline.lowering import (
    lower,
    lower_native,
    lower_own,
    own_facts,
    source_of,
)
from prejit.compiler.pipeline.model import ReadModel, open_weights, stores_out_in
from prejit.compiler.pipeline.plan import (
    Lowered,
    OwnFacts,
    Plan,
    PlannedProgram,
    TargetKernels,
    calls_kernels,
    find_toolchain,
    kernels_of,
    plan_build,
)
from prejit.compiler.pipeline.program_keys import own_lower_key
from prejit.compiler.pipeline.tracing import parameters_of, remember
from prejit.compiler.pipeline.user_code import ReadCode, find_code
from prejit.compiler.progress import Progress
from prejit.runtime.base.child_process import end_with_parent, take_stdout, write_answer
from prejit.runtime.errors import PrejitError


@final
class _Notes(Progress):
    """Keeps lines for the build, which shows them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def taken(self) -> tuple[str, ...]:
        """Return the lines since the last call."""
        found, self._lines = self._lines, []
        return tuple(found)

    def _tell(self, text: str) -> None:
        self._lines.append(text)

    def _tell_finished(self, text: str) -> None:
        pass


@final
class Lowerer:
    """Plans and lowers as the build does that started this process."""

    def __init__(self, project: Project, manifest: Manifest) -> None:
        """Read nothing yet."""
        self._project = project
        self._manifest = manifest
        self._store = ChildStore(Path(project.root), project.namespace)
        self._progress = _Notes()
        self._parameters: dict[str, Mapping[str, str]] = {}  # by section
        first = self._plan(names=(), retrace=False)
        self._model: ReadModel = cache(partial(read_planned, first))
        out_in = stores_out_in(manifest, first.targets)
        self._code: ReadCode = cache(partial(find_code, manifest, out_in=out_in))

    def prepare(self) -> Checked | None:
        """Read the model and the user's code, so that the first program need not wait for it.

        Returns:
            What they show, if this process checks them; else None.

        Raises:
            PrejitError: they have a mistake.
        """
        if not self._project.check:
            self._code()
            if self._is_published:
                self._model()
            return None
        plan = self._plan(names=None, retrace=self._project.retrace)
        weights = open_weights(plan.model) if plan.model and self._is_published else None
        check(plan, self._model, weights, self._code)
        if plan.own is None:
            plan = replace(plan, own=self._own)
            if plan.own_trace is not None and self._own is not None:
                nothing = replace(plan, programs=(), own=None)
                remember(nothing, {}, {}, self._own, self._code, self._store, self._progress)
        decodes = self._manifest.generate is not None
        size = vocab_size(plan, self._model, self._code) if decodes else None
        return Checked(size, plan.own)

    def lower(self, work: Work) -> Done:
        """Lower a unit of programs.

        Raises:
            PrejitError: a program cannot be lowered.
        """
        retrace = self._project.retrace
        before = self._known(self._plan(names=tuple(work.programs), retrace=retrace), work)
        # What is known of the user's decoder was kept before, or is kept by the process that checks it.
        before = replace(before, own=self._own if before.own is None else before.own)
        plan = lower_own(before, self._code, self._store, self._progress)
        lowered = {each.spec.name: self._lower(plan, each) for each in plan.programs}
        parameters = self._parameters_of(plan)
        remember(before, lowered, parameters, plan.own, self._code, self._store, self._progress)
        self._lower_native(plan, lowered, chosen=work.chosen)
        section = plan.programs[0].spec.section
        stored, notes = tuple(self._store.taken()), self._progress.taken()
        return Done(lowered, parameters.get(section, {}), stored, notes)

    def _plan(self, names: Sequence[str] | None, *, retrace: bool) -> Plan:
        return plan_build(
            self._manifest,
            self._store,
            only=self._project.only,
            forms=self._project.forms_table,
            directory=self._project.model_directory,
            retrace=retrace,
            names=names,
        )

    @property
    def _is_published(self) -> bool:
        """Whether the model is a published one, and not the user's."""
        return self._manifest.model is not None and not self._manifest.has_own_model

    @cached_property
    def _own(self) -> OwnFacts | None:
        return own_facts(self._code()) if self._manifest.has_own_model else None

    def _known(self, plan: Plan, work: Work) -> Plan:
        """Return the plan with the portable programs that the build has."""

        def known(program: PlannedProgram) -> PlannedProgram:
            found = work.programs[program.spec.name]
            if found is None:
                return program
            key = program.key
            if self._manifest.has_own_model and program.spec.kind != "call":
                key = own_lower_key(self._manifest, program.spec, found.portable.raw_digest)
            return replace(program, lowered=found, key=key)

        return replace(plan, programs=tuple(map(known, plan.programs)))

    def _lower(self, plan: Plan, program: PlannedProgram) -> Lowered:
        return lower(plan, program, self._model, self._code, self._store, self._progress)

    def _parameters_of(self, plan: Plan) -> Mapping[str, Mapping[str, str]]:
        """Return the parameters of the unit's functions by section, which are hashed once."""
        new = [
            each
            for each in plan.programs
            if each.spec.kind == "call" and each.spec.section not in self._parameters
        ]
        found = parameters_of(replace(plan, programs=tuple(new)), self._code)
        for each in new:
            self._parameters[each.spec.section] = found.get(each.spec.section, {})
        return self._parameters

    def _lower_native(self, plan: Plan, lowered: Mapping[str, Lowered], *, chosen: bool) -> None:
        """Lower the programs again that call kernels of a target."""
        calling = [each for each in plan.programs if calls_kernels(plan.manifest, each.spec)]
        kernels = self._kernels(plan) if calling else ()
        for program in calling:
            if kernels and not chosen:
                lower_native(plan, program, self._model, self._code, self._store, {})
            for each in kernels if chosen else ():
                made = lowered[program.spec.name]
                source_of(plan, program, made, each, self._model, self._code, self._store)

    def _kernels(self, plan: Plan) -> tuple[TargetKernels, ...]:
        """Return the kernels of the targets that have some. The build has compiled them."""
        found = []
        for target in plan.targets:
            toolchain = find_toolchain(target)
            library = None if toolchain is None else find_kernels(toolchain, self._store)
            if toolchain is not None and isinstance(library, KernelLibrary):
                found.append(kernels_of(library, toolchain, plan.forms))
        return tuple(found)


def answer(line: bytes, lowerer: Lowerer) -> dict[str, Any]:
    """Return the answer to a request after the first one."""
    try:
        done = lowerer.lower(Work.from_plain(json.loads(line)["lower"]))
    except PrejitError as error:
        return {"error": plain_error(error)}
    return {"lowered": plain(done)}


def begin(project: Project) -> tuple[dict[str, Any], Lowerer | None]:
    """Return the answer to the first request, and what answers the others; None: it answers none."""
    sys.path[:] = project.path
    try:
        manifest = read_manifest(Path(project.manifest))
        if manifest_digest(manifest) != project.content:
            return {"declined": f"{project.manifest} has changed"}, None
        lowerer = Lowerer(project, manifest)
        checked = lowerer.prepare()
    except PrejitError as error:
        return {"error": plain_error(error)}, None
    return {"checked": None if checked is None else plain(checked)}, lowerer


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    first = requests.readline()
    if not first:
        return
    body, lowerer = begin(Project.from_plain(json.loads(first)))
    write_answer(answers, body)
    if lowerer is None:
        return
    for line in iter(requests.readline, b""):
        write_answer(answers, answer(line, lowerer))


def main() -> None:
    """Serve stdin and stdout."""
    # Code of the user may never return. The thread that started this process lives as long as its crew.
    end_with_parent()
    faulthandler.enable()  # a library that crashes shows where
    answers = take_stdout()  # what the user's code prints must not mix with the answers
    requests = open(os.dup(0), "rb")  # noqa: SIM115
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # nor must it read the requests
    os.close(null)
    serve(requests, answers)


if __name__ == "__main__":
    main()
