"""An executable that computes wrong numbers is found out before it is used, and never runs here again."""

import dataclasses
import json
import math

import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from tests.extent import sampled as sampled_cases
from tests.golden import forged

import prejit.runtime
from prejit.runtime import AnswerError, FallbackWarning, PrejitWarning, fallback_counts
from prejit.runtime.format.arrays import Golden, is_results
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.checks.program_table import check_array
from prejit.runtime.programs import golden_check, quarantine
from prejit.runtime.programs.golden_check import (
    GoldenResult,
    compare,
    format_results,
    parse_results,
    sampled,
)
from prejit.runtime.programs.golden_inputs import golden_inputs, words
from prejit.runtime.programs.ready_programs import Programs

X = np.ones((2, 16), np.float32)
SUBTLE = ("rows swapped", "one term of the sum dropped")
"""The one keeps the mean of the result, the other nearly all of it."""
MISCOMPILED = (*SUBTLE, "operands swapped", "tanh dropped", "bias dropped")


@pytest.fixture(scope="session")
def swapped(make_recipe):
    """The same programs, compiled from a function with two operands swapped."""
    return make_recipe(miscompiled="operands swapped")


@pytest.fixture
def wrong(answering, swapped, tmp_path):
    """A bundle whose executables compute something else than its portable programs and golden answers."""
    return forged(answering, swapped, "executable").write(tmp_path / "wrong")


def expected(recipe):
    values = np.tanh(X @ recipe.weights["score:kernel"])
    return values + recipe.weights["score:bias"]


def kept(cache):
    return [json.loads(each.read_bytes()) for each in sorted(cache.glob("canary/v1/*.json"))]


def score(path, **options):
    """Return a result, and how its program was obtained."""
    with prejit.runtime.load(path, **options) as bundle:
        result = bundle.call("score", x=X)
        return result, {each.program: each.source for each in bundle.report()}["score/b2"]


def test_a_wrong_result_or_an_ended_quarantine(wrong, answering, runtime_cache, monkeypatch):
    """A later load does not even load what is in quarantine, also one that asks no executable."""
    before, told = fallback_counts().get("canary", 0), list[str]()
    with pytest.warns(FallbackWarning, match=r"score/b2: .*golden answer.*quarantine"):
        result, source = score(wrong, on_fallback=lambda axis: told.append(axis.name))
    np.testing.assert_allclose(result, expected(answering), rtol=1e-5)
    assert (source, told) == ("compiled", ["canary"])
    assert fallback_counts()["canary"] == before + 1
    (answer,) = kept(runtime_cache)
    assert not answer["right"]
    monkeypatch.setattr(Programs, "load", lambda *_: pytest.fail("it was loaded"))
    with pytest.warns(FallbackWarning):
        assert score(wrong, canary="off")[1] == "kept"


@pytest.mark.parametrize(
    "error", ["UNKNOWN: CUDNN_STATUS_BAD_PARAM\nin cuda_dnn.cc", "RESOURCE_EXHAUSTED: memory"]
)
def test_a_failing_executable_ends_its_load(answering, tmp_path, runtime_cache, monkeypatch, error):
    right, asked = golden_check.golden_values, list[str]()

    def golden_values(programs, program, *args):
        asked.append(program.name)
        if len(asked) <= 2:  # an executable, and once more
            raise JaxRuntimeError(error)
        return right(programs, program, *args)

    monkeypatch.setattr(golden_check, "golden_values", golden_values)
    path = answering.write(tmp_path / "right")
    if "RESOURCE" in error:
        with pytest.raises(JaxRuntimeError, match="RESOURCE"):
            score(path)
        assert (len(asked), kept(runtime_cache)) == (1, [])
        return
    said = r"score/b2: .*CUDNN_STATUS_BAD_PARAM\. It is in quarantine"
    with pytest.warns(FallbackWarning, match=said):
        result, source = score(path)
    np.testing.assert_allclose(result, expected(answering), rtol=1e-5)
    assert source == "compiled"
    assert [each["right"] for each in kept(runtime_cache)] == [False]


def test_one_wrong_answer_is_kept_for_ever(wrong, answering, runtime_cache, monkeypatch):
    """It is not used in this process, and the next one asks again."""
    found = [False, True]
    real = quarantine.compare

    def once(*given):
        difference = real(*given)
        is_right = found.pop(0) if found else difference.share <= 1
        return dataclasses.replace(difference, share=0.0) if is_right else difference

    monkeypatch.setattr(quarantine, "compare", once)
    with pytest.warns(FallbackWarning, match="asked again"):
        np.testing.assert_allclose(score(wrong)[0], expected(answering), rtol=1e-5)
    assert kept(runtime_cache) == []


