"""A comment or a page that a prompt can break shows a reviewer something else than the verdict."""

import json

import pytest
from tests.html_pages import EVIL, alone

from prejit.runtime.errors import UsageError
from prejit.runtime.format.release_limits import ReleaseLimits
from prejit.server.releases.gate_run import (
    GateVerdict,
    requests_of,
    verdict_json,
    verdict_line,
    verdict_markdown,
    verdict_page,
    verdict_table,
)
from prejit.server.releases.measured_checks import RequestDifference
from prejit.server.releases.release_contents import ReleaseCheck

BAD = ReleaseCheck("tokens", "failed", "9 results", "2 differ", f"a|b\n{EVIL}")
GOOD = ReleaseCheck("targets", "passed", "v2", "v2")
VERDICT = GateVerdict(
    *("sha256:a", "sha256:b", (GOOD, BAD), ReleaseLimits(p95_ms=7), 3),
    differences=(RequestDifference("7", "/v1/completions", EVIL, 2),),
    seconds=1.25,
)


def test_a_verdict_is_the_same_in_every_form_and_breaks_none():
    assert not VERDICT.passed
    line = "failed: sha256:b may not take the place of sha256:a: tokens;"
    assert verdict_line(VERDICT).startswith(line)
    found = json.loads(json.dumps(verdict_json(VERDICT)))
    assert (found["passed"], found["limits"]["p95_ms"]) == (False, 7)
    assert [each["outcome"] for each in found["checks"]] == ["passed", "failed"]
    assert "targets" in verdict_table(VERDICT)
    passed = GateVerdict("sha256:a", "sha256:b", (GOOD,), ReleaseLimits(), 3, (), 1.0)
    assert passed.passed
    assert "may take the place" in verdict_line(passed)
    assert "passed the gate" in verdict_markdown(passed)
    comment = verdict_markdown(VERDICT)
    rows = [line for line in comment.splitlines() if line.startswith("| tokens")]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 6
    assert "<script" not in comment
    alone(verdict_page(VERDICT)).check_harmless(2)


def test_a_log_of_several_models_needs_a_name():
    def line(model, status=200):
        calls = [{"kind": "generate", "model": model, "token_ids": [1]}]
        return {"event": "request", "status": status, "calls": calls, "id": model}

    start = {"event": "start", "max_tokens": 9}
    assert requests_of("l", [start, line("a"), line("a", 500)], None) == ([line("a")], "a", 9)
    both = [line("a"), line("b")]
    assert requests_of("l", both, "b") == ([line("b")], "b", None)
    wrong = ((both, None, "a, b"), (both, "c", "a, b"), ([start], None, "no request"))
    for lines, name, found in wrong:
        with pytest.raises(UsageError, match=f"l: expected .* found {found}"):
            requests_of("l", lines, name)
