"""Each step of a build runs no code of prejit that its digest lacks: a change of it makes results again.

As a program, `python -m` this module MANIFEST OUTPUT, it builds and writes ran.json: for each step of
`prejit.compiler.store.prejit_code` the modules whose code ran, with their top-level functions and classes.
"""

import contextlib
import inspect
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests import own_decoders, quick_compiling
from tests.decoders import write_random
from tests.encoders import bert_config
from tests.extent import sampled
from tests.parity.encoder_cases import Case

from prejit.compiler.compile import worker_process
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker import worker_requests
from prejit.compiler.compile.worker.worker_compile import compile_program
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline import build_run, published_files, workspace
from prejit.compiler.pipeline.build_interface import BuildOptions
from prejit.compiler.pipeline.lower import program_lowering
from prejit.compiler.pipeline.lower.program_lowering import lower_native
from prejit.compiler.pipeline.measure import accuracy, golden_answers, golden_child
from prejit.compiler.pipeline.pack import bundle_files, weights_layer
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.workspace import UserCode, Workspace
from prejit.compiler.progress import Quiet
from prejit.compiler.store import prejit_code
from prejit.compiler.store.directory_store import DirectoryStore

ROOT = Path(__file__).parents[4]
STORING = (
    # What keeps results decides none.
    *("prejit.compiler.store.", "prejit.compiler.progress"),
    *(f"prejit.runtime.base.{name}" for name in ("files", "file_hashing", "written_files")),
    # The digests of a checkpoint's files are in the key, and do not change what is read.
    "prejit.compiler.pipeline.published_files",
    # What runs the user's code apart from other code, and notes what it reads, decides no result.
    *(
        f"prejit.compiler.lowering.user.{name}"
        for name in ("observing", "observer", "modules", "trace_inputs")
    ),
    # Methods of dataclasses, as those that the standard library generates.
    "prejit.runtime.records",
    "prejit.compiler.base.python_source:is_in_package",
    "prejit.compiler.manifest.manifest",
)
BESIDE = {
    # Weights are made while they are packed: the key of a layer has the digests of both.
    "PACKING": ("WEIGHTS", "OWN_WEIGHTS")
}
SIZES = "[generate]\nbatch = [1]\nprompt = [8]\ncontext = [24]\n"
SOURCE = '[model]\nsource = "model"\n'
MANIFESTS = {
    "decoder": f'{SOURCE}dtype = "int8"\n{SIZES}',
    "mesh": f"{SOURCE}{SIZES}[mesh]\ntensor = 3\n",
    "encoder": f'{SOURCE}dtype = "bfloat16"\n[encode]\nshapes = [[1, 8]]\n',
    "own": f'[model]\nmodule = "own_decoders:nnx_decoder"\ndtype = "int8"\n{SIZES}',
}
PUBLISHED = {"LOWERING", "PACKING", "WEIGHTS", "ACCURACY", "COMPILING", "GOLDEN"}
RUN = {kind: PUBLISHED for kind in ("decoder", "encoder")}
RUN["mesh"] = PUBLISHED - {"ACCURACY"}
RUN["own"] = {"PACKING", "OWN_WEIGHTS", "OWN_ACCURACY", "COMPILING", "GOLDEN"}
ran = {}
"""The code that ran, by step and module."""
WITHIN = (
    # The functions that make the result of each step, and where the build finds them.
    ("LOWERING", program_lowering, "_lower_model"),
    ("LOWERING", program_lowering, "_lower_native"),
    ("LOWERING", workspace, "read_model"),
    ("PACKING", bundle_files, "write_weights"),
    ("WEIGHTS", weights_layer, "_tensors"),
    ("WEIGHTS", published_files, "open_weights"),
    ("OWN_WEIGHTS", weights_layer, "_own_tensors"),
    ("ACCURACY", accuracy, "_measure_published"),
    ("OWN_ACCURACY", accuracy, "_measure_own"),
)


