"""The digest of our own code in keys: all code that decides a result, no other code, and no prose."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from prejit.compiler.store import prejit_code
from prejit.compiler.store.prejit_code import KnownDigests, code_digest
from prejit.compiler.store.source_file import definitions
from prejit.runtime.base.files import digest_of

Edit = Callable[[str, Callable[[str], str]], None]
READ = cache(definitions)
"""Reads each text once in all tests."""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at, unwanted = tmp_path_factory.mktemp("sources"), shutil.ignore_patterns("*.so", "*.pyc")
    return {
        name: Path(shutil.copytree(root, at / name, ignore=unwanted))
        for name, root in prejit_code._ROOTS.items()
    }


@pytest.fixture
def edit(copied: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Changes the source of a module, in a copy of ours, until the end of the test."""
    monkeypatch.setattr(prejit_code, "_ROOTS", copied)
    monkeypatch.setattr(prejit_code, "definitions", READ)
    originals: dict[Path, str] = {}

    def change(module: str, how: Callable[[str], str]) -> None:
        file = prejit_code._file(module)
        before = file.read_text()
        originals.setdefault(file, before)
        after = how(before)
        assert after != before, "the edit changes nothing"
        file.write_text(after)
        forget()

    forget()
    yield change
    for file, content in originals.items():
        file.write_text(content)
    forget()


def forget() -> None:
    for cached in (
        *(prejit_code.code_digest, prejit_code.reached, prejit_code._known),
        *(prejit_code._content, prejit_code._links, prejit_code._module, prejit_code._is_module),
    ):
        cached.cache_clear()


STEPS = {
    name: roots
    for name, roots in vars(prejit_code).items()
    if name.isupper() and not name.startswith("_") and isinstance(roots, tuple)
}
"""The roots of each step's code."""
MODELS = {"LOWERING", "WEIGHTS", "ACCURACY"}
LOWERED = {"LOWERING", "USER_DECODERS"}
CHANGES = [
    ("compiler.models.families.decoders:TextDecoder", MODELS),
    ("compiler.models.sharding:shardings", {"LOWERING"}),
    (
        "compiler.models.quantizing:quantized",
        {"WEIGHTS", "OWN_WEIGHTS", "OWN_ACCURACY", "USER_DECODERS"},
    ),
    ("compiler.lowering.sampling_programs:sample", LOWERED),
    ("compiler.lowering.user.function_lowering:lower_function", {"USER_FUNCTIONS"}),
    ("compiler.pipeline.lower.program_lowering:put_lowered", {*LOWERED, "USER_FUNCTIONS"}),
    ("compiler.checkpoint.checkpoint:Checkpoint", {"WEIGHTS", "ACCURACY"}),
    ("compiler.pipeline.pack.bundle_files:_entry", {"PACKING"}),
    ("compiler.pipeline.measure.model_comparison:of_decoder", {"ACCURACY", "OWN_ACCURACY"}),
    ("compiler.pipeline.measure.golden_child:NUDGE", {"GOLDEN"}),
    ("compiler.pipeline.measure.sizes_child:_NUDGE", {"SIZES"}),
    ("runtime.machine.fingerprint:Fingerprint", {"GOLDEN"}),
    ("compiler.compile.worker.worker_compile:ZSTD_LEVEL", {"COMPILING"}),
    ("compiler.compile.worker.disassembly:in_order", {"COMPILING"}),
    ("runtime.device.portable:compile_ahead", {"COMPILING"}),
    ("runtime.device._jax_parts:compile_options", {"COMPILING", "GOLDEN", "SIZES"}),
    ("compiler.native.kernel_library:_LINK_FLAGS", {"KERNELS"}),
    ("compiler.checkpoint.tokenizer_check:", {"TOKENIZER"}),
]
"""What decides results makes them again, and no others."""


def test_a_change_of_our_code_makes_again_what_it_decides_and_nothing_else(edit: Edit) -> None:
    before = {name: code_digest(*roots) for name, roots in STEPS.items()}
    for place, steps in CHANGES:
        module, _, name = place.partition(":")
        line = f"{name} = {name}" if name else "print(1)"
        edit(f"prejit.{module}", lambda source, line=line: f"{source}\n{line}\n")
        assert not name or f"prejit.{place}" in defined(f"prejit.{module}"), f"{place} is gone"
        after = {name: code_digest(*roots) for name, roots in STEPS.items()}
        assert {step for step in STEPS if after[step] != before[step]} == steps, place
        before = after


