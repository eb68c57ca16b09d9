"""A miss names the ingredient of jax's key that differs, both values, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prejit.runtime.format.bundle_schema import RecordedProgram, Segment
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.recorded.causes import Difference, differences
from prejit.runtime.recorded.hook import jax_texts
from prejit.runtime.recorded.hook_events import JaxRequest, WatchedProcess
from prejit.runtime.recorded.recorded_bundle import RecordedBundle
from prejit.runtime.recorded.run_report import report_of, text
from prejit.runtime.verdict import Axis, Verdict

SAME = dict.fromkeys(jax_texts.INGREDIENTS, "0" * 64)
CONDITIONS = {
    "platform": "cpu",
    "backend version": "1",
    "device kind": "cpu",
    "device count": "1",
    "XLA flags": "",
}
PROGRAM = RecordedProgram(
    "jit_score",
    f"jit_score-{'0' * 64}-cache",
    Segment(0, 1, "", 1, ""),
    SAME,
    CONDITIONS,
    ("float32[8]",),
)
FOUND = JaxRequest(
    name="jit_score",
    key=f"jit_score-{'1' * 64}",
    outcome="miss",
    seconds=0.25,
    saved_seconds=None,
    arguments=("float32[8]",),
    ingredients=SAME,
    conditions=CONDITIONS,
    where="serve.py:7",
    not_kept=None,
)
NEEDS = Requirement("cpu", "x86_64", ("avx2", "sse"), "1.2.3")


def why(
    found: JaxRequest,
    *recorded: RecordedProgram,
    jaxlib: str = "1.2.3",
    features: tuple[str, ...] = NEEDS.cpu_features,
) -> tuple[Difference, ...]:
    return differences(found, recorded, NEEDS, jaxlib=jaxlib, cpu_features=features)


def differing(*names: str, **conditions: str) -> JaxRequest:
    return replace(
        FOUND,
        ingredients={**SAME, **dict.fromkeys(names, "1" * 64)},
        conditions={**CONDITIONS, **{k.replace("_", " "): v for k, v in conditions.items()}},
    )


@pytest.mark.parametrize(
    ("found", "expected", "hint"),
    [
        (
            replace(differing(jax_texts.COMPUTATION), arguments=("float32[16]",)),
            "arguments: recorded (float32[8]), found (float32[16])",
            "record this run too",
        ),
        (
            differing(jax_texts.COMPUTATION),
            "computation: recorded another program of these arguments, found this one",
            "a static argument, or a shape that it takes from outside",
        ),
        (
            differing(jax_texts.JAXLIB, jax_texts.COMPUTATION, jax_texts.ACCELERATOR),
            "jaxlib: recorded 1.2.3, found 4.5.6",
            "install jaxlib 1.2.3",
        ),
        (
            differing(jax_texts.XLA_FLAGS, jax_texts.COMPILE_OPTIONS, **{"XLA flags": "--xla_x=1"}),
            "XLA flags: recorded none, found --xla_x=1",
            "set XLA_FLAGS",
        ),
        (
            differing(jax_texts.COMPILE_OPTIONS, device_count="2"),
            "device count: recorded 1, found 2",
            "use as many devices",
        ),
        (
            differing(jax_texts.COMPILE_OPTIONS),
            "compile_options: recorded another one, found this one",
            "compiler options of jit",
        ),
        (
            differing(jax_texts.ACCELERATOR, device_kind="NVIDIA L4"),
            "device kind: recorded cpu, found NVIDIA L4",
            "it adds what this machine needs",
        ),
        (
            differing(jax_texts.ACCELERATOR),
            "CPU features: recorded also avx2, found also avx512f",
            "it adds what this machine needs",
        ),
        (
            differing(jax_texts.BACKEND, backend_version="2"),
            "backend version: recorded 1, found 2",
            "plugin and driver",
        ),
        (
            differing(jax_texts.COMPRESSION),
            "compression: recorded another compression, found this one",
            "install zstandard in both",
        ),
        (
            replace(FOUND, name="jit_other"),
            "program: recorded none of this name, found (float32[8])",
            "record this run too",
        ),
        (
            replace(FOUND, name="jit_other", outcome="refused"),
            "program: recorded none of this name, found (float32[8])",
            "but jax before 0.12 keeps no program that calls Python",
        ),
        (
            replace(FOUND, name="jit_other", not_kept=f"... {jax_texts.CALLBACKS} (...)"),
            "callbacks: recorded none, found (float32[8])",
            "it compiles in every process, unless you take the call out of it",
        ),
        (
            replace(FOUND, outcome="uncached"),
            "jax's cache: recorded on, found off",
            "jax_enable_compilation_cache",
        ),
        (
            replace(FOUND, ingredients={}),
            "cause: recorded 1 of this name, found not known",
            "logging.disable",
        ),
        (FOUND, f"file: recorded {PROGRAM.file}, found not loaded", "warnings of jax"),
    ],
    ids=lambda value: value.partition(",")[0] if isinstance(value, str) else "",
)
def test_the_cause_is_what_differs_first(found: JaxRequest, expected: str, hint: str) -> None:
    jaxlib = "4.5.6" if "4.5.6" in expected else "1.2.3"
    [cause] = why(found, PROGRAM, jaxlib=jaxlib, features=("avx512f", "sse"))
    assert str(cause) == expected
    assert hint in cause.hint


def test_the_nearest_program_is_compared_and_each_ingredient_has_a_cause() -> None:
    """A program differs in each of them once: no two say the same."""
    far = replace(PROGRAM, ingredients=dict.fromkeys(SAME, "2" * 64), arguments=("float32[99]",))
    near = replace(PROGRAM, arguments=("float32[16]",))
    [cause] = why(differing(jax_texts.COMPUTATION), far, near)
    assert cause.recorded == "(float32[16])"
    others = replace(PROGRAM, arguments=("float32[99]",), file=f"a{PROGRAM.file}")
    [cause] = why(differing(jax_texts.COMPUTATION), others, PROGRAM)
    assert cause.name == "computation", "equal arguments are nearer than others"
    causes = [
        str(cause) for name in jax_texts.INGREDIENTS for cause in why(differing(name), PROGRAM)
    ]
    assert len(set(causes)) == len(jax_texts.INGREDIENTS)


def bundle(directory: Path | None) -> RecordedBundle:
    axis = Axis("jaxlib", "equal", "1.2.3", "4.5.6", directory is not None)
    return RecordedBundle(
        "serve", "sha256:" + "a" * 64, Verdict("cpu", (axis,)), NEEDS, (PROGRAM,), directory
    )


MACHINE = Fingerprint("cpu", "x86_64", ("avx2", "sse"), "1.2.3", "", 1, 1)
HIT = replace(FOUND, outcome="hit", seconds=0.5, saved_seconds=3.0)


def process(*requests: JaxRequest, directory: str | None = None) -> WatchedProcess:
    return WatchedProcess({"jax": "1", "jaxlib": "1.2.3", "python": "3"}, directory, requests)


def test_the_report_counts_explains_and_notes(tmp_path: Path) -> None:
    miss = replace(differing(jax_texts.COMPUTATION), arguments=("float32[16]",))
    report = report_of(bundle(tmp_path), [process(HIT, miss), process(HIT, miss)], MACHINE)
    assert (report.hits, len(report.misses), report.processes) == (2, 2, 2)
    [used] = report.programs
    assert (used.hits, used.hit_seconds, used.saved_seconds) == (2, 1.0, 6.0)
    assert (used.misses, used.miss_seconds) == (2, 0.5)
    shown = text(report)
    assert "2 hits in 1.00 s, 2 misses in 0.50 s; 2 processes" in shown
    assert "compiling took 6 s more when it was recorded" in shown
    assert shown.count("miss: jit_score at serve.py:7, 2 times") == 1
    assert shown.count("arguments: recorded (float32[8]), found (float32[16])") == 1
    described = report.described()
    assert (described["hits"], described["missed"]) == (2, 2)
    assert described["misses"][0]["differs"][0]["found"] == "(float32[16])"
    report = report_of(bundle(tmp_path), [], MACHINE)
    assert "no process reported" in text(report)
    own = process(HIT, directory="/tmp/own")
    assert "jax_compilation_cache_dir to /tmp/own: not used" in text(
        report_of(bundle(tmp_path), [own], MACHINE)
    )
    other = replace(own, versions={**own.versions, "jaxlib": "9.9.9"}, found_directory=None)
    assert "the program runs jaxlib 9.9.9 and prejit 1.2.3" in text(
        report_of(bundle(tmp_path), [other], MACHINE)
    )
    shown = text(report_of(bundle(None), [process(HIT)], MACHINE))
    assert "nothing of the bundle was used: jaxlib: needs 1.2.3, found 4.5.6" in shown
    assert "note: the hits are of the program's own cache" in shown
