"""Which programs a manifest asks for."""

from __future__ import annotations

from typing import Any

from prejit.compiler.manifest.manifest import Generate, Manifest, Model
from prejit.compiler.manifest.specs import program_specs


def manifest(generate: Generate | None, programs: Any = ()) -> Manifest:
    model = Model("model") if generate else None
    return Manifest("b", model=model, generate=generate, programs=programs, targets=())


def test_every_bucket_gets_a_program_and_no_name_twice() -> None:
    specs = program_specs(manifest(Generate((1, 4), (16, 64), (32, 128))))
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    assert [n for n in names if n.startswith("decode")] == [
        *("decode/b1-c32", "decode/b1-c128", "decode/b4-c32", "decode/b4-c128")
    ]
    assert "prefill/b4-t64-c128" in names
    specs = program_specs(manifest(Generate((1,), (16, 64), (32,))))
    names = [spec.name for spec in specs if spec.kind != "copy"]
    assert names == ["decode/b1-c32", "prefill/b1-t16-c32"], "no prompt is longer than a context"
    sizes = Generate((1, 4), (16,), (32, 64), draft_tokens=8)
    found = [spec for spec in program_specs(manifest(sizes)) if spec.kind == "verify"]
    assert [spec.name for spec in found] == [
        *("verify/b1-k8-c32", "verify/b1-k8-c64", "verify/b4-k8-c32", "verify/b4-k8-c64")
    ]
    assert found[0].bucket == {"batch": 1, "context": 32, "draft": 8}
