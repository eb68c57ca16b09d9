"""When a build writes its report, and what is in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from prejit.compiler.api import build, build_all, program
from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.manifest.reading import check_manifest
from prejit.compiler.pipeline.built import Built
from prejit.compiler.progress import Quiet
from prejit.compiler.reporting import report_files


def twice(x: Any) -> Any:
    return x + x


def thrice(x: Any) -> Any:
    return x * 3


def made(output: Path, *programs: Program) -> Built:
    return build(
        programs, output / "out", name="demo", cache=output / "cache", workers=1, quiet=True
    )


def read(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "out" / "demo.report.json").read_bytes())
    return found


def test_a_build_reports_what_it_did_and_what_changed_since_the_last_one(tmp_path: Path) -> None:
    x = jnp.ones(3)
    first = made(tmp_path, program(twice, x))
    report = read(tmp_path)
    assert report["digest"] == first.digest
    assert report["change"] is None
    assert report["origins"] == {"compiled": 1}
    (row,) = report["programs"]
    assert (row["program"], row["origin"], row["target"]) == ("twice", "compiled", "cpu-host")
    assert row["compile_seconds"] > 0
    assert "compiling twice for cpu-host" in {step["what"] for step in report["steps"]}
    assert report["peak_memory"]["workers"] > 10_000_000
    assert "<svg" in (tmp_path / "out" / "demo.report.html").read_text()

    second = made(tmp_path, program(twice, x), program(thrice, x))
    report = read(tmp_path)
    assert report["origins"] == {"this machine": 1, "compiled": 1}
    assert report["change"]["digest"] == first.digest
    assert report["change"]["added"] == ["thrice for cpu-host"]
    assert not report["change"]["changed"]
    assert second.digest != first.digest


def test_a_build_that_changes_nothing_leaves_the_report_and_one_without_makes_it(
    tmp_path: Path,
) -> None:
    x = jnp.ones(3)
    made(tmp_path, program(twice, x))
    paths = [tmp_path / "out" / f"demo.report.{kind}" for kind in ("json", "html")]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths]
    made(tmp_path, program(twice, x))
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in paths] == before
    paths[1].unlink()
    made(tmp_path, program(twice, x))
    assert read(tmp_path)["origins"] == {"this machine": 1}
    assert paths[1].exists()


def test_a_report_that_cannot_be_written_does_not_fail_the_build(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "demo.report.json").mkdir(parents=True)
    built = build(
        program(twice, jnp.ones(3)),
        tmp_path / "out",
        name="demo",
        cache=tmp_path / "cache",
        workers=1,
    )
    assert built.written
    assert "no report was written" in capsys.readouterr().err


def test_a_program_from_a_shared_store_names_it(tmp_path: Path) -> None:
    for machine in ("one", "two"):
        build(
            program(twice, jnp.ones(3)),
            tmp_path / "out",
            name="demo",
            cache=tmp_path / machine,
            shared=str(tmp_path / "shared"),
            workers=1,
            quiet=True,
        )
        for path in (tmp_path / "out").glob("*.report.*"):
            if machine == "one":
                path.unlink()
    ((origin, count),) = read(tmp_path)["origins"].items()
    assert str(tmp_path / "shared") in origin
    assert count == 1


def test_programs_that_are_equal_are_compiled_once_and_say_so(tmp_path: Path) -> None:
    x = jnp.ones(3)
    again = replace(program(twice, x), name="again")
    made(tmp_path, program(twice, x), again)
    assert read(tmp_path)["origins"] == {"compiled": 1, "equal to another program": 1}


def test_manifests_of_one_command_have_a_report_each(tmp_path: Path) -> None:
    x = jnp.ones(3)
    requests = [
        (check_manifest(Manifest(name, programs=[program(twice, x)], targets=["cpu-host"])), ())
        for name in ("one", "two")
    ]
    build_all(requests, tmp_path, cache=tmp_path / "cache", workers=1, done=lambda _: None)
    found = [json.loads((tmp_path / f"{name}.report.json").read_bytes()) for name in ("one", "two")]
    assert [report["bundle"] for report in found] == ["one", "two"]
    assert [len(report["programs"]) for report in found] == [1, 1]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"report": 0, "digest": "sha256:1"}'])
def test_a_last_report_that_is_none_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "demo.report.json").write_text(content)
    made(tmp_path, program(twice, jnp.ones(3)))
    assert read(tmp_path)["change"] is None


def test_a_build_that_was_replaced_meanwhile_writes_no_report(tmp_path: Path) -> None:
    built = made(tmp_path, program(twice, jnp.ones(3)))
    path = tmp_path / "out" / "demo.report.json"
    path.unlink()
    other = Built(built.path, "sha256:other", 1, 0, True, None, built.programs)
    report_files.report_build(other, Quiet(), {})
    assert not path.exists()
