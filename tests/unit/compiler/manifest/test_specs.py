"""Which programs a manifest asks for."""

from prejit.compiler.manifest.manifest import Generate, Manifest, Model, Program
from prejit.compiler.manifest.specs import program_specs


def manifest(generate, programs=()):
    model = Model("model") if generate else None
    return Manifest("b", model=model, generate=generate, programs=programs, targets=())


def test_every_bucket_gets_a_program_and_no_name_twice():
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
    program = Program("score", "m:f", {"x": "float32[{a}, {b}]"}, {"a": (1, 2), "b": (3, 4)})
    specs = program_specs(manifest(None, (program, Program("step", "m:g", {}))))
    assert [spec.name for spec in specs] == [
        *("score/a1-b3", "score/a1-b4", "score/a2-b3", "score/a2-b4", "step")
    ]
    assert specs[1].bucket == {"a": 1, "b": 4}
    assert all(spec.kind == "call" for spec in specs)
    program = Program("embed", "m:f", {"x": "float32[{batch2}]"}, {"batch2": (4, 16)})
    found = [spec.name for spec in program_specs(manifest(None, program))]
    assert found == ["embed/batch2=4", "embed/batch2=16"], "a digit does not run into the size"


def test_caches_can_be_copied_between_batches_and_grow_into_the_next_context():
    specs = program_specs(manifest(Generate((2, 4, 8), (16,), (32, 64, 128))))
    axes = ("source_batch", "source_context", "batch", "context")
    copies = {(*(each.bucket[name] for name in axes),) for each in specs if each.kind == "copy"}
    into_slots = {(2, context, batch, context) for batch in (2, 4, 8) for context in (32, 64, 128)}
    growth = {(batch, *pair, 0) for batch in (2, 4, 8) for pair in ((32, 64), (64, 128))}
    grown = {(batch, short, batch, long) for batch, short, long, _ in growth}
    steps = ((4, 8), (8, 4), (4, 2))
    neighbours = {(a, context, b, context) for a, b in steps for context in (32, 64, 128)}
    assert copies == into_slots | grown | neighbours
    # Prompts that were computed together can be copied into every larger batch.
    specs = program_specs(manifest(Generate((1, 2, 4, 8), (16,), (32,))))
    copying = [spec.bucket for spec in specs if spec.kind == "copy"]
    into = {each["source_batch"] for each in copying if each.get("batch") == 8}
    assert into == {1, 2, 4}
