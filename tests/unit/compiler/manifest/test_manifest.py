"""Manifests: what is right is read as it was meant, and what is wrong is told with its place."""

import copy
import json
import os
import re
import tomllib
from dataclasses import fields

import pytest
from tests.extent import ALL, one_in

from prejit.compiler.manifest.manifest import Generate
from prejit.compiler.manifest.manifest_tables import SECTIONS
from prejit.compiler.manifest.reading import key_lines, read_manifest
from prejit.compiler.manifest.shape_string import parse_shape
from prejit.compiler.manifest.specs import program_specs
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
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("manifests")
    (path / "demo-model").mkdir()
    (path / "checkpoint").mkdir()
    (path / "score.safetensors").touch()
    (path / "LICENSE").touch()
    os.mkfifo(path / "fifo")
    return path


def read(directory, text):
    path = directory / "m.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_manifest(path)


def problems(directory, text):
    with pytest.raises(ManifestError) as caught:
        read(directory, text)
    return str(caught.value).replace(f"{directory}/", "").split("\n")


def test_a_good_manifest_says_what_it_means(directory):
    manifest = read(directory, GOOD)
    assert manifest.bundle.name == "demo"
    assert manifest.resolve(manifest.model.source) == directory / "demo-model"
    assert manifest.generate == Generate(batch=(1, 4), prompt=(16, 64), context=(128,))
    (program,) = manifest.programs
    assert program.args == {"x": "float32[{batch}, 128]"}
    assert program.expand() == (({"batch": 1}, {}), ({"batch": 8}, {}))
    text = GOOD.replace(", 128]", ", {length}]").replace("[8, 1] }", "[8, 1], length = [32, 64] }")
    (program,) = read(directory, text).programs
    assert [bucket for bucket, _ in program.expand()] == [
        {"batch": batch, "length": length} for batch in (1, 8) for length in (32, 64)
    ]
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
    found = read(directory, ENCODER)
    assert found.encode.shapes == ((1, 16), (1, 128), (8, 32))
    assert found.generate is None
    limited = read(directory, GOOD + '[slo]\np95_ms = 300\nmax_slower = "7.5%"\n')
    assert limited.slo == ReleaseLimits(p95_ms=300, max_slower="7.5%")


