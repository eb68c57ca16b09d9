"""Manifests: what is right is read as it was meant, and what is wrong is told with its place."""

from __future__ import annotations

import json
import os
import re
import string
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import ALL, examples

from prejit.compiler.manifest.manifest import Generate, Manifest
from prejit.compiler.manifest.manifest_tables import SECTIONS
from prejit.compiler.manifest.reading import key_lines, read_manifest
from prejit.compiler.manifest.shape_string import parse_shape
from prejit.compiler.manifest.specs import program_specs
from prejit.compiler.targets.target_table import names as target_names
from prejit.compiler.targets.target_table import target
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import DTYPES
from prejit.runtime.format.release_limits import ReleaseLimits

GOOD = """\
[bundle]
name = "demo"

[model]
source = "demo-model"
dtype = "float32"

[generate]
batch = [4, 1]
prompt = [64, 16]
context = [128]

[[program]]
name = "score"
function = "my_package.model:score"
args = { x = "float32[{batch}, 128]" }
buckets = { batch = [8, 1] }
params = "score.safetensors"

[[target]]
name = "cpu-x86-64-v3"
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifests")
    (path / "demo-model").mkdir()
    (path / "checkpoint").mkdir()
    (path / "score.safetensors").touch()
    (path / "LICENSE").touch()
    os.mkfifo(path / "fifo")
    return path


def read(directory: Path, text: str) -> Manifest:
    path = directory / "m.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_manifest(path)


def read_or_refuse(directory: Path, text: str) -> None:
    """Anything but a manifest or a ManifestError with a place and a hint is a failure."""
    try:
        read(directory, text)
    except ManifestError as error:
        refused = error
    else:
        return
    assert all(line.startswith(f"{directory}/m.toml") for line in str(refused).split("\n"))
    assert refused.hint


def problems(directory: Path, text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        read(directory, text)
    return str(caught.value).replace(f"{directory}/", "").split("\n")


def test_a_good_manifest_says_what_it_means(directory: Path) -> None:
    manifest = read(directory, GOOD)
    assert manifest.bundle.name == "demo"
    assert manifest.resolve(manifest.model.source) == directory / "demo-model"
    assert manifest.generate == Generate(batch=(1, 4), prompt=(16, 64), context=(128,))
    (program,) = manifest.programs
    assert program.args == {"x": "float32[{batch}, 128]"}
    assert program.expand() == (({"batch": 1}, {}), ({"batch": 8}, {}))
    text = GOOD.replace(", 128]", ", {length}]").replace("[8, 1] }", "[8, 1], length = [32, 64] }")
    (program,) = read(directory, text).programs
    sizes = [tuple(bucket.values()) for bucket, _ in program.expand()]
    assert sizes == [(1, 32), (1, 64), (8, 32), (8, 64)]
    text = GOOD.replace("{batch}, ", "").replace("buckets = { batch = [8, 1] }\n", "")
    assert read(directory, text).programs[0].expand() == (({}, {}),)
    assert manifest.targets == (target("cpu-x86-64-v3"),)
    extra = 'static = { mode = ["fast", "exact mode"], on = [true] }\n'
    manifest = read(directory, GOOD.replace("buckets = {", f"{extra}buckets = {{"))
    specs = [spec for spec in program_specs(manifest) if spec.section]
    assert [spec.name for spec in specs] == [
        f"score/batch{batch}-mode={mode}-on=True" for batch in (1, 8) for mode in ("fast", "1")
    ]
    assert specs[1].static == {"mode": "exact mode", "on": True}


MISTAKES = r"""
name = "demo" => nmae = "demo"
    2: bundle.nmae: unknown key (did you mean "name"?); allowed: name, license
[generate] => [genrate]
    8: genrate: unknown key (did you mean "generate"?) ...
buckets = { batch = [8, 1] } => pad = ["batch"]\nbucket = { batch = [8, 0] }
    18: program[0].bucket: unknown key (did you mean "buckets"?) ...
    18: program[0].bucket.batch[1]: expected an integer from 1 to 2147483647; found 0
"demo" => "Demo"
    2: bundle.name: expected lowercase letters and digits with single . _ - ... ; found "Demo"
"demo-model" => "demo-modle"
    5: model.source: expected a directory at ... ; found none (did you mean "demo-model"?)
"demo-model" => "hf://gpt2"
    5: model.source: expected a directory, or "hf://org/name@revision"; found "hf://gpt2"