def defined(module: str) -> set[str]:
    """The names that a module defines twice: of which an edit added the second."""
    named = prejit_code._module(module).named
    return {f"{module}:{name}" for name, found in named.items() if len(found) == 2}


MAIN, HELPER, OTHER = (f"prejit.compiler.{name}" for name in ("main", "base.helper", "base.other"))
SOURCES = {
    MAIN: """
        from typing import TYPE_CHECKING
        from prejit.compiler.base.helper import double

        if TYPE_CHECKING:
            from prejit.compiler.base.other import Other

        def run(x):
            if x < 0:
                raise ValueError(f"expected 0 or more, found {x}")
            return double(x) + len("text")
        """,
    HELPER: "def double(x):\n    return 2 * x\n",
    OTHER: "def double(x):\n    return x + x\n\nclass Other:\n    pass\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    monkeypatch.setattr(prejit_code, "_ROOTS", {"prejit.compiler": tmp_path})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "__init__.py").touch()
    for name, source in SOURCES.items():
        prejit_code._file(name).write_text(textwrap.dedent(source))

    def change(module: str, how: Callable[[str], str]) -> None:
        file = prejit_code._file(module)
        before = file.read_text()
        assert how(before) != before, "the edit changes nothing"
        file.write_text(how(before))
        forget()

    forget()
    yield change
    forget()


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda source: source.replace(old, new)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (MAIN, "def run", '"""What it is for: (."""\n\n\ndef run'),
        (MAIN, "return double(x) +", "return double(  # both\n        x) +"),
        (MAIN, "expected 0 or more, found {x}", "cannot double {x}"),
        (MAIN, '"text"', "'te' 'xt'"),
        (HELPER, "    return", "    'Return twice x.'\n    return"),
        (OTHER, "x + x", "x - x"),
    ],
)
def test_prose_changes_no_digest(module: str, old: str, new: str, package: Edit) -> None:
    before = code_digest(MAIN)
    package(module, replaced(old, new))
    assert code_digest(MAIN) == before


def test_all_that_runs_changes_the_digest(package: Edit) -> None:
    found = [code_digest(MAIN)]
    for module, old, new in (
        (MAIN, "x < 0", "x < 1"),
        (MAIN, '"text"', '"texts"'),
        (MAIN, "ValueError", "TypeError"),
        (HELPER, "2 *", "3 *"),
        (MAIN, "base.helper", "base.other"),
        (MAIN, "    return", "return"),
    ):
        package(module, replaced(old, new))
        found.append(code_digest(MAIN))
    assert len({*found}) == len(found)


def test_what_an_import_runs_is_in_all_digests(package: Edit) -> None:
    before = code_digest(f"{MAIN}:run")
    package(HELPER, lambda source: f"{source}\nprint(1)\n")
    assert code_digest(f"{MAIN}:run") != before
    with pytest.raises(ValueError, match=r"found nothing at prejit\.compiler\.main:gone"):
        code_digest(f"{MAIN}:gone")


def test_a_root_package_has_a_digest_and_is_in_no_other(package: Edit) -> None:
    """A user's module may import it."""
    root = prejit_code._file("prejit.compiler")
    root.write_text("A = 1\n")
    forget()
    before = code_digest("prejit.compiler"), code_digest(MAIN)
    package("prejit.compiler", replaced("1", "2"))
    assert code_digest("prejit.compiler") != before[0]
    assert code_digest(MAIN) == before[1]


def test_code_beside_what_is_used_changes_no_digest(package: Edit) -> None:
    package(HELPER, lambda source: source + "\ndef triple(x):\n    return 3 * x\n")
    before = code_digest(f"{MAIN}:run")
    package(HELPER, replaced("3 *", "4 *"))
    assert code_digest(f"{MAIN}:run") == before
    package(HELPER, replaced("2 *", "triple(1) - 1 *"))
    used = code_digest(f"{MAIN}:run")
    package(HELPER, replaced("4 *", "5 *"))
    assert code_digest(f"{MAIN}:run") != used