def test_wrong_weights_or_programs_run(answering, swapped, make_recipe, wrong, tmp_path):
    for other, layers in ((make_recipe(1.5), ["weights"]), (swapped, ["executable", "portable"])):
        path = forged(answering, other, *layers).write(tmp_path / layers[0])
        with (
            pytest.warns(FallbackWarning),
            pytest.raises(AnswerError, match="neither its executable nor its portable program"),
        ):
            score(path)
    assert score(answering.write(tmp_path / "good"))[1] == "loaded"
    with pytest.raises(AnswerError, match="golden answer") as caught:
        score(wrong, on_mismatch="error")
    assert caught.value.exit_code == 3
    assert "verify --run" in str(caught.value.hint)


@pytest.mark.parametrize("how", sampled_cases(MISCOMPILED, lambda how: how in SUBTLE))
def test_a_miscompiled_program_is_within_the_tolerance(how, answering, make_recipe, tmp_path):
    path = forged(answering, make_recipe(miscompiled=how), "executable").write(tmp_path / "wrong")
    with prejit.runtime.load(path, canary="off") as bundle:
        found = {each.program: each for each in bundle.check_answers()}
    assert found["score/b8"].share > 2, found["score/b8"]
    assert not found["nest"].difference


def test_other_programs_are_asked_at_other_starts(answering, tmp_path, runtime_cache, monkeypatch):
    path = answering.write(tmp_path / "right")
    count = len(answering.targets[0].config.programs)
    for options, asked in (({"canary": "off"}, 0), ({}, 1), ({"canary": "all"}, count)):
        with prejit.runtime.load(path, **options) as bundle:
            bundle.prepare()
        assert len(kept(runtime_cache)) == asked
    for damage in (b"{", b'{"right": 1}', b"\xff" * 20):
        for file in runtime_cache.glob("canary/v1/*.json"):
            file.write_bytes(damage)
        with pytest.warns(PrejitWarning, match="counts as none"):
            result, source = score(path)
        np.testing.assert_allclose(result, expected(answering), rtol=1e-5)
        assert source == "loaded"
    monkeypatch.setattr(quarantine, "compare", lambda *_: pytest.fail("asked again"))
    score(path)


def test_a_later_start_asks_what_it_loads_first(answering, tmp_path, runtime_cache, monkeypatch):
    path = answering.write(tmp_path / "right")
    score(path)
    monkeypatch.setattr(quarantine, "compare", lambda *_: pytest.fail("asked again"))
    with prejit.runtime.load(path) as bundle:
        bundle._programs.expect(("score/b8", "score/b2"), pytest.fail)
        assert bundle._programs["score/b8"]
    assert len(kept(runtime_cache)) == 1


def test_nothing_is_asked_after_a_wrong_answer_of_another_program(wrong, runtime_cache):
    with pytest.warns(FallbackWarning):
        score(wrong)
    with prejit.runtime.load(wrong) as bundle:
        bundle._programs.expect(("nest", "score/b2"), pytest.fail)
        assert bundle._programs["nest"]
    assert sorted(each["right"] for each in kept(runtime_cache)) == [False, True]


@pytest.mark.filterwarnings("ignore::prejit.runtime.PrejitWarning")
def test_verify_run_says_ok_to_wrong_programs(wrong, said):
    said("verify", wrong)  # every byte is as it was built
    told = said("verify", wrong, "--run", status=3)
    assert "WRONG" in told
    assert "in quarantine" in told
    assert "in quarantine on this machine" in said("inspect", wrong)
    answers = json.loads(said("verify", wrong, "--run", "--json", status=3))["answers"]
    assert {each["program"]: bool(each["difference"]) for each in answers} == {
        **{"score/b2": True, "score/b8": True, "nest": False, "tick": False}
    }


@pytest.mark.filterwarnings("ignore::prejit.runtime.PrejitWarning")
def test_nothing_lifts_a_quarantine(answering, tmp_path, said, runtime_cache):
    path = answering.write(tmp_path / "right")
    assert "quarantine" not in said("verify", path, "--run")
    files = {file: json.loads(file.read_bytes()) for file in runtime_cache.glob("canary/v1/*.json")}

    def quarantine():
        for file, answer in files.items():
            file.write_text(json.dumps({**answer, "right": False, "difference": "[] found 1"}))
            file.chmod(0o600)
        assert "in quarantine" in said("inspect", path)

    quarantine()
    forgotten = json.loads(said("verify", path, "--forget", "--json"))["forgotten"]
    assert sorted(forgotten) == sorted(map(str, files))
    assert "in quarantine" not in said("inspect", path)
    quarantine()
    assert "its quarantine is lifted" in said("verify", path, "--run")
    assert "in quarantine" not in said("inspect", path)


