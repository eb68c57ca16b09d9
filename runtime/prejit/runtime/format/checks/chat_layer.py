"""The chat layer: how messages become a prompt, and its check."""

from __future__ import annotations

from dataclasses import dataclass

from prejit.runtime.base.typed_json import from_json
from prejit.runtime.errors import RejectError


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat layer: how messages become a prompt.

    Attributes:
        templates: Jinja sources by name, as transformers reads them. `default` is used unless a request names
            another.
        special_tokens: texts that templates use under names such as `bos_token` and `eos_token`.
    """

    templates: dict[str, str]
    special_tokens: dict[str, str]


def check_chat(content: bytes, path: str) -> Chat:
    """11. Check that a chat layer is canonical and holds at least one template, and only Unicode.

    A template is parsed when it is first used, because Jinja is not part of the format.
    """
    chat = from_json(Chat, content, path)
    if not chat.templates:
        raise RejectError(path, "expected at least one chat template, found none")
    for table in (chat.templates, chat.special_tokens):
        for name, text in table.items():
            try:
                f"{name}{text}".encode()
            except UnicodeEncodeError as error:
                raise RejectError(
                    path, f"{name!r:.80}: expected Unicode: {error.reason}"
                ) from error
            if not name:
                raise RejectError(path, "expected a name for each template and token, found none")
    return chat
