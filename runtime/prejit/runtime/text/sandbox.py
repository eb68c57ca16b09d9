"""Jinja with limits, for chat templates.

A template comes from whoever published the model, and it runs in the server. Jinja's sandbox keeps it away
from Python's internals. In addition, this module limits each rendering: the rounds of its loops and calls
(MAX_STEPS), its output, and each string or list that an operator or a width makes (MAX_CHARACTERS).

It does not limit what one call does with large values that already exist: `replace` with a long text for a
short one, or printing a list that contains another list many times. A server that takes templates from
strangers should render them in a process of their own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from string import Formatter
from typing import Any

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
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 300_000
"""Maximum number of loop rounds and calls in one rendering: a few seconds. A message takes about ten."""
MAX_CHARACTERS = 1 << 24
"""Maximum number of characters in a rendered prompt, and in each string on the way there."""
MAX_BITS = 1 << 14
"""Maximum size of an integer in bits. Python's arithmetic on larger ones is slow."""

_WIDE = re.compile(r"%[-+ #0]*(?:\d*\.)?(?:\*|\d{7})")
_WIDE_NAMED = re.compile(r"\)[-+ #0]*(?:\d*\.)?\d{7}")  # behind the name in `%(name)s`
_WIDE_BRACES = re.compile(r"\{|\d{7}")
"""Match, in a format for `%` and in a part of one for str.format, widths of a million or more, and those
that come from a value."""
_MAX_DATE_CHARACTERS = 1 << 12
"""Maximum size of a format of dates. Python gives a result up to 256 times as much memory."""


def parse(sandbox: Sandbox, source: str) -> Template:
    """Parse a template and compile it.

    Raises:
        ValueError: it does not parse; the message begins with the line.
    """
    try:
        return sandbox.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:  # in the Python code made from it
        raise ValueError(f"line 1: expected a template, found {type(error).__name__}") from error
    except TypeError as error:  # Jinja computes constants, such as a dict whose key is a list
        raise ValueError(f"line 1: {error}") from error


def check_template(source: str) -> None:
    """Check that a template parses.

    Raises:
        ValueError: it does not; the message begins with the line.
    """
    parse(Sandbox(), source)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Give the rendering in this context a new budget of steps and characters."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


@dataclass(slots=True)
class _Budget:
    """The steps and characters that a rendering has left."""

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
"""Names of str.format and of the functions in jinja2.filters that take the size of their result."""


def _check_numbers(function: Callable[..., Any], values: Iterable[Any]) -> None:
    """Raise SecurityError for huge widths and counts; functions that take numbers as data may have any."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in _SIZED or isinstance(getattr(function, "__self__", None), str):
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_CHARACTERS:
                raise SecurityError(f"{name}: expected at most {MAX_CHARACTERS}, found {value}")


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the attribute that decides what Jinja passes first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().take_step()
        _check_numbers(function, (*args, *kwargs.values()))
        if function is do_format:
            _check_percents(str(args[0]))
        return _checked(function(*args, **kwargs))

    return bounded


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the same items, and count a step for each."""
    budget = _budget.get()
    for item in items:
        budget.take_step()
        yield item


@pass_context  # without it Jinja would evaluate constant text only once
def _measured(_: Context, value: Any) -> Any:
    """Return the same value, and count its characters."""
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
    # Jinja's own tojson escapes for HTML, but a model reads plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_DATE_CHARACTERS:
        raise SecurityError(f"strftime_now: expected at most {_MAX_DATE_CHARACTERS} characters")
    return datetime.now().strftime(form)


class _Dict:
    """`dict` in a template, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in a template, without names that begin with an underscore."""

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
    """`{% generation %}...{% endgeneration %}` marks the model's text for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_text")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @pass_eval_context
    def _text(self, context: nodes.EvalContext, caller: Macro) -> str:
        return str(caller())


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja set up as in transformers, with limits on every loop, call and operator."""

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
        del self.globals["lipsum"]  # one call writes random texts for as long as it is told
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
        """Call a function for a template, as one step."""
        _budget.get().take_step()
        _check_numbers(__obj, (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read an attribute: none that makes bytes, which have no limits."""
        return attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator for a template, unless the result would be huge."""
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return str.format as Jinja's sandbox wraps it, after a check of the format."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_braces(value.__self__)
        return wrapped


def _filter(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_percents(form: str) -> None:
    if _WIDE.search(form) or ("%(" in form and _WIDE_NAMED.search(form)):
        raise SecurityError("expected a format without large or variable widths")


def _check_braces(form: str) -> None:
    if any(_WIDE_BRACES.search(spec or "") for _, _, spec, _ in Formatter().parse(form)):
        raise SecurityError("expected a format without large or variable widths")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise SecurityError for an operation with a huge result, before it runs."""
    if operator == "%":
        if isinstance(left, str):
            _check_percents(left)
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
