"""Chat templates: from messages to the text of a prompt, as transformers renders them.

Follows transformers 5 (utils/chat_template_utils.py, render_jinja_template, and
tokenization_utils_base.py, apply_chat_template), so that a template written for it gives the same text.

A template comes from whoever published the model, and runs in the server. Jinja's sandbox keeps it from
Python's internals. Beyond that, a rendering is bounded: rounds of loops and calls (MAX_STEPS); all that is
printed, and each string or list that an operator makes, or a width asks for (MAX_CHARACTERS). Not bounded is
what one call does with large values that are there already: `replace` with a long text for a short one,
or printing a list that holds another list many times over. A server that takes templates of strangers
renders them in a process of its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, final

from jinja2 import (
    Template,
    TemplateError,
    TemplateSyntaxError,
    nodes,
    pass_context,
    pass_eval_context,
)
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.schema import Chat

MAX_STEPS = 300_000
"""Rounds of loops and calls in one rendering: some seconds at most. A message takes about ten."""
MAX_CHARACTERS = 1 << 24
"""Of a rendered prompt, and of every string on the way there."""
MAX_BITS = 1 << 14
"""Of an integer: Python's arithmetic on larger ones takes its time."""

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' mark behind the message that is to be continued; its space tells whether it was stripped."""
_WIDE = re.compile(r"%[-+ #0]*(?:\d*\.)?(?:\*|\d{7})|\{[^{}]*:[^{}]*\d{7}")
"""In a format, for `%` or str.format: a width of a million and more, or one that `%` takes from a value."""

Messages = Sequence[Mapping[str, Any]]


@final
class ChatTemplates:
    """The chat templates of a bundle. Safe for many threads."""

    def __init__(self, chat: Chat, path: str) -> None:
        """Takes verified templates; each is compiled when it is first wanted.

        Args:
            chat: the templates.
            path: the file that they came from, for errors.
        """
        self._chat = chat
        self._path = path
        self._environment = _Environment()
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
        """The prompt's text. Arguments as `Bundle.apply_chat_template`.

        Raises:
            UsageError: an argument has not the form that templates take; there is no such template; or
                the template raises, is refused by the sandbox or exceeds what a rendering may use.
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
                    hint="the one begins a new message, the other goes on with the last",
                )
            final = _mark_final(plain)
        compiled = self._compiled(source, name)
        token = _budget.set(_Budget())
        try:
            text = compiled.render({**given, "messages": plain})
        except RecursionError as error:
            raise UsageError(f"chat template {name!r}: it calls itself without end") from error
        except Exception as error:  # a template meets whatever Python raises on its data
            raise UsageError(
                f"chat template {name!r}: {error or type(error).__name__}",
                hint="the template of this model does not take these messages",
            ) from error
        finally:
            _budget.reset(token)
        return _cut_final(text, final, name) if continue_final_message else text

    def _compiled(self, source: str, name: str) -> Template:
        if source not in self._ready:  # two threads may both compile it: they get the same
            try:
                self._ready[source] = _parsed(self._environment, source)
            except ValueError as error:
                raise RejectError(self._path, f"chat template {name!r}: {error}") from error
        return self._ready[source]

    def _choose(self, template: str | None, tools: object) -> tuple[str, str]:
        """As transformers' get_chat_template."""
        templates = self._chat.templates
        if template is None:
            wished = _TOOL_USE if tools is not None and _TOOL_USE in templates else _DEFAULT
        else:
            wished = template
        if wished not in templates:
            raise UsageError(
                f"chat template: expected one of {', '.join(sorted(templates))}, found {wished!r:.80}",
                hint="name one of them as `template`",
            )
        return wished, templates[wished]


def check_template(source: str) -> None:
    """Parses a template.

    Raises:
        ValueError: it does not parse; the message begins with its line.
    """
    _parsed(_Environment(), source)


def _parsed(environment: _Environment, source: str) -> Template:
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:  # of the Python that it becomes
        raise ValueError(f"line 1: expected a template, found {type(error).__name__}") from error


