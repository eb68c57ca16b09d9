"""The programs that a manifest asks for, by name, kind and bucket. No JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prejit.compiler.manifest.manifest import REPEAT
from prejit.runtime.format.checks.encoder_interfaces import IMAGE_PREFILL, encoder_bucket_name
from prejit.runtime.format.constants import EncodedConstant, described
from prejit.runtime.format.names import ADAPTABLE_KINDS, ADAPTED, DRAFT

if TYPE_CHECKING:
    from prejit.compiler.manifest.manifest import Encode, Generate, Manifest, Program

ENCODER_KINDS = ("embed", "layer", "pool")
"""The kinds of an encoder's programs, in the order in which they run."""
TYPICAL_TOKENS = 128
"""The tokens of a sentence in a packed row, for its cost."""
DRAFT_SECTION = "draft"
"""The section of a manifest with a draft model; with a colon it begins the names of the model's tensors."""
IMAGE = "image"
"""The kind of the programs that read images."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One function at one bucket of shapes.

    Attributes:
        name: `decode/b1-c128`, `prefill/b1-t16-c128`, `verify/b1-k8-c128`, `copy/b1-c128-to-b4-c128`,
            `encode/b1-n64-c128`, `adapted-decode/b1-c128`, `draft-decode/b1-c128`,
            `image-prefill/b1-t64-c128`, `encode/b8-t128/layer`, `encode/b1-t1024-s256/layer`, `images/b4`,
            `score/batch8`, `score/batch8-mode=fast`, `score`.
        kind: as in `bundle_schema.ProgramEntry`.
        bucket: static sizes by name.
        section: name of the [[program]] that it comes from, or `draft`; empty for programs of the model.
        static: values of static arguments by name.
        mask: name or position of the argument that masks padding; empty: there is none.
        pad: variables that a caller may have less of.
        open_sizes: variables that a call may give other sizes; the server compiles for them.
    """

    name: str
    kind: str
    bucket: dict[str, int]
    section: str = ""
    static: dict[str, Any] = field(default_factory=dict)
    mask: str = ""
    pad: tuple[str, ...] = ()
    open_sizes: tuple[str, ...] = ()


def program_specs(manifest: Manifest) -> tuple[ProgramSpec, ...]:
    """Return every program of a manifest: for each bucket of its model, then for the user's functions."""
    specs: list[ProgramSpec] = []
    if (sizes := manifest.generate) is not None:
        own = [*decoder_specs(sizes)]
        specs += own if manifest.adapters is None else [*own, *adapted_specs(own)]
        if (draft := manifest.of_draft) is not None and draft.generate is not None:
            specs += draft_specs(decoder_specs(draft.generate))
    if manifest.encode is not None:
        specs += encoder_specs(manifest.encode)
    for program in manifest.programs:
        spelled = _spelled(program)
        for bucket, static in program.expand():
            # `n4`, and `n2=4`: not `n24`.
            sized = [f"{name}{'=' * name[-1:].isdigit()}{size}" for name, size in bucket.items()]
            sized += [f"{name}={spelled[name, described(value)]}" for name, value in static.items()]
            name = f"{program.name}/{'-'.join(sized)}" if sized else program.name
            mask = "" if program.mask is None else str(program.mask)
            specs.append(
                ProgramSpec(
                    name, "call", bucket, program.name, static, mask, program.padded, program.opened
                )
            )
    return tuple(specs)


def _spelled(program: Program) -> dict[tuple[str, EncodedConstant], str]:
    """Return each static value as the names of programs have it, by its argument and itself.

    It is written as it is, or as its place where it has other characters. All values of an argument are
    places where that gives one text twice, as for "1" beside 1.
    """
    found: dict[tuple[str, EncodedConstant], str] = {}
    repeat = {REPEAT: program.repeat} if program.repeat else {}
    for name, values in {**program.static, **repeat}.items():
        texts = [
            str(value) if type(value) in _SPELLED and _NAME.fullmatch(str(value)) else str(place)
            for place, value in enumerate(values)
        ]
        if len({*texts}) < len(texts):
            texts = [str(place) for place in range(len(values))]
        found |= {(name, described(v)): text for v, text in zip(values, texts, strict=True)}
    return found


_SPELLED = (str, int, bool, float)
_NAME = re.compile(r"[\w.+]{1,32}")


