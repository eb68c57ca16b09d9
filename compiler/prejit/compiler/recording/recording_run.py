"""Run a program once, and pack the files of jax's cache that it leaves."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prejit.compiler.pipeline.describe.attaching import attach_descriptions
from prejit.compiler.pipeline.describe.provenance import recording_provenance
from prejit.compiler.pipeline.pack.bundle_files import DESCRIPTIONS, assemble, check_readable
from prejit.compiler.recording.merging import (
    RecordedTarget,
    collect,
    is_of,
    merged,
    packed,
    read_targets,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.locks import lock_file, remove_and_unlock
from prejit.runtime.errors import BuildError, StoreError
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.hook.watch import Orders
from prejit.runtime.recorded.hook_events import JaxRequest, read_events
from prejit.runtime.recorded.recorded_run import cache_settings, environment_for, run_command


@dataclass(frozen=True)
class Recording:
    """The result of a recording.

    Attributes:
        path: the directory of the bundle.
        name, digest: name and digest of the bundle.
        status: the exit status of the program.
        added: the number of programs that the recording added.
        programs: the number of programs in the bundle, of all targets.
        targets: the names of its targets.
        left_out: why programs that jax compiled are not in the bundle, one line each.
        requests: what the program's processes asked of jax.
    """

    path: Path
    name: str
    digest: str
    status: int
    added: int
    programs: int
    targets: tuple[str, ...]
    left_out: tuple[str, ...]
    requests: tuple[JaxRequest, ...]


def default_name(command: Sequence[str]) -> str:
    """Return a bundle's name for a command: that of its Python file, its module or its program."""
    word = next((each for each in command if each.endswith(".py")), command[0])
    if "-m" in command[:-1]:
        word = command[command.index("-m") + 1].rpartition(".")[2]
    return bundle_name(Path(word).stem)


def bundle_name(text: str) -> str:
    """Return a text as the name of a bundle: small letters and digits with single dashes between them."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "recorded"


def record(command: Sequence[str], output: Path) -> Recording:
    """Run a command, and write what jax compiled for it into a bundle.

    A bundle that is there gets it in addition. The program gets what the bundle holds already, so that only
    the rest compiles.

    Args:
        command: the command and its arguments. It may start processes of its own.
        output: the directory of the bundle.

    Raises:
        BuildError: the program compiled nothing, and there is no bundle.
        RejectError: the bundle that is there is damaged.
        StoreError: the bundle cannot be written.
        UsageError: the command cannot be started, or `prejit build` wrote the bundle that is there.
    """
    machine = Fingerprint.current()
    with tempfile.TemporaryDirectory(prefix="prejit-record-") as scratch:
        cache, events = Path(scratch, "cache"), Path(scratch, "events")
        cache.mkdir()
        events.mkdir()
        known = [
            program
            for target in read_targets(output)
            if is_of(target, machine)
            for program in target.programs.values()
        ]
        for program in known:
            (cache / program.entry.file).write_bytes(program.content())
        orders = Orders(cache_settings(cache, write=True), str(events), functions=True)
        status = run_command(command, environment_for(orders, os.environ))
        processes = read_events(events)
        found, left_out = collect(
            cache, processes, machine, {program.entry.file for program in known}
        )
    requests = tuple(request for process in processes for request in process.requests)
    return _write(output, status, found, left_out, requests)


def _write(
    output: Path,
    status: int,
    found: Sequence[RecordedTarget],
    left_out: Sequence[str],
    requests: tuple[JaxRequest, ...],
) -> Recording:
    """Merge targets into the bundle at `output` and write it."""
    name = bundle_name(output.name)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = output.parent / f".{output.name}.record.lock"
        held = lock_file(lock)
    except OSError as error:
        raise StoreError(f"{output.parent}: cannot write a bundle: {error.strerror}") from error
    try:
        # Another recording may have written since this one began.
        before = read_targets(output)
        targets = merged(before, found)
        if not targets:
            raise BuildError(
                f"the program compiled nothing with jax, and ended with status {status}",
                hint="record a command that calls jitted functions; Python must not run with -I, -E or -S",
            )
        index, blobs = assemble(name, [packed(target, name) for target in targets], DESCRIPTIONS)
        check_readable(index, blobs)
        write_layout(output, index, blobs)
        digest = digest_of(index)
        attach_descriptions(output, digest, partial(recording_provenance, digest))
    finally:
        remove_and_unlock(lock, held)
    count = sum(len(target.programs) for target in targets)
    return Recording(
        output,
        name,
        digest,
        status,
        count - sum(len(target.programs) for target in before),
        count,
        tuple(target.name for target in targets),
        tuple(left_out),
        requests,
    )
