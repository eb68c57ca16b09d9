"""Text and conversations to token ids, with the tokenizer and the chat templates of one bundle."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from prejit.runtime.base.process_facts import Span, importing, span
from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.errors import UsageError
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.names import CHAT_MEDIA_TYPE, TOKENIZER_MEDIA_TYPE

if TYPE_CHECKING:
    from prejit.runtime.text.chat_template import ChatTemplates
    from prejit.runtime.text.tokenizer import Tokenizer


@final
class BundleText:
    """The tokenizer and the chat templates of a bundle, each read when it is first used. Thread-safe.

    Attributes:
        reads: when they were read.
    """

    def __init__(self, bundle: str, layers: Mapping[str, Layer]) -> None:
        """Keep the layers of a bundle."""
        self._bundle = bundle
        self._layers = layers
        self.reads: list[Span] = []

    @property
    def has_tokenizer(self) -> bool:
        """True if the bundle has a tokenizer."""
        return TOKENIZER_MEDIA_TYPE in self._layers

    @property
    def has_chat_template(self) -> bool:
        """True if the bundle has a chat template."""
        return CHAT_MEDIA_TYPE in self._layers

    @once
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the bundle has none.

        Raises:
            RejectError: it is damaged.
        """
        layer = self._layers.get(TOKENIZER_MEDIA_TYPE)
        if layer is None:
            return None
        started = time.perf_counter()
        with importing():
            from prejit.runtime.text.tokenizer import Tokenizer  # costs 20 ms, only text needs it

        tokenizer = Tokenizer(layer.wait()[:], layer.path)
        self.reads.append(span("loading", started))
        return tokenizer

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            UsageError: the bundle has none.
            RejectError: it is damaged.
        """
        if self.tokenizer is None:
            raise UsageError(
                f"{self._bundle}: this bundle has no tokenizer, so a prompt cannot be text",
                hint="give token ids, or build from a model directory with a tokenizer.json",
            )
        return self.tokenizer

    @once
    def chat(self) -> ChatTemplates | None:
        """The chat templates, or None if the bundle has none.

        Raises:
            RejectError: they are damaged.
        """
        layer = self._layers.get(CHAT_MEDIA_TYPE)
        if layer is None:
            return None
        started = time.perf_counter()
        with importing():  # Jinja costs 40 ms, only chats need it
            from prejit.runtime.format.checks.seldom_parts import check_chat
            from prejit.runtime.text.chat_template import ChatTemplates

        templates = ChatTemplates(check_chat(bytes(layer.wait()), layer.path), layer.path)
        self.reads.append(span("loading", started))
        return templates