@pytest.mark.parametrize(
    ("statement", "name", "use"),
    [
        ("from prejit.compiler.base.other import double", "double", "return {}(x)"),
        ("from prejit.compiler.base.other import double as two", "two", "return [*map({}, [x])]"),
        ("from prejit.compiler.base import other", "other.double", "return f'{{{}(x)}}'"),
        (
            *("import prejit.compiler.base.other as another", "another.double"),
            "def inner(y={}):\n        return y(x)\n    return inner()",
        ),
    ],
)
def test_code_is_found_by_any_import(statement: str, name: str, use: str, package: Edit) -> None:
    for place in ("top", "inside"):
        body = f"    {use.format(name)}\n"
        inside = f"    {statement}\n" if place == "inside" else ""
        top = f"{statement}\n" if place == "top" else ""
        package(MAIN, lambda _, t=top, i=inside, b=body: f"{t}\ndef run(x):\n{i}{b}")
        before = code_digest(f"{MAIN}:run")
        package(OTHER, replaced("class Other:\n    pass\n", "class Other:\n    x = 1\n"))
        assert code_digest(f"{MAIN}:run") == before
        package(OTHER, replaced("x + x", "x - -x"))
        assert code_digest(f"{MAIN}:run") != before
        package(OTHER, lambda _: textwrap.dedent(SOURCES[OTHER]))


DIGEST = digest_of(b"code")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sources that were written just now count as settled, and the cache is empty."""
    monkeypatch.setattr(prejit_code, "SETTLED_SECONDS", -1.0)
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def sources(tmp_path: Path, settled: None) -> dict[str, Path]:
    (tmp_path / "code" / "inner").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("A = 1\n")
    (tmp_path / "code" / "inner" / "b.py").write_text("B = 1\n")
    return {"prejit.code": tmp_path / "code"}


def test_a_later_process_finds_what_was_kept(sources: dict[str, Path]) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    (sources["prejit.code"] / "__pycache__").mkdir()
    (sources["prejit.code"] / "__pycache__" / "a.pyc").write_bytes(b"")  # no source
    assert KnownDigests(sources).get("step") == DIGEST
    assert KnownDigests(sources).get("other step") is None


def _rewrite_with_its_old_times(path: Path) -> None:
    status = path.stat()
    path.write_text("B = 2\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda code: (code / "a.py").write_text("A = 2\n"),
        lambda code: _rewrite_with_its_old_times(code / "inner" / "b.py"),
        lambda code: (code / "inner" / "c.py").write_text(""),
        lambda code: (code / "inner" / "b.py").unlink(),
        lambda code: (code / "a.py").rename(code / "z.py"),
    ],
    ids=["written", "written, with the times of before", "added", "removed", "renamed"],
)
def test_a_source_that_changed_ends_all(
    change: Callable[[Path], object], sources: dict[str, Path]
) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    change(sources["prejit.code"])
    assert KnownDigests(sources).get("step") is None


def test_sources_that_changed_just_now_or_a_file_that_others_may_write_are_not_believed(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change could leave the same times."""
    with monkeypatch.context() as patch:
        patch.setattr(prejit_code, "SETTLED_SECONDS", 60.0)
        KnownDigests(sources).keep("step", DIGEST)
    assert KnownDigests(sources).get("step") is None
    KnownDigests(sources).keep("step", DIGEST)
    [file] = (tmp_path / "cache").rglob("*.json")
    file.chmod(0o666)
    assert KnownDigests(sources).get("step") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: b"",
        lambda held: b"[]",
        lambda held: json.dumps({**held, "digests": {"step": "sha256:0"}}).encode(),
        lambda held: json.dumps({**held, "sources": "0"}).encode(),
    ],
    ids=["empty", "a list", "no digest", "other sources"],
)
def test_a_damaged_file_counts_as_missing(
    damage: Callable[[dict[str, object]], bytes], sources: dict[str, Path], tmp_path: Path
) -> None:
    KnownDigests(sources).keep("step", DIGEST)
    [file] = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(damage(json.loads(file.read_bytes())))
    assert KnownDigests(sources).get("step") is None
    KnownDigests(sources).keep("step", DIGEST)
    assert KnownDigests(sources).get("step") == DIGEST


def test_a_module_that_moves_changes_no_digest(package: Edit) -> None:
    before = code_digest(MAIN)
    prejit_code._file(HELPER).rename(prejit_code._file("prejit.compiler.helping"))
    package(MAIN, replaced("prejit.compiler.base.helper", "prejit.compiler.helping"))
    assert HELPER not in prejit_code.reached(MAIN)
    assert code_digest(MAIN) == before
