"""Golden answers: what each program returns here for arguments that a seed makes, so that others can compare.

The executables of the first target that runs on the build host give them. If none does, the portable programs
give them, compiled for this host. A process with one thread asks, so that the order of sums is the same on
every build host. The store keeps the answers by what decides them: a build that changes nothing asks nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.pipeline.measure.golden_child import GoldenRequest
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, PackedTarget
from prejit.compiler.pipeline.result_keys import golden_key, measuring_key
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store, kept_values
from prejit.runtime.base.child_process import last_line, run_child
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.process_facts import THREADS
from prejit.runtime.base.process_memory import free_memory_bytes
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.arrays import RECIPE, Golden
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, ProgramEntry
from prejit.runtime.format.checks.layers import check_weights
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    LIBRARY_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint

SEED = 1
"""The seed of all golden answers."""

_EXACT, _ROUNDED, _ELSEWHERE, _IN_BYTES = 8, 5, 4, 3
"""Tolerances, as exponents of one half: of programs of float32 on CPUs, of other programs on CPUs, of all on
accelerators, and of models with int4 weights and decoders with int8. Kernels of these round to int8 what
portable programs do not: in 8 layers of int8 by all of the second one, and a router may take another expert,
which doubles the last one."""
NARROW = ("bfloat16", "float16", "float8", "float4", "int8", "int4", "uint8", "uint4")
"""How the names of dtypes begin that have fewer bits than float32."""
_MOST_WORK = 1 << 42
"""A program that reads more bytes than this for all its tokens together is not asked: it takes too long."""
_CALL_SECONDS = 60.0
"""CPU time limit of a user's function. A loop may never end with arguments that mean nothing."""
_PORTABLE = "portable"
_CHILD = "prejit.compiler.pipeline.measure.golden_child"


@dataclass(frozen=True)
class Answering:
    """The target that answers, whether its executables run here, and the platform that they run on."""

    target: PackedTarget
    matched: bool
    platform: str

    @property
    def source(self) -> str:
        """The name of the target whose executables answer, or `portable`."""
        return self.target.config.target if self.matched else _PORTABLE

    @property
    def threads(self) -> int:
        """The number of threads that answer: one, or those of a mesh, whose devices wait for each other."""
        mesh = self.target.config.mesh
        return 1 if mesh is None else mesh.size


def ask(
    module: str, content: bytes, timeout_seconds: float, *, threads: int = 1
) -> tuple[list[dict[str, Any]], str]:
    """Run a module with a request on its stdin, and return its answers, and how it ended.

    Programs may end that process, and a time limit ends it: the answers until then are returned. Each line of
    its stdout is an answer, as JSON. One thread gives sums one order on every build host. Nothing that it
    compiles is kept.
    """
    environment = {
        **os.environ,
        "NPROC": f"{threads}",
        "PJRT_NPROC": f"{threads}",
        THREADS: "1",
        "PREJIT_COMPILE_CACHE_BYTES": "0",
    }
    try:
        code, output, errors = run_child(
            (sys.executable, "-m", module), content, seconds=timeout_seconds, env=environment
        )
    except OSError as error:
        return [], f"its process cannot be started: {error.strerror}"
    ended = "its process took too long"
    if code is not None and code != -signal.SIGPROF:  # a limit that it gave itself
        ended = f"its process ended with {code}: {last_line(errors):.300}"
    # It may have ended within its last line.
    lines = (line for line in output.splitlines(keepends=True) if line.endswith(b"\n"))
    return [json.loads(line) for line in lines], ended


