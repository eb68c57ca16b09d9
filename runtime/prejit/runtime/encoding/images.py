"""Images to embeddings and to scores: pictures to pixels by Pillow, and the programs that run.

Pixels are those of transformers 5's PilBackend (image_processing_backends.py) and `load_image`, bit for bit:
the program rescales and normalizes them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from math import ceil
from typing import TYPE_CHECKING, Any, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.device.transfer import aligned_zeros, to_numpy
from prejit.runtime.encoding.buckets import Bucket, fitting, partition
from prejit.runtime.errors import UsageError
from prejit.runtime.format.bundle_schema import Images
from prejit.runtime.format.checks.seldom_parts import MATCH
from prejit.runtime.programs.ready_programs import Programs

if TYPE_CHECKING:
    from PIL.Image import Image

Values = np.ndarray[Any, np.dtype[np.float32]]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Picture = Any
"""The path of a file, its bytes, an image of Pillow, or uint8 [H, W, 3]."""

_WANTED = "the path or the bytes of an image, an image of Pillow, or an array uint8 [H, W, 3]"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The formats of files that are read."""

_MOST = 2**26


@final
class ImagePrograms:
    """The programs that read images, by their batch. Safe to use from many threads.

    Attributes:
        images: the bundle's description of the model.
    """

    def __init__(self, images: Images, programs: Programs) -> None:
        """Sort the programs of a bundle by batch."""
        self.images, self._programs, self._device = images, programs, programs.device
        self._names: dict[Bucket, str] = {}
        for program in programs.table.values():
            if program.kind == "image":
                batch = program.bucket["batch"]
                cost = program.cost_microseconds
                self._names[Bucket(batch, 1, batch if cost is None else cost)] = program.name
        self._fitting = fitting(list(self._names))

    def encode(self, pictures: Picture | Sequence[Picture]) -> Values:
        """Return what the model finds, float32 [N, width]: embeddings, or logits of labels.

        Raises:
            UsageError: a picture is none, or Pillow is not installed.
            RejectError: a program is damaged.
        """
        return self.run(self.pixels(pictures))

    def pixels(self, pictures: Picture | Sequence[Picture]) -> list[Pixels]:
        """Return the pixels of pictures as `pixels_of`."""
        one = isinstance(pictures, str | bytes | os.PathLike) or hasattr(pictures, "convert")
        one = one or getattr(pictures, "ndim", 0) == 3
        listed = arguments.items("images", [pictures] if one else pictures, "a list of images")
        return [pixels_of(each, self.images, f"images[{at}]") for at, each in enumerate(listed)]

    def run(self, pixels: Sequence[Pixels]) -> Values:
        """Return what `encode` does, of pixels."""
        found = np.zeros((len(pixels), self.images.width), np.float32)
        for bucket, first, end in partition([1] * len(pixels), self._fitting):
            batch = aligned_zeros((bucket.batch, *self.images.size, 3), np.dtype(np.uint8))
            batch[: end - first] = pixels[first:end]
            name = self._names[bucket]
            weights = self._programs.weights(self._programs.table[name].weights)
            (result,) = self._programs[name].run([*weights, self._device.put(batch)])
            found[first:end] = to_numpy(result)[: end - first]
        return found

    def matches(self, images: Values, texts: Values) -> Values:
        """Return logits of how images match texts, float32 [N, M], from their embeddings."""
        *bias, scale = (float(to_numpy(each).ravel()[0]) for each in self._programs.weights(MATCH))
        cosines = images @ texts.T
        return cosines * np.float32(np.exp(np.float32(scale))) + np.float32(sum(bias))

    def activated(self, logits: Values) -> Values:
        """Return probabilities: together 1 for each image with `softmax`, each alone with `sigmoid`."""
        with np.errstate(over="ignore"):  # then a probability is 0
            if self.images.scores == "sigmoid":
                return (1 / (1 + np.exp(-logits))).astype(np.float32)
            parts = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
        return (parts / parts.sum(-1, keepdims=True)).astype(np.float32)


def pixels_of(picture: Picture, images: Images, name: str) -> Pixels:
    """Return the pixels of a picture as a program takes them: uint8 [H, W, 3].

    Raises:
        UsageError: it is no picture; the error calls it `name`. Or Pillow is not installed.
    """
    size = (images.size[0], images.size[1])
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            arguments.refuse(name, _WANTED, picture)
        if 0 in picture.shape:
            arguments.refuse(name, "an image with pixels", picture)
        if picture.shape[:2] == size and images.resize in ((), size):
            return picture
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise UsageError(
            f"{name}: expected Pillow to be installed, or an array uint8 {[*size, 3]}",
            hint="pip install 'prejit[image]'",
        ) from error
    if not isinstance(picture, np.ndarray | Image.Image | str | bytes | os.PathLike):
        arguments.refuse(name, _WANTED, picture)
    try:
        if isinstance(picture, np.ndarray):
            image = Image.fromarray(np.ascontiguousarray(picture))
        elif isinstance(picture, Image.Image):
            image = _without_alpha(picture)
        else:
            file = BytesIO(picture) if isinstance(picture, bytes) else picture
            with Image.open(file, formats=FORMATS) as opened:
                if (frames := getattr(opened, "n_frames", 1)) > 1:
                    arguments.refuse(name, f"an image of one frame, not {frames}", picture)
                image = ImageOps.exif_transpose(opened).convert("RGB")
            if image.info.get("transparency") is not None:  # processors differ in what they do
                arguments.refuse(name, "a file without a transparent color", picture)
        if 0 in image.size:
            arguments.refuse(name, "an image with pixels", picture)
        return _cropped(_resized(image, images, name), size)
    except UsageError:
        raise
    except Exception as error:  # Pillow raises many classes for damaged files
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # Pillow's text has an address in memory
            reason = "of another format, or damaged"
        raise UsageError(
            f"{name}: expected an image that Pillow reads ({', '.join(FORMATS)}), found "
            f"{arguments.described(picture)}: {reason}"
        ) from error


def _without_alpha(image: Image) -> Image:
    """Return an image in RGB; what is transparent lies on white."""
    import PIL.Image

    if "A" in image.getbands() or image.info.get("transparency") is not None:
        whole = image.convert("RGBA")
        white = PIL.Image.new("RGBA", whole.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, whole)
    return image.convert("RGB")


def _resized(image: Image, images: Images, name: str) -> Pixels:
    width, height = image.size
    if len(images.resize) == 2:
        height, width = images.resize
    elif images.resize:
        (shorter,) = images.resize
        longer = int(shorter * max(width, height) / min(width, height))
        if shorter * longer > _MOST:
            wanted = f"an image of at most {_MOST} pixels after its shorter edge becomes {shorter}"
            arguments.refuse(name, wanted, f"{width} x {height} pixels")
        width, height = (shorter, longer) if width <= height else (longer, shorter)
    if (width, height) != image.size:
        image = image.resize((width, height), images.resample)
    return np.asarray(image)


def _cropped(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the middle of an image; what is outside of it is black."""
    for axis, wanted in enumerate(size):
        found = pixels.shape[axis]
        if found < wanted:
            padding = [(0, 0)] * 3
            before = ceil((wanted - found) / 2)
            padding[axis] = (before, wanted - found - before)
            pixels = np.pad(pixels, padding)
        elif found > wanted:
            first = (found - wanted) // 2
            pixels = (
                pixels[first : first + wanted] if axis == 0 else pixels[:, first : first + wanted]
            )
    return pixels
