"""Executables in the store: `find_compiled` decides whether an earlier build's is used again.

The key of a job (executable_keys.py) holds all that its result depends on. `prejit plan` asks for the same
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from prejit.compiler.compile.compile_jobs import Compiled, CompileJob
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import RejectError


def find_compiled(store: Store, key: Key) -> Compiled | None:
    """Return the undamaged result of a compile key; None: it has to be compiled."""
    return as_compiled(store.get(key, verify=True))


def as_compiled(stored: Mapping[str, Any] | None) -> Compiled | None:
    """Return a result of a store; None: there is none, or another version of prejit wrote other fields."""
    with suppress(RejectError):
        return None if stored is None else Compiled.from_plain(stored)
    return None


def compile_once(
    store: Store,
    job: CompileJob,
    compile_job: Callable[[CompileJob], Compiled | None],
    *,
    progress: Progress,
    give_up: Callable[[], bool],
) -> tuple[Compiled | None, bool]:
    """Return the result of a job, from the store or compiled now and put into the store.

    Builds that share a store compile a job once: the others wait for the one that compiles it.

    `compile_job` returns None if it was ended, and `give_up` ends the wait for another build.

    Returns:
        The result, or None where the job was ended; and whether it was compiled now.
    """
    label = f"waiting for another build, which compiles {job.program} for {job.target.name}"
    with ExitStack() as stack:
        with progress.phase(label):
            held = stack.enter_context(store.making(job.key, give_up=give_up))
        if not held:
            return None, False
        # Another build may have compiled it since it was submitted.
        if (stored := find_compiled(store, job.key)) is not None:
            return stored, False
        compiled = compile_job(job)
        if compiled is not None:
            store.put(job.key, compiled.to_plain(), blobs=[compiled.executable.digest])
        return compiled, True
