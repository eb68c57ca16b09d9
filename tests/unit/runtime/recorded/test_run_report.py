"""A miss names the ingredient of jax's key that differs, both values, and what to do."""

import re
from dataclasses import replace

import pytest

from prejit.runtime.format.bundle_schema import RecordedProgram, Segment
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.recorded.hook import jax_texts
from prejit.runtime.recorded.recorded_bundle import RecordedBundle
from prejit.runtime.recorded.run_report import differences, report_of, text
from prejit.runtime.recorded.watched_command import JaxRequest, WatchedProcess
from prejit.runtime.verdict import Axis, Verdict

SAME = dict.fromkeys(jax_texts.INGREDIENTS, "0" * 64)
CONDITIONS = {"platform": "cpu", "backend version": "1", "device kind": "cpu", "device count": "1"}
CONDITIONS |= {"XLA flags": ""}
FILE, SEGMENT = f"jit_score-{'0' * 64}-cache", Segment(0, 1, "", 1, "")
PROGRAM = RecordedProgram("jit_score", FILE, SEGMENT, SAME, CONDITIONS, ("float32[8]",))
FOUND = JaxRequest(
    **{"name": "jit_score", "key": f"jit_score-{'1' * 64}", "outcome": "miss", "seconds": 0.25},
    **{"saved_seconds": None, "arguments": ("float32[8]",), "ingredients": SAME},
    **{"conditions": CONDITIONS, "where": "serve.py:7", "not_kept": None},
)
NEEDS = Requirement("cpu", "x86_64", ("avx2", "sse"), "1.2.3")


def why(found, *recorded, jaxlib="1.2.3", more="avx2"):
    return differences(found, recorded, NEEDS, jaxlib=jaxlib, cpu_features=(more, "sse"))


def differing(*names, **conditions):
    others = {**CONDITIONS, **{k.replace("_", " "): v for k, v in conditions.items()}}
    ingredients = {**SAME, **dict.fromkeys(names, "1" * 64)}
    return replace(FOUND, ingredients=ingredients, conditions=others)


T = jax_texts
SHAPES, ANOTHER = "(float32[8])", differing(T.COMPUTATION)
OTHER_SHAPE = replace(ANOTHER, arguments=("float32[16]",))
OTHER_JAXLIB = differing(T.JAXLIB, T.COMPUTATION, T.ACCELERATOR)
OTHER_FLAGS = differing(T.XLA_FLAGS, T.COMPILE_OPTIONS, **{"XLA flags": "--xla_x=1"})
NO_NAME = replace(FOUND, name="jit_other")
OTHER_PROGRAM = "another program of these arguments"
CAUSES = [
    (OTHER_SHAPE, f"arguments: {SHAPES} | (float32[16]) => record this run too"),
    (ANOTHER, f"computation: {OTHER_PROGRAM} | this one => a static argument, or"),
    (OTHER_JAXLIB, "jaxlib: 1.2.3 | 4.5.6 => install jaxlib 1.2.3"),
    (OTHER_FLAGS, "XLA flags: none | --xla_x=1 => set XLA_FLAGS"),
    (differing(T.COMPILE_OPTIONS, device_count="2"), "device count: 1 | 2 => as many devices"),
    (differing(T.COMPILE_OPTIONS), "compile_options: another one | this one => options of jit"),
    (differing(T.ACCELERATOR, device_kind="NVIDIA L4"), "device kind: cpu | NVIDIA L4 => it adds"),
    (differing(T.ACCELERATOR), "CPU features: also avx2 | also avx512f => it adds what this"),
    (differing(T.BACKEND, backend_version="2"), "backend version: 1 | 2 => plugin and driver"),
    (differing(T.COMPRESSION), "compression: another compression | this one => zstandard in both"),
    (NO_NAME, f"program: none of this name | {SHAPES} => record this run too"),
    (replace(FOUND, outcome="uncached"), "jax's cache: on | off => jax_enable_compilation_cache"),
    (replace(FOUND, ingredients={}), "cause: 1 of this name | not known => logging.disable"),
    (FOUND, f"file: {PROGRAM.file} | not loaded => warnings of jax"),
]
"""What was found; its cause, what is recorded | what was found => a part of the hint."""