MISTAKES = r"""
name = "demo" => nmae = "demo"
    2: bundle.nmae: unknown key (did you mean "name"?); allowed: name, license
[generate] => [genrate]
    8: genrate: unknown key (did you mean "generate"?) ...
buckets = { batch = [8, 1] } => pad = ["batch"]\nbucket = { batch = [8, 0] }
    18: program[0].bucket: unknown key (did you mean "buckets"?) ...
    18: program[0].bucket.batch[1]: expected an integer from 1 to 2147483647; found 0
"demo-model" => "demo-modle"
    5: model.source: expected a directory at ... ; found none (did you mean "demo-model"?)
source = "demo-model"\n => (nothing)
    4: model.source: missing; expected a directory, or ...
"demo-model" => "acme/demo-1.5"
    5: model.source: expected a directory at ... ; found none (of the Hugging Face hub it is "hf://acme/demo-1.5")
"demo-model" => "~/demo"
    5: model.source: expected a directory at ... ; found none (write ... : nothing expands ~)
source = "demo-model" => module = "model"
    5: model.module: expected "package.module:attribute"; found "model"
source = "demo-model" => source = "demo-model"\nparams = "score.safetensors"
    6: model.params: expected module beside it; a source has its own weights
source = "demo-model" => module = "m:m"\nparams = "scores.safetensors"
    6: model.params: expected a .safetensors file ... ; found none (did you mean "score.safetensors"?)
source = "demo-model"\ndtype = "float32"\n => module = "m:m"\n[mesh]\ntensor = 2\n
    6: mesh: expected none beside model.module: a mesh splits a model with ...
source = "demo-model"\ndtype = "float32"\n\n[generate]\nbatch = [4, 1]\nprompt = [64, 16]\ncontext = [128]\n => module = "m:m"\n[encode]\nshapes = [[1, 8]]\n
    6: encode: expected [generate]: an encoder of your own is a [[program]]
source = "demo-model"\ndtype = "float32" => module = "m:m"\ndtype = "int4"
    6: model.dtype: expected float32, bfloat16 or int8 for a model of your own; int4 is for a source
source = "demo-model"\ndtype = "float32"\n\n[generate]\n => module = "m:m"\n[generate]\ncache_dtype = "int8"\n
    7: generate.cache_dtype: expected float32 or bfloat16 for a model of your own; int8 is for a source
"float32"\n => "int4"\n[mesh]\ntensor = 2\n
    7: mesh: expected none beside model.dtype int4: words of 8 values are not split
"float32"\n => "float16"\n
    6: model.dtype: expected "float32", "bfloat16", "int8" or "int4"; found "float16" (did you mean "bfloat16"?)
"float32"\n => "int8"\nevaluation = "LICENCE"\n
    7: model.evaluation: expected a file at "LICENCE", ... ; found none (did you mean "LICENSE"?)
"float32"\n => "int8"\naccuracy = false\nevaluation = "LICENSE"\n
    8: model.evaluation: expected none beside accuracy = false, which measures nothing
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
context = [128] => context = [128]\ndraft_tokens = 4\n[draft]\nsource = "demo"\ndtype = "int9"
    14: draft.source: expected a directory at "demo", ... ; found none
    15: draft.dtype: expected "float32", "bfloat16", "int8" or "int4"; found "int9" (did you mean "int8"?)
context = [128] => context = [128]\n[draft]\nsource = "demo-model"
    8: generate.draft_tokens: expected 1 or more, such as 4, beside [draft], ... ; found 0
context = [128] => context = [128]\ndraft_tokens = 4\n[draft]\ndtype = "int8"
    13: draft.source: missing; expected a directory, or a .gguf file, or "hf://org/name@revision"
context = [128] => context = [128]\ndraft_tokens = 4\n[draft]\nsource = "demo-model"\n[mesh]\ntensor = 2
    13: draft: expected none beside [mesh]: a draft model runs on one device
source = "demo-model" => module = "m:m"\n[draft]\nsource = "demo-model"
    6: draft: expected a [model] with a source, and no module, beside it
    10: generate.draft_tokens: expected 1 or more, such as 4, beside [draft], ... ; found 0
context = [128] => context = [128]\n[adapters]\nslots = 0\nrank = 513\n[mesh]\ntensor = 2
    12: adapters: expected none beside [mesh]: several devices take none
    13: adapters.slots: expected an integer of 1 to 256; found 0
    14: adapters.rank: expected an integer of 1 to 512; found 513
source = "demo-model"\ndtype = "float32"\n => module = "m:m"\n[adapters]\nslots = 2\n
    6: adapters: expected a [model] with a source beside it, whose matrices they change
context = [128] => context = [128]\nsource = [16]\ndraft_tokens = 4\n[adapters]\nslots = 2\n[draft]\nsource = "demo-model"
    14: adapters: expected none beside generate.source: an encoder-decoder takes none
    16: draft: expected none beside generate.source: it guesses for prompts alone
context = [128] => context = [128, 8]
    10: generate.prompt: expected one of at most 8, the shortest context; found [64, 16]
[generate]\nbatch = [4, 1]\nprompt = [64, 16]\ncontext = [128]\n => (nothing)
    generate: missing; [model] needs a [generate] table with batch, prompt ...
[model]\nsource = "demo-model"\ndtype = "float32"\n => (nothing)
    model: missing; [generate] needs a [model] table with a source
"score" => "decode"
    14: program[0].name: "decode" is the name of a program of [model]; expected another
{batch} => {bach}
    16: program[0].args.x: undefined bucket variable "bach" (did you mean "batch"?); defined: batch
    17: program[0].buckets.batch: expected a bucket variable that args use; they use bach
float32[{ => flaot32[{
    16: program[0].args.x: expected a dtype (did you mean "float32"?) ...
{ x = "float32[{batch}, 128]" } => "float32[{batch}, 128]"
    16: program[0].args: expected a table of keyword arguments, a ... ; found "float32[{batch}, 128]"
args = { x = "float32[{batch}, 128]" } => (nothing)
    13: program[0].args: missing; expected a table of keyword arguments, a ...
args = { => donate = ["y"]\npad = ["bach"]\nshardings = { x = ["rows"] }\nstatic = { mode = [1, 2, 1] }\nargs = {
    16: program[0].donate[0]: expected an argument, one of "x"; found "y"
    17: program[0].pad[0]: undefined bucket variable "bach" (did you mean "batch"?); defined: batch
    18: program[0].shardings.x: expected a list with an axis of the mesh, ... the axes are data, tensor; found ["rows"]
    19: program[0].static.mode: expected a list of different texts, ... ; found [1, 2, 1]
[[target]] => [mesh]\naxes = { fsdp = 2, tp = 0, "t-p" = 2 }\ntensor = 2\n[[target]]
    21: mesh.axes: expected none beside data, tensor or [generate]: data and tensor split a decoder
    21: mesh.axes.tp: expected a table of names and sizes such as ... ; found {"tp": 0}
    21: mesh.axes.t-p: expected a table of names and sizes such as ... ; found {"t-p": 2}
[[target]] => [mesh]\ndata = 0\ntensor = 99999999999\n[[target]]
    21: mesh.data: expected an integer of 1 to 4096; found 0
    22: mesh.tensor: expected an integer of 1 to 4096; found 99999999999
"score.safetensors" => "score.safetensor"
    18: program[0].params: expected a .safetensors ... ; found none (did you mean "score.safetensors"?)
name = "cpu-x86-64-v3" => name = "cpu-host"\n[[target]]\nname = "cpu-host"
    23: target[1].name: expected each target once; found "cpu-host", which is target[0] too
[[target]] => [target]
    20: target: expected at least one [[target]] table with a name; found {"name": "cpu-x86-64-v3"}
float32[{batch}, 128] => float32[{batch}, 65536, 2147483647]
    16: program[0].args.x: expected at most ... 2[{batch}, 65536, 2147483647]" of 1125899906318336
buckets = { batch => pad = ["batch", "batch"]\ndonate = ["x", "x"]\ncarry = ["x"]\nreads = ["/dev/zero"]\nbuckets = { batch
    17: program[0].pad[1]: expected each once; found "batch" again
    18: program[0].donate[1]: expected each once; found "x" again
    19: program[0].carry: expected repeat beside it, the numbers of steps that one call runs
    20: program[0].reads[0]: expected a file or directory at ... ; found a device or a socket
name = "demo" => name = "demo.report.json"
    2: bundle.name: expected a name that does not end with .report.json, ... ; found "demo.report.json"
"score.safetensors" => "fifo"
    18: program[0].params: expected a .safetensors file or an orbax ... ; found a FIFO
"cpu-x86-64-v3" => "cpu-x86-64-v3"\ngpu = { core_count = 1, bandwidth_bytes = 1, l2_bytes = 1, clock = 1 }
    22: target[0].gpu.clock_mhz: missing; expected an integer
    22: target[0].gpu.clock: unknown key (did you mean "clock_mhz"?) ...
"cpu-x86-64-v3" => "cpu-x86-64-v3"\n[slo]\np95_ms = 0\nmax_slower = "7.5"\nmax_larger = 5\nfirst_tokn_ms = 9\nnought = 0
    23: slo.p95_ms: expected an integer of 1 or more; found 0
    24: slo.max_slower: expected a share such as "5%"; found "7.5"
    25: slo.max_larger: expected a share such as "5%"; found 5
    26: slo.first_tokn_ms: unknown key (did you mean "first_token_ms"?) ...
    27: slo.nought: unknown key; allowed: ...
"""  # noqa: E501
"""What is written in place of what, and the lines of the error, in which ... stands for any text."""
LARGE = (
    ("[128]", f"[128, 0x{'f' * 5000}]", "11: generate.context[1]: ... an integer of 20000 bits"),
    ("[4, 1]", str([*range(1, 2001)]), "8: generate: expected at most 10,000 programs ... 12000"),
    ("[8, 1] }", f"{[*range(1, 10001)]} }}", "13: program[0]: expected at most ... found 10012"),
    ("[{batch},", f"[{'1, ' * 64}{{batch}},", "16: program[0].args.x: expected at most 64 ... 66"),
    ('"float32[{batch}, 128]"', "[" * 200 + '"x"' + "]" * 200, "13: program: nested too deeply"),
)


