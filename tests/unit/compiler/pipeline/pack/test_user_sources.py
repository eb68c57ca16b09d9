"""The sources of a bundle: every module that its functions import, and nothing that is installed."""

from prejit.compiler.manifest.manifest import Manifest, Program
from prejit.compiler.pipeline.pack.user_sources import SourceContent, digest_now, manifest_sources
from prejit.runtime.base.files import digest_of


def write(directory, **files):
    for name, content in files.items():
        path = directory / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (directory / "m.toml").write_text("")
    program = Program("f", fn="own.first:f", args=["float32[2]"], params="steps")
    return Manifest("m", programs=[program], targets=["cpu-host"], path=directory / "m.toml")


def test_modules_are_followed_through_every_kind_of_import(tmp_path):
    manifest = write(
        tmp_path,
        own__first="import numpy, own.second\nfrom . import third\nfrom .deep.er import x\n",
        own__second="def f():\n    from beside import y\n",
        own__third="broken syntax (",
        own__deep__er="from ..fourth import z",
        own__fourth="import own.first",
        beside="import json",
        unused="",
    )
    (tmp_path / "own" / "deep" / "package.txt").touch()
    (tmp_path / "own" / "__init__.py").touch()
    found = {each.name for each in manifest_sources(manifest)}
    assert found == {
        *("beside.py", "own/__init__.py", "own/deep/er.py", "own/first.py"),
        *("own/fourth.py", "own/second.py", "own/third.py"),
    }


def test_a_directory_of_parameters_is_one_source(tmp_path):
    manifest = write(tmp_path, own__first="")
    steps = tmp_path / "steps" / "1"
    steps.mkdir(parents=True)
    for name in ("a", "b"):
        (steps / name).write_text(name)
    first, source = manifest_sources(manifest)
    assert first == SourceContent("manifest", "own/first.py", digest_of(b""))
    assert source.name == "steps/"
    assert digest_now(source, tmp_path) == source.digest
    (steps / "b").rename(steps / "c")
    assert digest_now(source, tmp_path) != source.digest
    assert digest_now(source, tmp_path / "elsewhere") is None