source = "demo-model"\n => (nothing)
    4: model.source: missing; expected a directory, or ...
source = "demo-model" => module = "model"
    5: model.module: expected "package.module:attribute"; found "model"
source = "demo-model" => source = "demo-model"\nparams = "score.safetensors"
    6: model.params: expected module beside it, whose parameters they are; a source has its own weights
source = "demo-model" => module = "m:m"\nparams = "scores.safetensors"
    6: model.params: expected a .safetensors file ... ; found none (did you mean "score.safetensors"?)
source = "demo-model"\ndtype = "float32"\n => module = "m:m"\n[mesh]\ntensor = 2\n
    6: mesh: expected none beside model.module: a mesh splits a model with ...
source = "demo-model"\ndtype = "float32"\n\n[generate]\nbatch = [4, 1]\nprompt = [64, 16]\ncontext = [128]\n => module = "m:m"\n[encode]\nshapes = [[1, 8]]\n
    6: encode: expected [generate]: a model of your own is a decoder; an encoder is a [[program]]
"float32"\n => "float16"\n
    6: model.dtype: expected "float32", "bfloat16" or "int8"; found "float16" (did you mean "bfloat16"?)
context = [128] => context = [128]\ncache_dtype = "int8"
    12: generate.cache_dtype: expected "float32" or "bfloat16"; found "int8"
"float32"\n => "int8"\nevaluation = "LICENCE"\n
    7: model.evaluation: expected a file at "LICENCE", ... ; found none (did you mean "LICENSE"?)
"float32"\n => "int8"\naccuracy = false\nevaluation = "LICENSE"\n
    8: model.evaluation: expected none beside accuracy = false, which measures nothing
[128]\n => [128]\n[[program]]\nname = "f"\nfunction = "m:f"\nargs = {}\nstatic = { mode = [1.5] }\nmask = 2.5\n
    16: program[0].static.mode[0]: expected a text, an integer or a boolean; found 1.5
    17: program[0].mask: expected the name or the position of an argument; found 2.5
[4, 1] => [0, true,\n  "x"]
    9: generate.batch[0]: expected an integer from 1 to 2147483647; found 0
    9: generate.batch[1]: expected an integer from 1 to 2147483647; found true
    10: generate.batch[2]: expected an integer from 1 to 2147483647; found "x"
[4, 1] => [4, 1, 4]
    9: generate.batch[2]: expected each size once; found 4 again
[64, 16] => [64, 256]
    10: generate.prompt[1]: expected at most 128, the longest context; found 256
context = [128] => context = [128]\ndraft_tokens = 65
    12: generate.draft_tokens: expected an integer of 0 to 64, below every context; found 65
context = [128] => context = [128, 16]\ndraft_tokens = 16
    12: generate.draft_tokens: expected an integer of 0 to 64, below every context; found 16
context = [128] => context = [128, 8]
    10: generate.prompt: expected one of at most 8, the shortest context; found [64, 16]
[generate]\nbatch = [4, 1]\nprompt = [64, 16]\ncontext = [128]\n => (nothing)
    generate: missing; [model] needs a [generate] table with batch, prompt ...
[model]\nsource = "demo-model"\ndtype = "float32"\n => (nothing)
    model: missing; [generate] needs a [model] table with a source
"score" => "decode"
    14: program[0].name: "decode" is the name of a program of [model]; expected another
my_package.model:score => my_package.model
    15: program[0].function: expected "package.module:attribute", or the ... ; found "my_package.model"
{batch} => {bach}
    16: program[0].args.x: undefined bucket variable "bach" (did you mean "batch"?); defined: batch
    17: program[0].buckets.batch: expected a bucket variable that args use; they use bach
