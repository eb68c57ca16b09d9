"""Prompts with images: what the bundle's program read of them, and how they enter a KV cache.

All tokens of an image see each other. So an image is never divided: a chunk ends before it. Text behind the
last image is computed as that of any other prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from prejit.runtime.device.transfer import aligned_zeros
from prejit.runtime.errors import UsageError
from prejit.runtime.format.bundle_schema import Images
from prejit.runtime.format.checks.encoder_interfaces import IMAGE_PREFILL
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import KVCache
from prejit.runtime.generation.prefill import (
    Chunks,
    Entering,
    Limit,
    filling,
    no_limit,
    sampling_inputs,
)

Whole = np.ndarray[Any, np.dtype[np.int32]]


@final
@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt, in order.

    Attributes:
        embeddings: float32 [images * tokens of one, D].
        digest: of their pixels.
        described: the bundle's description of images.
    """

    embeddings: np.ndarray[Any, np.dtype[np.float32]]
    digest: str
    described: Images

    @property
    def count(self) -> int:
        """The number of images."""
        return len(self.embeddings) // self.tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of an image."""
        return self.described.tokens or 1

    def expanded(self, text: str) -> str:
        """Return a text with the tokens of an image where it has the mark of one.

        Raises:
            UsageError: it has not as many marks as there are images.
        """
        begin = self._marks[0]
        if (found := text.count(begin)) != self.count:
            raise UsageError(
                f"prompt: expected {begin!r} once for each of {self.count} images, found it "
                f"{found} times"
            )
        return expanded(text, self.described)

    def ends(self, prompt: Sequence[int]) -> Whole:
        """Return the position of the last token of each token's image, -1 for text: int32 [N].

        Raises:
            UsageError: the prompt has not the tokens of these images, with text behind each.
        """
        tokens = np.asarray(prompt, np.int32)
        (places,) = np.nonzero(tokens == self.described.token_id)
        of_image = places.reshape(-1, self.tokens) if len(places) % self.tokens == 0 else places
        firsts, lasts = of_image[..., :1], of_image[..., -1:]
        is_whole = of_image.ndim == 2 and np.array_equal(
            of_image, firsts + np.arange(self.tokens, dtype=np.int64)
        )
        is_apart = is_whole and not np.isin(lasts + 1, [*firsts.ravel(), len(tokens)]).any()
        if not is_apart or len(of_image) != self.count:
            raise UsageError(
                f"prompt: expected {self.count} times {self.tokens} tokens "
                f"{self.described.token_id}, one after the other, and another token behind each "
                f"image; found {len(places)} such tokens",
                hint=f"give a text with {self._marks[0]!r} for each image, or messages to "
                "apply_chat_template",
            )
        found = np.full(len(tokens), -1, np.int32)
        found[of_image] = lasts
        return found

    def is_missing(self, member: Entering) -> bool:
        """Return whether a cache lacks one of them, of a row that enters it."""
        return bool(self.ends(member.row.request.prompt).max() >= member.start)

    @property
    def _marks(self) -> tuple[str, ...]:
        return self.described.marks or ("", "", "")


def expanded(text: str, images: Images) -> str:
    """Return a text with the tokens of an image for each mark of one, as transformers' processor makes it."""
    begin, image, end = images.marks or ("", "", "")
    return text.replace(begin, f"\n\n{begin}{image * (images.tokens or 1)}{end}\n\n")


def read_images(decoder: Any, pictures: Any) -> Any:
    """Return what a decoder reads of pictures in prompts (seeing_programs.py); None: there are none.

    Raises:
        UsageError: its prompts are texts alone; or as `SeeingPrograms.read_images`.
    """
    if isinstance(pictures, (list, tuple)) and not pictures:
        return None
    if not hasattr(decoder, "read_images"):
        raise UsageError(
            f"images: expected none, as the prompts of {decoder.programs.bundle} are texts alone",
            hint="build a model that reads images, with images in [generate] of the manifest",
        )
    return decoder.read_images(pictures)


def filling_images(
    decoder: DecoderPrograms,
    cache: Callable[[], KVCache],
    members: Mapping[int, Entering],
    limit: Limit = no_limit,
) -> Chunks:
    """Compute prompts with images in a cache of the smallest batch. Arguments as `prefill.filling`.

    A chunk with an image takes all tokens of the image, whatever the limit is.
    """
    batch = cache().batch
    lengths, done = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
    ends: dict[int, Whole] = {}
    for place, member in members.items():
        lengths[place], done[place] = len(member.row.request.prompt), member.start
        images = member.row.request.images
        whole = np.full(lengths[place], -1, np.int32)
        ends[place] = whole if images is None else images.ends(member.row.request.prompt)
    fixed = sampling_inputs(decoder, batch, members)
    while any(ends[place].max() >= done[place] for place in members):
        program = _program(decoder, cache(), int((lengths - done).max()))
        size = program.bucket["prompt"]
        yield batch * size
        count = np.minimum(lengths - done, size)
        width = decoder.programs.arguments(program.name)[3].shape[2]
        tokens, last = np.zeros((batch, size), np.int32), np.full((batch, size), -1, np.int32)
        embeddings = aligned_zeros((batch, size, width), np.dtype(np.float32))
        for place, member in members.items():
            images, prompt = member.row.request.images, member.row.request.prompt
            first, end = done[place], done[place] + count[place]
            # Before the image, or at its beginning.
            if end < lengths[place] and ends[place][end] >= 0:
                end = min(end, ends[place][end] + 1 - images.tokens)
            count[place] = end - first
            tokens[place, : end - first] = prompt[first:end]
            last[place, : end - first] = ends[place][first:end]
            if images is not None:
                before = np.count_nonzero(ends[place][:first] >= 0)
                (shown,) = np.nonzero(ends[place][first:end] >= 0)
                embeddings[place, shown] = images.embeddings[before : before + len(shown)]
        inputs = {"tokens": tokens, "start": done.copy(), "length": count}
        inputs |= {"embeddings": embeddings, "ends": last}
        placed = {name: decoder.device.put(value) for name, value in inputs.items()}
        results = cache().run(program, {**placed, **fixed})
        done += count
        for place, member in members.items():
            if count[place]:
                member.row.usage.computed_tokens += batch * size / int(np.count_nonzero(count))
                member.row.usage.programs[program.name] = None
                if done[place] == lengths[place]:
                    member.read(results, place)
    rest = {
        place: replace(member, start=int(done[place]))
        for place, member in members.items()
        if done[place] < lengths[place]
    }
    yield from filling(decoder, cache, rest, limit)
    for place, member in rest.items():
        members[place].token, members[place].logprob = member.token, member.logprob


def _program(decoder: DecoderPrograms, cache: KVCache, tokens: int) -> Any:
    """Return the smallest program that takes so many tokens with images at once, or else the largest."""
    found = sorted(
        (
            program
            for program in decoder.programs.table.values()
            if program.kind == IMAGE_PREFILL
            and (program.bucket["batch"], program.bucket["context"]) == cache.bucket
        ),
        key=lambda program: program.bucket["prompt"],
    )
    return next((each for each in found if each.bucket["prompt"] >= tokens), found[-1])
