"""A plugin of pytest for the second interpreter: it runs what can differ there, in a few minutes.

An older Python, jax and jaxlib can change what touches them: private interfaces, dispatch, tracing, compiled
programs and their loading, and the standard library's own errors. Everything else runs on the first
interpreter alone. `make test-other-all` runs all unit, parity and format tests on the second one, too.
"""

import re
from pathlib import Path

import pytest

CHOSEN = {
    "format": "bundles of other versions are read, loaded and called",
    "integration/test_minimal_loader.py": "builds a decoder and a bundle of functions, loads them, generates",
    "parity": "one model of each family, traced, compiled and called",
    "unit/compiler/compile/worker": "what jaxlib's compiler is given, and its machine code",
    "unit/compiler/lowering/test_lowering_programs.py": "what jax's tracing and export give",
    "unit/compiler/lowering/test_own_models.py": "decoders of flax and equinox, of older versions",
    "unit/compiler/lowering/test_user_code.py": "jax's errors, and what its tracing reads",
    "unit/compiler/pipeline/test_build_run.py": "a whole build, and its loading",
    "unit/compiler/pipeline/lower/test_observer.py": "what Python says of code that a trace ran",
    "unit/compiler/pipeline/lower/test_trace_keeping.py": "what jax says of it",
    "unit/runtime/base": "errors and files of the standard library",
    "unit/runtime/device": "private parts of jaxlib: executables, arrays, dispatch, settings",
    "unit/runtime/jitted": "jax's own dispatch, which calls go around",
    "unit/runtime/programs/test_dispatched_calls.py": "calls by jaxlib's dispatch",
    "unit/runtime/programs/test_pytree.py": "jax's trees",
    "unit/runtime/recorded": "jax's dispatch and its texts, which recordings watch",
    "unit/runtime/ship/test_mounted_forms.py": "headers of tars, whose digests name layers",
    "unit/runtime/test_call.py": "arrays in and out",
    "unit/runtime/test_fallback.py": "portable programs that this jaxlib compiles",
}
"""Files and directories of tests, and what can differ."""
RANDOM = {"test_whatever_is_passed_gives_a_result_or_an_error_of_prejit"}
"""Long tests of random values. Their files have tests with chosen values, which run."""
ALL_CASES = ("tests/unit/runtime/device/test_executable.py", "tests/unit/runtime/base/")
"""Tests that run with all their cases, because these touch different private interfaces or errors.

Other tests run with their first case only. It shows that the code works there; the other cases have other
values."""
FAMILIES = {
    "test_logits_and_greedy_tokens_equal_those_that_torch_gave": r"[a-z]+\d?",
    "test_results_equal_those_that_torch_gave": r"[a-z]+-[a-z]+",
}
"""Tests of all model families, and what of a case's id names the family: its first case runs."""
TESTS = Path(__file__).parent
_PATHS = tuple(TESTS / path for path in CHOSEN)


def pytest_configure():
    """Refuse names of files that have moved."""
    if missing := [str(path) for path in _PATHS if not path.exists()]:
        raise pytest.UsageError(f"tests/other_interpreter.py names no file: {', '.join(missing)}")


def pytest_ignore_collect(collection_path):
    """Leave out files that are not chosen, before they are imported."""
    chosen = any(
        collection_path.is_relative_to(p) or p.is_relative_to(collection_path) for p in _PATHS
    )
    return None if chosen else True


@pytest.hookimpl(trylast=True)  # what `make test` leaves out on each interpreter is left out before
def pytest_collection_modifyitems(config, items):
    """Deselect further cases of a test."""
    seen = set[str]()
    kept, left = [], []
    for item in items:
        (kept if _can_differ(item, seen) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _can_differ(item, seen):
    if item.name in RANDOM:
        return False
    if item.nodeid.startswith(ALL_CASES):
        return True
    name, _, case = item.name.partition("[")
    family = re.match(FAMILIES.get(name, ""), case)
    assert family is not None, item.nodeid
    kind = f"{item.parent and item.parent.nodeid}::{name}[{family[0]}"
    is_first = kind not in seen
    seen.add(kind)
    return is_first
