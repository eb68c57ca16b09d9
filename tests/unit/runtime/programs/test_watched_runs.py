"""Whether the first program that returns NaN or infinity is named, and no other."""

import ml_dtypes
import numpy as np
import pytest
from tests.odd_weights import spoil_weights

from prejit.runtime import load
from prejit.runtime.cli.commands import run
from prejit.runtime.errors import NumbersError
from prejit.runtime.programs.watched_runs import refuse_odd

ASK = {"max_new_tokens": 4, "stop_token_ids": ()}


def test_the_first_program_with_a_nan_is_named_with_its_run(decoder_dir):
    with load(decoder_dir) as bundle:
        expected = bundle.generate([1, 2, 3], **ASK).token_ids
        bundle.check_finite()
        assert bundle.generate([1, 2, 3], **ASK).token_ids == expected
        spoil_weights(bundle)
        with pytest.raises(NumbersError) as error:
            bundle.generate([1, 2, 3], **ASK)
    assert "decoder: prefill/b1-t3-c24, run " in str(error.value)
    assert "expected numbers, found nan at " in str(error.value)


ODD = (
    (np.array([[0, 1], [np.inf, np.nan]]), r"found inf at y\[1, 0\], the first of 2 in it"),
    (np.float32(np.nan), "found nan at y, the first of 1"),
    (np.array([1, np.nan], ml_dtypes.bfloat16), r"found nan at y\[1\]"),
    (np.array([1, complex(0, np.inf)]), r"at y\[1\]"),
)


def test_the_index_is_that_of_the_first_one_and_what_has_no_nan_passes():
    for value, message in ODD:
        with pytest.raises(NumbersError, match=message):
            refuse_odd("bundle: program", ("y",), np.asarray(value))
    for value in (np.arange(3), np.array([True]), np.zeros((0, 2)), np.ones(3, ml_dtypes.bfloat16)):
        refuse_odd("bundle: program", ("y",), value)
    refuse_odd("bundle: program", ("logprobs",), np.array([0.0, -np.inf]))  # impossible tokens
    with pytest.raises(NumbersError):
        refuse_odd("bundle: program", ("logprobs",), np.array([np.nan]))


def test_the_command_checks_a_call(bundle_dir, tmp_path):
    x = np.zeros((2, 16), np.float32)
    np.save(tmp_path / "x.npy", x)
    arguments = ["call", str(bundle_dir), "score", "--arg", f"x={tmp_path / 'x.npy'}"]
    arguments += ["-o", str(tmp_path / "out"), "--check-finite"]
    assert run(arguments) == 0
    x[1, 3] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(NumbersError, match=r"example: score/b2: expected numbers, found nan at "):
        run(arguments)
