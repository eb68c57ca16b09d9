"""Compare programs with the results that `[program.check]` names, and refuse a build where they differ.

A function of NumPy gets the arguments of the program's golden answer, and its results take the place of that
answer: so `prejit verify --run`, and each machine that asks for golden answers, compares with them too. A
file has arguments of its own, which a bundle does not hold: the build alone compares with it.

Every build compares. The store keeps nothing of it, because only a run shows what the user's code returns.
"""

from __future__ import annotations

import json
import math
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.manifest.manifest import Manifest, Program, ProgramCheck
from prejit.compiler.pipeline.measure.golden_answers import (
    SEED,
    Answering,
    answering_target,
    ask,
    golden_request,
)
from prejit.compiler.pipeline.measure.reference_child import (
    ARGUMENTS,
    RESULTS,
    ReferenceComparison,
    ReferenceRequest,
    ReferenceResults,
)
from prejit.compiler.pipeline.pack.bundle_files import PackedTarget
from prejit.compiler.pipeline.workspace import Workspace, read_params
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format.arrays import RECIPE, TOLERANCES, Array, Golden
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.checks.call_programs import check_static, check_tree
from prejit.runtime.format.constants import encode, same
from prejit.runtime.programs import pytree
from prejit.runtime.programs.golden_inputs import Values, call_input

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.modules import UserModules

SOURCE = "reference"
"""The source of a golden answer that a function of a [program.check] gave."""
_CHILD = "prejit.compiler.pipeline.measure.reference_child"


def with_checked_answers(
    space: Workspace, targets: Sequence[PackedTarget], timeout_seconds: float
) -> tuple[PackedTarget, ...]:
    """Return the targets of a bundle, after their programs gave the results of each [program.check].

    The programs of the target that answers on this host run. Those of the others must give the same golden
    answers, which come from the functions of the checks.

    Raises:
        ManifestError: a function or a file does not exist, or its arguments or results are others.
        BuildError: a program returns something else, or cannot run here, or a function fails.
    """
    manifest = space.plan.manifest
    checks = {each.name: each.check for each in manifest.programs if each.check is not None}
    if not checks:
        return tuple(targets)
    answering = answering_target(targets)
    entries = [each for each in answering.target.config.programs if each.function in checks]
    with (
        space.progress.phase("comparing programs with references"),
        tempfile.TemporaryDirectory(prefix="prejit-check-") as directory,
    ):
        references = [
            *_from_files(manifest, checks, entries),
            *_from_functions(manifest, checks, entries, Path(directory)),
        ]
        found = _compare(answering, references, timeout_seconds)
    if wrong := [each for each in found if each.result or each.error]:
        raise _error(manifest, checks, wrong)
    answers = {
        each.program: (reference.golden, each.golden)
        for each, reference in zip(found, references, strict=True)
        if each.golden is not None and reference.golden is not None
    }
    return tuple(_with_answers(target, answers) for target in targets)


def _with_answers(target: PackedTarget, answers: Mapping[str, tuple[int, str]]) -> PackedTarget:
    programs = [
        replace(each, golden=Golden(RECIPE, SEED, SOURCE, *answers[each.name]))
        if each.name in answers
        else each
        for each in target.config.programs
    ]
    return replace(target, config=replace(target.config, programs=tuple(programs)))


def _from_files(
    manifest: Manifest, checks: Mapping[str, ProgramCheck], entries: Sequence[ProgramEntry]
) -> Iterator[ReferenceResults]:
    """Yield the references of files, each with the program whose arguments have the shapes of the file."""
    for section, check in checks.items():
        for name in check.files:
            path = manifest.resolve(name)
            where = f"{manifest.where}: program {section!r}: check: {name}"
            try:
                with np.load(path, allow_pickle=False) as file:
                    shapes = {key: file[key].shape for key in file.files}
            except (
                OSError,
                ValueError,
                EOFError,
                TypeError,
                zipfile.BadZipFile,
                zlib.error,
            ) as error:
                hint = "write it with numpy.savez"
                raise ManifestError(f"{where}: cannot read arrays: {error}", hint=hint) from error
            buckets = [each for each in entries if each.function == section]
            wanted = {each.name: _shapes(each) for each in buckets}
            results = {
                RESULTS + (pytree.dotted(array.path) or "result")
                for each in buckets
                for array in map(Array.parse, each.results)
            }
            given = {key: shape for key, shape in shapes.items() if not key.startswith(RESULTS)}
            fitting = [bucket for bucket, arguments in wanted.items() if arguments == given]
            if not fitting:
                known = "; ".join(f"{bucket}: {_spelled(each)}" for bucket, each in wanted.items())
                raise ManifestError(
                    f"{where}: expected the arguments of a bucket ({known}), found {_spelled(given)}",
                    hint="write numpy.savez(FILE, **{'args.x': x, 'results.result': y})",
                )
            unknown = [key for key in shapes if key.startswith(RESULTS) and key not in results]
            if unknown:
                raise ManifestError(
                    f"{where}: expected results of the program ({', '.join(sorted(results))}), "
                    f"found {', '.join(unknown)}",
                    hint="leave them out, or name them as the program does",
                )
            for bucket in fitting:  # several, where static arguments differ
                yield ReferenceResults(bucket, str(path), check.tolerance, None)


def _shapes(entry: ProgramEntry) -> dict[str, tuple[int, ...]]:
    arrays = map(Array.parse, entry.arguments)
    return {ARGUMENTS + pytree.dotted(array.path): array.shape for array in arrays}


