"""A process that lowers programs for a build: `python -P -m prejit.compiler.pipeline.lower.lowerer_child`.

Each line of stdin is a request, each line of stdout its answer (`crew`). The end of stdin ends the process.
What the user's code prints goes to stderr, as in a build.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO, final

from prejit.compiler.base.process_errors import plain_error
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.native.kernel_library import KernelLibrary, find_kernels
from prejit.compiler.pipeline.lower.crew import Done, Project, Work, manifest_digest
from prejit.compiler.pipeline.lower.program_lowering import (
    lower,
    lower_native,
    lower_own,
    source_of,
)
from prejit.compiler.pipeline.lower.trace_keeping import remember
from prejit.compiler.pipeline.model import calls_kernels
from prejit.compiler.pipeline.plan import Lowered, Plan, PlannedProgram, plan_build
from prejit.compiler.pipeline.result_keys import own_lower_key
from prejit.compiler.pipeline.target_tools import TargetKernels, find_toolchain, kernels_of
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.child_process import end_with_parent, take_stdout, write_answer
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import PrejitError


@final
class _ChildStore(DirectoryStore):
    """Notes the keys of results, which the build sends to shared stores. Makes all at once.

    The build holds the right to make a result (`Store.making`) for its processes: it shares it with other
    machines, and it looks in shared stores before.
    """

    def __init__(self, root: Path, namespace: str) -> None:
        """Note nothing yet."""
        super().__init__(root, namespace)
        self._keys: list[Key] = []

    def taken(self) -> tuple[Key, ...]:
        """Return the keys of the results since the last call."""
        found, self._keys = self._keys, []
        return tuple(found)

    def put(self, key: Key, result: Mapping[str, Any], *, blobs: Iterable[str] = ()) -> None:
        """See `Store.put`."""
        super().put(key, result, blobs=blobs)
        self._keys.append(key)

    @contextmanager
    def making(self, key: Key, *, give_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """See `Store.making`."""
        del key, give_up
        yield True


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
        self._store = _ChildStore(Path(project.root), project.namespace)
        self._notes = _Notes()
        self._parameters: dict[str, dict[str, str]] = {}  # by section
        empty = plan_build(manifest, self._store, project.options, names=())
        self._space = Workspace.of(empty, self._store, self._notes)

    def prepare(self) -> None:
        """Read the model and the user's code, so that the first program need not wait for it."""
        self._space.code()
        if self._manifest.model is not None and not self._manifest.has_own_model:
            self._space.model()

    def lower(self, work: Work) -> Done:
        """Lower a unit of programs."""
        plan = plan_build(self._manifest, self._store, self._project.options, names=work.programs)
        untraced = self._space.with_plan(self._known(plan, work))
        plan = lower_own(untraced)
        space = self._space.with_plan(plan)
        lowered = {each.spec.name: lower(space, each) for each in plan.programs}
        remember(untraced, lowered, self._parameters_of(plan))
        self._lower_native(space, lowered, chosen=work.chosen)
        parameters = self._parameters.get(plan.programs[0].spec.section, {})
        return Done(lowered, parameters, self._store.taken(), self._notes.taken())

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

    def _parameters_of(self, plan: Plan) -> dict[str, dict[str, str]]:
        """Return the parameters of the unit's functions by section, which are hashed once."""
        new = tuple(
            each
            for each in plan.programs
            if each.spec.kind == "call" and each.spec.section not in self._parameters
        )
        found = self._space.with_plan(replace(plan, programs=new)).parameters()
        for each in new:
            self._parameters[each.spec.section] = dict(found.get(each.spec.section, {}))
        return self._parameters

    def _lower_native(
        self, space: Workspace, lowered: Mapping[str, Lowered], *, chosen: bool
    ) -> None:
        """Lower the programs again that call kernels of a target."""
        calling = [
            each for each in space.plan.programs if calls_kernels(space.plan.manifest, each.spec)
        ]
        kernels = self._kernels(space.plan) if calling else ()
        for program in calling:
            if kernels and not chosen:
                lower_native(space, program)
            for each in kernels if chosen else ():
                source_of(space, program, lowered[program.spec.name], each)

    def _kernels(self, plan: Plan) -> tuple[TargetKernels, ...]:
        """Return the kernels of the targets that have some. The build has compiled them."""
        found = []
        for target in plan.targets:
            toolchain = find_toolchain(target)
            library = None if toolchain is None else find_kernels(toolchain, self._store)
            if toolchain is not None and isinstance(library, KernelLibrary):
                found.append(kernels_of(library, toolchain, plan.forms))
        return tuple(found)


def begin(project: Project) -> Lowerer | dict[str, Any]:
    """Return what lowers the programs of a project; or, where nothing can, the answer to every request."""
    sys.path[:] = project.path
    try:
        manifest = read_manifest(Path(project.manifest))
        if manifest_digest(manifest) != project.content:
            return {"declined": f"{project.manifest} has changed"}
        lowerer = Lowerer(project, manifest)
        lowerer.prepare()
    except PrejitError as error:
        return {"error": plain_error(error)}
    return lowerer


def answer(line: bytes, lowerer: Lowerer) -> dict[str, Any]:
    """Return the answer to a request after the first one."""
    try:
        return {"lowered": asdict(lowerer.lower(from_plain(Work, json.loads(line))))}
    except PrejitError as error:
        return {"error": plain_error(error)}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    if not (first := requests.readline()):
        return
    begun = begin(from_plain(Project, json.loads(first)))
    for line in iter(requests.readline, b""):
        write_answer(answers, begun if isinstance(begun, dict) else answer(line, begun))


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
