"""Rules of `[draft]`, `[adapters]`, `[slo]`, heads and answers, images in prompts, dtypes of own models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.valid_values import (
    LEAST_PACKED,
    MAX_PACKED,
    MAX_RANK,
    MAX_SLOTS,
    SHARDING,
    KeyPath,
    expected,
)
from prejit.runtime.format.arrays import MESH_AXES
from prejit.runtime.format.limits import MAX_MESH_DEVICES
from prejit.runtime.format.release_limits import DEFAULT_SHARES, ReleaseLimits, fraction_of


def adapter_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find what is wrong with adapters that are kept apart from the weights."""
    adapters, model, generate = (
        table(data.get(name)) for name in ("adapters", "model", "generate")
    )
    for name, most in (("slots", MAX_SLOTS), ("rank", MAX_RANK)):
        size = adapters.get(name)
        if type(size) is int and not 0 < size <= most:
            yield ("adapters", name), wrong(expected(f"adapters.{name}"), size)
    if "adapters" not in data:
        return
    if "encode" in data:
        yield ("adapters",), "expected none beside [encode]: an encoder takes none"
    if "mesh" in data:
        yield ("adapters",), "expected none beside [mesh]: several devices take none"
    if "source" not in model:
        yield (
            ("adapters",),
            "expected a [model] with a source beside it, whose matrices they change",
        )
    if generate.get("source"):
        yield ("adapters",), "expected none beside generate.source: an encoder-decoder takes none"


def draft_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find what is wrong with a draft model."""
    if "draft" not in data:
        return
    model, generate = (table(data.get(name)) for name in ("model", "generate"))
    if "encode" in data:
        yield ("draft",), "expected none beside [encode]: an encoder gives no tokens"
    if "mesh" in data:
        yield ("draft",), "expected none beside [mesh]: a draft model runs on one device"
    if "source" not in model or "module" in model:
        yield ("draft",), "expected a [model] with a source, and no module, beside it"
    for name in ("source", "images"):
        if generate.get(name):
            yield ("draft",), f"expected none beside generate.{name}: it guesses for prompts alone"
    if "generate" in data and not generate.get("draft_tokens"):
        wanted = "expected 1 or more, such as 4, beside [draft], whose guesses the model verifies"
        yield ("generate", "draft_tokens"), f"{wanted}; found 0"
    for index, program in enumerate(_tables(data.get("program"))):
        if program.get("name") == "draft":  # its tensors would have such names
            yield ("program", index, "name"), "expected another name beside [draft]; found 'draft'"


def _tables(value: Any) -> list[dict[str, Any]]:
    return [table(each) for each in value] if isinstance(value, list) else []


def image_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find what is wrong with prompts that hold images."""
    generate, model = table(data.get("generate")), table(data.get("model"))
    images, contexts = generate.get("images"), generate.get("context")
    if not isinstance(images, list) or not images:
        return
    for section in ("adapters", "mesh"):
        if section in data:
            yield (section,), "expected none beside generate.images: prompts with images take none"
    if "module" in model:
        yield ("generate", "images"), "expected none: a model of your own reads prompts alone"
    if isinstance(contexts, list) and all(type(each) is int for each in (*contexts, *images)):
        longest = max(contexts, default=0)
        for index, size in enumerate(images):
            if size > longest:
                problem = f"expected at most {longest}, the longest context; found {shown(size)}"
                yield ("generate", "images", index), problem


def own_dtype_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find dtypes that a model of the user's own cannot have."""
    if table(data.get("model")).get("dtype") == "int4":
        problem = "expected float32, bfloat16 or int8 for a model of your own; int4 is for a source"
        yield ("model", "dtype"), problem
    if table(data.get("generate")).get("cache_dtype") == "int8":
        problem = "expected float32 or bfloat16 for a model of your own; int8 is for a source"
        yield ("generate", "cache_dtype"), problem


def result_problems(encode: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find what is wrong with packed batches, the heads and the answers of an encoder."""
    heads, answers, packed = (encode.get(key) for key in ("heads", "answers", "packed"))
    sizes = packed if isinstance(packed, list) else []
    for place, size in enumerate(sizes):
        if type(size) is int and not LEAST_PACKED <= size <= MAX_PACKED:
            yield ("encode", "packed", place), wrong(expected("encode.packed[]"), size)
        elif size in sizes[:place]:
            yield ("encode", "packed", place), f"expected each once; found {shown(size)} again"
    if packed and heads:
        yield ("encode", "packed"), "expected none beside heads, which are built for shapes alone"
    if isinstance(heads, list) and len(set(map(str, heads))) < len(heads):
        yield ("encode", "heads"), f"expected each head once; found {shown(heads)}"
    if isinstance(answers, dict):
        for key in ("yes", "no"):
            if answers.get(key) == "":
                yield (
                    ("encode", "answers", key),
                    f'expected a token such as "yes"; found {shown("")}',
                )


def slo_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find limits that are no share, or no positive number."""
    known = {each.name for each in fields(ReleaseLimits)}
    for name, value in table(data.get("slo")).items():
        if name not in known:
            continue  # pydantic reports it
        if name in DEFAULT_SHARES and isinstance(value, str):
            try:
                fraction_of(value)
            except ValueError:
                yield ("slo", name), wrong(expected(f"slo.{name}"), value)
        elif type(value) is int and value < 1:
            yield ("slo", name), wrong(expected(f"slo.{name}"), value)


def axis_problems(data: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Find what is wrong with the axes of a mesh, and with shardings along them."""
    mesh = table(data.get("mesh"))
    axes = mesh.get("axes")
    if axes is not None and ({*MESH_AXES} & mesh.keys() or "generate" in data):
        problem = "expected none beside data, tensor or [generate]: data and tensor split a decoder"
        yield ("mesh", "axes"), problem
    for name, size in table(axes).items():
        is_size = type(size) is int and 0 < size <= MAX_MESH_DEVICES
        if not is_size or not re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII):
            yield ("mesh", "axes", name), wrong(expected("mesh.axes"), {name: size})
    known = (*table(axes),) or MESH_AXES
    programs = data.get("program")
    for index, program in enumerate(programs if isinstance(programs, list) else ()):
        for place, split in table(table(program).get("shardings")).items():
            if not isinstance(split, list) or not all(isinstance(axis, str) for axis in split):
                continue  # pydantic reports it
            named = [axis for dimension in split for axis in dimension.split("+") if axis]
            # A result may be whole beside an argument like it that is split.
            says = bool(named) or place.partition(".")[0] == "result"
            if not {*named} <= {*known} or len({*named}) < len(named) or not says:
                wanted = f"{SHARDING}; the axes are {', '.join(known)}"
                yield ("program", index, "shardings", place), wrong(wanted, split)


def wrong(wanted: str, found: Any, guess: str = "") -> str:
    """Return the problem with a value."""
    return f"expected {wanted}; found {shown(found)}{guess}"


def table(value: Any) -> dict[str, Any]:
    """Return a table; a value of another type, which `manifest_tables` reports, is an empty one."""
    return value if isinstance(value, dict) else {}