def decoder_specs(sizes: Generate) -> Iterator[ProgramSpec]:
    """Yield a decoder's programs.

    A context has no prefill longer than itself, which no prompt could fill. Prompts with images are computed
    in the smallest batch, and copied. Copies go from the smallest batch
    to every other (a new row for a slot, a prefix for a new row), from each context to the next (a text that
    grows), from every batch to the larger ones (prompts that were computed together; an engine with more
    requests than before) and to the next smaller one (an engine with fewer).
    """
    if sizes.images:
        yield ProgramSpec("images/b1", IMAGE, {"batch": 1})
    for number, batch in enumerate(sizes.batch):
        for place, context in enumerate(sizes.context):
            bucket = {"batch": batch, "context": context}
            yield ProgramSpec(f"decode/b{batch}-c{context}", "decode", bucket)
            for prompt in sizes.prompt:
                if prompt <= context:
                    name = f"prefill/b{batch}-t{prompt}-c{context}"
                    yield ProgramSpec(name, "prefill", {**bucket, "prompt": prompt})
            if draft := sizes.draft_tokens:
                name = f"verify/b{batch}-k{draft}-c{context}"
                yield ProgramSpec(name, "verify", {**bucket, "draft": draft})
            if batch == sizes.batch[0]:
                for prompt in (size for size in sizes.images if size <= context):
                    name = f"{IMAGE_PREFILL}/b{batch}-t{prompt}-c{context}"
                    yield ProgramSpec(name, IMAGE_PREFILL, {**bucket, "prompt": prompt})
                for source in sizes.source:
                    name = f"encode/b{batch}-n{source}-c{context}"
                    yield ProgramSpec(name, "encode", {**bucket, "source": source})
            yield _copy_spec(sizes.batch[0], context, bucket)
            if place:
                yield _copy_spec(batch, sizes.context[place - 1], bucket)
            for smaller in sizes.batch[1:number]:  # from the smallest batch there is one already
                yield _copy_spec(smaller, context, bucket)
            if batch != sizes.batch[-1]:
                yield _copy_spec(sizes.batch[number + 1], context, bucket)


def adapted_specs(specs: Iterable[ProgramSpec]) -> Iterator[ProgramSpec]:
    """Yield the programs that run in place of others while a row of the batch has an adapter."""
    for spec in specs:
        if spec.kind in ADAPTABLE_KINDS:
            name, kind = (f"{ADAPTED}{text}" for text in (spec.name, spec.kind))
            yield replace(spec, name=name, kind=kind)


def draft_specs(specs: Iterable[ProgramSpec]) -> Iterator[ProgramSpec]:
    """Yield the programs of a draft model, from those that its own bundle would have."""
    for spec in specs:
        name, kind = (f"{DRAFT}{text}" for text in (spec.name, spec.kind))
        yield replace(spec, name=name, kind=kind, section=DRAFT_SECTION)


def undrafted(spec: ProgramSpec) -> ProgramSpec:
    """Return a program of a draft model as one of a model of its own; others as they are."""
    return replace(spec, kind=spec.kind.removeprefix(DRAFT))


def encoder_specs(encode: Encode) -> Iterator[ProgramSpec]:
    """Yield an encoder's programs: three for each bucket, and one for each batch of images.

    A packed bucket has room for as many sentences as have 4 tokens.

    All layers of an encoder are the same. One program that runs for each layer with other weights compiles
    and loads in a fraction of the time that one program of all layers takes.
    """
    for batch in encode.images:
        yield ProgramSpec(f"images/b{batch}", IMAGE, {"batch": batch})
    buckets = [{"batch": batch, "length": length} for batch, length in encode.shapes]
    buckets += [{"batch": 1, "length": each, "sentences": each // 4} for each in encode.packed]
    for bucket in buckets:
        for kind in ENCODER_KINDS:
            yield ProgramSpec(f"{encoder_bucket_name(**bucket)}/{kind}", kind, bucket)


def _copy_spec(batch: int, context: int, to: dict[str, int]) -> ProgramSpec:
    name = f"copy/b{batch}-c{context}-to-b{to['batch']}-c{to['context']}"
    return ProgramSpec(name, "copy", {**to, "source_batch": batch, "source_context": context})