def _spelled(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def _from_functions(
    manifest: Manifest,
    checks: Mapping[str, ProgramCheck],
    entries: Sequence[ProgramEntry],
    directory: Path,
) -> Iterator[ReferenceResults]:
    """Yield the references of functions, whose arguments and results are written to a directory."""
    from prejit.compiler.lowering.user.modules import UserModules

    modules = UserModules(None if manifest.path is None else manifest.directory)
    for section, check in checks.items():
        if check.function is None:
            continue
        where = f"{manifest.where}: program {section!r}: check.function"
        function = check.function
        if isinstance(function, str):
            function = modules.find(function, where, impure=True)
        if not callable(function):
            raise ManifestError(f"{where}: expected a function, found {type(function).__name__}")
        params = _params(manifest, manifest.section(section))
        for place, entry in enumerate(each for each in entries if each.function == section):
            arrays = [Array.parse(text) for text in entry.arguments]
            values = [
                call_input(array, SEED, number, entry.mask or "")
                for number, array in enumerate(arrays)
            ]
            theirs = [np.copy(each) for each in values]  # a function may write into its arguments
            results = _returned(
                modules, manifest.section(section), function, params, entry, arrays, theirs, where
            )
            file = directory / f"{section}-{place}.npz"
            named = {
                ARGUMENTS + pytree.dotted(a.path): v for a, v in zip(arrays, values, strict=True)
            }
            arrays_by_name: dict[str, Any] = named | results
            np.savez(file, **arrays_by_name)
            exponent = math.floor(-math.log2(check.tolerance))
            exponent = min(max(exponent, TOLERANCES[0]), TOLERANCES[-1])
            golden = None if entry.golden is None else exponent
            yield ReferenceResults(entry.name, str(file), check.tolerance, golden)


def _params(manifest: Manifest, program: Program) -> tuple[Any, ...]:
    """Return the first argument of a program's function, nested, in a tuple; empty: it takes none."""
    if program.params is None:
        return ()
    from prejit.compiler.lowering.user.found_function import nested_by_dots

    where = f"{manifest.where}: program {program.name!r}: params"
    values, nested = read_params(manifest, program.params, where)
    return ((nested or nested_by_dots)(values or {}),)


def _returned(
    modules: UserModules,
    program: Program,
    function: Any,
    params: tuple[Any, ...],
    entry: ProgramEntry,
    arrays: Sequence[Array],
    values: Sequence[Values],
    where: str,
) -> dict[str, Values]:
    """Return the results of a reference function by their names in a file."""
    at = f"{where}: {entry.name}"
    arguments = check_tree(entry.arguments_tree, arrays, at)
    given = pytree.unflatten(arguments, iter(values))
    named = dict(given) if isinstance(given, dict) else {}
    positional = () if isinstance(given, dict) else given
    static: dict[str, Any] = {}
    for name, kept in check_static(entry, at).items():
        values = program.static.get(name, ())  # the bundle has digests of some
        static[name] = next((v for v in values if same(encode(v), kept)), kept)
    with modules.tracing(at, hint="it is called with NumPy arrays"):
        found = function(*params, *positional, **named, **static)
    results = [Array.parse(text) for text in entry.results]
    try:
        leaves = pytree.flatten(check_tree(entry.results_tree, results, at), found)
    except pytree.MisfitError as misfit:
        raise BuildError(f"{at}: expected the results of the program: {misfit}") from misfit
    converted = {}
    for array, leaf in zip(results, map(np.asarray, leaves), strict=True):
        if leaf.shape != array.shape:
            raise BuildError(
                f"{at}: {pytree.spell(array.path)}: expected {array.dtype}{list(array.shape)}, as the "
                f"program returns, found {leaf.dtype}{list(leaf.shape)}"
            )
        converted[RESULTS + (pytree.dotted(array.path) or "result")] = leaf
    return converted


def _compare(
    answering: Answering, references: Sequence[ReferenceResults], timeout_seconds: float
) -> list[ReferenceComparison]:
    """Return what each program returned beside its reference, as a process of its own found."""
    programs, given = golden_request(answering, ())
    request = ReferenceRequest(programs, tuple(references))
    content = b"".join([json.dumps(asdict(request)).encode(), b"\n", *given])
    answers, ended = ask(_CHILD, content, timeout_seconds, threads=answering.threads)
    found = [from_plain(ReferenceComparison, answer) for answer in answers]
    left = references[len(found) :]
    return [*found, *(ReferenceComparison(each.program, each.file, error=ended) for each in left)]


def _error(
    manifest: Manifest, checks: Mapping[str, ProgramCheck], wrong: Sequence[ReferenceComparison]
) -> BuildError:
    lines = []
    for each in wrong:
        section = each.program.partition("/")[0]
        check = checks[section]
        names = {str(manifest.resolve(name)): name for name in check.files}
        reference = names.get(each.file, check.function)
        about = f"{manifest.where}: program {each.program}: check"
        if each.error:
            lines.append(f"{about}: cannot compare it with {reference}: {each.error}")
            continue
        place = f"{each.result}[{', '.join(map(str, each.index))}]" if each.index else each.result
        lines.append(
            f"{about}: expected what {reference} has, {each.expected}, found {each.found} at {place}, its "
            f"largest difference, {each.difference} (tolerance {check.tolerance:g})"
        )
    return BuildError(
        "\n".join(lines),
        hint="mend the function, or the reference; a larger tolerance in [program.check] allows rounding",
    )
