"""How a model's publisher wants it to generate: what prejit follows of its generation_config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.generation.sampling import Sampling


def check_generation(content: bytes, written: int, path: str) -> Defaults:
    """12. A decoder's generation config is JSON, and what of it is followed can be used.

    Args:
        content: of the layer.
        written: the bundle's format. Programs of 1 and 2 take neither min_p nor repetition_penalty.
        path: of the layer.
    """
    from prejit.runtime.generation.defaults import parse  # NumPy, which no other check needs

    try:
        found = parse(content)
    except ValueError as error:
        raise RejectError(path, str(error)) from error
    return found if written > 2 else replace(found, min_p=None, repetition_penalty=None)


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Defaults:
    """Options of a bundle's decoder, for requests that do not give their own.

    The names and meanings are those of transformers' GenerationConfig. None: the file does not have it. Its
    stop tokens are no part of this, but of the bundle's program table. Everything else in the file is
    ignored: `max_length` too, because it counts the prompt.

    Attributes:
        do_sample: whether tokens are drawn. Otherwise they are the most likely ones, whatever temperature is.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`. The temperature is 1 where
            do_sample is true and there is none.
        max_new_tokens: stop after so many.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def options(self) -> dict[str, Any]:
        """Return these as options of `Bundle.generate`, without those that would change nothing."""
        found = {name: getattr(self, name) for name in (*_SAMPLING, "max_new_tokens")}
        if not self.do_sample:
            del found["temperature"]
        elif self.temperature is None:
            found["temperature"] = 1.0
        return {name: value for name, value in found.items() if value is not None}


def parse(content: bytes) -> Defaults:
    """Read a generation_config.json.

    Raises:
        ValueError: it is no JSON object, or a value has a type or a range that cannot be used.
    """
    try:
        said = json.loads(content)
    except RecursionError:
        raise ValueError("expected JSON, found objects nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"expected a JSON object, found {type(said).__name__}")
    names = (field.name for field in fields(Defaults))
    found = {name: said[name] for name in names if said.get(name) is not None}
    if not isinstance(found.get("do_sample", False), bool):
        raise ValueError(f"do_sample: expected true or false, found {found['do_sample']!r:.80}")
    limit = found.get("max_new_tokens", 1)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"max_new_tokens: expected an integer of 1 or more, found {limit!r:.80}")
    try:
        Sampling(**{name: found[name] for name in _SAMPLING if name in found})
    except UsageError as error:
        raise ValueError(f"{error!s:.200}") from error
    return Defaults(**found)