def with_golden_answers(
    targets: Sequence[PackedTarget], store: Store, progress: Progress, timeout_seconds: float
) -> tuple[PackedTarget, ...]:
    """Return the targets of a bundle, their programs with golden answers: from the store, or asked for now.

    A program that fails here, or is too large for this machine, has none. The progress says so. The time
    limit is for all programs together, up to one that ends their process.
    """
    answering = answering_target(targets)
    weights = _layer(answering.target, WEIGHTS_MEDIA_TYPE)
    dtypes = _dtypes(weights)
    keys: dict[tuple[str, int], Key] = {}
    for target in targets:
        for program in answering.target.config.programs:
            tolerance = _tolerance(target.config, program, dtypes)
            keys[program.name, tolerance] = _key(answering, program, tolerance, weights)
    known: dict[tuple[str, int], str] = kept_values(store, keys, "results")
    if missing := [each for each in keys if each not in known]:
        lock = measuring_key("golden", *((f"{n} {t}", keys[n, t].digest) for n, t in missing))
        with progress.phase("asking programs for golden answers"), store.making(lock):
            known = kept_values(store, keys, "results")
            missing = [each for each in missing if each not in known]
            asked = _ask(answering, missing, progress, timeout_seconds)
            for each, results in asked.items():
                store.put(keys[each], {"results": results})
            known |= asked

    def answered(target: PackedTarget) -> PackedTarget:
        programs = []
        for program in target.config.programs:
            tolerance = _tolerance(target.config, program, dtypes)
            if (results := known.get((program.name, tolerance))) is not None:
                golden = Golden(RECIPE, SEED, answering.source, tolerance, results)
                program = replace(program, golden=golden)
            programs.append(program)
        return replace(target, config=replace(target.config, programs=tuple(programs)))

    return tuple(map(answered, targets))


def answering_target(targets: Sequence[PackedTarget]) -> Answering:
    """Return the target that answers: the one that this machine would load, or else the first."""
    machine = Fingerprint.current()
    fitting = [
        (preference(needs, machine), place, target)
        for place, target in enumerate(targets)
        if compare(target.config.target, needs := target.config.requirement, machine).matches
    ]
    if fitting:
        _, _, target = min(fitting, key=lambda each: each[:2])
        return Answering(target, True, machine.platform)
    return Answering(targets[0], False, "cpu")


def _dtypes(weights: PackedLayer | None) -> dict[str, str]:
    if weights is None or not weights.size:
        return {}
    assert isinstance(weights.content, Path)
    layer = Layer.in_file(weights.content)
    tensors = check_weights(memoryview(layer.content), layer.path)
    return {name: tensor.dtype for name, tensor in tensors.items()}


def _tolerance(config: Config, program: ProgramEntry, dtypes: Mapping[str, str]) -> int:
    """Return the tolerance of a program's answer.

    Kernels multiply narrow matrices in few bits, and accelerators may multiply float32 in fewer bits.
    """
    names = config.weight_sets.get(program.weights or "", ())
    own = {dtypes[name] for name in names}
    has_int4 = (config.decoder or config.encoder) and STORED_DTYPES["int4"].words in own
    if has_int4 or (config.decoder and "int8" in own):
        return _IN_BYTES - any(".experts." in name for name in names)
    if config.requirement.platform != "cpu":
        return _ELSEWHERE
    for text in (*program.arguments, *program.results):
        own.add(text.partition("] ")[2].partition("[")[0])
    return _ROUNDED if any(name.startswith(NARROW) for name in own) else _EXACT


def _key(
    answering: Answering, program: ProgramEntry, tolerance: int, weights: PackedLayer | None
) -> Key:
    config = answering.target.config
    model = config.decoder or config.encoder
    cache = None if config.decoder is None else config.decoder.cache
    tensors = None if program.weights is None else config.weight_sets[program.weights]
    signature = (program.kind, program.bucket, program.arguments, program.results, program.mask)
    return golden_key(
        f"{config.bundle}/{program.name}",
        program=program.portable.raw_digest,
        executable=program.executable.raw_digest if answering.matched else _PORTABLE,
        weights="none" if weights is None else weights.digest,
        signature=digest_of(to_json([signature, tensors, cache, model and model.vocab_size])),
        tolerance=tolerance,
        seed=SEED,
    )


