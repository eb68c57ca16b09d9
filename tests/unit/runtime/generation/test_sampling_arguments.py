"""The host's side of sampling: what a request may ask for, and the arrays that say it."""

import numpy as np
import pytest

from prejit.runtime.errors import UsageError
from prejit.runtime.generation.options import Sampling
from prejit.runtime.generation.sampling_arguments import arrays, bias_row, history_row


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, np.nan, np.inf, 1e39, "hot", None, True)),
        *(("top_k", value) for value in (-1, 2**31, 1.5, True, "3")),
        *(("top_p", value) for value in (0, -1, 1.1, np.nan, "all")),
        *(("min_p", value) for value in (-0.1, 1.1, np.nan, None)),
        *(("repetition_penalty", value) for value in (0, -1, np.nan, np.inf, 1e39)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, np.nan, "no")),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, np.nan, np.inf)),
        *(("seed", value) for value in (-1, 2**64, 0.5, None)),
        *(("logit_bias", value) for value in ({-1: 1.0}, {1.5: 1.0}, {"a": 1.0}, {True: 1.0})),
        *(("logit_bias", value) for value in ({7: np.nan}, {7: np.inf}, {7: 1e39}, {7: "x"})),
        *(("logit_bias", value) for value in (3, "ab", [(1,)], {1: 0.0, "a": 1.0})),
        ("logit_bias", ((7, 1.0), (7, 2.0))),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name_with_both_sides(name, value):
    said = rf"^{name}( of token \S+)?: expected .*, found "
    with pytest.raises(UsageError, match=said) as caught:
        Sampling(**{name: value})
    found = dict(value).get(7, "") if isinstance(value, dict) else value
    assert str(found) in str(caught.value)


def test_values_are_taken_however_written_and_are_the_programs_arguments():
    for options in (
        {"temperature": 3e38, "top_k": 2**31 - 1, "top_p": 1e-9, "seed": 2**64 - 1, "min_p": 1},
        {"repetition_penalty": 1e-38, "presence_penalty": -2, "frequency_penalty": 2},
        {"top_k": np.int64(3), "temperature": np.float32(0.5)},
    ):
        sampling = Sampling(**options)
        assert {name: getattr(sampling, name) for name in options} == options
    biased = Sampling(logit_bias={np.int64(0): -np.inf})
    assert bias_row(biased, 2).tolist() == [-np.inf, 0]
    pairs = Sampling(logit_bias=((9, 2.0), (1, -np.inf)))
    bias = {1: -np.inf, 9: 2}
    mapping = Sampling(logit_bias=bias)
    bias[1] = 5.0
    assert pairs == mapping
    assert hash(pairs) == hash(mapping)
    assert mapping != Sampling(logit_bias={1: -np.inf, 9: 3})
    with pytest.raises(UsageError, match=r"logit_bias: expected token ids of 0 to 3, found 9"):
        arrays([mapping], 4, [0])
    other = Sampling(0.5, 3, 0.9, 2**40 + 7, 0.1, 1.2, 1.0, -0.5, {2: -np.inf, 0: 1.5})
    found = arrays([Sampling(), other], 4, [0, 5])
    expected = {
        **{"temperature": np.float32([0, 0.5]), "top_k": np.int32([0, 3])},
        **{"top_p": np.float32([1, 0.9]), "min_p": np.float32([0, 0.1])},
        "repetition_penalty": np.float32([1, 1.2]),
        "presence_penalty": np.float32([0, 1]),
        "frequency_penalty": np.float32([0, -0.5]),
        "seed": np.uint32([[0, 0], [2**8, 7]]),
        "bias": np.float32([[0, 0, 0, 0], [1.5, 0, -np.inf, 0]]),
        "logprobs": np.int32([0, 5]),
    }
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name, strict=True)
    assert arrays([Sampling(), Sampling(temperature=1.0)], 50_000, [0, 0])["bias"] is None
    for small in (1e-45, 1e-60):  # too small for some devices
        found = arrays([Sampling(temperature=small, repetition_penalty=small)], 4, [0])
        assert found["temperature"] == 0
        assert found["repetition_penalty"] == np.finfo(np.float32).tiny
    row = history_row([1, 1, 2], [2, 3, 3], 5)
    assert (row.dtype, row.tolist()) == (np.int32, [0, 1, 3, 4, 0])
    assert history_row([], [], 3).tolist() == [0, 0, 0]
    for options in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert Sampling(**{options: 0.5}).needs_history
    assert not Sampling(0.5, 3, 0.9, 7, 0.1, logit_bias={1: 1.0}).needs_history
