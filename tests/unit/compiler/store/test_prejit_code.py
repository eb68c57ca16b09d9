"""The digest of our own code in keys: all code that decides a result, no other code, and no prose."""

import json
import os
import shutil
import textwrap
from functools import cache
from pathlib import Path

import pytest

from prejit.compiler.store import prejit_code
from prejit.compiler.store.prejit_code import KnownDigests, code_digest, definitions
from prejit.runtime.base.files import digest_of


def forget():
    cached = ("code_digest", "reached", "_known", "_content", "_links", "_module", "_is_module")
    for name in cached:
        getattr(prejit_code, name).cache_clear()


def edit(module, how):
    """Change the source of a module, in a copy of ours or in a small one."""
    file = prejit_code._file(module)
    before = file.read_text()
    assert how(before) != before, "the edit changes nothing"
    file.write_text(how(before))
    forget()


@pytest.fixture
def forgotten():
    forget()
    yield
    forget()


@pytest.fixture
def copied(tmp_path, monkeypatch, forgotten):
    """A copy of our sources."""
    unwanted = shutil.ignore_patterns("*.so", "*.pyc")
    roots = {
        name: Path(shutil.copytree(root, tmp_path / name, ignore=unwanted))
        for name, root in prejit_code._ROOTS.items()
    }
    monkeypatch.setattr(prejit_code, "_ROOTS", roots)
    monkeypatch.setattr(prejit_code, "definitions", cache(definitions))  # reads each text once


STEPS = {
    name: roots
    for name, roots in vars(prejit_code).items()
    if name.isupper() and not name.startswith("_") and isinstance(roots, tuple)
}
"""The roots of each step's code."""
MODELS, LOWERED = {"LOWERING", "WEIGHTS", "ACCURACY"}, {"LOWERING", "USER_DECODERS"}
OWN = {"OWN_WEIGHTS", "OWN_ACCURACY", "USER_DECODERS"}
CHANGES = [
    ("compiler.models.families.decoders:TextDecoder", {*MODELS, "BITS", "INT4_TEXT"}),
    ("compiler.models.decoder_matrices:shardings", {"LOWERING"}),
    ("compiler.models.quantizing:quantized", {"BITS", "WEIGHTS", *OWN}),
    ("compiler.lowering.sampling_programs:sample", LOWERED),
    ("compiler.lowering.user.function_lowering:lower_function", {"USER_FUNCTIONS"}),
    ("compiler.lowering.user.observer:_caller", {"USER_FUNCTIONS", "USER_DECODERS"}),
    ("compiler.lowering.user.observing:_READERS", {"USER_FUNCTIONS", "USER_DECODERS"}),
    ("compiler.pipeline.lower.program_lowering:put_lowered", {*LOWERED, "USER_FUNCTIONS"}),
    ("compiler.checkpoint.checkpoint:Checkpoint", {"BITS", "WEIGHTS", "ACCURACY"}),
    ("compiler.pipeline.pack.bundle_files:_entry", {"PACKING"}),
    ("compiler.pipeline.measure.model_comparison:of_decoder", {"ACCURACY", "OWN_ACCURACY"}),
    ("compiler.pipeline.measure.golden_child:NUDGE", {"GOLDEN"}),
    ("compiler.pipeline.measure.sizes_child:_NUDGE", {"SIZES"}),
    ("runtime.machine.fingerprint:Fingerprint", {"GOLDEN"}),
    ("compiler.compile.worker.worker_compile:ZSTD_LEVEL", {"COMPILING"}),
    ("compiler.compile.worker.disassembly:narrowed", {"COMPILING"}),
    ("compiler.compile.worker.xla:_compile_ahead", {"COMPILING"}),
    ("runtime.device._jax_parts:compile_options", {"COMPILING", "GOLDEN", "SIZES"}),
    ("compiler.native.kernel_library:_LINK_FLAGS", {"KERNELS"}),
    ("compiler.checkpoint.configured_tokenizer:", {"TOKENIZER"}),
]
"""What decides results makes them again, and no others."""


@pytest.mark.usefixtures("copied")
def test_a_change_of_our_code_makes_again_what_it_decides_and_nothing_else():
    before = {name: code_digest(*roots) for name, roots in STEPS.items()}
    for place, steps in CHANGES:
        module, _, name = f"prejit.{place}".partition(":")
        line = f"{name} = {name}" if name else "print(1)"
        edit(module, lambda source, line=line: f"{source}\n{line}\n")
        assert not name or len(prejit_code._module(module).named[name]) == 2, f"{place} is gone"
        after = {name: code_digest(*roots) for name, roots in STEPS.items()}
        assert {step for step in STEPS if after[step] != before[step]} == steps, place
        before = after


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
def package(tmp_path, monkeypatch, forgotten):
    monkeypatch.setattr(prejit_code, "_ROOTS", {"prejit.compiler": tmp_path})
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "__init__.py").touch()
    for name, source in SOURCES.items():
        prejit_code._file(name).write_text(textwrap.dedent(source))
    return edit


def replaced(old, new):
    return lambda source: source.replace(old, new)


