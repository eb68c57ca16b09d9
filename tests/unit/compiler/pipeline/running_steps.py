"""Build a manifest, and list what code of prejit ran in each step: `python -m` this module, MANIFEST OUTPUT.

It writes ran.json: for each step of `prejit.compiler.store.own_code` the modules whose code ran, each with
the names of its top-level functions and classes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from prejit.compiler.compile import worker_process
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker import requests
from prejit.compiler.compile.worker.worker_compile import compile_program
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline import run, workspace
from prejit.compiler.pipeline.lower import lowering
from prejit.compiler.pipeline.lower.lowering import lower_native
from prejit.compiler.pipeline.measure import accuracy, golden_answers, golden_child
from prejit.compiler.pipeline.pack import bundle_files, model_layers
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.workspace import UserCode, Workspace
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore

ran: dict[str, dict[str, set[str]]] = {}
"""The code that ran, by step and module."""
WITHIN = (
    # The functions that make the result of each step, and where the build finds them.
    ("LOWERING", lowering, "_lower_model"),
    ("LOWERING", lowering, "_lower_native"),
    ("LOWERING", workspace, "read_model"),
    ("PACKING", bundle_files, "write_weights"),
    ("WEIGHTS", model_layers, "_tensors"),
    ("WEIGHTS", model_layers, "open_weights"),
    ("OWN_WEIGHTS", model_layers, "_own_tensors"),
    ("ACCURACY", accuracy, "_measure_published"),
    ("OWN_ACCURACY", accuracy, "_measure_own"),
)


@contextlib.contextmanager
def watching(step: str) -> Iterator[None]:
    """Notes what code of prejit runs, in threads that start meanwhile too."""
    found = ran.setdefault(step, {})
    before = sys.getprofile()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        name = frame.f_code.co_qualname.partition(".")[0]
        # Neither the bodies of modules and classes, nor methods that dataclasses generate.
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED and name.isidentifier()
        if event == "call" and module.startswith("prejit.") and is_function and name[:2] != "__":
            found.setdefault(module, set()).add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def watched(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run_watched(*args: Any, **options: Any) -> Any:
        with watching(step):
            return function(*args, **options)

    return run_watched


def main(manifest_file: Path, output: Path) -> None:
    asked: list[dict[str, Any]] = []
    questions: list[bytes] = []
    compile_in_worker, start = worker_process.WorkerProcess._ask, golden_answers.run_child

    def compile_twice(worker: Any, request: Any, seconds: float) -> Any:
        asked.append(request)
        return compile_in_worker(worker, request, seconds)

    def answer_twice(command: Any, content: bytes, **options: Any) -> Any:
        if "golden_child" in command[-1]:
            questions.append(content)
        return start(command, content, **options)

    for step, place, name in WITHIN:
        setattr(place, name, watched(step, getattr(place, name)))
    worker_process.WorkerProcess._ask = compile_twice  # type: ignore[method-assign]
    golden_answers.run_child = answer_twice  # type: ignore[assignment]
    manifest, store = read_manifest(manifest_file), DirectoryStore.open(output / "cache")
    pool = WorkerPool(store, workers=1)
    run.build(manifest, output, store=store, executor=pool, progress=Quiet())

    if not manifest.has_own_model and manifest.model is not None and manifest.mesh is None:
        plan = plan_build(manifest, store)
        assert plan.model is not None
        read = workspace.read_model(manifest, plan.model)
        space = Workspace(plan, lambda: read, UserCode, store, Quiet())
        for program in plan.programs:
            if program.spec.kind not in ("copy", "embed"):
                lower_native(space, program)
    for request in asked[:2]:  # what the workers did, here
        with watching("COMPILING"):
            requests._compile(store, compile_program, request)
    for question in questions:
        sys.stdin = io.TextIOWrapper(io.BytesIO(question))
        with watching("GOLDEN"), contextlib.redirect_stdout(io.StringIO()):
            golden_child.main()
    listed = {
        step: {at: sorted(names) for at, names in found.items()} for step, found in ran.items()
    }
    (output / "ran.json").write_text(json.dumps(listed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
