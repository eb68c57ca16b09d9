"""Calling programs: nested arguments and results, buckets, and errors that say what was wrong."""

import ml_dtypes
import numpy as np
import pytest
from tests.threads import in_threads

from prejit.runtime import load
from prejit.runtime.errors import UsageError

X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def example(settled_dir, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load(settled_dir)


def tree(half=None, count=None, flag=True):
    half = np.array([1, 2, 3], ml_dtypes.bfloat16) if half is None else half
    count = np.array([[1, 2], [3, 4]], np.int32) if count is None else count
    return {"half": half, "pair": (count, flag)}


def test_the_right_bucket_answers_in_many_threads_too(example, recipe):
    kernel, bias = recipe.weights["score:kernel"], recipe.weights["score:bias"]

    def check(random, size):
        x = random.standard_normal((size, 16), np.float32)
        expected = np.tanh(x @ kernel) + bias
        np.testing.assert_allclose(example.call("score", x=x), expected, rtol=1e-4, atol=1e-5)

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(25):
            check(random, random.choice([2, 8]))

    for size in (2, 8):
        check(np.random.default_rng(size), size)
    used = {report.program: report.source for report in example.report()}
    assert used["score/b2"] == used["score/b8"] == "loaded"
    in_threads(6, work)


def test_results_are_nested_as_the_functions_and_others_are_refused(example):
    result = example.call("nest", tree=tree())
    assert result.keys() == {"scalar", "sums"}
    assert (result["scalar"], result["scalar"].shape) == (np.float32(2.5), ())
    doubled, counted = result["sums"]
    assert doubled.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(doubled.astype(np.float32), [2, 4, 6])
    np.testing.assert_array_equal(counted, [[2, 3], [4, 5]])
    kept = example.call("nest", tree=tree(flag=np.False_))["sums"][0]
    np.testing.assert_array_equal(kept.astype(np.float32), [1, 2, 3])
    with pytest.raises(UsageError, match="unexpected 0: its arguments are given by name"):
        example.call("score", X)
    for use, prompt, lacking in (
        (example.generate, [1, 2, 3], "decoder"),
        (example.generate, "text", "decoder"),
        (example.encode, ["text"], "encoder"),
    ):
        with pytest.raises(UsageError, match=f"this bundle holds no {lacking}") as caught:
            use(prompt)
        assert str(caught.value.hint).endswith("`Bundle.call`: nest, score, tick")
    assert not example.has_tokenizer


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("scores", {"x": X}, "no program 'scores'"),
        ("score", {"y": X}, "score/b2: x is missing, and unexpected y"),
        ("score", {"x": X[:1]}, r"score/b8: x: expected float32\[8, 16\], found float32\[1, 16\]"),
        ("score", {"x": X.astype("f8")}, r"float32\[2, 16\], found float64\[2, 16\]"),
        ("score", {"x": X.astype(">f4")}, r"expected float32\[2, 16\], found >f4|float32"),
        ("score", {"x": "text"}, r"expected float32\[2, 16\], found <U4"),
        ("nest", {"tree": {"half": tree()["half"]}}, r"tree\['pair'\]\[0\] is missing"),
        ("nest", {"tree": {**tree(), "more": X}}, r"unexpected tree\['more'\]"),
        ("nest", {"tree": tree(flag=1)}, r"\[1\]: expected bool\[\], found (int64|weak int32)\[\]"),
    ],
)
def test_wrong_arguments_say_what_was_expected_and_found(name, arguments, complaint, example):
    with pytest.raises(UsageError, match=complaint) as caught:
        example.call(name, **arguments)
    assert caught.value.hint is not None