def _messages(messages: object) -> list[dict[str, Any]]:
    plain = _plain_objects("messages", messages)
    if not plain:
        raise UsageError("messages: expected at least one, found none")
    # Clients send `"content": null`, which templates would print; they know a key that is missing.
    plain = [{k: v for k, v in message.items() if v is not None} for message in plain]
    for message in plain:
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        if reasoning is not None:
            message.setdefault("thinking", reasoning)
            message["reasoning_content"] = reasoning
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
    """A copy in JSON's own types: a template can call no method of the caller's objects, nor change them."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # an enum of strings is a string
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    if isinstance(value, Mapping):
        return {_key(where, key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{place}]", item) for place, item in enumerate(value)]
    raise UsageError(f"{where}: expected what JSON has, found {type(value).__name__}")


def _key(where: str, key: Any) -> Any:
    plain = _plain(where, key)
    if isinstance(plain, list | dict):
        raise UsageError(f"{where}: expected text as keys, found {type(key).__name__}")
    return plain


def _mark_final(messages: list[dict[str, Any]]) -> str:
    """Marks the end of the last message's text, and gives that text."""
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
            f"continue_final_message: chat template {name!r} does not give out the last message as it is"
        )
    kept = text[:place]
    return kept if text.startswith(_CONTINUED, place) else kept.rstrip()


@dataclass(slots=True)
class _Budget:
    """What a rendering may still do."""

    steps: int = MAX_STEPS
    characters: int = MAX_CHARACTERS

    def take_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise SecurityError(f"expected at most {MAX_STEPS} rounds of loops and calls")


_budget: ContextVar[_Budget] = ContextVar("budget")


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise SecurityError(f"expected at most {MAX_CHARACTERS} characters, found {size}")


def _checked(result: Any) -> Any:
    if isinstance(result, str):
        _check_size(len(result))
    return result


_SIZED = {
    *("do_batch", "do_center", "do_format", "do_indent", "do_round", "do_slice", "do_truncate"),
    *("do_wordwrap", "_tojson", "format", "format_map"),
}
"""Names of jinja2.filters' functions that make text or lists as large as a number says, and str.format."""


def _check_numbers(function: Callable[..., Any], values: Iterable[Any]) -> None:
    """Refuses huge widths and counts. Numbers that are data (a time, an id) do not go to such functions."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in _SIZED or isinstance(getattr(function, "__self__", None), str):
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_CHARACTERS:
                raise SecurityError(f"{name}: expected at most {MAX_CHARACTERS}, found {value}")


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # with the mark that says what Jinja passes first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().take_step()
        _check_numbers(function, (*args, *kwargs.values()))
        return _checked(function(*args, **kwargs))

    return bounded


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """The same items, each of them a step."""
    budget = _budget.get()
    for item in items:
        budget.take_step()
        yield item


@pass_context  # or Jinja would compute it once, for constant text
def _measured(_: Context, value: Any) -> Any:
    """The same value, its characters counted."""
    if isinstance(value, str):
        budget = _budget.get()
        budget.characters -= len(value)
        if budget.characters < 0:
            raise SecurityError(f"expected at most {MAX_CHARACTERS} characters of output")
    return value


def _concatenated(items: Sequence[Any]) -> str:
    texts = [str(item) for item in items]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would read; a model reads the JSON.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """`dict` in a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in a template; names of Python's own are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name an argument `self`
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"namespace: expected names without a leading underscore, found {name!r:.80}"
        )


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: what the model writes, for training; here plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @pass_eval_context
    def _text(self, context: nodes.EvalContext, caller: Macro) -> str:
        return str(caller())


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, with every loop, call and operator bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(function)
        self.filters |= {
            "_counted": _counted,
            "_measured": _measured,
            "_concatenated": _concatenated,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filter("_counted", loop.iter)
        for concat in list(tree.find_all(nodes.Concat)):
            items = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [_filter("_concatenated", items)]
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [_filter("_measured", node) for node in output.nodes]
        return tree

    def call(
        __self,  # noqa: N805 (a template may name an argument `self`)
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _budget.get().take_step()
        _check_numbers(__obj, (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_format(form: str) -> None:
    if _WIDE.search(form):
        raise SecurityError("expected a format without large or variable widths")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuses an operation whose result would be huge, before it is made."""
    if operator == "%":
        if isinstance(left, str):
            _check_format(left)
        return
    left_size, right_size = _size(left), _size(right)
    if isinstance(left, int) and isinstance(right, int):
        if operator in ("*", "**"):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if max(bits, right.bit_length()) > MAX_BITS:
                raise SecurityError(f"{operator}: expected integers of at most {MAX_BITS} bits")
    elif operator == "+" and left_size is not None and right_size is not None:
        _check_size(left_size + right_size)
    elif operator == "*" and left_size is not None and isinstance(right, int):
        _check_size(left_size * right)
    elif operator == "*" and right_size is not None and isinstance(left, int):
        _check_size(right_size * left)


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, str | list | tuple) else None
