"""A snapshot of a process that another machine restores: the bundle stays, is loaded again, or is refused."""

import dataclasses
import os
import random

import numpy as np
import pytest

from prejit.compiler.native.kernel_library import level_features
from prejit.runtime import FallbackWarning, Fingerprint, MismatchError
from prejit.runtime.adapters.serverless_handler import ServerlessHandler

HERE = Fingerprint.current()
X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)
EVENT = {"x": X.tolist()}


def answer(bundle, event):
    return bundle.call("score", x=np.array(event["x"], np.float32)).tolist()


@pytest.fixture
def restored(monkeypatch):
    """Makes this process run on a machine with another fingerprint, as after the restore of a snapshot."""

    def on(machine):
        monkeypatch.setattr(Fingerprint, "current", classmethod(lambda cls: machine))

    return on


def test_on_an_equal_machine_the_bundle_stays_and_random_numbers_are_new(bundle_dir):
    handler = ServerlessHandler(bundle_dir, answer)
    expected = handler(EVENT)
    handler.before_snapshot()
    assert {each.source for each in handler.bundle.report()} == {"loaded"}
    before, drawn = handler.bundle, []
    for _ in range(2):  # two processes from one snapshot
        random.seed(5)
        np.random.seed(5)
        handler.after_restore()
        drawn.append((random.random(), np.random.random()))
    assert handler.bundle is before
    assert handler(EVENT) == expected
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_a_machine_that_fits_another_target_loads_it(bundle_dir, restored):
    handler = ServerlessHandler(bundle_dir, answer, on_mismatch="error")
    expected = handler(EVENT)
    if handler.bundle.target != "cpu-host":
        pytest.skip("this machine has nothing beyond x86-64-v3")
    handler.before_snapshot()
    needs = handler.bundle.config.requirement.cpu_features
    lost = next(name for name in reversed(needs) if name not in level_features("x86-64-v3"))
    restored(dataclasses.replace(HERE, cpu_features=tuple({*HERE.cpu_features} - {lost})))
    handler.after_restore()
    assert (handler.bundle.target, handler.bundle.matched) == ("cpu-x86-64-v3", True)
    np.testing.assert_allclose(handler(EVENT), expected, rtol=1e-5)


def test_a_machine_that_fits_none_is_refused_or_warned(bundle_dir, restored):
    strict = ServerlessHandler(bundle_dir, answer, on_mismatch="error")
    handler = ServerlessHandler(bundle_dir, answer)
    expected = handler(EVENT)
    for each in (strict, handler):
        each.before_snapshot()
    restored(dataclasses.replace(HERE, cpu_features=("sse2",)))
    with pytest.raises(MismatchError, match="cpu_features"):
        strict.after_restore()
    with pytest.warns(FallbackWarning, match="cpu_features"):
        handler.after_restore()
    np.testing.assert_allclose(handler(EVENT), expected, rtol=1e-5)
    assert not handler.bundle.matched
    handler.before_snapshot()  # its programs are compiled now
    before = handler.bundle
    handler.after_restore()
    assert handler.bundle is before
    restored(HERE)
    handler.after_restore()
    assert handler.bundle.matched


def test_files_that_changed_are_mapped_again(recipe, tmp_path):
    path = recipe.write(tmp_path / "example")
    handler = ServerlessHandler(path, answer)
    handler.before_snapshot()
    before = handler.bundle
    os.rename(path, tmp_path / "old")
    recipe.write(path)  # as when the restored machine mounts its own copy
    handler.after_restore()
    assert handler.bundle is not before
    assert handler(EVENT) == answer(handler.bundle, EVENT)


def test_the_hooks_of_lambda_are_those_of_the_handler(bundle_dir):
    hooks = pytest.importorskip("snapshot_restore_py", reason="it is not installed")
    handler = ServerlessHandler(bundle_dir, answer, on_mismatch="error")
    assert (handler.before_snapshot, (), {}) in hooks.get_before_snapshot()
    assert (handler.after_restore, (), {}) in hooks.get_after_restore()
