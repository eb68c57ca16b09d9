"""Images in requests: their files, and how many pixels they may have."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from math import prod
from typing import TypeVar

from starlette.requests import Request

from prejit.runtime.encoding.images import FORMATS
from prejit.server.gate.http_errors import field_error
from prejit.server.gate.request_clients import check_tokens, unless_gone
from prejit.server.served.served import Served

MOST_PIXELS = 2**28
"""Maximum number of pixels of all images of a request."""
MAX_IMAGES = 2048
"""Maximum number of images of a request."""

_T = TypeVar("_T")


def file_of(image: str, field: str, where: str) -> bytes:
    """Return the file of an image, which is checked when it is read.

    Args:
        image: a data URL in base64, or its base64 alone.
        field: of the request, for errors.
        where: the place in the field, for errors.

    Raises:
        ApiError: it is something else. The server fetches nothing.
    """
    head, comma, data = image.rpartition(",")
    if "://" in image[:16] or (comma and not head.endswith(";base64")):
        raise field_error(field, f"{where}: expected a data URL in base64")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError as error:
        raise field_error(field, f"{where}: expected base64: {error}") from error


async def reading(
    request: Request,
    served: Served,
    files: Sequence[bytes],
    field: str,
    read: Callable[[Sequence[bytes]], _T],
) -> _T:
    """Return what a function reads of images, in a thread of its own. Other arguments as `file_of`.

    Raises:
        ApiError: they have too many pixels, or the key has no tokens left.
        ClientDisconnect: the client is gone.
    """
    check_tokens(request.state.key)

    def run() -> _T:
        _check_pixels(served, files, field)
        with served.engine.sleeper:
            return read(files)

    return await unless_gone(request.receive, asyncio.to_thread(run))


def _check_pixels(served: Served, files: Sequence[bytes], field: str) -> None:
    """Check how many pixels images have, as their files say, or as the model takes them."""
    assert served.bundle.config.images is not None
    least = prod(served.bundle.config.images.size)
    total = least * len(files)
    for file in files:
        with suppress(Exception):  # who reads the file says what is wrong with it
            from PIL import Image

            with Image.open(BytesIO(file), formats=FORMATS) as image:
                total += max(0, prod(image.size) - least)
    if total > MOST_PIXELS:
        wanted = f"at most {MOST_PIXELS} pixels in all images"
        raise field_error(field, f"expected {wanted}, found {total}; send smaller or fewer ones")