def mistakes():
    """A good manifest, what is written in place of what, and the lines of the error."""
    for old, new, told in LARGE:
        yield GOOD, old, new, [told]
    for good, text in ((GOOD, MISTAKES), (ENCODER, MISTAKES_OF_ENCODERS)):
        for part in re.split(r"\n(?=\S)", text.strip()):
            change, *lines = part.split("\n    ")
            old, new = (side.replace("\\n", "\n") for side in change.split(" => "))
            yield good, old, new.replace("(nothing)", ""), lines


def is_told(line, expected):
    place = "m.toml:" if expected[0].isdecimal() else "m.toml: "
    pattern = re.escape(place + expected).replace(r"\ \.\.\.\ ", ".*").replace(r"\ \.\.\.", ".*")
    return re.fullmatch(pattern, line) is not None


def test_a_mistake_is_told_with_its_place(directory):
    for good, old, new, expected in mistakes():
        assert good.count(old) == 1, old
        told = problems(directory, good.replace(old, new))
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
MISTAKES_OF_ENCODERS = r"""
[1, 16] => [1, 0]
    8: encode.shapes[1][1]: expected ...
[1, 128]] => [1, 128]]\npacked = [8, 64, 64]\nheads = ["sparse"]
    9: encode.packed: expected none beside heads, ...
    9: encode.packed[0]: expected an integer of 16 to ...
    9: encode.packed[2]: expected each once; found 64 again
[1, 16] => [1, 128]
    8: encode.shapes[2]: expected each shape once; found [1, ...
[[8, 32], [1, 16], [1, 128]] => []
    8: encode.shapes: expected a list of ...
shapes = => shape =
    8: encode.shape: unknown key (did you mean "shapes"?) ...
[encode] => [adapters]\nslots = 2\n[encode]
    7: adapters: expected none beside [encode]: an encoder takes none
[encode] => [mesh]\ntensor = 2\n[encode]
    7: mesh: expected no [encode] beside ...
[encode] => [generate]\nbatch = [1]\nprompt = [8]\ncontext = [16]\n[encode]
    11: encode: expected no [generate] beside it ...
[model]\nsource = "demo-model"\n => (nothing)
    model: missing; [encode] needs a [model] ...
"""