@pytest.mark.parametrize(("found", "expected"), CAUSES, ids=[text[:25] for _, text in CAUSES])
def test_the_cause_is_what_differs_first(found, expected):
    name, recorded, now, hint = re.split(": | \\| | => ", expected, maxsplit=3)
    jaxlib = "4.5.6" if now == "4.5.6" else "1.2.3"
    [cause] = why(found, PROGRAM, jaxlib=jaxlib, more="avx512f")
    assert str(cause) == f"{name}: recorded {recorded}, found {now}"
    assert hint in cause.hint


def test_the_nearest_program_is_compared_and_each_ingredient_has_a_cause():
    """A program differs in each of them once: no two say the same."""
    far = replace(PROGRAM, ingredients=dict.fromkeys(SAME, "2" * 64), arguments=("float32[99]",))
    near = replace(PROGRAM, arguments=("float32[16]",))
    [cause] = why(ANOTHER, far, near)
    assert cause.recorded == "(float32[16])"
    others = replace(PROGRAM, arguments=("float32[99]",), file=f"a{PROGRAM.file}")
    [cause] = why(ANOTHER, others, PROGRAM)
    assert cause.name == "computation", "equal arguments are nearer than others"
    causes = {str(cause) for name in SAME for cause in why(differing(name), PROGRAM)}
    assert len(causes) == len(SAME)


def bundle(directory):
    axis = Axis("jaxlib", "equal", "1.2.3", "4.5.6", directory is not None)
    return RecordedBundle(
        "serve", "sha256:" + "a" * 64, Verdict("cpu", (axis,)), NEEDS, (PROGRAM,), directory
    )


MACHINE = Fingerprint("cpu", "x86_64", ("avx2", "sse"), "1.2.3", "", 1, 1)
HIT = replace(FOUND, outcome="hit", seconds=0.5, saved_seconds=3.0)


def process(*requests, directory=None):
    return WatchedProcess({"jax": "1", "jaxlib": "1.2.3", "python": "3"}, directory, requests)


def test_the_report_counts_explains_and_notes(tmp_path):
    report = report_of(bundle(tmp_path), [process(HIT, OTHER_SHAPE)] * 2, MACHINE)
    [used] = report.programs
    assert (used.hits, used.hit_seconds, used.saved_seconds) == (2, 1.0, 6.0)
    assert (used.misses, used.miss_seconds) == (2, 0.5)
    shown, described = text(report), report.described()
    assert "2 hits in 1.00 s, 2 misses in 0.50 s; 2 processes" in shown
    assert "compiling took 6 s more when it was recorded" in shown
    assert shown.count("miss: jit_score at serve.py:7, 2 times") == 1
    assert shown.count("arguments: recorded (float32[8]), found (float32[16])") == 1
    assert (described["hits"], described["missed"]) == (2, 2)
    assert described["misses"][0]["differs"][0]["found"] == "(float32[16])"
    own = process(HIT, directory="/tmp/own")
    other = replace(own, versions={**own.versions, "jaxlib": "9.9.9"}, found_directory=None)
    unused = "nothing of the bundle was used: jaxlib: needs 1.2.3, found 4.5.6"
    for directory, processes, said in (
        (tmp_path, [], "no process reported"),
        (tmp_path, [own], "jax_compilation_cache_dir to /tmp/own: not used"),
        (tmp_path, [other], "the program runs jaxlib 9.9.9 and prejit 1.2.3"),
        (None, [process(HIT)], unused),
        (None, [process(HIT)], "note: the hits are of the program's own cache"),
    ):
        assert said in text(report_of(bundle(directory), processes, MACHINE))