def test_all_that_runs_changes_the_digest_and_prose_does_not(package):
    found = [code_digest(MAIN)]
    for module, old, new in (
        (MAIN, "def run", '"""What it is for: (."""\n\n\ndef run'),
        (MAIN, "return double(x) +", "return double(  # both\n        x) +"),
        (MAIN, "expected 0 or more, found {x}", "cannot double {x}"),
        (MAIN, '"text"', "'te' 'xt'"),
        (HELPER, "    return", "    'Return twice x.'\n    return"),
        (OTHER, "x + x", "x - x"),
    ):
        package(module, replaced(old, new))
        assert code_digest(MAIN) == found[0], new
    for module, old, new in (
        *((MAIN, "x < 0", "x < 1"), (MAIN, "'xt'", "'xts'"), (HELPER, "2 *", "3 *")),
        *((MAIN, "ValueError", "TypeError"), (MAIN, "base.helper", "base.other")),
        (MAIN, "    return", "return"),
    ):
        package(module, replaced(old, new))
        assert code_digest(MAIN) not in found, new
        found.append(code_digest(MAIN))


def test_what_an_import_runs_is_in_all_digests_but_nothing_beside_it_and_no_place(package):
    package(HELPER, lambda source: source + "\ndef triple(x):\n    return 3 * x\n")
    found = [code_digest(f"{MAIN}:run")]
    for old, new, changes in (
        ("3 *", "4 *", False),
        ("2 *", "triple(1) - 1 *", True),
        ("4 *", "5 *", True),
        ("def triple", "print(1)\n\ndef triple", True),
    ):
        package(HELPER, replaced(old, new))
        found.append(code_digest(f"{MAIN}:run"))
        assert (found[-1] != found[-2]) == changes, new
    with pytest.raises(ValueError, match=r"found nothing at prejit\.compiler\.main:gone"):
        code_digest(f"{MAIN}:gone")
    before = code_digest(MAIN)
    prejit_code._file(HELPER).rename(prejit_code._file("prejit.compiler.helping"))
    package(MAIN, replaced("prejit.compiler.base.helper", "prejit.compiler.helping"))
    assert HELPER not in prejit_code.reached(MAIN)
    assert code_digest(MAIN) == before


def test_code_is_found_by_any_import(package):
    other = "prejit.compiler.base.other"
    inner = "def inner(y={}):\n        return y(x)\n    return inner()"
    for statement, name, use in (
        (f"from {other} import double", "double", "return {}(x)"),
        (f"from {other} import double as two", "two", "return [*map({}, [x])]"),
        ("from prejit.compiler.base import other", "other.double", "return f'{{{}(x)}}'"),
        (f"import {other} as another", "another.double", inner),
    ):
        for top, inside in ((f"{statement}\n", ""), ("", f"    {statement}\n")):
            source = f"{top}\ndef run(x):\n{inside}    {use.format(name)}\n"
            package(MAIN, lambda _, source=source: source)
            before = code_digest(f"{MAIN}:run")
            package(OTHER, replaced("class Other:\n    pass\n", "class Other:\n    x = 1\n"))
            assert code_digest(f"{MAIN}:run") == before
            package(OTHER, replaced("x + x", "x - -x"))
            assert code_digest(f"{MAIN}:run") != before
            package(OTHER, lambda _: textwrap.dedent(SOURCES[OTHER]))


DIGEST = digest_of(b"code")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Sources that were written just now count as settled, and the cache is empty."""
    monkeypatch.setattr(prejit_code, "SETTLED_SECONDS", -1.0)
    (tmp_path / "code" / "inner").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("A = 1\n")
    (tmp_path / "code" / "inner" / "b.py").write_text("B = 1\n")
    return {"prejit.code": tmp_path / "code"}


def test_what_may_be_wrong_is_not_believed(sources, runtime_cache, monkeypatch):
    """New sources, whose second change could leave the same times; a file of others; a damaged one."""
    with monkeypatch.context() as patch:
        patch.setattr(prejit_code, "SETTLED_SECONDS", 60.0)
        KnownDigests(sources).keep("step", DIGEST)
    assert KnownDigests(sources).get("step") is None
    KnownDigests(sources).keep("step", DIGEST)
    [file] = runtime_cache.rglob("*.json")
    file.chmod(0o666)
    assert KnownDigests(sources).get("step") is None
    file.chmod(0o600)
    held = json.loads(file.read_bytes())
    wrong = {**held, "digests": {"step": "sha256:0"}}, {**held, "sources": "0"}
    for content in (b"", b"[]", *(json.dumps(each).encode() for each in wrong)):
        file.write_bytes(content)
        assert KnownDigests(sources).get("step") is None
        KnownDigests(sources).keep("step", DIGEST)
        assert KnownDigests(sources).get("step") == DIGEST


def test_a_source_that_changed_ends_all(sources, runtime_cache):
    code = sources["prejit.code"]

    def rewrite_with_its_old_times():
        status = (code / "inner" / "b.py").stat()
        (code / "inner" / "b.py").write_text("B = 2\n")
        os.utime(code / "inner" / "b.py", ns=(status.st_atime_ns, status.st_mtime_ns))

    for change in (
        lambda: (code / "a.py").write_text("A = 2\n"),
        rewrite_with_its_old_times,
        lambda: (code / "inner" / "c.py").write_text(""),
        lambda: (code / "inner" / "b.py").unlink(),
        lambda: (code / "a.py").rename(code / "z.py"),
    ):
        KnownDigests(sources).keep("step", DIGEST)
        change()
        assert KnownDigests(sources).get("step") is None
