"""Bundles as models of LangChain and LlamaIndex: the texts and vectors are those of the bundle."""

import asyncio

import pytest

WHY = "{} is not installed: `make test-platforms` does it"
OPTIONS = {"max_new_tokens": 12}
MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "true"}]


def answer_of(bundle):
    return bundle.generate(bundle.apply_chat_template(MESSAGES), **OPTIONS).text


def test_langchain_embeds_completes_and_chats(lettered_bundle, encoder_bundle):
    pytest.importorskip("langchain_core", reason=WHY.format("langchain-core"))
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.vectorstores import InMemoryVectorStore

    from prejit.runtime.adapters.langchain_models import (
        LangChainChatModel,
        LangChainEmbeddings,
        LangChainLLM,
    )

    embeddings = LangChainEmbeddings(encoder_bundle)
    assert embeddings.embed_documents(["a b", "c"]) == encoder_bundle.encode(["a b", "c"]).tolist()
    store = InMemoryVectorStore.from_texts(["a b", "c d e"], embeddings)
    assert store.similarity_search("a b", k=1)[0].page_content == "a b"

    model = LangChainLLM(bundle=lettered_bundle, options=OPTIONS)
    text = lettered_bundle.generate("ab", **OPTIONS).text
    assert len(text) > 4
    assert model.invoke("ab") == text
    chunks = list(model.stream("ab"))
    assert len(chunks) > 2
    assert "".join(chunks) == text
    assert model.invoke("ab", stop=[text[2:4]]) == text[: text.index(text[2:4])]

    chat = LangChainChatModel(bundle=lettered_bundle, options=OPTIONS)
    messages = [SystemMessage("ab"), HumanMessage("true")]
    found = chat.invoke(messages)
    assert found.content == answer_of(lettered_bundle)
    assert found.usage_metadata["output_tokens"] == 12
    assert found.response_metadata["finish_reason"] == "length"
    assert "".join(str(each.content) for each in chat.stream(messages)) == found.content
    assert asyncio.run(chat.ainvoke(messages)).content == found.content


def test_llama_index_embeds_completes_and_chats(lettered_bundle, encoder_bundle):
    pytest.importorskip("llama_index.core", reason=WHY.format("llama-index-core"))
    from llama_index.core.llms import ChatMessage

    from prejit.runtime.adapters.llama_index_models import LlamaIndexEmbedding, LlamaIndexLLM

    embedding = LlamaIndexEmbedding(bundle=encoder_bundle)
    expected = encoder_bundle.encode(["a b", "c"]).tolist()
    assert embedding.get_text_embedding_batch(["a b", "c"]) == expected
    assert embedding.get_query_embedding("c") == encoder_bundle.encode("c")[0].tolist()
    assert asyncio.run(embedding.aget_query_embedding("c")) == embedding.get_query_embedding("c")

    model = LlamaIndexLLM(bundle=lettered_bundle, options=OPTIONS)
    assert (model.metadata.context_window, model.metadata.is_chat_model) == (512, True)
    text = lettered_bundle.generate("ab", **OPTIONS).text
    assert model.complete("ab").text == text
    assert "".join(each.delta or "" for each in model.stream_complete("ab")) == text
    messages = [ChatMessage(role=each["role"], content=each["content"]) for each in MESSAGES]
    assert model.chat(messages).message.content == answer_of(lettered_bundle)
    assert [each.message.content for each in model.stream_chat(messages)][-1] == answer_of(
        lettered_bundle
    )
    assert text.startswith(model.complete("ab", max_new_tokens=2).text)
