"""Keep traces of the user's code in the store, once they are known to be worth keeping.

A trace is kept when what it read is still as it was, and when tracing the same code again gives the same
program. The second trace is made once for each section, where the first took less than `_CHECK_SECONDS`: a
function that reads the clock, a counter or a random number without a key shows itself there. An order that
differs between processes, such as that of a set, shows itself when the store has the trace of another one
for the same inputs: `prejit build --retrace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from prejit.compiler.lowering.user.trace_inputs import Input
from prejit.compiler.pipeline.lower.program_lowering import lower_function, lower_own_decoder
from prejit.compiler.pipeline.plan import Lowered, OwnFacts, Plan, PlannedProgram
from prejit.compiler.pipeline.result_keys import Contents, content_of
from prejit.compiler.pipeline.stored_traces import Known, declared_reads, remember_trace, remembered
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import BuildError

if TYPE_CHECKING:
    from prejit.compiler.lowering.export import LoweredProgram

_CHECK_SECONDS = 2.0
"""A program whose first trace took less CPU time than this is traced a second time, and compared."""
_IMPURE = "take what changes as an argument, give random numbers a key, and sort sets"
_UNSEEN = (
    "a file that it reads by other means than open() may have changed: declare it as `reads`; if there is "
    f"none, the function is not pure: {_IMPURE}"
)


def read_own(space: Workspace) -> Workspace:
    """Return the workspace with the facts about the user's decoder, read and kept now if a plan has none."""
    plan = space.plan
    if not plan.manifest.has_own_model or plan.own is not None:
        return space
    model = space.code().model
    assert model is not None
    contents = {name: content_of(read()) for name, read in model.exact.values.items()}
    orders = {name: tuple(map(int, axes)) for name, axes in model.stored.orders.items()}
    own = OwnFacts(model.vocab_size, contents, orders)
    if plan.own_trace is not None and (read := _read(space)) is not None:
        read.keep(plan.own_trace, asdict(own), (), space.store)
    return space.with_plan(replace(plan, own=own))


def remember(
    space: Workspace, lowered: Mapping[str, Lowered], parameters: Mapping[str, Contents]
) -> None:
    """Keep the traces of programs that this build made.

    The workspace has the plan from before anything was traced. `parameters` are those of the user's functions
    by section.
    """
    plan, store = space.plan, space.store
    fresh = [each for each in plan.programs if each.lowered is None]
    traced = [each for each in fresh if each.trace is not None]
    users = [each for each in fresh if each.trace is not None or each.spec.kind == "call"]
    if users:
        with space.progress.phase("comparing second traces"):
            _check_again(space, users, lowered)
    read = _read(space) if traced else None
    troubles = dict[str, str]()  # with the first program that has each
    for program in traced:
        assert program.trace is not None
        made, spec = lowered[program.spec.name], program.spec
        result: dict[str, Any] = {"lowered": asdict(made)}
        if spec.kind == "call":
            result["parameters"] = dict(parameters.get(spec.section, {}))
        if spec.kind == "call" and plan.manifest.section(spec.section).is_file:
            kept = {"trace": result}
            remember_trace(program.trace, {}, ((), ()), kept, made.blobs, store, reads=False)
        elif read is not None:
            if read.trouble:
                troubles.setdefault(read.trouble, spec.name)
            else:
                _check_stored(plan, program, made, read.inputs, store)
            read.keep(program.trace, result, made.blobs, store)
    for trouble, name in troubles.items():
        space.progress.note(f"{name} is traced at every build: {trouble}")


@dataclass(frozen=True)
class _Read:
    """The inputs that the code of a manifest read, with their digests, and why they may not stand for it."""

    inputs: Mapping[Input, str]
    trouble: str
    search_path: tuple[tuple[str, ...], tuple[str, ...]]

    def keep(
        self, known: Known, result: Mapping[str, Any], blobs: tuple[str, ...], store: Store
    ) -> None:
        """Keep a result under these inputs; or, where these may not stand for it, why."""
        kept = {"never": self.trouble} if self.trouble else {"trace": result}
        blobs = () if self.trouble else blobs
        remember_trace(known, self.inputs, self.search_path, kept, blobs, store)


