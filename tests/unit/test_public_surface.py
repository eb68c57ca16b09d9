"""The public names of the three doors. A name that is added or removed here is a promise that changes."""

import ast
import importlib
import inspect
from collections import defaultdict
from pathlib import Path

import pytest

RUNTIME = """
AnswerError Axis Batch Bundle CheckedAnswer ClosedError ContextError DeadlineError Defaults EncodeStats
Encoded ExecutableError FallbackWarning Fingerprint JitStats Logprob MismatchError
Options Piece PolicyError Prefix PrejitError PrejitWarning QueueFullError RejectError Request Result
Sampling Session StartReport Stats StoreError Token TruncationWarning UntrustedError
UntrustedWarning Usage UsageError fallback_counts jit load
"""
COMPILER = """
BuildError Built BundleTable CheckpointError Encode Generate GpuTable Library Manifest ManifestError Mesh
Model NetworkError PlannedExecutable Program ProgramCheck TargetTable build plan program read_manifest
"""
DOORS = {
    "prejit.runtime": RUNTIME.split(),
    "prejit.server": ["Engine", "EngineMetrics", "Grammars", "Stream"],
    "prejit.compiler": COMPILER.split(),
}
ROOTS = [Path(importlib.import_module(door).__path__[0]) for door in DOORS]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_has_these_names_and_no_others(door):
    module = importlib.import_module(door)
    assert sorted(module.__all__) == sorted(DOORS[door])
    for name in module.__all__:
        public = getattr(module, name)
        assert public.__name__ == name
        assert inspect.getdoc(public), f"{name} has no docstring"
    with pytest.raises(AttributeError, match=rf"{door}.*no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_a_name_of_both_doors_is_one_thing():
    doors = [importlib.import_module(door) for door in ("prejit.runtime", "prejit.compiler")]
    for name in set(DOORS["prejit.runtime"]) & set(DOORS["prejit.compiler"]):
        assert getattr(doors[0], name) is getattr(doors[1], name), name


def test_importing_the_build_side_imports_nothing_else_and_hides_no_public_name(
    run_python,
):
    """Importing `prejit.compiler.build` would replace the function of that name by a module."""
    run_python(
        "import sys, prejit.compiler\n"
        "found = [m for m in sys.modules if m.startswith('prejit')]\n"
        "assert found == ['prejit', 'prejit.compiler'], found\n"
        "heavy = {'numpy', 'jax', 'click', 'pydantic', 'flax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from prejit.compiler import Manifest, Program, TargetTable, read_manifest\n"
        "heavy = {'jax', 'flax', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import pkgutil, prejit.runtime, prejit.server\n"
        "for door in (prejit.compiler, prejit.runtime, prejit.server):\n"
        "    modules = {found.name for found in pkgutil.iter_modules(door.__path__)}\n"
        "    assert not modules & set(door.__all__), modules & set(door.__all__)\n"
    )


def test_the_name_of_a_class_or_file_stands_for_one_thing():
    files = defaultdict[str, list[str]](list)
    for root in ROOTS:
        for file in sorted(root.rglob("*.py")):
            place = str(file.relative_to(root.parent))
            if not file.name.startswith("__"):
                files[file.name].append(place)
            for statement in ast.parse(file.read_text()).body:
                if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                    files[statement.name].append(place)
    assert {name: places for name, places in files.items() if len(places) > 1} == {}
