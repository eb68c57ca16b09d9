"""Fixtures of all tests: their directories, and fresh processes. Fixtures that make bundles have modules."""

import gc
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from .extent import deselect_thorough, examples
from .processes import ran
from .quick_compiling import build_quickly, compile_quickly

pytest_plugins = (
    *("tests.once", "tests.warm", "tests.recipes", "tests.golden", "tests.kernel_bundles"),
    *("tests.decoders", "tests.lettered"),
)  # in the order of their imports


# No example fails because the machine is busy, and each run tries the same ones. To search for others:
# --hypothesis-profile=search.
for name, derandomize in (("tests", True), ("search", False)):
    settings.register_profile(
        name,
        deadline=None,
        max_examples=examples(30, 100),
        derandomize=derandomize,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("tests")

LONGEST = (
    *("test_mesh.py", "test_draft_model.py", "test_kernel_linear.py", "test_snippets.py"),
    *("test_any_program.py", "test_sibling_parity.py", "test_trace_keeping.py", "test_parity.py"),
    *("test_prefill.py", "test_encode.py", "test_own_decoder.py", "test_run_time_adapters.py"),
    *("test_golden.py", "test_sampling_programs.py", "test_pool.py", "test_build.py"),
    *("test_user_code.py", "test_openai_api.py", "test_jit.py", "test_executable.py"),
    *("test_images.py", "test_untraced.py", "test_serve.py", "test_kinds_of_programs.py"),
    "test_manifest.py",
)
"""The files that take longest, in the order in which workers of pytest-xdist take them: see durations.md."""


def pytest_sessionstart(session):
    """Compile quickly in this process, unless its tests run in others."""
    if not session.config.getoption("numprocesses", None):
        compile_quickly()
        build_quickly()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among 8,000 tests, while they are made and later: 6 % of parity's CPU time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Put the longest files first, so that no worker ends with one while the others are idle."""
    deselect_thorough(config, items)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def runtime_cache(tmp_path, monkeypatch):
    """A runtime cache of each test's own: what one test leaves there cannot help another."""
    cache = tmp_path / "runtime-cache"
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(cache))
    return cache


@pytest.fixture(autouse=True)
def _drafts_always_pay(request, monkeypatch):
    """Drafts are verified however long that takes here: else measured times decide which calls there are."""
    if request.node.get_closest_marker("measured_drafts") is None:
        pace = "prejit.runtime.generation.drafting.DraftPace"
        monkeypatch.setattr(f"{pace}.allows", lambda *_: True)


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory):
    """The build cache of a run, for all workers; PREJIT_TEST_CACHE names one that outlives the run."""
    if kept := os.environ.get("PREJIT_TEST_CACHE"):
        return Path(kept).absolute()
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "build-cache"


@pytest.fixture(scope="session")
def build_programs(tmp_path_factory, build_cache):
    """Builds a bundle of the user's programs, and returns its path: `build_programs([Program(...)])`."""

    def build_programs(programs, name="built"):
        from prejit.compiler import build

        output = tmp_path_factory.mktemp(name)
        return build(programs, output, name=name, cache=build_cache, quiet=True).path

    return build_programs


@pytest.fixture(scope="session")
def environment_cache(tmp_path_factory):
    """Make environments of targets once for all tests, in what PREJIT_ENVIRONMENTS then names."""
    kept = os.environ.get("PREJIT_TEST_ENVIRONMENTS")
    path = Path(kept).absolute() if kept else tmp_path_factory.mktemp("environments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREJIT_ENVIRONMENTS", str(path))
        yield path
    if not kept:
        shutil.rmtree(path)


@pytest.fixture
def run_python(tmp_path):
    """Runs code or `-m module` in a fresh process: `run_python(code, *argv, status=0, env={})`."""

    def run(code, *argv, status=0, env=None, timeout=120):
        command = [sys.executable, *(["-c", code] if code is not None else []), *argv]
        environment = {**os.environ, **(env or {})}
        return ran(*command, status=status, env=environment, timeout=timeout, cwd=tmp_path)

    return run


@pytest.fixture
def prejit(run_python):
    """Runs `python -m prejit.runtime ...` in a fresh process: `prejit("verify", path, status=4)`."""

    def run(*argv, **options):
        return run_python(None, "-m", "prejit.runtime", *argv, **options)

    return run


@pytest.fixture(name="ran")
def _ran(capsys):
    """Runs a command in this process. Gives what it wrote: `ran("verify", path, status=4).err`."""
    from prejit.runtime.__main__ import main

    def ran(*argv, status=0):
        assert main([*map(str, argv)]) == status
        return capsys.readouterr()

    return ran


@pytest.fixture
def said(ran):
    """Runs a command in this process and returns what it prints."""
    return lambda *argv, **options: str(ran(*argv, **options).out)


@pytest.fixture
def no_warnings_of_fallback():
    """For tests that fall back on purpose and look at something else."""
    import warnings

    from prejit.runtime import FallbackWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield
