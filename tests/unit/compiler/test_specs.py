"""Which programs a manifest asks for."""

from __future__ import annotations

from pathlib import Path

from prejit.compiler.manifest import Bundle, Generate, Manifest, Model, Program
from prejit.compiler.specs import program_specs


def manifest(generate: Generate | None, programs: tuple[Program, ...] = ()) -> Manifest:
    model = Model("model") if generate else None
    return Manifest(Path("m.toml"), Bundle("b"), model, generate, None, programs, ())


def test_every_bucket_gets_a_program_and_no_name_twice() -> None:
    specs = program_specs(manifest(Generate((1, 4), (16, 64), (32, 128))))
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert [n for n in names if n.startswith("decode")] == [
        *("decode/b1-c32", "decode/b1-c128", "decode/b4-c32", "decode/b4-c128")
    ]
    assert "prefill/b4-t64-c128" in names


def test_a_prompt_longer_than_a_context_is_left_out() -> None:
    specs = program_specs(manifest(Generate((1,), (16, 64), (32,))))
    assert [spec.name for spec in specs] == ["decode/b1-c32", "prefill/b1-t16-c32"]


def test_buckets_of_a_function_are_all_combinations() -> None:
    program = Program("score", "m:f", {"x": "float32[{a}, {b}]"}, {"a": (1, 2), "b": (3, 4)})
    specs = program_specs(manifest(None, (program, Program("step", "m:g", {}))))
    assert [spec.name for spec in specs] == [
        *("score/a1-b3", "score/a1-b4", "score/a2-b3", "score/a2-b4", "step")
    ]
    assert specs[1].bucket == {"a": 1, "b": 4}
    assert all(spec.kind == "call" for spec in specs)
