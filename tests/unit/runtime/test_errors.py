"""Errors and warnings, wherever they are printed: a traceback, a log, a terminal."""

import copy
import traceback
import warnings

import pytest

from prejit.runtime.errors import (
    FallbackWarning,
    MismatchError,
    PrejitError,
    RejectError,
    StoreError,
)

HOSTILE = "a\x1b]0;pwned\x07b\u202ec\x9b31m"
SPELT = "a\\x1b]0;pwned\\x07b\\u202ec\\x9b31m"


@pytest.mark.parametrize("kind", [PrejitError, StoreError, MismatchError])
def test_a_message_cannot_move_the_cursor_of_whoever_prints_it(kind):
    """As a traceback does, which never asks for `describe`."""
    error = kind(HOSTILE, hint=HOSTILE)
    assert str(error) == SPELT
    assert error.describe() == f"error[{kind.code}]: {SPELT}\n\nhint: {SPELT}"
    assert str(RejectError(HOSTILE, HOSTILE)) == f"{SPELT}: {SPELT}"


def test_a_traceback_and_a_warning_show_plain_characters():
    error = PrejitError("no such thing", hint="an older one")
    error.hint = HOSTILE
    shown = "".join(traceback.format_exception(error))
    assert shown.endswith(f"PrejitError: no such thing\nhint: {SPELT}\n")
    assert shown.count("hint: ") == 1
    copied = copy.copy(error)
    assert (copied.hint, copied.__notes__) == (error.hint, error.__notes__)
    assert "hint" not in "".join(traceback.format_exception(PrejitError("no such thing")))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warnings.warn(HOSTILE, FallbackWarning, stacklevel=1)
    assert str(told[0].message) == SPELT