float32[{ => flaot32[{
    16: program[0].args.x: expected a dtype (did you mean "float32"?) ...
{ x = "float32[{batch}, 128]" } => "float32[{batch}, 128]"
    16: program[0].args: expected a table of keyword arguments, a ... ; found "float32[{batch}, 128]"
args = { x = "float32[{batch}, 128]" } => (nothing)
    13: program[0].args: missing; expected a table of keyword arguments, a ...
args = { => donate = ["y"]\nargs = {
    16: program[0].donate[0]: expected an argument, one of "x"; found "y"
args = { => repeat = [5]\nargs = {
    16: program[0].repeat: expected carry beside it, which names the arguments that come back
args = { => pad = ["bach"]\nargs = {
    16: program[0].pad[0]: undefined bucket variable "bach" (did you mean "batch"?); defined: batch
args = { => mask = "x"\nargs = {
    16: program[0].mask: expected pad beside it, which says what is padded
args = { => shardings = { x = ["rows"] }\nargs = {
    16: program[0].shardings.x: expected a list with "data", "tensor" or "" ... ; found ["rows"]
args = { => static = { mode = [1, 2, 1] }\nargs = {
    16: program[0].static.mode: expected a list of different texts, ... ; found [1, 2, 1]
"score.safetensors" => "score.safetensor"
    18: program[0].params: expected a .safetensors ... ; found none (did you mean "score.safetensors"?)
"cpu-x86-64-v3" => "cpu-x86-64-V3"
    21: target[0].name: unknown target "cpu-x86-64-V3" ... (did you mean "cpu-x86-64-v3"?) ...
name = "cpu-x86-64-v3" => name = "cpu-host"\n[[target]]\nname = "cpu-host"
    23: target[1].name: expected each target once; found "cpu-host", which is target[0] too
[[target]] => [target]
    20: target: expected at least one [[target]] table with a name; found {"name": "cpu-x86-64-v3"}
float32[{batch}, 128] => float32[{batch}, 65536, 2147483647]
    16: program[0].args.x: expected at most ... 2[{batch}, 65536, 2147483647]" of 1125899906318336
buckets = { batch => pad = ["batch", "batch"]\ndonate = ["x", "x"]\nbuckets = { batch
    17: program[0].pad[1]: expected each once; found "batch" again
    18: program[0].donate[1]: expected each once; found "x" again
buckets = { batch => carry = ["x"]\nbuckets = { batch
    17: program[0].carry: expected repeat beside it, the numbers of steps that one call runs
name = "demo" => name = "demo.report.json"
    2: bundle.name: expected a name that does not end with .report.json, ... ; found "demo.report.json"
"score.safetensors" => "fifo"
    18: program[0].params: expected a .safetensors file or an orbax ... ; found a FIFO
buckets = { batch => reads = ["/dev/zero"]\nbuckets = { batch
    17: program[0].reads[0]: expected a file or directory at ... ; found a device or a socket
"cpu-x86-64-v3" => "cpu-x86-64-v3"\ngpu = { core_count = 1, bandwidth_bytes = 1, l2_bytes = 1, clock = 1 }
    22: target[0].gpu.clock_mhz: missing; expected an integer
    22: target[0].gpu.clock: unknown key (did you mean "clock_mhz"?) ...
"""  # noqa: E501
"""What is written in place of what, and the lines of the error, in which ... stands for any text."""
LARGE = (
    ("[128]", f"[128, 0x{'f' * 5000}]", "11: generate.context[1]: ... an integer of 20000 bits"),
    ("[4, 1]", str([*range(1, 2001)]), "8: generate: expected at most 10,000 programs ... 12000"),
    ("[8, 1] }", f"{[*range(1, 10001)]} }}", "13: program[0]: expected at most ... found 10012"),
    ("[{batch},", f"[{'1, ' * 64}{{batch}},", "16: program[0].args.x: expected at most 64 ... 66"),
    ('"float32[{batch}, 128]"', "[" * 200 + '"x"' + "]" * 200, "13: program: nested too deeply"),
)


def mistakes() -> Iterator[tuple[str, str, list[str]]]:
    for old, new, told in LARGE:
        yield old, new, [told]
    for part in re.split(r"\n(?=\S)", MISTAKES.strip()):
        change, *lines = part.split("\n    ")
        old, new = (side.replace("\\n", "\n") for side in change.split(" => "))
        yield old, new.replace("(nothing)", ""), lines


def is_told(line: str, expected: str) -> bool:
    place = "m.toml:" if expected[0].isdecimal() else "m.toml: "
    pattern = re.escape(place + expected).replace(r"\ \.\.\.\ ", ".*").replace(r"\ \.\.\.", ".*")
    return re.fullmatch(pattern, line) is not None


def test_a_mistake_is_told_with_its_place(directory: Path) -> None:
    for old, new, expected in mistakes():
        assert GOOD.count(old) == 1, old
        told = problems(directory, GOOD.replace(old, new))
        assert len(told) == len(expected), new
        assert all(map(is_told, told, expected)), f"{new}\n{told}\n{expected}"
    assert problems(directory, "") == [
        "m.toml: bundle: missing; expected a [bundle] table with a name",
        "m.toml: target: missing; expected at least one [[target]] table with a name",
        "m.toml: nothing to build; expected a [model] with [generate] or [encode], or a [[program]]",
    ]


ENCODER = """\
[bundle]
name = "encoder"

[model]
source = "demo-model"

[encode]
shapes = [[8, 32], [1, 16], [1, 128]]

[[target]]
name = "cpu-x86-64-v3"
"""


def test_an_encoders_shapes_come_back_ascending_and_mistakes_are_told(directory: Path) -> None:
    found = read(directory, ENCODER)
    assert found.encode.shapes == ((1, 16), (1, 128), (8, 32))
    assert found.generate is None
    decoder = "[generate]\nbatch = [1]\nprompt = [8]\ncontext = [16]\n[encode]"
    for old, new, told in (
        ("[1, 16]", "[1, 0]", "m.toml:8: encode.shapes[1][1]: expected "),
        ("[1, 16]", "[1, 128]", "m.toml:8: encode.shapes[2]: expected each shape once; found [1, "),
        ("[[8, 32], [1, 16], [1, 128]]", "[]", "m.toml:8: encode.shapes: expected a list of"),
        ("shapes =", "shape =", 'm.toml:8: encode.shape: unknown key (did you mean "shapes"?)'),
        ("[encode]", "[mesh]\ntensor = 2\n[encode]", "m.toml:7: mesh: expected no [encode] beside"),
        ("[encode]", decoder, "m.toml:11: encode: expected no [generate] beside it"),
        (
            '[model]\nsource = "demo-model"\n',
            "",
            "m.toml: model: missing; [encode] needs a [model]",
        ),
    ):
        assert ENCODER.count(old) == 1
        lines = problems(directory, ENCODER.replace(old, new))
        assert any(line.startswith(told) for line in lines), told


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[bundle]\nname "demo"\n', "m.toml:2:6: not TOML: "),
        ("[bundle]\nname = ", "m.toml:2:8: not TOML: "),
        ("[bundle]\nname = 'a'\nname = 'b'\n", "m.toml:3:11: not TOML: "),
        ("x = " + "[" * 5000, "m.toml: not TOML: nested too deeply"),
        ("x = " + "9" * 5000, "m.toml: not TOML: Exceeds the limit"),
    ],
)
def test_bad_toml_is_told_with_line_and_column(directory: Path, text: str, place: str) -> None:
    (line,) = problems(directory, text)
    assert line.startswith(place)
    path = directory / "latin1.toml"
    path.write_bytes(b'[bundle]\nname = "caf\xe9"\n')
    with pytest.raises(ManifestError, match=r"latin1.toml:2:12: expected UTF-8, found byte 0xe9"):
        read_manifest(path)


def test_a_shape_string_has_a_dtype_and_sizes() -> None:
    assert parse_shape("float32[{batch}, 128]", {"batch": 8}) == ("float32", (8, 128), False)
    assert parse_shape("int32[]", {}) == ("int32", (), False)
    assert parse_shape(" bfloat16 [ 2 ]", {}) == ("bfloat16", (2,), False)
    assert parse_shape("weak float32[]", {}) == ("float32", (), True)
    for text in (
        *("", "float32", "float32[", "float32[2,]", "float32[-1]", "float32[0]", "f32[2]", "[2]"),
        *("float32[2]x", "float32[{batch]", "float32[{b-c}]", "float32[99999999999]", "float32[٣]"),
    ):
        with pytest.raises(ManifestError, match="expected"):
            parse_shape(text, {"batch": 1})
    with pytest.raises(ManifestError, match='undefined bucket variable "bach"'):
        parse_shape("float32[{bach}]", {"batch": 1})


def test_no_dtype_of_jax_is_missing_and_none_is_invented() -> None:
    from jax._src import dtypes

    # float0 stands for "no gradient" and strings are for constants: neither is an argument.
    of_jax = {str(dtype) for dtype in dtypes._jax_dtype_set} - {
        "StringDType()",
        "[('float0', 'V')]",
    }
    refused = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}  # XLA:CPU does not take them
    assert of_jax - refused == set(DTYPES)


# Random manifests. A small TOML writer: JSON's text is TOML's but for tables.


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value)


def toml_key(key: str) -> str:
    bare = key and not set(key) - set(string.ascii_letters + string.digits + "_-")
    return key if bare else json.dumps(key)


def toml(data: dict[str, Any]) -> str:
    return "".join(f"{toml_key(key)} = {toml_value(value)}\n" for key, value in data.items())


SIZES = st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=4, unique=True)
WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """A [[program]] that uses every variable that it defines."""
    # Three extents make an argument, and at most 2**40 elements.
    sizes = st.lists(st.integers(1, 2**13), min_size=1, max_size=3, unique=True)
    buckets = draw(st.dictionaries(WORDS, sizes, max_size=3))
    extents = st.one_of(
        st.integers(1, 4096).map(str),
        *([st.sampled_from([f"{{{v}}}" for v in buckets])] if buckets else []),
    )
    leaves = st.builds(
        lambda dtype, shape: f"{dtype}[{', '.join(shape)}]",
        st.sampled_from(DTYPES),
        st.lists(extents, max_size=3),
    )
    every_variable = "float32[" + ", ".join(f"{{{name}}}" for name in buckets) + "]"
    tree = draw(
        st.recursive(
            leaves,
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(string.printable, max_size=5), inner, max_size=3)
            ),
            max_leaves=5,
        )
    )
    program = {
        "name": draw(WORDS.filter(lambda name: name not in ("prefill", "decode"))),
        "function": "a.b:c",
        "args": draw(st.sampled_from([{"t": tree, "all": every_variable}, [tree, every_variable]])),
    }
    if buckets or draw(st.booleans()):
        program["buckets"] = buckets
    if draw(st.booleans()):
        program["params"] = draw(st.sampled_from(["score.safetensors", "checkpoint"]))
    return program


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """Data of a right manifest."""
    data: dict[str, Any] = {
        "bundle": {"name": draw(st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True))}
    }
    if draw(st.booleans()):
        data["bundle"]["license"] = "LICENSE"
    unique = {"unique_by": lambda item: item["name"]}
    found = draw(st.lists(programs(), max_size=2, **unique))
    if not found or draw(st.booleans()):
        sources = st.sampled_from(["demo-model", "hf://org/name", "hf://org/name@v1.0"])
        own = st.fixed_dictionaries(
            {"module": st.just("a.b:c")},
            optional={
                "source": sources,
                "params": st.sampled_from(["score.safetensors", "checkpoint"]),
            },
        )
        data["model"] = draw(st.fixed_dictionaries({"source": sources}) | own)
        generate = {name: draw(SIZES) for name in ("batch", "prompt", "context")}
        shortest = min(generate["prompt"])
        contexts = {size for size in generate["context"] if size >= shortest}
        generate["context"] = sorted({*contexts, max(generate["prompt"])})
        data["generate"] = generate
    if found:
        data["program"] = found
    single = [name for name in target_names() if target(name).device_count == 1]
    names = draw(st.lists(st.sampled_from(single), min_size=1, unique=True))
    data["target"] = [{"name": name} for name in names]
    return data


@given(data=manifests())
@settings(max_examples=examples(30, 60), deadline=None)
def test_a_right_manifest_is_read_as_meant(directory: Path, data: dict[str, Any]) -> None:
    manifest = read(directory, toml(data))
    assert manifest.bundle.name == data["bundle"]["name"]
    assert [found.name for found in manifest.targets] == [e["name"] for e in data["target"]]
    assert (manifest.model is None) == ("model" not in data)
    for name in ("batch", "prompt", "context") if manifest.generate else ():
        assert getattr(manifest.generate, name) == tuple(sorted(data["generate"][name]))
    for program, expected in zip(manifest.programs, data.get("program", []), strict=True):
        assert program.args == expected["args"]
        assert program.params == expected.get("params")
        buckets = {k: tuple(sorted(v)) for k, v in expected.get("buckets", {}).items()}
        assert program.buckets == buckets


VALUES = st.recursive(
    st.one_of(
        st.integers(-(2**70), 2**70),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8).filter(lambda text: text.isprintable()),
        st.sampled_from(["", "\0", "/", "..", "cpu-host", "float32[{batch}]", "hf://a/b", "[0]"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    return [p for key, item in pairs for p in [(*path, key), *places(item, (*path, key))]]


@given(data=manifests(), draw=st.data())
@settings(max_examples=examples(50, 150), deadline=None)
def test_a_manifest_with_one_thing_changed_is_read_or_refused(
    directory: Path, data: dict[str, Any], draw: st.DataObject
) -> None:
    *parents, last = draw.draw(st.sampled_from(places(data)))
    node: Any = data
    for key in parents:
        node = node[key]
    match draw.draw(st.sampled_from(["replace", "delete", "add"])):
        case "replace":
            node[last] = draw.draw(VALUES)
        case "delete":
            del node[last]
        case "add" if isinstance(node, dict):
            node[draw.draw(WORDS)] = draw.draw(VALUES)
        case _:
            node.append(draw.draw(VALUES))
    read_or_refuse(directory, toml(data))


ODD = (-1, 1.5, True, "x", "\0", "a/\0/*", "x" * 5000, "fifo", "/dev/zero", [], {}, {"a": [1]})


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_with_any_value_is_read_or_refused(directory: Path, section: str) -> None:
    for place, key in enumerate(fields(SECTIONS[section][0])):
        whole = {
            **tomllib.loads(GOOD),
            "encode": {"shapes": [[1, 4]]},
            "library": [{"path": "LICENSE", "handlers": {"a": "b"}}],
            "mesh": {},
            "slo": {},
        }
        table = whole[section][0] if isinstance(whole[section], list) else whole[section]
        for turn, odd in enumerate(ODD, place):
            forms = (odd, [odd], {"a": [odd]})
            for value in forms if ALL else forms[turn % 3 : turn % 3 + 1]:
                table[key.name] = value
                read_or_refuse(directory, toml(whole))


def test_limits_of_a_release_are_read_and_each_wrong_one_is_named(directory: Path) -> None:
    path = directory / "slo.toml"
    path.write_text(GOOD + '[slo]\np95_ms = 300\nmax_slower = "7.5%"\n')
    assert read_manifest(path).slo == ReleaseLimits(p95_ms=300, max_slower="7.5%")
    wrong = '[slo]\np95_ms = 0\nmax_slower = "7.5"\nmax_larger = 5\nfirst_tokn_ms = 9\n'
    path.write_text(GOOD + wrong)
    with pytest.raises(ManifestError) as caught:
        read_manifest(path)
    lines = [line.partition(": ")[2] for line in str(caught.value).splitlines()]
    lines = [line.partition("; allowed")[0] for line in lines]
    assert lines == [
        "slo.p95_ms: expected an integer of 1 or more; found 0",
        'slo.max_slower: expected a share such as "5%"; found "7.5"',
        'slo.max_larger: expected a share such as "5%"; found 5',
        'slo.first_tokn_ms: unknown key (did you mean "first_token_ms"?)',
    ]


@given(
    at=st.integers(0, len(GOOD)),
    length=st.integers(0, 12),
    inserted=st.text("[]{}\"'=.,#\n\\ab1-\0\N{EURO SIGN}", max_size=4),
)
@settings(max_examples=examples(60, 300), deadline=None)
def test_a_damaged_text_is_refused(directory: Path, at: int, length: int, inserted: str) -> None:
    read_or_refuse(directory, GOOD[:at] + inserted + GOOD[at + length :])


def test_lines_of_keys_are_found_in_every_kind_of_toml() -> None:
    text = '''\
# a = 1
a.b = """
[no] "quoted" \\""" more"""   # the end
"c d".'e' = [
  1, # comment ]
  { f = ']', g = [2] },
]
[t . u]
when = 1979-05-27 07:32:00
v = \'\'\'
x = 1\'\'\'
[[t.w]]
[[t.w]]
y = [[], [3,
4]]
[t.w.z]
q = "[\\"]"
'''
    lines = key_lines(text)
    assert {path: lines[path] for path in lines if path[-1] in ("b", "e", "f", "g", "v", "q")} == {
        ("a", "b"): 2,
        ("c d", "e"): 4,
        ("c d", "e", 1, "f"): 6,
        ("c d", "e", 1, "g"): 6,
        ("t", "u", "v"): 10,
        ("t", "w", 1, "z", "q"): 17,
    }
    assert lines["t", "w", 1] == 13
    assert lines["t", "w", 1, "y", 1, 1] == 15


@given(data=manifests())
@settings(max_examples=examples(15, 40), deadline=None)
def test_lines_are_found_for_every_key_of_a_manifest(data: dict[str, Any]) -> None:
    lines = key_lines(toml(data))
    assert set(places(data)) <= set(lines)
    for number, key in enumerate(data, start=1):
        assert {line for path, line in lines.items() if path[0] == key} == {number}