def test_the_recipe_changes_and_old_answers_are_wrong():
    # Version 1, for ever: a change needs a new version.
    assert [*map(int, words(1, 0, 4))] == [301794027, 2789948889, 2117216093, 1959625965]
    entry = ProgramEntry("f", "call", {}, "", (), (), *(None,) * 3)
    texts = ('["x"] float32[2,2]', '["n"] int32[3]', '["m"] bool[2]', '["b"] bfloat16[2]')
    arrays = tuple(check_array(text, None, "") for text in texts)
    x, n, m, b = golden_inputs(entry, arrays, 0, 1)
    assert x.dtype == np.float32
    assert abs(x).max() < 1
    assert set(n) <= {0, 1, 2}
    assert m.dtype == bool
    assert b.dtype.name == "bfloat16"
    np.testing.assert_array_equal(x, next(golden_inputs(entry, arrays, 0, 1)))
    assert not np.array_equal(x, next(golden_inputs(entry, arrays, 0, 2)))
    cache = check_array('["k0"] int8[1,2,300,12]', None, "")
    sizes = {"batch": 1, "prompt": 4, "context": 300}
    prefill = dataclasses.replace(entry, kind="prefill", bucket=sizes)
    [rows] = golden_inputs(prefill, (cache,), 512, 1)
    factors = rows[..., 8:].copy().view(np.float32)
    assert (factors == np.float32(1 / 127)).all()  # and never NaN, which no mask hides
    results = (None, GoldenResult(None, 0, (3, -4)), GoldenResult(-2, 271, (-54, "n", "p", "m")))
    text = format_results(results)
    assert text == "- =3,-4 -2:271,-54,n,p,m"
    assert is_results(text)
    assert parse_results(text) == results
    wrong_texts = ["=", "- ", "x", "1:", "1:-3", "=1,n", "1:2,3,,4", f"1:2,{'9' * 19}", "\n"]
    assert [text for text in wrong_texts if is_results(text)] == []


@pytest.mark.parametrize(
    ("value", "other", "right"),
    [
        ([1.0, 2.0], [1.0, 2.001], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([1.0, math.nan], [1.0, math.nan], True),
        ([1.0, math.inf], [1.0, -math.inf], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e30, 1e-30], [1e30, 0.0], True),
        ([3, -1], [3, -1], True),
        ([3, -1], [4, 0], False),
    ],
)
def test_a_difference_is_missed_or_made(value, other, right):
    kinds = ("float32", "complex64") if value != [3, -1] else ("int32",)
    for dtype in kinds:
        one, two = np.array(value, dtype), np.array(other, dtype)
        text = format_results((sampled(one, one, 8),))
        assert is_results(text)
        array = check_array(f'["y"] {dtype}[2]', None, "")
        found = compare(Golden(1, 1, "x", 8, text), [array], [two], [two]).share
        assert (found <= 1) == right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_nan_beside_the_samples_is_found(dtype):
    right, first = np.ones(5, dtype), slice(0, 2)
    wrong = right.copy()
    wrong[4] = math.nan
    array = check_array(f'["y"] {dtype}[5]', None, "")
    for known, value, share in ((right, wrong, math.inf), (wrong, wrong, 0), (wrong, right, 0)):
        text = format_results((sampled(known, known[first], 8),))
        assert is_results(text)
        golden = Golden(1, 1, "x", 8, text)
        assert compare(golden, [array], [value], [value[first]]).share == share


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1, 10**18, 10**18 - 1, 1.7e308])
def test_numbers_of_64_bits_have_an_answer_or_are_not_compared(number):
    value = np.array([number, number])
    text = format_results((sampled(value, value, 8),))
    assert is_results(text)
    array = check_array(f'["y"] {value.dtype}[2]', None, "")
    golden = Golden(1, 1, "x", 8, text)
    assert compare(golden, [array], [value], [value]).share <= 1
    wrong = value - value
    found = compare(golden, [array], [wrong], [wrong]).share
    assert (found > 1) == (text != "-")
