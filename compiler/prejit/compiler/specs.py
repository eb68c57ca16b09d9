"""The programs that a manifest asks for, by name, kind and bucket. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

from prejit.compiler.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One function at one bucket of shapes.

    Attributes:
        name: `decode/b1-c128`, `prefill/b1-t16-c128`, `score/batch8`, `score`.
        kind: `prefill`, `decode` or `call`.
        bucket: static sizes by name.
        section: the manifest's [[program]] that it comes from, by name; empty for a decoder's.
    """

    name: str
    kind: str
    bucket: dict[str, int]
    section: str = ""


def program_specs(manifest: Manifest) -> tuple[ProgramSpec, ...]:
    """Every program of a manifest: decode and prefill for each bucket, then the user's functions.

    A prefill bucket longer than a context is left out for that context: no prompt could fill it.
    """
    specs = []
    if (sizes := manifest.generate) is not None:
        for batch in sizes.batch:
            for context in sizes.context:
                bucket = {"batch": batch, "context": context}
                specs.append(ProgramSpec(f"decode/b{batch}-c{context}", "decode", bucket))
                specs += [
                    ProgramSpec(
                        f"prefill/b{batch}-t{prompt}-c{context}",
                        "prefill",
                        {**bucket, "prompt": prompt},
                    )
                    for prompt in sizes.prompt
                    if prompt <= context
                ]
    for program in manifest.programs:
        for bucket in program.expand():
            sized = "-".join(f"{name}{size}" for name, size in bucket.items())
            name = f"{program.name}/{sized}" if sized else program.name
            specs.append(ProgramSpec(name, "call", bucket, program.name))
    return tuple(specs)
