"""The options that a model's publisher recommends: the part of generation_config.json that prejit follows."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.generation.options import OPTIONS


@dataclass(frozen=True, slots=True)
class Defaults:
    """Options of a bundle's decoder for requests that do not give their own.

    Names and meanings are those of transformers' GenerationConfig. None: the file does not have the option.
    Its stop tokens are in the bundle's program table instead. Everything else in the file is ignored,
    `max_length` included, because it counts the prompt too.

    Attributes:
        do_sample: whether tokens are drawn at random. If not, the most likely token is taken, whatever
            temperature says.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`. If do_sample is true and there
            is no temperature, it is 1.
        max_new_tokens: stop after this many tokens.
        min_new_tokens: do not stop before this many tokens.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None

    def options(self) -> dict[str, Any]:
        """Return these as options of `Bundle.generate`, without those that change nothing."""
        found = {name: getattr(self, name) for name in _PUBLISHED}
        if not self.do_sample:
            del found["temperature"]
        elif self.temperature is None:
            found["temperature"] = 1.0
        return {name: value for name, value in found.items() if value is not None}


_PUBLISHED = tuple(field.name for field in fields(Defaults) if field.name in OPTIONS)
"""Names of the options that generation_config.json may set; a test compares them with `OPTIONS`."""


def check_generation(content: bytes, path: str) -> Defaults:
    """12. Check that a decoder's generation config is JSON and that the options in it can be used.

    Args:
        content: the bytes of the layer.
        path: the file of the layer, for errors.

    Raises:
        RejectError: the layer is damaged.
    """
    try:
        return parse(content)
    except ValueError as error:
        raise RejectError(path, str(error)) from error


def parse(content: bytes) -> Defaults:
    """Read a generation_config.json.

    Raises:
        ValueError: the content is no JSON object, or a value has a wrong type or is out of range.
    """
    try:
        config = json.loads(content)
    except RecursionError:
        raise ValueError("expected JSON, found objects nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"expected a JSON object, found {type(config).__name__}")
    names = ("do_sample", *_PUBLISHED)
    found = {name: config[name] for name in names if config.get(name) is not None}
    if not isinstance(found.get("do_sample", False), bool):
        raise ValueError(f"do_sample: expected true or false, found {found['do_sample']!r:.80}")
    try:
        for name in found.keys() - {"do_sample"}:
            OPTIONS[name].check(name, found[name])
    except UsageError as error:
        raise ValueError(f"{error!s:.200}") from error
    return Defaults(**found)
