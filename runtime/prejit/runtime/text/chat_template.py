"""Chat templates: from messages to the text of a prompt, as transformers renders them.

Follows transformers 5 (utils/chat_template_utils.py, render_jinja_template, and
tokenization_utils_base.py, apply_chat_template), so that a template written for it gives the same text. The
template itself runs in `sandbox`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from jinja2 import Template

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.checks.seldom_parts import Chat
from prejit.runtime.text.sandbox import Sandbox, limited, parse

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""The mark that transformers puts behind a message to be continued. Its space shows whether the template
stripped the message."""

Messages = Sequence[Mapping[str, Any]]


@final
class ChatTemplates:
    """The chat templates of a bundle. Safe to use from many threads."""

    def __init__(self, chat: Chat, path: str) -> None:
        """Keep verified templates. Each is compiled when it is first used."""
        self._chat = chat
        self._path = path
        self._sandbox = Sandbox()
        self._ready: dict[str, Template] = {}

    def render(
        self,
        messages: Messages,
        *,
        template: str | None = None,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the text of a prompt. Arguments as `Bundle.apply_chat_template`.

        Raises:
            UsageError: an argument does not have the form that templates take; there is no such template; or
                the template raises, does something that the sandbox forbids, or exceeds its limits.
            RejectError: the template does not parse.
        """
        name, source = self._choose(template, tools)
        given = {
            "tools": None if tools is None else _plain_objects("tools", tools),
            "documents": None if documents is None else _plain_objects("documents", documents),
            **self._chat.special_tokens,
            **{key: _plain(key, value) for key, value in variables.items()},
            "add_generation_prompt": add_generation_prompt,
        }
        plain = _messages(messages)
        final = ""
        if continue_final_message:
            if add_generation_prompt:
                raise UsageError(
                    "expected add_generation_prompt or continue_final_message, found both",
                    hint="the first begins a new message, the second continues the last one",
                )
            final = _mark_final(plain)
        compiled = self._compiled(source, name)
        try:
            with limited():
                text = compiled.render({**given, "messages": plain})
        except RecursionError as error:
            raise UsageError(f"chat template {name!r}: it calls itself without end") from error
        except Exception as error:  # a template may raise anything that Python raises on its data
            raise UsageError(
                f"chat template {name!r}: {error or type(error).__name__}",
                hint="the template of this model does not take these messages",
            ) from error
        return _cut_final(text, final, name) if continue_final_message else text

    def _compiled(self, source: str, name: str) -> Template:
        if source not in self._ready:  # two threads may both compile it; the results are the same
            try:
                self._ready[source] = parse(self._sandbox, source)
            except ValueError as error:
                raise RejectError(self._path, f"chat template {name!r}: {error}") from error
        return self._ready[source]

    def _choose(self, template: str | None, tools: object) -> tuple[str, str]:
        """Return the name and source of the template to use, by the rule of get_chat_template."""
        templates = self._chat.templates
        usual = _TOOL_USE if tools is not None and _TOOL_USE in templates else _DEFAULT
        chosen = usual if template is None else template
        if chosen not in templates:
            raise UsageError(
                f"chat template: expected one of {', '.join(sorted(templates))}, found {chosen!r:.80}"
                + did_you_mean(chosen, templates),
                hint="name one of them as `template`",
            )
        return chosen, templates[chosen]


def _messages(messages: object) -> list[dict[str, Any]]:
    plain = _plain_objects("messages", messages)
    if not plain:
        raise UsageError("messages: expected at least one, found none")
    # Clients send `"content": null`. Templates would print it, but they handle a missing key.
    plain = [{k: v for k, v in message.items() if v is not None} for message in plain]
    for place, message in enumerate(plain):
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:  # the order shows where a template writes a whole message
            plain[place] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return plain


def _plain_objects(name: str, values: object) -> list[dict[str, Any]]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise UsageError(f"{name}: expected a list of objects, found {type(values).__name__}")
    for place, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise UsageError(
                f"{name}[{place}]: expected an object, found {type(value).__name__}",
                hint='a message is {"role": "user", "content": "Hello"}'
                if name == "messages"
                else None,
            )
    return [_plain(f"{name}[{place}]", value) for place, value in enumerate(values)]


def _plain(where: str, value: Any) -> Any:
    """Return a copy in JSON's own types, so that a template cannot call or change the caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # an enum of strings is a string
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {_key(where, key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{place}]", item) for place, item in enumerate(value)]
    raise UsageError(f"{where}: expected a JSON value, found {type(value).__name__}")


def _key(where: str, key: Any) -> Any:
    plain = _plain(where, key)
    if isinstance(plain, list | dict):
        raise UsageError(f"{where}: expected text as keys, found {type(key).__name__}")
    return plain


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return that text without the mark."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and "text" in part]
        if parts:
            text = str(parts[-1]["text"])
            parts[-1]["text"] = text + _CONTINUED
            return text
    elif isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUED
        return content
    raise UsageError(
        "continue_final_message: expected text as the content of the last message, found "
        f"{type(content).__name__}"
    )


def _cut_final(text: str, final: str, name: str) -> str:
    place = text.rfind(_CONTINUED.strip())
    if place < 0 or final.strip() not in text:
        raise UsageError(
            f"continue_final_message: expected the last message unchanged in the prompt, but chat template "
            f"{name!r} changes it"
        )
    kept = text[:place]
    return kept if text.startswith(_CONTINUED, place) else kept.rstrip()
