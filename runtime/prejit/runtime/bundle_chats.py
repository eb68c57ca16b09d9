"""Methods of a bundle with chat templates: conversations to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.loaded_bundle import LoadedBundle


class BundleChats(LoadedBundle):
    """The methods of `Bundle` that render conversations."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation by the model's own template, a prompt for `generate`.

        Arguments and ids are those of transformers' method of the same name, with one exception: by default
        the header of the answer is added, because the ids are for generating.

        Args:
            messages: objects such as `{"role": "user", "content": "Hello"}`. A part `{"type": "image"}` of a
                content stands for the next one of `generate(..., images=[...])`.
            template: name of one of several templates; None: `tool_use` if there are tools and the model has
                it, else `default`.
            add_generation_prompt: whether to add the header of the model's answer; None: yes, unless
                continue_final_message.
            continue_final_message: leave the last message open, so that the model continues it.
            tools: JSON schemas of the functions that the model may call.
            documents: documents that the model may cite, for templates that use them.
            **variables: other variables of the template, such as `enable_thinking`.

        Raises:
            UsageError: the bundle has no such template; the messages do not have the form that it takes, or
                it rejects them; or it needs more than a rendering may use (`sandbox.MAX_STEPS`).
            RejectError: the template is damaged.
        """
        text = self.render_chat_template(
            messages,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **variables,
        )
        images = self.config.images
        if images is not None and images.marks is not None and _has_images(messages):
            from prejit.runtime.generation.image_prompts import expanded

            text = expanded(text, images)
        contexts = (p.bucket["context"] for p in self.config.programs if p.kind == "decode")
        room = max(contexts, default=None)
        return self.tokenizer.encode(text, add_special_tokens=False, max_tokens=room)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text that `apply_chat_template` encodes, with its special tokens spelled out.

        Arguments and errors as `apply_chat_template`.
        """
        if self.text.chat is None:
            raise UsageError(
                f"{self.name}: this bundle has no chat template",
                hint="give the prompt as text, or build from a model directory whose "
                "tokenizer_config.json has a chat_template",
            )
        if template is not None:
            arguments.text("template", template)
        continues = arguments.flag("continue_final_message", continue_final_message)
        begins = not continues
        if add_generation_prompt is not None:
            begins = arguments.flag("add_generation_prompt", add_generation_prompt)
        try:
            return self.text.chat.render(
                messages,
                template=template,
                add_generation_prompt=begins,
                continue_final_message=continues,
                tools=tools,
                documents=documents,
                variables=variables,
            )
        except RecursionError:
            raise UsageError(
                "messages: expected objects nested less deeply than Python's recursion limit"
            ) from None


def _has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a part of a message is an image."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)
