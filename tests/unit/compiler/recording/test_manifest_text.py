"""The manifest of a recording: which calls are buckets of one section, and what is said of the others."""

import itertools
import math
import tomllib
from pathlib import Path

from prejit.compiler.recording.manifest_text import examples_path, recorded_manifest
from prejit.runtime.recorded.watched_command import JaxRequest

PATH = Path("my.serve-1.toml")


def array(shape):
    return {"kind": "array", "of": shape}


def call(*shapes, name="serve:score", **more):
    arguments = [["xyz"[place], array(shape)] for place, shape in enumerate(shapes)]
    none = {"by_place": False, "static": {}, "fixed": {}, "donated": [], "trouble": ""}
    return {"name": name, "home": "/app", "arguments": arguments, **none, **more}


def made(*calls):
    requests = [
        JaxRequest(
            "jit_score", None, "miss", 0.1, None, None, {}, {}, "serve.py:7", None, None, call
        )
        for call in calls
    ]
    return recorded_manifest("serve", requests, PATH)


def programs(*calls):
    return tomllib.loads(made(*calls).text).get("program", [])


def test_calls_of_other_sizes_are_buckets():
    one, two = call("float32[8,3]", "int32[8]"), call("float32[2,3]", "int32[2]")
    apart = [call(f"float32[{sizes}]") for sizes in ("1,4", "1,8", "2,4")]
    decided = [call(f"float32[{n}]", f"float32[{n // 3}]") for n in (4, 5, 6)]
    named = [call(arguments=[["batch", array(f"float32[{size}]")]]) for size in (1, 2)]
    for calls, *found in (
        ([call("float32[8,8]")] * 2, ({"x": "float32[8, 8]"}, {})),
        # Sizes that are equal in every call are one variable, those that change apart are several.
        ([one, two], ({"x": "float32[{batch}, 3]", "y": "int32[{batch}]"}, {"batch": [2, 8]})),
        (apart, ({"x": "float32[{batch}, {length}]"}, {"batch": [1, 2], "length": [4, 8]})),
        (  # n and n + 1: a section would build n = 4 with 9, which no call had and code may not take
            [call(f"float32[{n}]", f"float32[{n + 1}]") for n in (4, 8)],
            *(({"x": f"float32[{n}]", "y": f"float32[{n + 1}]"}, {}) for n in (4, 8)),
        ),
        (  # a size that another decides is not combined with it
            decided,
            ({"x": "float32[{batch}]", "y": "float32[1]"}, {"batch": [4, 5]}),
            ({"x": "float32[6]", "y": "float32[2]"}, {}),
        ),
        (named, ({"batch": "float32[{batch2}]"}, {"batch2": [1, 2]})),  # no name of an argument
    ):
        assert [(each["args"], each.get("buckets", {})) for each in programs(*calls)] == found


def test_static_values_are_combined_and_other_dtypes_are_sections_of_their_own():
    both = itertools.product((1, 2), ("fast", "exact"))
    calls = [call(f"float32[{n}]", static={"mode": mode, "deep": True}) for n, mode in both]
    [found] = programs(*calls)
    assert found["buckets"] == {"batch": [1, 2]}
    assert found["static"] == {"mode": ["fast", "exact"], "deep": [True]}
    both = programs(call("float32[1]", static={"n": 1}), call("float32[1]", static={"n": True}))
    assert [each["static"] for each in both] == [{"n": [1, True]}]
    shapes = ("float32[8]", "int32[8]", "float32[8,1]")
    found = programs(*map(call, shapes), call("float32[8]", donated=["x"]))
    assert [each["name"] for each in found] == ["score", "score-2", "score-3", "score-4"]
    assert found[3]["donate"] == ["x"]


def test_what_toml_cannot_write_is_made_by_python():
    third = {"kind": "new", "of": "fractions:Fraction", "constants": [["numerator", "=3"]]}
    others = [{"kind": "none"}, {"kind": "number", "of": "complex"}, third]
    others += [{"kind": "object", "of": "math:pi"}, {"kind": "weak", "of": "float32[]"}]
    parts = [[array(f"float32[{n}]"), *others] for n in (1, 2)]
    trees = [{"kind": "tuple", "items": [*enumerate(each)]} for each in parts]
    found = made(*(call(arguments=[["pair", each]]) for each in trees))
    [program] = tomllib.loads(found.text)["program"]
    assert program["args"] == "my_serve_1_examples:score_args"
    assert examples_path(PATH) == Path("my_serve_1_examples.py")
    namespace = {}
    exec(found.examples, namespace)
    example = namespace["score_args"](batch=3)
    assert example["pair"][0].shape == (3,)
    assert example["pair"][1:5] == (None, 0j, 3, math.pi)
    assert example["pair"][5].weak_type


def test_what_is_left_out_is_named_with_its_reason():
    for given, reason in (
        (call(name=None, trouble="no name was found"), "no name was found"),
        (call("float32[0]"), "expected an integer from 1"),
        (call("float0[3]"), "expected a dtype"),
    ):
        found = made(given)
        assert found.programs == 0
        [line] = found.left_out
        assert line.startswith("jit_score at serve.py:7: ")
        assert reason in line
        assert f"#   {line}\n" in found.text
        assert "program" not in tomllib.loads(found.text)
        assert "#   2 x jit_score\n" in made(None, None, given).text, "functions of jax are counted"
    assert made(call("float32[1]"), call("int32[1]", home=None)).homes == {Path("/app")}
