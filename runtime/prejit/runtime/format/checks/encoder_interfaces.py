"""The arguments and results of the programs of an encoder, as in docs/bundle-format.md."""

from __future__ import annotations

import re
from collections.abc import Callable

from prejit.runtime.format.bundle_schema import Config, ProgramEntry

_HIDDEN = re.compile(r'\["hidden"\] float32\[\d+,\d+,(\d{1,10})\]')
_VECTORS = re.compile(r'\["multi_vector"\] float32\[\d+,\d+,(\d{1,10})\]')


def encoder_signatures(
    config: Config,
) -> Callable[[ProgramEntry], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return what maps a program, whose bucket was checked, to its arguments and results."""
    encoder, images = config.encoder, config.images
    width, vectors = 0, 0
    heads = (encoder.heads if encoder else None) or ()
    for program in config.programs:
        if program.kind == "embed" and (found := _HIDDEN.fullmatch("".join(program.results[:1]))):
            width = int(found[1])
        if program.kind == "pool" and (found := _VECTORS.fullmatch("".join(program.results[1:2]))):
            vectors = int(found[1])

    def signature(program: ProgramEntry) -> tuple[tuple[str, ...], tuple[str, ...]]:
        kind, batch = program.kind, program.bucket["batch"]
        if kind == "image":
            size = ",".join(map(str, images.size if images else ()))
            pixels = f'["pixels"] uint8[{batch},{size},3]'
            return (pixels,), (f'["embedding"] float32[{batch},{images and images.width}]',)
        count, length = program.bucket["length"], f'["length"] int32[{batch}]'
        hidden = f'["hidden"] float32[{batch},{count},{width}]'
        if kind == "embed":
            return (f'["tokens"] int32[{batch},{count}]',), (hidden,)
        if kind == "layer":
            return (length, f"{hidden} donated"), (hidden,)
        sizes = {"multi_vector": f"{batch},{count},{vectors}", "sparse": f"{batch},{count}"}
        of_tokens = (f'["{head}"] float32[{sizes[head]}]' for head in heads)
        embedding = f'["embedding"] float32[{batch},{encoder and encoder.width}]'
        return (length, hidden), (embedding, *of_tokens)

    return signature
