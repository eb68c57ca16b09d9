"""Which pictures are refused before they take memory, or because they are damaged."""

import io

import numpy as np
import pytest
from PIL import Image

from prejit.runtime import UsageError
from prejit.runtime.encoding.images import pixels_of
from prejit.runtime.format.bundle_schema import Images

CROPPED = Images("clip", 8, (21, 21), (21,), 3, None, None)


def file(image, kind, **options):
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def test_a_picture_that_is_refused_is_named(monkeypatch):
    long = np.zeros((200_000, 1, 3), np.uint8)
    plain = Image.new("RGB", (30, 30), "red")
    too_many = "an image of at most 67108864 pixels after its shorter"
    for wrong, message in (
        *((each, too_many) for each in (file(Image.fromarray(long), "PNG"), long)),
        (file(plain, "PPM"), r"an image .*reads \(PNG, JPEG, .*: of another format, or damaged$"),
        (file(plain, "PNG", transparency=(255, 0, 0)), "a file without a transparent color"),
        (file(Image.new("P", (3, 3)), "GIF", transparency=0), "a file without a transparent color"),
    ):
        with pytest.raises(UsageError, match=rf"images\[3\]: expected {message}"):
            pixels_of(wrong, CROPPED, "images[3]")
    assert pixels_of(file(Image.new("RGB", (2_000, 1)), "PNG"), CROPPED, "a").shape == (21, 21, 3)
    for error in (RuntimeError("broken"), NotImplementedError("later"), TypeError(), MemoryError()):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(Image.Image, "resize", fail)
        with pytest.raises(UsageError, match=f"Pillow reads .*: {error or type(error).__name__}"):
            pixels_of(plain, CROPPED, "images[3]")
