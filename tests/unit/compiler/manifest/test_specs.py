"""Which programs a manifest asks for."""

from prejit.compiler.manifest.manifest import Generate, Manifest, Model, Program
from prejit.compiler.manifest.specs import program_specs


def manifest(generate, programs=()):
    model = Model("model") if generate else None
    return Manifest("b", model=model, generate=generate, programs=programs, targets=())


def names_of(manifest, kind=""):
    return [each.name for each in program_specs(manifest) if each.kind == (kind or each.kind)]


def test_every_bucket_gets_a_program_and_no_name_twice():
    sizes = manifest(Generate((1, 4), (16, 64), (32, 128), draft_tokens=8))
    names = names_of(sizes)
    assert len(set(names)) == len(names)
    buckets = [f"b{batch}-c{context}" for batch in (1, 4) for context in (32, 128)]
    assert names_of(sizes, "decode") == [f"decode/{each}" for each in buckets]
    assert names_of(sizes, "verify") == [f"verify/{each.replace('-', '-k8-')}" for each in buckets]
    assert names_of(sizes, "prefill") == [  # no prompt is longer than a context
        f"prefill/b{batch}-t{prompt}-c{context}"
        for batch in (1, 4)
        for prompt, context in ((16, 32), (16, 128), (64, 128))
    ]
    [first, *_] = (each for each in program_specs(sizes) if each.kind == "verify")
    assert first.bucket == {"batch": 1, "context": 32, "draft": 8}
    program = Program("score", "m:f", {"x": "float32[{a}, {b}]"}, {"a": (1, 2), "b": (3, 4)})
    functions = manifest(None, (program, Program("step", "m:g", {})))
    assert (
        names_of(functions, "call")
        == names_of(functions)
        == [*("score/a1-b3", "score/a1-b4", "score/a2-b3", "score/a2-b4", "step")]
    )
    assert program_specs(functions)[1].bucket == {"a": 1, "b": 4}
    program = Program("embed", "m:f", {"x": "float32[{batch2}]"}, {"batch2": (4, 16)})
    found = names_of(manifest(None, program))
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
