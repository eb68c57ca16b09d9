"""Files of results: their names tell the machine, and they can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness.report import Target, markdown
from benchmarks.harness.results import begin, file_name, judged, save

FACTS = {"date": "2026-01-02 03:04", "machine": {"cpu": "Intel(R) Xeon(R) @ 2.0GHz", "cores": 2}}


def test_the_name_of_a_file_tells_date_machine_and_subject() -> None:
    assert file_name(FACTS, "encode") == "2026-01-02-intel-r-xeon-r-2-0ghz-2-encode"


def test_a_target_that_is_missed_is_written_as_missed() -> None:
    (found,) = judged([Target("x", 2.0, 1.0)])
    assert found["met"] is False


def test_what_is_saved_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "new", "run", {**FACTS, "samples": {"a": [1.5]}}, "# Page\n")
    assert json.loads((tmp_path / "new" / "run.json").read_text())["samples"] == {"a": [1.5]}
    assert (tmp_path / "new" / "run.md").read_text() == "# Page\n"
    assert capsys.readouterr().out == "# Page\n\n"


def test_a_page_names_the_command_that_repeats_it() -> None:
    facts = {**begin(3), "load_average_after": 0.0}
    assert "`make bench` repeats it." in markdown(facts, [], [])
    assert "`make gpu` repeats it." in markdown(facts, [], [], command="make gpu")
