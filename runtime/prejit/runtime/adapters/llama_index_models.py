"""A bundle as embedding model and language model of LlamaIndex.

from llama_index.core import Settings
from prejit.runtime.adapters.llama_index_models import LlamaIndexEmbedding, LlamaIndexLLM

Settings.embed_model = LlamaIndexEmbedding(bundle=load("artifacts/encoder"))
Settings.llm = LlamaIndexLLM(bundle=load("artifacts/assistant"), options={"max_new_tokens": 256})
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback


class LlamaIndexEmbedding(BaseEmbedding):
    """The encoder of a bundle."""

    bundle: Any

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self.bundle.encode(texts).tolist()

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embeddings([query])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)


class LlamaIndexLLM(CustomLLM):
    """The decoder of a bundle, for plain texts, and for conversations by its chat template.

    Attributes:
        bundle: the bundle.
        options: those of `Bundle.generate`, for each call that does not give its own.
    """

    bundle: Any
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def metadata(self) -> LLMMetadata:
        """How long a text may become, and whether it may be a conversation."""
        return LLMMetadata(
            context_window=self.bundle.decoder.contexts[-1],
            is_chat_model=self.bundle.has_chat_template,
            model_name=self.bundle.name,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return the text that follows a prompt."""
        return CompletionResponse(text=self._generate(prompt, kwargs))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Yield the text that follows a prompt as it grows."""
        text = ""
        for piece in self.bundle.stream(prompt, **self.options | kwargs):
            text += piece.text
            yield CompletionResponse(text=text, delta=piece.text)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation."""
        text = self._generate(self._prompt(messages), kwargs)
        return ChatResponse(message=ChatMessage(role="assistant", content=text))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield the answer to a conversation as it grows."""
        text = ""
        for piece in self.bundle.stream(self._prompt(messages), **self.options | kwargs):
            text += piece.text
            message = ChatMessage(role="assistant", content=text)
            yield ChatResponse(message=message, delta=piece.text)

    def _generate(self, prompt: str | list[int], options: dict[str, Any]) -> str:
        return self.bundle.generate(prompt, **self.options | options).text

    def _prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        found = [{"role": each.role.value, "content": each.content or ""} for each in messages]
        return self.bundle.apply_chat_template(found)
