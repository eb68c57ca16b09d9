"""What a load says in the log, and what it never says."""

import dataclasses
import logging

import numpy as np
import pytest
from tests.layouts import GOLDEN

from prejit.runtime import load
from prejit.runtime.__main__ import main
from prejit.runtime.errors import FallbackWarning
from prejit.runtime.machine.fingerprint import Fingerprint

DECODER = GOLDEN / "decoder"
X = np.ones((2, 16), np.float32)


def said(caplog):
    lines = [f"{r.name.rpartition('.')[2]}: {r.getMessage()}" for r in caplog.records]
    caplog.clear()
    return "\n".join(lines)


def test_a_load_says_what_it_did_and_why(settled_dir, caplog):
    caplog.set_level(logging.INFO, "prejit")
    with load(settled_dir) as bundle:
        bundle.call("score", x=X)
    first = said(caplog)
    assert f"loader: {settled_dir}: no trust policy applies" in first
    assert f"{bundle.digest}: chose target cpu-host: it matches" in first
    assert "blobs: verified: all that was hashed is right" in first
    assert "ready_programs: example: score/b2: loaded in " in first
    other = dataclasses.replace(Fingerprint.current(), jaxlib="0.9.9")
    with pytest.warns(FallbackWarning), load(settled_dir, fingerprint=other) as bundle:
        bundle.call("score", x=X)
    found = said(caplog)
    assert "blobs: verifying: 0 bytes are hashed, " in found  # by receipts
    assert f"chose target {bundle.target}: none matches, and it is the closest" in found
    assert f"target {bundle.target} does not match: jaxlib: needs " in found
    assert "ready_programs: example: score/b2: compiled in " in found


@pytest.mark.usefixtures("no_warnings_of_fallback")
def test_nothing_is_printed_unasked_and_never_a_prompt(capsys):
    log = logging.getLogger("prejit")
    before = [*log.handlers], log.level
    asked = ["generate", str(DECODER), "--prompt", "sesame", "--max-new-tokens", "1"]
    printed = []
    for more in ([], ["-v"], ["-vv"]):
        assert main([*asked, *more]) == 0
        assert ([*log.handlers], log.level) == before, "a command leaves nothing behind"
        printed.append(capsys.readouterr().err)
    plain, verbose, steps = printed
    assert "prejit.runtime" not in plain
    assert " INFO prejit.runtime.loader: " in verbose
    assert "DEBUG" not in verbose
    assert " DEBUG prejit.runtime.format.blobs: sha256:" in steps
    assert "sesame" not in "".join(printed)