def _read(space: Workspace) -> _Read | None:
    """Return what the code read; None: some of it changed meanwhile, or was read before this build."""
    modules = space.code().modules
    assert modules is not None
    seen, present = modules.observer.seen(), modules.present()
    if not seen.complete:
        return None
    inputs: dict[Input, str] = {}
    for each in seen.inputs:
        digest = present.digest(each)
        expected = seen.digests.get(each, digest)
        if digest != expected and each.kind == "module" and each in seen.files:
            # Code of the user changed where Python looks for modules: the file itself stands for it.
            each = Input("file", seen.files[each])
            digest, expected = present.digest(each), expected.partition(" ")[0]
        if digest != expected:
            return None
        inputs[each] = digest
    trouble = seen.trouble
    if seen.hidden and not declared_reads(space.plan.manifest) and not trouble:
        trouble = f"{seen.hidden}, which prejit cannot see: name them in `reads`"
    return _Read(inputs, trouble, modules.search_path())


def _check_again(
    space: Workspace, traced: list[PlannedProgram], lowered: Mapping[str, Lowered]
) -> None:
    """Trace one program of each section a second time, where that is quick.

    Python's objects come from a process that may have jitted functions of its own. Their caches stay.
    """
    first: dict[str, PlannedProgram] = {}
    for program in traced:
        if 0 < space.code().seconds.get(program.spec.name, 0) < _CHECK_SECONDS:
            first.setdefault(program.spec.section, program)
    if not first:
        return
    import jax

    def trace(program: PlannedProgram) -> LoweredProgram:
        how = lower_function if program.spec.kind == "call" else lower_own_decoder
        return how(space, program)

    if any(program.trace is not None for program in first.values()):
        jax.clear_caches()  # else a function under jax.jit would not be traced again
    for program in first.values():
        if digest_of(trace(program).portable) != lowered[program.spec.name].portable.raw_digest:
            other = trace(program)
            if program.trace is not None:
                jax.clear_caches()
            raise _impure(space.plan, program, other, trace(program))


def _check_stored(
    plan: Plan, program: PlannedProgram, made: Lowered, inputs: Mapping[Input, str], store: Store
) -> None:
    """Compare a trace with the one that the store has for the same inputs."""
    assert program.trace is not None
    known = remembered(program.trace, inputs, store)
    if known is None:
        return
    before = from_plain(Lowered, known["lowered"])
    if before.portable.raw_digest == made.portable.raw_digest:
        return
    programs = [store.read_blob(each.portable.raw_digest) for each in (before, made)]
    if None in programs:
        return
    from prejit.compiler.lowering.user.traced_primitives import differing_line

    first, second = programs
    assert first is not None
    assert second is not None
    expected = "to give the program that an earlier build traced from the same inputs"
    raise _error(plan, program, expected, differing_line(first, second), _UNSEEN)


def _impure(
    plan: Plan, program: PlannedProgram, first: LoweredProgram, second: LoweredProgram
) -> BuildError:
    from prejit.compiler.lowering.user.traced_primitives import differing_line, differing_operation

    found = None
    if first.traced is not None and second.traced is not None:
        found = differing_operation(first.traced, second.traced)
    expected = "to give the same program each time that it is traced"
    found = found or differing_line(first.portable, second.portable)
    return _error(plan, program, expected, found, _IMPURE)


def _error(plan: Plan, program: PlannedProgram, expected: str, found: str, hint: str) -> BuildError:
    is_function = program.spec.kind == "call"
    section = plan.manifest.section(program.spec.section) if is_function else plan.manifest.model
    assert section is not None
    return BuildError(
        f"{plan.manifest.where}: program {program.spec.name}: expected {section.label} {expected}, "
        f"found two that differ in {found}",
        hint=hint,
    )
