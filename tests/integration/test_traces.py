"""Builds of the user's code that changed nothing, or one line: what they import, trace and compile."""

import json
import shutil

import pytest
from tests import own_decoders
from tests.manifests import functions_manifest, write_manifest

FUNCTIONS = {
    "f": 'function = "one:f"; args = ["float32[3]"]',
    "g": 'function = "one:g"; args = ["float32[3]"]',
    "h": 'function = "two:h"; args = ["float32[{n}]"]; buckets = { n = [1, 2] }',
}
NOOP = """
import json, sys
from prejit.runtime.__main__ import main

status = main(sys.argv[1:])
heavy = {"jax", "flax", "equinox", "one", "two", "own_decoders"} & sys.modules.keys()
print(json.dumps({"status": status, "heavy": sorted(heavy)}))
"""


def noop(python, run, build_cache, directory, manifest):
    arguments = ("build", directory / manifest, "-o", directory / "out", "--json", "--no-measure")
    done = python(NOOP, *arguments, PREJIT_CACHE=str(build_cache))
    *built, imported = done.stdout.splitlines()
    [found] = json.loads("\n".join(built))
    assert json.loads(imported) == {"status": 0, "heavy": []}
    return dict(found)


@pytest.mark.thorough
def test_a_build_that_changes_nothing_imports_neither_jax_nor_the_users_code(
    run, python, build_cache, tmp_path
):
    functions_manifest(tmp_path / "functions.toml", FUNCTIONS)
    one = "def f(x):\n    return x * 11\n\n\ndef g(x):\n    return x * 13\n"
    (tmp_path / "one.py").write_text(one)
    (tmp_path / "two.py").write_text("def h(x):\n    return x * 17\n")
    arguments = ("build", tmp_path / "functions.toml", "-o", tmp_path / "out", "--json")
    run(*arguments, quick=False)
    found = noop(python, run, build_cache, tmp_path, "functions.toml")
    assert (found["compiled"], found["cached"], found["written"]) == (0, 4, False)
    (tmp_path / "one.py").write_text(one.replace("13", "14"))
    [changed] = json.loads(run(*arguments, quick=False).stdout)
    assert (changed["compiled"], changed["cached"]) == (1, 3)


@pytest.mark.thorough
def test_a_decoder_of_the_user_is_not_imported_again(run, python, build_cache, tmp_path):
    shutil.copy(own_decoders.__file__, tmp_path / "own_decoders.py")
    module = 'module = "own_decoders:equinox_decoder"'
    more = {"prompt": (8,), "context": (32,), "targets": ("cpu-x86-64-v3",)}
    write_manifest(tmp_path / "own.toml", model=module, **more)
    options = ("-o", tmp_path / "out", "--no-measure")
    run("build", tmp_path / "own.toml", *options, quick=False)
    found = noop(python, run, build_cache, tmp_path, "own.toml")
    assert (found["compiled"], found["written"]) == (0, False)
    run("plan", tmp_path / "own.toml")  # all is cached: its exit status is 0
    with (tmp_path / "own_decoders.py").open("a") as file:
        file.write("\nUNUSED = 1\n")
    planned = run("plan", tmp_path / "own.toml", "--json", status=8)
    rows = json.loads(planned.stdout)["programs"]
    assert {row["state"] for row in rows} == {"traced at build"}
    assert all("module own_decoders: sha256:" in row["why"] for row in rows)
