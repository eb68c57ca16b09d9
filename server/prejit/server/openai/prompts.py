"""Texts, conversations and images to what a model reads, away from the event loop where that takes long."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from math import prod
from typing import Any, TypeVar, cast

from starlette.requests import Request

from prejit.runtime.encoding.images import FORMATS
from prejit.runtime.errors import ContextError
from prejit.server.gate.http_errors import field_error
from prejit.server.gate.request_clients import check_tokens, unless_gone
from prejit.server.served.served import Served
from prejit.server.served.work_threads import TEXTS, in_thread

T = TypeVar("T")

Inputs = str | list[int | str | list[int]]
"""A text, a list of token ids, or a list of either."""

INLINE_CHARACTERS = 10_000
"""The texts of a request are tokenized on the event loop up to this length: that takes less time than a
thread's turn."""


async def off_loop(characters: int, function: Callable[[], T]) -> T:
    """Return the result of a function, run in a thread if it works on many characters.

    Args:
        characters: of the text. For messages and tools it is the size of the request: a template may run long
            on many of them without much text.
        function: takes no arguments.
    """
    if characters > INLINE_CHARACTERS:
        return await in_thread(TEXTS, function)
    return function()


def as_inputs(name: str, value: Inputs) -> list[str | list[int]]:
    """Return the inputs in the field of that name, which holds one or several.

    Raises:
        ApiError: it is empty, or mixes token ids with inputs.
    """
    if isinstance(value, str):
        return [value]
    # In C: the list may have millions of items, and the event loop waits.
    kinds = {*map(type, value)}
    if not value or (int in kinds and len(kinds) > 1):
        found = f"token ids beside {name}s" if value else "an empty list"
        raise field_error(name, f"expected a text, token ids, or a list of either, found {found}")
    return cast("list[str | list[int]]", [value] if kinds == {int} else value)


def need_text_model(served: Served) -> None:
    """Check that a model continues texts.

    Raises:
        ApiError: it is an encoder, functions, or an encoder-decoder, which reads a source.
    """
    config = served.bundle.config
    if config.encoder is not None and config.encoder.scores is not None:
        found = "which scores; POST queries and documents to /v1/rerank"
    elif config.encoder is not None:
        found = "an encoder; POST its texts to /v1/embeddings"
    elif config.decoder is None:
        found = "which holds functions; POST their arguments to /v2/models/NAME/infer"
    elif served.bundle.decoder.source is not None:
        found = "which reads a source"
    else:
        return
    raise field_error(
        "model", f"expected one that continues a prompt, found {served.name!r}, {found}"
    )


def kept(served: Served, prompt: Sequence[int], keep: int | None) -> Sequence[int]:
    """Return the end of a prompt that a request keeps.

    Args:
        served: the model.
        prompt: token ids.
        keep: how many tokens, 0 and more; -1: as many as the longest context has; None: all.

    Raises:
        ContextError: these are certainly too many, which is found before anything looks at each of them.
    """
    context = served.bundle.decoder.contexts[-1]
    if keep is not None:
        prompt = prompt[max(0, len(prompt) - (context if keep == -1 else keep)) :]
    if len(prompt) > context:
        raise ContextError(
            f"prompt: expected at most {context} tokens (the longest context), found {len(prompt)}"
        )
    return prompt


def encoded(served: Served, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a prompt. Call it by `off_loop`.

    Args:
        served: the model.
        text: the prompt.
        add_special_tokens: whether the tokenizer adds its own.

    Raises:
        UsageError: the bundle has no tokenizer.
        ContextError: the text is certainly longer than any context, also where only its end is kept: all
            of it would be tokenized.
    """
    bundle = served.bundle
    decoder = bundle.config.decoder
    room = None if decoder is None else bundle.decoder.contexts[-1]
    return bundle.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=room)


def of_messages(
    served: Served,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None,
    effort: str | None = None,
) -> list[int]:
    """Return the token ids of a conversation. Other arguments and errors as `Bundle.apply_chat_template`.

    Args:
        served: the model.
        messages: the conversation.
        tools: as templates take them.
        add_generation_prompt: whether the model's answer begins.
        continue_final_message: whether the last message stays open.
        variables: of the template.
        effort: the variable `reasoning_effort`, unless `variables` has it.

    Raises:
        ApiError: a variable has the name of another argument.
    """
    given = {} if effort is None else {"reasoning_effort": effort}
    variables = {**given, **(variables or {})}
    if reserved := _RESERVED & variables.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise field_error(name, "expected it as a field of the request")
    return served.bundle.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )


_RESERVED = {
    *("self", "messages", "template", "tools", "documents"),
    *("add_generation_prompt", "continue_final_message"),
}
"""Variables of a template that have fields or arguments of their own."""

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