def _ask(
    answering: Answering,
    wanted: Sequence[tuple[str, int]],
    progress: Progress,
    timeout_seconds: float,
) -> dict[tuple[str, int], str]:
    """Return the answers of programs, asked in a process of their own. What fails is missing."""
    table = {program.name: program for program in answering.target.config.programs}
    asked = []
    for name, tolerance in wanted:
        if (reason := _too_large(table[name])) is None:
            asked.append(f"{name} {tolerance}")
        else:
            progress.note(f"{name} gets no golden answer: {reason}")
    found: dict[tuple[str, int], str] = {}
    while asked:
        request, given = golden_request(answering, asked)
        content = b"".join([json.dumps(asdict(request)).encode(), b"\n", *given])
        answers, ended = ask(_CHILD, content, timeout_seconds, threads=answering.threads)
        ends = len(answers) + 1  # the next one ended the process
        found |= _read(answers, asked[:ends], ended, progress)
        asked = asked[ends:]
    return found


def golden_request(
    answering: Answering, wanted: Sequence[str]
) -> tuple[GoldenRequest, list[bytes]]:
    """Return the request for programs of the target that answers, and the layers that follow it."""
    layers = _layers(answering.target)
    weights = _layer(answering.target, WEIGHTS_MEDIA_TYPE)
    path = None if weights is None else weights.content
    assert path is None or isinstance(path, Path)
    request = GoldenRequest(
        to_json(answering.target.config).decode(),
        answering.platform,
        answering.matched,
        SEED,
        tuple(wanted),
        None if path is None else str(path),
        tuple(each if isinstance(each, str) else len(each) for each in layers),
        _CALL_SECONDS,
    )
    return request, [each for each in layers if isinstance(each, bytes)]


def _read(
    answers: Sequence[Mapping[str, Any]], asked: Sequence[str], ended: str, progress: Progress
) -> dict[tuple[str, int], str]:
    """Return the answers of the process, and say which programs have none."""
    found: dict[tuple[str, int], str] = {}
    errors: dict[str, str] = {}
    for answer in answers:
        name, tolerance = answer["program"], answer["tolerance"]
        if "results" in answer:
            found[name, tolerance] = answer["results"]
        else:
            errors[f"{name} {tolerance}"] = answer["error"]
    for each in asked:
        name, _, tolerance = each.rpartition(" ")
        if (name, int(tolerance)) not in found:
            progress.note(f"{name} gets no golden answer: {errors.get(each, ended)}")
    return found


def _too_large(program: ProgramEntry) -> str | None:
    """Return why a program is not asked; None: it is."""
    sizes = program.bucket
    tokens = 1
    if program.kind not in ("call", "copy"):
        tokens = sizes["batch"] * max(sizes.get(each, 1) for each in ("prompt", "draft", "length"))
    if program.memory.argument_bytes * tokens > _MOST_WORK:
        return "it would take this machine minutes"
    # The weights are most of it, and are pages of a file, like those that the build has read.
    if program.memory.need_bytes > (free := free_memory_bytes(with_files=True)):
        return f"it needs {program.memory.need_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"
    return None


def _layers(target: PackedTarget) -> list[bytes | str]:
    """Return the layers that the process gets: executables, portable programs, kernels, libraries.

    Packs of programs are named by their files: this process does not read them.
    """
    found: list[bytes | str] = []
    for media_type in (EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE, KERNELS_MEDIA_TYPE):
        layer = _layer(target, media_type)
        found.append(b"" if layer is None else _content(layer))
    named = {each.digest: each for each in target.layers if each.media_type == LIBRARY_MEDIA_TYPE}
    return [*found, *(_content(named[each.digest]) for each in target.config.libraries or ())]


def _layer(target: PackedTarget, media_type: str) -> PackedLayer | None:
    return next((each for each in target.layers if each.media_type == media_type), None)


def _content(layer: PackedLayer) -> bytes | str:
    return layer.content if isinstance(layer.content, bytes) else str(layer.content)
