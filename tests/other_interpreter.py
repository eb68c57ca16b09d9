"""A plugin of pytest for the second interpreter: it runs what can differ there, in a few minutes."""

from pathlib import Path

import pytest

CHOSEN = {
    "format": "bundles of other versions are read, loaded and called",
    "integration/test_minimal_loader.py": "builds a decoder and a bundle of functions, loads them, generates",
    "parity": "a model of each kind, traced, compiled and called",
    "unit/compiler/compile/worker": "what jaxlib's compiler is given, and its machine code",
    "unit/compiler/lowering/test_function_lowering.py": "what jax's tracing and export give",
    "unit/compiler/lowering/test_own_models.py": "decoders of flax and equinox, of older versions",
    "unit/compiler/lowering/test_user_code.py": "jax's errors, and what its tracing reads",
    "unit/compiler/pipeline/test_build_run.py": "a whole build, and its loading",
    "unit/compiler/pipeline/lower/test_observer.py": "what Python says of code that a trace ran",
    "unit/compiler/pipeline/lower/test_trace_keeping.py": "what jax says of it",
    "unit/runtime/base/test_files.py": "files of the standard library",
    "unit/runtime/base/test_process_facts.py": "what it says of processes",
    "unit/runtime/base/test_threads_and_forks.py": "its threads",
    "unit/runtime/device/test_dispatch.py": "its dispatch",
    "unit/runtime/device/test_executable.py": "private parts of jaxlib: its clients, executables and arrays",
    "unit/runtime/device/test_jax_settings.py": "jax's settings",
    "unit/runtime/device/test_kernels.py": "custom calls",
    "unit/runtime/jitted": "jax's own dispatch, which calls go around",
    "unit/runtime/programs/test_dispatched_calls.py": "calls by jaxlib's dispatch",
    "unit/runtime/programs/test_pytree.py": "jax's trees",
    "unit/runtime/recorded": "jax's dispatch and its texts, which recordings watch",
    "unit/runtime/ship/test_mounted_forms.py": "headers of tars, whose digests name layers",
    "unit/runtime/test_call.py": "arrays in and out",
    "unit/runtime/test_fallback.py": "portable programs that this jaxlib compiles",
    "unit/server/telemetry/test_metrics_collector.py": "typing sets attributes of generic classes",
}
RANDOM = {"test_whatever_is_passed_gives_a_result_or_an_error_of_prejit"}
"""Long tests of random values. Their files have tests with chosen values, which run."""
TESTS = Path(__file__).parent
_PATHS = tuple(TESTS / path for path in CHOSEN)


def pytest_configure():
    """Refuse names of files that have moved."""
    if missing := [str(path) for path in _PATHS if not path.exists()]:
        raise pytest.UsageError(f"tests/other_interpreter.py names no file: {', '.join(missing)}")


def pytest_ignore_collect(collection_path):
    """Leave out files that are not chosen, before they are imported."""
    at = collection_path
    chosen = any(at.is_relative_to(p) or p.is_relative_to(at) for p in _PATHS)
    return None if chosen else True


@pytest.hookimpl(trylast=True)  # what `make test` leaves out on each interpreter is left out before
def pytest_collection_modifyitems(config, items):
    """Deselect further cases of a test: the first shows that the code works there."""
    seen = set[str]()
    kept, left = [], []
    for item in items:
        (kept if _can_differ(item, seen) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _can_differ(item, seen):
    if item.name in RANDOM:
        return False
    name, _, _ = item.nodeid.partition("[")
    is_first = name not in seen
    seen.add(name)
    return is_first
