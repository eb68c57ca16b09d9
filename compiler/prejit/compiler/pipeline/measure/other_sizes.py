"""Compare the user's programs with their functions at sizes that no bucket has, and refuse what differs.

A program that is padded, or that has symbolic sizes, may give another answer than its function: a mean counts
the padding, and code that looks at a size while it is traced sees that of the bucket, or none. The lowering
keeps the function at a few sizes (`lowering.user.varying_sizes`); here both run, in a process of their own.
The store keeps that they were compared, so a build that changes nothing compares nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from prejit.compiler.manifest.manifest import UNCHECKED
from prejit.compiler.pipeline.measure.golden_answers import NARROW, ask
from prejit.compiler.pipeline.measure.sizes_child import Compared, SizeDifference, SizesRequest
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.plan import Lowered, Plan, PlannedProgram
from prejit.compiler.pipeline.result_keys import Contents, measuring_key, sizes_key
from prejit.compiler.pipeline.workspace import Workspace
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store, kept_values
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.process_memory import free_memory_bytes
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.errors import BuildError
from prejit.runtime.format.arrays import Array

_EXACT, _NARROW = 12, 5
"""Tolerances, as exponents of one half: of programs of float32, and of those with narrower numbers. The same
code at two sizes adds in another order."""
_MOST_BYTES = 1 << 30
"""A program with more bytes of parameters, arguments and results than this is not compared."""
_MOST_SHOWN = 5
"""Maximum number of differing results of a program in an error."""
_CHILD = "prejit.compiler.pipeline.measure.sizes_child"
_HINTS = {
    True: "what a function returns must not depend on padding: give it a mask (`mask`), or leave the "
    'variable out of `pad`; if these results may differ, write pad = "unchecked"',
    False: "code that looks at a size (==, in, %, a dict, isinstance) decides once for all sizes: list "
    "the sizes in `buckets` and leave the variable out of `open_sizes`; if these results may differ, write "
    'open_sizes = "unchecked"',
}
"""The hint about a difference, by whether the program was padded."""


def check_sizes(
    space: Workspace,
    lowered: Mapping[str, Lowered],
    user: Mapping[str, Contents],
    weights: Callable[[], PackedLayer | None],
    timeout_seconds: float,
) -> None:
    """Compare programs with their functions at other sizes, where the store does not know them equal.

    A program that cannot run here is not compared. The progress says so. `user` has the parameters of the
    user's functions by section, `weights` returns the weights layer. The time limit is for all programs
    together.

    Raises:
        BuildError: results differ; the error names all of them.
    """
    plan, store, progress = space.plan, space.store, space.progress
    compared: dict[str, Compared] = {}
    keys: dict[str, Key] = {}
    for program in plan.programs:
        name, made = program.spec.name, lowered[program.spec.name]
        if made.trials:
            parameters = user.get(program.spec.section, {})
            compared[name] = _compared(program, made, parameters)
            label = f"{plan.manifest.bundle.name}/{name}"
            keys[name] = sizes_key(label, digest_of(to_json(compared[name])), parameters)
        elif reason := _untried(plan, program, made):
            _note(name, reason, progress)
    # Why programs were not compared; empty for those that were.
    known: dict[str, str] = kept_values(store, keys, "unchecked")
    differences: dict[str, list[SizeDifference]] = {}
    if missing := {name: key.digest for name, key in keys.items() if name not in known}:
        lock = measuring_key("sizes", *missing.items())
        with progress.phase("comparing programs at other sizes"), store.making(lock):
            known = kept_values(store, keys, "unchecked")
            asked = [each for name, each in compared.items() if name not in known]
            layer = weights() if any(each.weights for each in asked) else None
            reasons, differences = _ask(asked, layer, store, timeout_seconds)
            for each in asked:
                if each.name not in differences:
                    known[each.name] = reasons.get(each.name, "")
                    store.put(keys[each.name], {"unchecked": known[each.name]})
    for name, reason in known.items():
        if reason:
            _note(name, reason, progress)
    if differences:
        raise _error(plan, differences)


def _untried(plan: Plan, program: PlannedProgram, lowered: Lowered) -> str:
    """Return why a program has no other sizes to compare; empty: it needs none."""
    spec = program.spec
    if spec.kind != "call":
        return ""
    section = plan.manifest.section(spec.section)
    pads = UNCHECKED not in section.pad and any(spec.bucket[name] > 1 for name in spec.pad)
    opens = UNCHECKED not in section.open_sizes and spec.open_sizes
    if not (pads or opens):
        return ""
    if plan.manifest.mesh is not None:
        return "a mesh splits it"
    if "cpu" not in lowered.platforms:
        return "it does not lower for CPUs"
    return "its function fails at each other size that was tried"


def _note(name: str, reason: str, progress: Progress) -> None:
    progress.note(f"{name} is not compared with its function at other sizes: {reason}")


def _compared(program: PlannedProgram, lowered: Lowered, parameters: Contents) -> Compared:
    spec = program.spec
    arrays = map(Array.parse, (*lowered.arguments, *lowered.results))
    dtypes = (*(array.dtype for array in arrays), *parameters.values())
    return Compared(
        spec.name,
        lowered.portable.raw_digest,
        None if lowered.symbolic is None else lowered.symbolic.raw_digest,
        lowered.platforms,
        tuple(f"{spec.section}:{name}" for name in lowered.weights),
        lowered.arguments,
        lowered.results,
        spec.mask,
        spec.pad,
        _NARROW if any(each.startswith(NARROW) for each in dtypes) else _EXACT,
        lowered.trials,
    )


def _ask(
    programs: Sequence[Compared], weights: PackedLayer | None, store: Store, seconds: float
) -> tuple[dict[str, str], dict[str, list[SizeDifference]]]:
    """Return why programs were not compared, and what differs, each by the name of the program."""
    reasons: dict[str, str] = {}
    differences: dict[str, list[SizeDifference]] = {}
    for program in programs:
        if (need := _bytes(program)) > _MOST_BYTES or 4 * need > free_memory_bytes():
            reasons[program.name] = "it is too large for this machine"
    left = [program for program in programs if program.name not in reasons]
    blobs = {
        digest
        for each in left
        for digest in (each.portable, each.symbolic, *(trial.portable for trial in each.trials))
        if digest is not None
    }
    files = {digest: str(store.blob_path(digest)) for digest in blobs}
    while left:
        path = None if weights is None else str(weights.content)
        request = SizesRequest(files, path, tuple(left))
        answers, ended = ask(_CHILD, json.dumps(asdict(request)).encode() + b"\n", seconds)
        for answer in answers:
            name = answer["program"]
            if "error" in answer:
                reasons[name] = answer["error"].partition("\n")[0]
            elif found := [SizeDifference(**each) for each in answer["differences"]]:
                differences[name] = found
        left = left[len(answers) :]
        if left:  # it ended the process
            reasons[left.pop(0).name] = ended
    return reasons, differences


def _bytes(program: Compared) -> int:
    arrays = map(Array.parse, (*program.arguments, *program.results))
    return sum(dtype_of(each.dtype).itemsize * math.prod(each.shape) for each in arrays)


def _error(plan: Plan, differences: Mapping[str, Sequence[SizeDifference]]) -> BuildError:
    lines = []
    for name, found in differences.items():
        label = plan.manifest.section(name.partition("/")[0]).label
        lines.append(
            f"{plan.manifest.where}: program {name}: expected what {label} returns at each size, found"
        )
        for each in found[:_MOST_SHOWN]:
            sizes = ", ".join(f"{variable}={size}" for variable, size in each.sizes.items())
            how = "padded" if each.padded else "with open sizes"
            lines.append(
                f"  {each.result}: {each.found} in place of {each.expected} at {sizes}, {how}"
            )
        if len(found) > _MOST_SHOWN:
            lines.append(f"  and {len(found) - _MOST_SHOWN} more results")
    kinds = {each.padded for found in differences.values() for each in found}
    return BuildError("\n".join(lines), hint="; ".join(_HINTS[kind] for kind in sorted(kinds)))