@contextlib.contextmanager
def watching(step):
    """Notes what code of prejit runs, in threads that start meanwhile too."""
    found, before = ran.setdefault(step, {}), sys.getprofile()
    seen = {}  # by id: equal code of two modules is two functions

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or id(code) in seen:
            return
        seen[id(code)] = code
        module = str(frame.f_globals.get("__name__", ""))
        name = code.co_qualname.partition(".")[0]
        # Neither the bodies of modules and classes, nor methods that dataclasses generate.
        is_function = code.co_flags & inspect.CO_OPTIMIZED and name.isidentifier()
        if module.startswith("prejit.") and is_function and name[:2] != "__":
            found.setdefault(module, set()).add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


def main(manifest_file, output):
    asked, questions = [], []
    compile_in_worker, start = worker_process.WorkerProcess._ask, golden_answers.run_child

    def compile_twice(worker, request, seconds):
        asked.append(request)
        return compile_in_worker(worker, request, seconds)

    def answer_twice(command, content, **options):
        if "golden_child" in command[-1]:
            questions.append(content)
        return start(command, content, **options)

    for step, place, name in WITHIN:
        # A context manager of contextlib decorates functions, too.
        setattr(place, name, watching(step)(getattr(place, name)))
    worker_process.WorkerProcess._ask = compile_twice
    golden_answers.run_child = answer_twice
    manifest, store = read_manifest(manifest_file), DirectoryStore.open(output / "cache")
    pool = WorkerPool(store, workers=1)
    build_run.build(manifest, output, BuildOptions(store=store, executor=pool, progress=Quiet()))

    if not manifest.has_own_model and manifest.model is not None and manifest.mesh is None:
        plan = plan_build(manifest, store)
        read = workspace.read_model(manifest, plan.model)
        space = Workspace(plan, lambda: read, UserCode, store, Quiet(), lambda: None)
        for program in plan.programs:
            if program.spec.kind not in ("copy", "embed"):
                lower_native(space, program)
    for request in asked[:2]:  # what the workers did, here
        with watching("COMPILING"):
            worker_requests._compile(store, compile_program, request)
    for question in questions:
        sys.stdin = io.TextIOWrapper(io.BytesIO(question))
        with watching("GOLDEN"), contextlib.redirect_stdout(io.StringIO()):
            golden_child.main()
    said = {step: {at: sorted(names) for at, names in found.items()} for step, found in ran.items()}
    (output / "ran.json").write_text(json.dumps(said))


def code_of(steps):
    """The names of the code that is in the digests of steps, as module:name."""
    found = (prejit_code.reached(*getattr(prejit_code, step)) for step in steps)
    parts = (part for each in found for part in each.items())
    return {f"{module}:{n}" for module, of in parts for each in of for n in each.names}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sampled(MANIFESTS, lambda kind: kind == "encoder"))
def test_no_step_runs_code_that_its_digest_lacks(kind, tmp_path):
    if kind == "own":
        shutil.copy(own_decoders.__file__, tmp_path / "own_decoders.py")
    elif kind == "encoder":
        case = Case("tiny", bert_config(), 7, pooling=("mean_tokens",), normalize=True)
        case.write(tmp_path / "model")
    else:
        write_random("gpt2", tmp_path / "model")
    manifest = tmp_path / "m.toml"
    target = '[[target]]\nname = "cpu-host"\n'
    manifest.write_text(f'[bundle]\nname = "m"\n{MANIFESTS[kind]}{target}')
    quiet = {"PATH": "/nonexistent", "CXX": "/nonexistent", "XLA_FLAGS": quick_compiling.XLA_FLAGS}
    subprocess.run(
        [sys.executable, "-m", "tests.unit.compiler.pipeline.test_steps", manifest, tmp_path],
        cwd=ROOT,
        env={**os.environ, **quiet},  # a compiler for kernels would take half a minute
        check=True,
    )
    ran = json.loads((tmp_path / "ran.json").read_text())
    assert ran.keys() == RUN[kind]
    for step, modules in ran.items():
        seen = {f"{module}:{name}" for module, names in modules.items() for name in names}
        outside = seen - code_of((step, *BESIDE.get(step, ())))
        outside = {each for each in outside if not each.startswith(STORING)}
        assert not outside, f"{step} runs what its digest lacks (prejit.compiler.store.prejit_code)"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