def test_bad_toml_is_told_with_line_and_column(directory):
    assert read(directory, "\ufeff" + GOOD).bundle == read(directory, GOOD).bundle
    for text, place in (
        ('[bundle]\nname "demo"\n', "m.toml:2:6: not TOML: "),
        ("[bundle]\nname = ", "m.toml:2:8: not TOML: "),
        ("[bundle]\nname = 'a'\nname = 'b'\n", "m.toml:3:11: not TOML: "),
        ("x = " + "[" * 5000, "m.toml: not TOML: nested too deeply"),
        ("x = " + "9" * 5000, "m.toml: not TOML: Exceeds the limit"),
        ('[bundle]\nname = "caf\udce9"\n', "m.toml:2:12: expected UTF-8, found byte 0x"),
    ):
        (line,) = problems(directory, text)
        assert line.startswith(place)


def test_a_shape_string_has_a_dtype_of_jax_and_sizes():
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
    from jax._src import dtypes

    # float0 stands for "no gradient" and strings are for constants: neither is an argument.
    no_arguments = {"StringDType()", "[('float0', 'V')]"}
    of_jax = {str(dtype) for dtype in dtypes._jax_dtype_set} - no_arguments
    refused = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}  # XLA:CPU does not take them
    assert of_jax - refused == set(DTYPES)


def toml(value):
    """A value as TOML, whose tables are inline."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {toml(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


ODD = (-1, 1.5, True, "x", "\0", "a/\0/*", "x" * 5000, "fifo", "/dev/zero", [], {}, {"a": [1]})


@pytest.mark.parametrize("section", one_in(3, SECTIONS))
def test_a_key_with_any_value_is_read_or_refused(directory, section):
    more = {"encode": {"shapes": [[1, 4]]}, "mesh": {}, "slo": {}, "adapters": {}}
    more["draft"] = {"source": "checkpoint"}
    more["library"] = [{"path": "LICENSE", "handlers": {"a": "b"}}]
    for place, key in enumerate(fields(SECTIONS[section][0])):
        whole = copy.deepcopy({**tomllib.loads(GOOD), **more})
        table = whole[section][0] if isinstance(whole[section], list) else whole[section]
        values = [value for odd in ODD for value in (odd, [odd], {"a": [odd]})]
        for value in values if ALL else values[place % 8 :: 8]:
            table[key.name] = value
            text = "".join(f"{name} = {toml(whole[name])}\n" for name in whole)
            try:
                read(directory, text)
            except ManifestError as error:
                refused = error
            else:
                continue
            places = str(refused).split("\n")
            assert all(line.startswith(f"{directory}/m.toml") for line in places)
            assert refused.hint


def test_lines_of_keys_are_found_in_every_kind_of_toml():
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
        **{("a", "b"): 2, ("c d", "e"): 4, ("c d", "e", 1, "f"): 6, ("c d", "e", 1, "g"): 6},
        **{("t", "u", "v"): 10, ("t", "w", 1, "z", "q"): 17},
    }
    assert (lines["t", "w", 1], lines["t", "w", 1, "y", 1, 1]) == (13, 15)
