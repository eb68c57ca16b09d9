"""A bundle as embeddings, language model and chat model of LangChain.

    from prejit.runtime.adapters.langchain_models import LangChainChatModel

    model = LangChainChatModel(bundle=load("artifacts/assistant"), options={"max_new_tokens": 256})
    for chunk in model.stream("Hello"): ...

Options are those of `Bundle.generate`, of the model or of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import LLM, BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    convert_to_openai_messages,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, GenerationChunk
from pydantic import BaseModel, Field

from prejit.runtime.bundle import Bundle


class LangChainEmbeddings(Embeddings):
    """The encoder of a bundle."""

    def __init__(self, bundle: Bundle) -> None:
        """Take a bundle that has an encoder."""
        self.bundle = bundle

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the embedding of each text."""
        return self.bundle.encode(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """Return the embedding of a text."""
        return self.bundle.encode([text])[0].tolist()


class _OfDecoder(BaseModel):
    """The fields of both models.

    Attributes:
        bundle: the bundle.
        options: of each call that does not give its own.
    """

    bundle: Any
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "prejit"


class LangChainLLM(_OfDecoder, LLM):
    """The decoder of a bundle, for plain texts."""

    def _call(
        self,
        prompt: str,
        stop: Sequence[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return self.bundle.generate(prompt, **self.options | _stop(stop) | kwargs).text

    def _stream(
        self,
        prompt: str,
        stop: Sequence[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in self.bundle.stream(prompt, **self.options | _stop(stop) | kwargs):
            if run_manager is not None:
                run_manager.on_llm_new_token(piece.text)
            yield GenerationChunk(text=piece.text)


class LangChainChatModel(_OfDecoder, BaseChatModel):
    """The decoder of a bundle, for conversations by its chat template."""

    def _prompt(self, messages: list[BaseMessage]) -> list[int]:
        found = convert_to_openai_messages(messages)
        return self.bundle.apply_chat_template(found)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        given = self.options | _stop(stop) | kwargs
        result = self.bundle.generate(self._prompt(messages), **given)
        used = result.stats.prompt_tokens, result.stats.new_tokens
        message = AIMessage(
            result.text,
            response_metadata={"finish_reason": result.finish_reason},
            usage_metadata={
                "input_tokens": used[0],
                "output_tokens": used[1],
                "total_tokens": sum(used),
            },
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        given = self.options | _stop(stop) | kwargs
        for piece in self.bundle.stream(self._prompt(messages), **given):
            chunk = ChatGenerationChunk(message=AIMessageChunk(piece.text))
            if run_manager is not None:
                run_manager.on_llm_new_token(piece.text, chunk=chunk)
            yield chunk


def _stop(texts: Sequence[str] | None) -> dict[str, Any]:
    return {} if texts is None else {"stop": texts}
