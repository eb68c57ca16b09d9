"""A release that loosens its own gate, or limits that nobody reads, would stop nothing."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.errors import RejectError
from prejit.runtime.format.bundle_schema import Descriptor, ImageManifest
from prejit.runtime.format.release_limits import (
    DEFAULT_SHARES,
    SLO,
    ReleaseLimits,
    fraction_of,
    limits_annotation,
)
from prejit.server.releases.gate_limits import described_limits, limits_of, stricter

NAMES = [each.name for each in fields(ReleaseLimits)]


def manifest(annotations):
    return ImageManifest(2, "", "", Descriptor("", "", 0), (), annotations)


def limits():
    shares = st.none() | st.integers(0, 2000).map(lambda each: f"{each / 10:g}%")
    numbers = st.none() | st.integers(1, 2**40)
    values = {name: shares if name in DEFAULT_SHARES else numbers for name in NAMES}
    return st.builds(ReleaseLimits, **values)


def test_limits_and_shares_that_no_build_writes_are_refused():
    numbers = ('{"p95_ms":"5"}', '{"max_slower":"5"}', '{"new":1}', '{ "p95_ms":5}')
    for text in ("", "[]", "ä", *numbers):
        with pytest.raises(RejectError, match="m: "):
            limits_of(manifest({SLO: text}), "m")
    for text in ("5", "5 %", "-5%", "five%", "1e3%", "5%\n", "%", "1" * 9 + "%"):
        with pytest.raises(ValueError, match="such as"):
            fraction_of(text)
    assert fraction_of("2.5%") == pytest.approx(0.025)
    assert limits_annotation(None) == limits_annotation(ReleaseLimits()) == {}
    assert described_limits(ReleaseLimits(start_ms=5)) == DEFAULT_SHARES | {"start_ms": 5}


@given(limits(), limits())
def test_a_bundle_carries_its_limits_and_the_stricter_one_of_each_name_holds(old, new):
    assert limits_of(manifest(limits_annotation(old)), "m") == old
    found, loosened = stricter(old, new)
    for name in NAMES:
        values = [getattr(each, name) for each in (old, new, found)]
        if name in DEFAULT_SHARES:
            was, now, holds = (each.share(name) for each in (old, new, found))
            assert holds == min(was, now)
            assert (name in loosened) == (now > was)
        else:
            given_values = [each for each in values[:2] if each is not None]
            choose = max if name == "tokens_per_second" else min
            assert values[2] == (choose(given_values) if given_values else None)
    assert stricter(old, old) == (old, ())
