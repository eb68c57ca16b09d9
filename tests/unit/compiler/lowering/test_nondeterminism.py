"""Clocks and random numbers in a traced function are refused by name: those of the user's own code alone."""

import datetime
import functools
import logging
import os
import random
import sys
import tempfile
import time
import uuid
from pathlib import Path
from random import random as drawn

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.manifests import functions_manifest

from prejit.compiler import Program, build
from prejit.compiler.lowering.user.modules import UserModules
from prejit.compiler.lowering.user.nondeterminism import refusing_nondeterminism
from prejit.compiler.manifest.reading import read_manifest
from prejit.runtime import load
from prejit.runtime.errors import BuildError

SEEDED, ARRAYS = random.Random(0), np.random.default_rng(0)
NOW = datetime.datetime.now


class Later(datetime.datetime):
    pass


def test_each_is_refused_by_name_and_line():
    for call, name in (
        (lambda: time.time(), "time.time"),
        (lambda: NOW(), "datetime.now"),
        (lambda: random.random(), "random.random"),
        (lambda: drawn(), "random.random"),
        (lambda: random.Random(), "random.Random"),
        (lambda: random.SystemRandom().random(), "random.SystemRandom.random"),
        (lambda: uuid.uuid4(), "uuid.uuid4"),
        (lambda: np.random.default_rng().normal(), "random.SystemRandom.getrandbits"),
        (lambda: time.strftime("%s"), "time.strftime"),
        (lambda: Later.now(), "datetime.now"),
        (lambda: functools.partial(time.time)(), "time.time"),
        (lambda: os.getpid(), "os.getpid"),
        (lambda: np.datetime64("now"), "np.datetime64[now]"),
    ):
        with pytest.raises(BuildError) as caught, refusing_nondeterminism("here"):
            call()
        line = call.__code__.co_firstlineno
        expected = "here: expected a function that gives the same program"
        assert str(caught.value).startswith(expected), name
        assert f"found {name}() at {__file__}:{line}" in str(caught.value)
        assert "impure = true" in str(caught.value.hint)
        assert sys.getprofile() is None
    for call in (lambda: np.random.rand(), lambda: (np.random.rand(), np.random.seed(0))):
        expected = r"global generator of np\.random"
        with pytest.raises(BuildError, match=expected), refusing_nondeterminism("here"):
            call()


def test_what_is_the_same_each_time_is_allowed():
    with refusing_nondeterminism("here"), tempfile.TemporaryDirectory():
        SEEDED.random()
        ARRAYS.normal(size=3)
        time.strftime("%Y", time.gmtime(0))
        np.random.seed(0)
        np.random.rand()
        np.datetime64("2026-01-01")
        random.seed(3)
        assert [random.random(), random.Random(4).gauss(0, 1), np.random.default_rng(5).normal()]
        logging.getLogger("prejit.test").warning("its record has a time")
        jax.jit(lambda x: jax.random.normal(jax.random.key(0), x.shape))(jnp.ones(3))


def test_an_error_of_the_code_itself_comes_first_and_another_profiler_stays():
    with pytest.raises(ZeroDivisionError), refusing_nondeterminism("here"):
        1 / (time.time() * 0)
    assert sys.getprofile() is None
    profile = lambda *_: None  # noqa: E731
    sys.setprofile(profile)
    try:
        with refusing_nondeterminism("here"):
            random.random()
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


def stamped(x):
    return x * round(time.time() / 1e12)  # the same number at each trace


def build_of(tmp_path, build_cache, function, **more):
    program = Program("f", fn=function, args=["float32[3]"], **more)
    return build(program, tmp_path, name="f", cache=build_cache, quiet=True)


def test_a_build_refuses_what_two_traces_do_not_show(tmp_path, build_cache):
    """Also inside of jitted functions, which jax traces once."""
    inner = jax.jit(stamped)
    for function in (stamped, lambda x: inner(x) + 1):
        with pytest.raises(BuildError, match=rf"time\.time\(\) at .*{Path(__file__).name}:\d+"):
            build_of(tmp_path, build_cache, function)
    built = build_of(tmp_path, build_cache, stamped, impure=True)
    assert load(built.path).call("f", np.ones(3, np.float32)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("generator", [SEEDED, np.random.default_rng()])
def test_python_objects_are_traced_twice(tmp_path, build_cache, generator):
    """Each trace draws the next number, with or without a seed."""
    kept = jax.jit(lambda x: x + 1)
    kept(1)
    with pytest.raises(BuildError, match=r"to give the same program each time .* differ in mul at"):
        build_of(tmp_path, build_cache, lambda x: x * generator.random())
    assert kept._cache_size() == 1  # the process keeps what it has compiled


MODULE = """
import time

def f(x):
    started = time.perf_counter()
    y = x + 1
    print(time.perf_counter() - started)
    return y
"""


def test_a_manifest_allows_it_and_forbids_it_again(tmp_path, build_cache):
    """A trace that was kept while it was allowed is no reason to allow it."""
    (tmp_path / "timed.py").write_text(MODULE)

    def built(more):
        keys = f'function = "timed:f"; args = ["float32[2]"]{more}'
        manifest = read_manifest(functions_manifest(tmp_path / "m.toml", {"f": keys}))
        return build(manifest, tmp_path / "out", cache=build_cache, quiet=True)

    built("; impure = true")
    with pytest.raises(BuildError, match=r"time\.perf_counter\(\) at .*timed\.py:5, .*timed\.py:7"):
        built("")


def test_a_module_that_draws_is_refused(tmp_path, monkeypatch):
    drawing = tmp_path / "drawing.py"
    (tmp_path / "drawn.py").write_text("from drawing import S\n\n\ndef f(x):\n    return x * S\n")
    for draws, name in (
        ("time.time() % 10", r"time\.time\(\)"),
        ("np.random.rand()", r"global generator of np\.random"),
    ):
        drawing.write_text(f"import random, time, uuid\nimport numpy as np\n\nS = {draws}\n")
        with pytest.raises(BuildError, match=rf"here: cannot import 'drawn': .*{name}"):
            UserModules(tmp_path).find("drawn:f", "here")
        assert callable(UserModules(tmp_path).find("drawn:f", "here", impure=True))
    drawing.unlink()
    packages = tmp_path / "site-packages"
    packages.mkdir()
    library = "import random, time, uuid\nS = time.time(), random.random(), uuid.uuid4()\n"
    (packages / "drawing.py").write_text(library)
    monkeypatch.syspath_prepend(str(packages))
    try:
        assert callable(UserModules(tmp_path).find("drawn:f", "here"))
    finally:
        sys.modules.pop("drawing", None)
