"""The command line of the server side: what scripts parse, exit codes, and errors that help."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from tests.recipes import with_trees

from prejit.runtime import __main__
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.names import TITLE
from prejit.runtime.machine.fingerprint import Fingerprint

X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)


@pytest.fixture
def x_file(tmp_path):
    np.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


@pytest.fixture
def foreign(tmp_path):
    """A saved fingerprint of a machine that is none of the targets."""
    path = tmp_path / "foreign.json"
    path.write_bytes(to_json(dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")))
    return path


def run(*argv):
    """In this process: for what needs none of its own."""
    return __main__.main([str(argument) for argument in argv])


def test_inspect_and_verify_say_what_is_there(settled_dir, recipe, said):
    shown = said("inspect", settled_dir)
    for part in (
        *("example", "cpu-host: fits this machine", "cpu-x86-64-v3", "score/b8", "nest", "jaxlib"),
        *("executables.v1+zstd", "weights.v1.safetensors", "temporary memory"),
    ):
        assert part in shown
    plain = json.loads(said("inspect", settled_dir, "--json"))
    assert plain["digest"] == digest_of(recipe.assemble()[0])
    assert [t["config"]["target"] for t in plain["targets"]] == ["cpu-host", "cpu-x86-64-v3"]
    programs = plain["targets"][0]["config"]["programs"]
    assert [p["name"] for p in programs] == ["score/b2", "score/b8", "nest", "tick"]
    assert programs[0]["arguments"] == ['["x"] float32[2,16]']
    titles = [layer["annotations"][TITLE] for layer in plain["targets"][0]["layers"]]
    assert titles == ["programs.xla", "LICENSE", "weights.safetensors", "programs.stablehlo"]
    digest = digest_of(recipe.assemble()[0])
    shown = said("verify", settled_dir)
    assert "ok: 2 targets, 8 programs" in shown
    assert digest in shown
    plain = json.loads(said("verify", settled_dir, "--json"))
    assert (plain["digest"], plain["targets"], plain["programs"]) == (digest, 2, 8)
    assert plain["bytes"] > 10_000


def test_explain_shows_every_axis(settled_dir, foreign, said):
    shown = said("explain", settled_dir)
    assert "this machine loads cpu-host: nothing is compiled" in shown
    assert shown.count(" cpu_features ") == shown.count(" architecture ") == 2
    assert json.loads(said("explain", settled_dir, "--json"))["target"] == "cpu-host"
    other = ("explain", settled_dir, "--fingerprint", foreign)
    shown = said(*other, status=3)
    assert f"the machine of {foreign} is none of the targets" in shown
    assert shown.count(" NO ") == 2
    plain = json.loads(said(*other, "--json", status=3))
    axes = [[axis["name"] for axis in v["axes"] if not axis["matches"]] for v in plain["verdicts"]]
    assert (plain["target"], axes) == (None, [["jaxlib"]] * 2)


def nest(bundle, tmp_path, half="tree.half"):
    np.save(tmp_path / "half.npy", np.array([1, 2, 3], ml_dtypes.bfloat16))
    np.save(tmp_path / "count.npy", np.ones((2, 2), np.int32))
    np.save(tmp_path / "flag.npy", np.True_)
    given = {half: "half", "tree.pair.0": "count", "tree.pair.1": "flag"}
    files = [a for name, file in given.items() for a in ("--arg", f"{name}={tmp_path}/{file}.npy")]
    return run("call", bundle, "nest", *files, "-o", tmp_path / "out")


def test_missing_damaged_foreign_end_differently(settled_dir, recipe, foreign, x_file, tmp_path):
    (tmp_path / "empty").mkdir()
    bundle_dir = recipe.only("cpu-host").write(tmp_path / "damaged")
    blob = max((bundle_dir / "blobs" / "sha256").iterdir(), key=lambda file: file.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    call = ("call", settled_dir, "score", "--arg", f"x={x_file}", "-o", tmp_path / "out")
    for argv, status in (
        *((("inspect", tmp_path / "none"), 6), (("inspect", x_file), 6)),
        *((("inspect", tmp_path / "empty"), 4), (("verify", bundle_dir), 4)),
        *((("inspect", bundle_dir), 0), (("explain", bundle_dir), 0)),
        (("explain", settled_dir, "--fingerprint", tmp_path / "none"), 6),
        (("explain", settled_dir, "--fingerprint", x_file), 4),
        ((*call, "--on-mismatch", "error"), 0),
        ((*call, "--on-mismatch", "error", "--fingerprint", foreign), 3),
        (("call", bundle_dir, *call[2:]), 4),
        (("call", settled_dir, "scores", *call[3:]), 2),
        (("generate", settled_dir, "--prompt", "x"), 2),
        (("generate", settled_dir, "--prompt-ids", "1"), 2),
        (("generate", settled_dir, "--prompt-ids", "1,x"), 2),
    ):
        assert run(*argv) == status, argv


def test_an_error_is_a_sentence_and_a_hint_with_the_nearest_path(tmp_path, ran):
    captured = ran("verify", tmp_path / "none", status=6)
    assert captured.out == ""
    head, blank, hint = captured.err.splitlines()
    assert head.startswith(f"error[store]: {tmp_path}/none: cannot open a bundle")
    assert blank == ""
    assert hint.startswith("hint: ")
    (tmp_path / "artifacts" / "encoder").mkdir(parents=True)
    (tmp_path / "artifacts" / "encodr.json").touch()
    for path in ("artifacts/encodr", "artfacts/encodr/", "artifacts/ENCODER"):
        for command, *rest in (("inspect",), ("encode", "a"), ("explain",)):
            said = ran(command, f"{tmp_path}/{path}", *rest, status=6).err
            assert said.endswith(f"hint: did you mean {tmp_path / 'artifacts' / 'encoder'}?\n")
    assert "or `prejit copy` from a .tar" in ran("inspect", tmp_path / "x" / "x", status=6).err


def test_call_says_where_time_went(settled_dir, x_file, tmp_path, prejit):
    call = ("call", settled_dir, "score", "--arg", f"x={x_file}", "-o", tmp_path / "out")
    assert run(*call) == 0
    start = json.loads(prejit(*call, "--json").stdout)["start"]
    seconds = {name: value for name, value in start.items() if name.endswith("_seconds")}
    assert seconds.pop("total_seconds") == pytest.approx(sum(seconds.values()))
    assert seconds.pop("verifying_seconds") == 0
    # Nothing of a command is nobody's: what it does itself is next to nothing.
    assert seconds.pop("other_seconds") < max(0.2, sum(seconds.values()) / 3)
    assert min(seconds.values()) > 0
    assert start["receipt_bytes"] > start["hashed_bytes"] == 0
    line, verified, *_ = prejit(*call, "--stats").stderr.splitlines()
    parts = "process, imports, reading, verifying, loading, first run, other"
    assert re.sub(r" \d+", "", line) == f"start ms: {parts}"
    assert re.fullmatch(r"verified 0\.0 MB; receipts for \d+\.\d MB", verified)


def test_an_option_that_is_0_or_empty_is_given(decoder_dir, settled_dir, ran):
    for option in ("max-new-tokens", "top-p", "repetition-penalty"):
        given = ("generate", decoder_dir, "--prompt-ids", "1,2", f"--{option}", "0")
        captured = ran(*given, status=2)
        assert captured.out == ""
        assert f"error[usage]: {option.replace('-', '_')}: expected" in captured.err
    for name, option in (("explain", "fingerprint"), ("bench", "baseline"), ("bench", "against")):
        ran(name, settled_dir, f"--{option}", "", status=6)


def test_call_refuses_arguments_that_make_no_sense(settled_dir, x_file, tmp_path, capsys):
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "text.npy").write_bytes(b"text")
    (tmp_path / "short.npy").write_bytes(x_file.read_bytes()[:-5])
    np.savez(tmp_path / "many.npz", x=X)
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], dtype=object))
    argv = ("call", settled_dir, "score", "-o", tmp_path / "out")
    for arguments, status in (
        *((["x"], 2), (["=x.npy"], 2), ([f"x={tmp_path}/none.npy"], 6), ([f"x={tmp_path}"], 6)),
        *(([f"x={tmp_path}/{name}"], 6) for name in ("empty.npy", "text.npy", "short.npy")),
        *(([f"x={tmp_path}/{name}"], 6) for name in ("many.npz", "pickled.npy")),
        ([f"x={x_file}", f"x={x_file}"], 2),
        ([f"x={x_file}", f"x.deep={x_file}"], 2),
        ([f"x.deep={x_file}", f"x={x_file}"], 2),
        ([f"x={x_file}", f"0={x_file}"], 2),
        ([f"x..y={x_file}"], 2),
    ):
        given = [part for text in arguments for part in ("--arg", text)]
        assert run(*argv, *given) == status, arguments
        assert "hint: " in capsys.readouterr().err or arguments in (["x"], ["=x.npy"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ['["..","..","escaped"]', '["{tmp}/escaped"]'])
def test_results_stay_in_their_place(path, recipe, tmp_path, x_file):
    """Their names come out of the bundle, and whoever wrote it need not be a friend."""
    path = path.replace("{tmp}", str(tmp_path))

    def change(config):
        first = dataclasses.replace(config.programs[0], results=(f"{path} float32[2,4]",))
        return dataclasses.replace(config, programs=(first, *config.programs[1:]))

    def files():
        return {each for each in tmp_path.rglob("*") if "runtime-cache" not in each.parts}

    forged = recipe.configured(change).write(tmp_path / "forged")
    before, out = files(), tmp_path / "a" / "b"
    assert run("call", forged, "score", "--arg", f"x={x_file}", "-o", out) == 0
    [made] = out.iterdir()
    assert files() - before == {out.parent, out, made}


def test_call_takes_nested_arguments_with_dots_in_keys(settled_dir, recipe, tmp_path, capsys):
    def named(old, new):
        def renamed(program):
            texts = tuple(text.replace(old, new) for text in program.arguments)
            return with_trees(dataclasses.replace(program, arguments=texts))

        def change(config):
            return dataclasses.replace(config, programs=tuple(map(renamed, config.programs)))

        return recipe.configured(change).write(tmp_path / "named")

    assert nest(settled_dir, tmp_path) == 0
    assert "sums.1.npy  int32[2, 2]" in capsys.readouterr().out
    found = {file.name: np.load(file) for file in (tmp_path / "out").iterdir()}
    assert found.keys() == {"scalar.npy", "sums.0.npy", "sums.1.npy"}
    assert found["sums.1.npy"].tolist() == [[2, 2], [2, 2]]
    bundle = named('["tree","half"]', '["tree","h.0/x"]')
    assert nest(bundle, tmp_path, "tree.h%2E0%2Fx") == 0
    for wrong in ("tree.h.0/x", "tree.half"):
        assert nest(bundle, tmp_path, wrong) == 2
        error = capsys.readouterr().err
        assert f"--arg: expected a name of an argument of 'nest', found {wrong!r}" in error
        assert "they are: tree.h%2E0%2Fx, tree.pair.0, tree.pair.1; a dot" in error
    seven = named('"half"', '"7"')  # a key that looks like a number is a key
    assert nest(seven, tmp_path, "tree.7") == 0


def test_a_reader_that_goes_away_ends_it_quietly_and_a_full_disk_is_told(settled_dir):
    command = f"exec {sys.executable} -m prejit.runtime inspect {settled_dir}"
    read, write = os.pipe()
    os.close(read)  # gone before it begins
    try:
        done = subprocess.run(command, shell=True, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141
    run = functools.partial(subprocess.run, shell=True, capture_output=True)
    full, closed = run(f"{command} >/dev/full"), run(f"{command} >&-")
    assert full.returncode not in (0, 120)
    assert b"No space left" in full.stderr
    assert b"Traceback" not in full.stderr
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_a_full_disk_behind_stderr_changes_no_result(decoder_dir, foreign):
    generate = f"generate {decoder_dir} --prompt-ids 1 --max-new-tokens 2 --fingerprint {foreign}"
    for command, status in ((f"{generate} --stats", 0), ("inspect missing", 6)):
        shell = f"exec {sys.executable} -m prejit.runtime {command} 2>/dev/full"
        done = subprocess.run(shell, shell=True, stdout=subprocess.PIPE)
        assert done.returncode == status
        assert bool(done.stdout) == (status == 0)


def test_a_command_that_flushes_stdout_runs_where_it_is_closed(settled_dir, tmp_path):
    (tmp_path / "here.json").write_bytes(to_json(Fingerprint.current()))
    (tmp_path / "damaged.json").write_text("{}")
    command = f"exec {sys.executable} -m prejit.runtime fleet {settled_dir} {tmp_path} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 6
    assert done.stderr.startswith(
        "error[store]: expected 2 fingerprints, found 1 that cannot be read"
    )


def test_output_is_readable_without_unicode(make_recipe, tmp_path, prejit):
    path = make_recipe(name="modèle-日本").write(tmp_path / "b")
    done = prejit("inspect", path, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert "cpu-host" in done.stdout


def test_what_a_bundle_says_moves_no_cursor(make_recipe, tmp_path, capsys):
    control = "\x1b[2J\x9b2J\b\b\r\u202e"
    evil = f"{control}all is well"

    def change(config):
        versions = {**config.versions, evil: evil}
        first = dataclasses.replace(config.programs[0], name=f"score/{evil}")
        programs = (first, *config.programs[1:])
        return dataclasses.replace(config, versions=versions, programs=programs)

    path = make_recipe(name=evil).configured(change).write(tmp_path / "b")
    array = tmp_path / "x.npy"
    np.save(array, X[:1])
    call = ("call", path, "score", "--arg", f"x={array}", "-o", tmp_path / "out")
    for argv in (("inspect", path), ("verify", path), ("explain", path), call):
        run(*argv)
        captured = capsys.readouterr()
        found = {each for each in control if not each.isprintable()}
        assert not found & {*captured.out, *captured.err}, argv
    assert "all is well" in captured.err


@pytest.mark.parametrize(("command", "house"), [("build", "compiler"), ("serve", "server")])
def test_a_wheel_is_named_where_it_is_missing(command, house, run_python):
    run = f"from prejit.runtime.__main__ import main\nsys.exit(main(['{command}', 'x.toml']))"
    done = run_python(f"import sys\nsys.modules['prejit.{house}'] = None\n{run}", status=2)
    assert done.stderr.startswith(f"error[usage]: `prejit {command}` needs prejit's {house}")
    assert f"hint: pip install 'prejit[{house}]'" in done.stderr
