"""Calls of a real bundle's programs that share runs: every caller gets what `Bundle.call` gives."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.runtime.format.forging import changed

from prejit.compiler import Program
from prejit.runtime import ClosedError, RejectError, UsageError, load
from prejit.server.engine.engine import Engine
from prejit.server.engine.microbatch_calls import Calling
from prejit.server.engine.request_recorder import Recorder
from prejit.server.engine.sleeper import Sleeper

PATIENCE = 30.0
BUCKETS = {"batch": (1, 4, 8)}


def rows(params, x):
    return {"y": jnp.tanh(x @ params), "first": (x[:, 0], None)}


def scaled(x, scale):
    return x * scale


def masked_mean(x, valid):
    return x - jnp.sum(x * valid[:, None], 0) / jnp.sum(valid)


def powered(x, power):
    return x**power


@pytest.fixture(scope="module")
def path(build_programs):
    params = np.random.default_rng(0).standard_normal((8, 16)).astype("f")
    x, batch = "float32[{batch}, 8]", {"buckets": BUCKETS, "pad": ["batch"]}
    texts = {"buckets": {"batch": (4,), "length": (4, 16)}, "pad": ["batch", "length"]}
    masked = {"args": {"x": x, "valid": "bool[{batch}]"}, "mask": "valid"}
    programs = [
        Program("rows", rows, {"x": x}, params=params, **batch),
        Program("scaled", scaled, [x, "float32[]"], **batch),
        Program("total", lambda x: x.sum(), [x], **batch),
        Program("masked", masked_mean, **masked, **batch),
        Program("powered", powered, [x], static={"power": (2, 3)}, **batch),
        Program("last", lambda x: x + 1, ["float32[3, {batch}]"], **batch),
        Program("donated", lambda x: x + 1, [x], donate=[0], **batch),
        Program("fixed", lambda x: x + 1, [x], buckets=BUCKETS),
        Program(
            *("texts", lambda x: (jnp.cumsum(x, 1), x.sum(1)), ["float32[{batch}, {length}]"]),
            **texts,
        ),
    ]
    return build_programs(programs)


@pytest.fixture(scope="module")
def bundle(path):
    return load(path, on_mismatch="error")


@pytest.fixture
def calling(bundle):
    recorder = Recorder(1, 64)
    calling = Calling(
        bundle.user_programs,
        bundle.dispatched,
        queue=64,
        recorder=lambda name: recorder.requests("call", name),
        sleeper=Sleeper("calls", 0, None, recorder.live),
    )
    yield calling
    calling.close()


def counts(calling, name):
    found = calling._recorder(name).snapshot()
    return found.succeeded, found.rows, found.padded_rows, found.runs


def x_of(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, 8)).astype("f")


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@contextlib.contextmanager
def together(calling, name):
    """Yield what submits calls that find the program running, so that they share runs."""
    with calling._lane(name).alone(0) as alone:
        assert alone is not None
        yield lambda *args, **kwargs: calling.submit(name, args, kwargs)


def results(futures):
    return [future.result(PATIENCE) for future in futures]


def test_callers_share_a_run_and_get_their_own_rows(bundle, calling):
    given = [x_of(count, seed) for seed, count in enumerate((1, 2, 3, 1))]
    with together(calling, "rows") as call:
        futures = [call(x=x) for x in given]
    found = jax.tree.map(lambda *arrays: np.concatenate(arrays), *results(futures))
    equal(found, bundle.call("rows", x=np.concatenate(given)))
    assert counts(calling, "rows") == (5, 7, 1, 2)


def test_a_lone_call_runs_in_its_own_thread_in_turns_of_the_largest_bucket(bundle, calling):
    before = threading.active_count()
    for count in (1, 3, 8):
        equal(calling.call("rows", (), {"x": x_of(count)}), bundle.call("rows", x=x_of(count)))
    assert threading.active_count() == before
    assert counts(calling, "rows") == (3, 12, 1, 3)
    for count in (9, 16, 21):
        runs = counts(calling, "rows")[3]
        found = calling.call("rows", (), {"x": x_of(count)})
        parts = [bundle.call("rows", x=x_of(count)[at : at + 8]) for at in range(0, count, 8)]
        equal(found, jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts))
        assert counts(calling, "rows")[3] == runs + len(parts)


def test_results_belong_to_their_caller_and_arguments_may_change_after_submit(calling, bundle):
    with together(calling, "rows") as call:
        futures = [call(x=x_of(1, 1)), call(x=x_of(1, 2)), call(x=jnp.asarray(x_of(1, 2)))]
    mine, theirs, of_jax = results(futures)
    kept = theirs["y"].copy()
    mine["y"][:] = 0
    np.testing.assert_array_equal(theirs["y"], kept)
    assert mine["y"].base is None  # it does not keep the rows of others in memory
    assert isinstance(of_jax["y"], jax.Array)  # as this caller's arguments
    np.testing.assert_array_equal(of_jax["y"], kept)
    x = x_of(2)
    expected = bundle.call("rows", x=x)
    donated = bundle.call("donated", x_of(4))
    changing = x_of(4)
    with together(calling, "rows") as call, together(calling, "donated") as call_other:
        futures = [call(x=x), call_other(changing)]
        x[:] = changing[:] = 0
    for found, right in zip(results(futures), (expected, donated), strict=True):
        equal(found, right)


TEXTS = [np.random.default_rng(n).random((1, n), "f") for n in (3, 2, 10, 4, 16)]
THREE = [x_of(4, seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        # Calls with equal common or static arguments share.
        ("scaled", [((x_of(1, k), np.float32(k % 2)), {}) for k in range(3)], (3, 3, 2, 2)),
        ("powered", [((x_of(2),), {"power": power}) for power in (2, 3, 2)], (3, 6, 2, 2)),
        # The batch axis need not be the first. Other padded sizes, here 4 and 16, are cut for each caller.
        ("last", [((np.ones((3, n), "f") * n,), {}) for n in (1, 2, 5)], (3, 8, 0, 1)),
        ("texts", [((x,), {}) for x in TEXTS], (5, 5, 3, 2)),
        # Programs whose rows may meet run alone.
        ("total", [((x,), {}) for x in THREE], (3, 0, 0, 3)),
        ("masked", [((), {"x": x}) for x in THREE], (3, 0, 0, 3)),
        ("donated", [((x,), {}) for x in THREE], (3, 0, 0, 3)),
        ("fixed", [((x,), {}) for x in THREE], (3, 0, 0, 3)),
    ],
)
def test_calls_share_runs_where_they_may(bundle, calling, name, given, expected):
    with together(calling, name) as call:
        futures = [call(*args, **kwargs) for args, kwargs in given]
    for (args, kwargs), found in zip(given, results(futures), strict=True):
        equal(found, bundle.call(name, *args, **kwargs))
    calls, rows, padded_rows, runs = counts(calling, name)
    assert (calls - 1, rows, padded_rows, runs - 1) == expected  # without the one that ran before


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("nothing", (), {}),
        ("rows", (), {}),
        ("rows", (), {"x": np.ones((2, 9), "f")}),
        ("rows", (), {"x": np.ones((0, 8), "f")}),
        ("rows", (), {"x": np.ones((2, 8), "f"), "y": 1}),
        ("fixed", (np.ones((2, 8), "f"),), {}),
    ],
)
def test_a_wrong_call_fails_at_once_as_in_bundle_call(bundle, calling, name, args, kwargs):
    with pytest.raises(UsageError) as expected:
        bundle.call(name, *args, **kwargs)
    for way in (calling.submit, calling.call):
        with pytest.raises(UsageError) as found:
            way(name, args, kwargs)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", ["last", "fixed"])  # rows share a run, and run alone
def test_where_jax_looks_for_nans_a_caller_gets_an_error_for_its_own(calling, name):
    x = np.zeros((3, 1) if name == "last" else (1, 8), np.float32)
    jax.config.update("jax_debug_nans", True)
    try:
        with together(calling, name) as submit:
            bad, good = submit(x + np.nan), submit(x)
        results([good])
        with pytest.raises(FloatingPointError, match=f"nan.* of {name}"):
            bad.result(PATIENCE)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_after_close_no_program_takes_calls(calling):
    calling.call("rows", (), {"x": x_of(1)})
    assert calling.drain(None)
    given = (("rows", (), {"x": x_of(1)}), ("last", (np.ones((3, 1), "f"),), {}))
    for each in given:  # the second one was never called
        with pytest.raises(ClosedError, match="takes no more calls"):
            calling.submit(*each)
    calling.undrain()
    results(calling.submit(*each) for each in given)
    calling.close()
    calling.undrain()
    with pytest.raises(ClosedError, match="found one that is closed"):
        calling.call("total", (x_of(1),), {})
    calling.close()


def padded(config):
    for n in (2, 8):
        sizes = {"bucket": {"batch": n}, "pad": ("batch",)}
        sizes |= {"arguments": (f'["x"] float32[{n},16] ~batch,',)}
        config = changed(config, f"score/b{n}", **sizes, results=(f"[] float32[{n},4] ~batch,",))
    return config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bucket": {}}, "size of 'batch'"),
        ({"arguments": ('["x"] float32[4]',)}, "score/b8: x: expected float32"),
    ],
)
def test_buckets_that_differ_in_more_than_their_rows_share_no_runs(change, said, recipe, tmp_path):
    forged = recipe.configured(lambda config: changed(padded(config), "score/b2", **change))
    engine = Engine(load(forged.write(tmp_path / "b")))
    with (
        contextlib.closing(engine),
        pytest.raises((RejectError, UsageError), match=said),
    ):
        engine.call("score", x=np.ones((9, 16), np.float32))


EXIT = """
import sys
import numpy as np
from prejit.runtime import load
from prejit.server import Engine

engine = Engine(load(sys.argv[1]))
engine.submit_call("rows", x=np.ones((3, 8), "f")).result(30)
futures = [engine.submit_call("rows", x=np.ones((8, 8), "f")) for _ in range(200)]
print("end")
"""


def test_a_process_that_does_not_close_its_engine_ends_by_itself(path, run_python):
    ran = run_python(EXIT, path, timeout=60)
    assert ran.stdout == "end\n"
    assert "Traceback" not in ran.stderr
