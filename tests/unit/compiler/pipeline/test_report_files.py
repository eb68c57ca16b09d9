"""When a build writes its report, and what is in it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from prejit.compiler.api import build, program
from prejit.compiler.pipeline import report_files
from prejit.compiler.pipeline.build_interface import Built
from prejit.compiler.progress import Quiet


def twice(x):
    return x + x


def thrice(x):
    return x * 3


def made(output, *programs):
    given = programs or (program(twice, jnp.ones(3)),)
    options = {"cache": output / "cache", "quiet": True, "workers": 1}
    return build(given, output / "out", name="demo", **options)


def read(output):
    return json.loads((output / "out" / "demo.report.json").read_bytes())


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    directory = tmp_path_factory.mktemp("first")
    made(directory)
    return directory


@pytest.fixture
def here(first, tmp_path):
    return Path(shutil.copytree(first, tmp_path / "here", symlinks=True))


def test_a_build_reports_what_it_did_and_what_changed(first, here):
    report = read(first)
    assert report["change"] is None
    assert report["origins"] == {"compiled": 1}
    (row,) = report["programs"]
    assert (row["program"], row["origin"], row["target"]) == ("twice", "compiled", "cpu-host")
    assert row["compile_seconds"] > 0
    assert "compiling twice for cpu-host" in {step["what"] for step in report["steps"]}
    assert report["peak_memory"]["workers"] > 10_000_000
    assert "<svg" in (first / "out" / "demo.report.html").read_text()
    x = jnp.ones(3)
    again = replace(program(thrice, x), name="again")  # compiled once with `thrice`
    second = made(here, program(twice, x), program(thrice, x), again)
    found = read(here)
    assert found["digest"] == second.digest != report["digest"]
    assert found["origins"] == {"this machine": 1, "compiled": 1, "equal to another program": 1}
    assert found["change"]["digest"] == report["digest"]
    assert {*found["change"]["added"]} == {"thrice for cpu-host", "again for cpu-host"}
    assert not found["change"]["changed"]


def test_the_report_of_no_change_stays_and_a_damaged_one_is_no_report(here):
    path = here / "out" / "demo.report.json"
    before = path.stat().st_ino, path.stat().st_mtime_ns
    built = made(here)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    for none in ("", "[]", "{", '{"report": 0, "digest": "sha256:1"}'):
        path.write_text(none)
        report_files.report_build(built, Quiet(), {})
        assert (read(here)["change"], read(here)["digest"]) == (None, built.digest)
    path.unlink()
    # Another build has replaced the bundle meanwhile: its report is not ours to write.
    other = Built(built.path, "sha256:other", 1, 0, True, None, built.programs)
    report_files.report_build(other, Quiet(), {})
    assert not path.exists()
