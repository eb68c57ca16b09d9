"""The programs of a decoder whose prompts may hold images, and what they have read of images."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from prejit.runtime.encoding.images import ImagePrograms, Picture
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.image_prompts import PromptImages

_KEPT = 16
"""Images whose embeddings are kept: each turn of a conversation has those of the turns before again."""


@final
class SeeingPrograms(DecoderPrograms):
    """The programs of a decoder whose prompts may hold images. Safe to use from many threads."""

    def __init__(self, *parts: Any) -> None:
        """As DecoderPrograms; the bundle describes its images."""
        super().__init__(*parts)
        images = self.programs.config.images
        assert images is not None
        self._images = ImagePrograms(images, self.programs)
        self._read: dict[str, np.ndarray[Any, Any]] = {}
        self._lock = threading.Lock()

    def check_text(self, tokens: Sequence[int]) -> None:
        """Check that a prompt without images has no tokens of any.

        Raises:
            UsageError: it has some.
        """
        images = self._images.images
        if images.token_id in tokens:
            raise UsageError(
                f"prompt: expected no token {images.token_id}, which stands for a part of an image, without "
                "images",
                hint="give images=[...]",
            )

    def read_images(self, pictures: Picture | Sequence[Picture]) -> PromptImages:
        """Return what the bundle's program reads of pictures, each as `Bundle.embed_images` takes it.

        Raises:
            UsageError: one is no picture, or Pillow is not installed.
            RejectError: the program is damaged.
        """
        if isinstance(pictures, PromptImages):
            return pictures
        pixels = self._images.pixels(pictures)
        digests = [hashlib.sha256(each).hexdigest() for each in pixels]
        with self._lock:
            found = {each: self._read.pop(each) for each in {*digests} & self._read.keys()}
        for digest, one in zip(digests, pixels, strict=True):
            if digest not in found:
                found[digest] = self._images.run([one])
        with self._lock:
            self._read |= found
            for old in [*self._read][:-_KEPT]:
                del self._read[old]
        described = self._images.images
        width = described.width // (described.tokens or 1)
        rows = [found[digest].reshape(-1, width) for digest in digests]
        embeddings = np.concatenate([np.zeros((0, width), np.float32), *rows])
        return PromptImages(embeddings, " ".join(digests), described)
