"""The arguments and results of the programs of an encoder, as in docs/bundle-format.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from prejit.runtime.format.bundle_schema import Config, Images, ProgramEntry

_HIDDEN = re.compile(r'\["hidden"\] float32\[\d+,\d+,(\d{1,10})\]')
_VECTORS = re.compile(r'\["multi_vector"\] float32\[\d+,\d+,(\d{1,10})\]')


IMAGE_PREFILL = "image-prefill"
"""The kind of the programs that put prompts with images into a cache."""
_Signature = tuple[tuple[str, ...], tuple[str, ...]]


def _image_prefill_signature(
    without: Callable[[ProgramEntry], _Signature], images: Images | None, program: ProgramEntry
) -> _Signature:
    """Return the signature of a program that puts prompts with images into a cache.

    `without` returns that of another program, and `images` describes the bundle's images.

    Raises:
        ValueError: the bundle has none for prompts.
    """
    if images is None or not images.tokens:
        raise ValueError(f"{program.name}: expected 'images' with tokens in the config, found none")
    arguments, results = without(replace(program, kind="prefill"))
    size = f"{program.bucket['batch']},{program.bucket['prompt']}"
    embeddings = f'["embeddings"] float32[{size},{images.width // images.tokens}]'
    return (*arguments[:3], embeddings, f'["ends"] int32[{size}]', *arguments[3:]), results


def encoder_bucket_name(batch: int, length: int, sentences: int = 0) -> str:
    """Return what the names of the programs of an encoder's bucket begin with."""
    return f"encode/b{batch}-t{length}{f'-s{sentences}' if sentences else ''}"


def encoder_signatures(
    config: Config, others: Callable[[ProgramEntry], _Signature]
) -> Callable[[ProgramEntry], _Signature]:
    """Return what maps a program, whose bucket was checked, to its arguments and results.

    `others` returns those of a program of a decoder.
    """
    encoder, images = config.encoder, config.images
    width, vectors = 0, 0
    heads = (encoder.heads if encoder else None) or ()
    for program in config.programs:
        if program.kind == "embed" and (found := _HIDDEN.fullmatch("".join(program.results[:1]))):
            width = int(found[1])
        if program.kind == "pool" and (found := _VECTORS.fullmatch("".join(program.results[1:2]))):
            vectors = int(found[1])

    def signature(program: ProgramEntry) -> _Signature:
        if program.kind == IMAGE_PREFILL:
            return _image_prefill_signature(others, images, program)
        kind, batch = program.kind, program.bucket["batch"]
        if kind == "image":
            size = ",".join(map(str, images.size if images else ()))
            pixels = f'["pixels"] uint8[{batch},{size},3]'
            return (pixels,), (f'["embedding"] float32[{batch},{images and images.width}]',)
        sentences = program.bucket.get("sentences", batch)
        count, length = program.bucket["length"], f'["length"] int32[{sentences}]'
        hidden = f'["hidden"] float32[{batch},{count},{width}]'
        if kind == "embed":
            packed = (length,) if "sentences" in program.bucket else ()
            return (f'["tokens"] int32[{batch},{count}]', *packed), (hidden,)
        if kind == "layer":
            return (length, f"{hidden} donated"), (hidden,)
        sizes = {"multi_vector": f"{batch},{count},{vectors}", "sparse": f"{batch},{count}"}
        of_tokens = (f'["{head}"] float32[{sizes[head]}]' for head in heads)
        embedding = f'["embedding"] float32[{sentences},{encoder and encoder.width}]'
        return (length, hidden), (embedding, *of_tokens)

    return signature
