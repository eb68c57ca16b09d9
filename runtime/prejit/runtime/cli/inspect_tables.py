"""Tables of `prejit inspect`: accuracy and product forms, calls of the user's programs, capacity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prejit.runtime.base.wording import shortened, size, table
from prejit.runtime.errors import UsageError
from prejit.runtime.format import trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Accuracy, Config, ProductForm, ProgramEntry
from prejit.runtime.format.checks.call_programs import check_arrays, check_static, check_tree
from prejit.runtime.format.constants import EncodedConstant
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import Contents
from prejit.runtime.programs.usage_hint import functions_of

_WIDTH = 90
"""Maximum number of characters of an argument or result."""


def accuracy_table(found: Accuracy) -> str:
    """Return a table of what a bundle's dtypes cost in accuracy."""
    without_file = {"sampled": "text that the model generated", "random": "random token ids"}
    text = without_file.get(found.text, found.text)
    unit = "" if text == "random pictures" else "tokens of "
    rows = [("measured on", f"{found.tokens} {unit}{text}")]
    if found.float32_perplexity_millionths is not None and found.perplexity_millionths is not None:
        exact, stored = found.float32_perplexity_millionths, found.perplexity_millionths
        rows += [
            ("perplexity in float32", f"{exact / 1e6:.4f}"),
            ("perplexity as stored", f"{stored / 1e6:.4f} ({(stored / exact - 1) * 100:+.3f} %)"),
        ]
    if found.logit_difference_millionths is not None:
        rows.append(("largest logit difference", f"{found.logit_difference_millionths / 1e6:.4f}"))
    if found.top1_agreement_millionths is not None:
        rows.append(("same most likely token", f"{found.top1_agreement_millionths / 1e4:.2f} %"))
    if found.cosine_millionths is not None:
        rows.append(("least cosine of embeddings", f"{found.cosine_millionths / 1e6:.6f}"))
    return table(("accuracy", f"{found.weights} weights"), rows)


def forms_table(forms: Sequence[ProductForm]) -> str:
    """Return a table of the form of each product and its gain, with the measured machines as notes."""
    rows, sources = [], list[str]()
    for each in forms:
        source = "not measured"
        if each.measured_on is not None:
            known = f"{each.measured_on}, {each.date}"
            if known not in sources:
                sources.append(known)
            source = f"[{sources.index(known) + 1}]"
            source += f" as {each.like}" if each.like is not None else ""
        times = dict(each.nanoseconds)
        own = times.pop(each.form, None)
        other = min(times, key=times.__getitem__, default=None)
        gain = "" if not own or other is None else f"{times[other] / own:.2f} x {other}"
        took = "" if own is None or each.like is not None else f"{own / 1e3:.1f}"
        rows.append((each.product, each.form, took, gain, source))
    head = ("product: rows x inputs x outputs", "form", "microseconds", "as fast as", "measured")
    notes = (f"[{number}] {known}" for number, known in enumerate(sources, 1))
    return "\n".join([table(head, rows), *notes])


def calls_table(config: Config) -> str:
    """Return a table of the arguments and results of the user's programs; empty if there are none.

    Sizes are those of the first bucket.

    Raises:
        RejectError: the program table is damaged.
    """
    functions = functions_of(config.programs)
    rows = [row for name, buckets in functions.items() for row in _rows(name, buckets, config)]
    return table(("call", "", "value"), rows) if rows else ""


def _rows(
    name: str, programs: Sequence[ProgramEntry], config: Config
) -> Iterator[tuple[str, str, str]]:
    first = programs[0]
    where = f"{config.bundle}: program table of {config.target}: {first.name}"
    arguments = check_arrays(first.arguments, first.kind, config.mesh, where)
    results = check_arrays(first.results, first.kind, config.mesh, where)
    tree = check_tree(first.arguments_tree, arguments, where)
    assert isinstance(tree, trees.Node)
    arrays, title = iter(arguments), name
    for key, child in zip(tree.keys, tree.children, strict=True):
        yield title, str(key), shortened(_described(child, arrays), _WIDTH)
        title = ""
    static: dict[str, list[str]] = {}
    for program in programs:
        for key, value in check_static(program, where).items():
            static.setdefault(key, []).append(
                str(value) if isinstance(value, EncodedConstant) else json.dumps(value)
            )
    for key, values in static.items():
        yield title, key, shortened(" or ".join(dict.fromkeys(values)), _WIDTH)
        title = ""
    gives = check_tree(first.results_tree, results, where)
    yield title, "->", shortened(_described(gives, iter(results)), _WIDTH)


def _described(tree: trees.Tree, arrays: Iterator[Array]) -> str:
    """Return a value as Python writes it, with dtypes and shapes for arrays."""
    if isinstance(tree, trees.Leaf):
        array = next(arrays)
        if tree.key:
            return f"random key{list(array.shape[:-1]) or ''}"
        names = array.variables or ("",) * len(array.shape)
        extents = ", ".join(
            name or str(extent) for name, extent in zip(names, array.shape, strict=True)
        )
        return f"{'weak ' * array.weak}{array.dtype}[{extents}]"
    parts = [_described(child, arrays) for child in tree.children]
    pairs = zip(tree.keys, parts, strict=True)
    match tree.kind:
        case "none":
            return "None"
        case "list":
            return f"[{', '.join(parts)}]"
        case "dict":
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"
        case "namedtuple" | "record":
            name = tree.type.rpartition(":")[2]
            return f"{name}({', '.join(f'{key}={part}' for key, part in pairs)})"
        case _:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """The memory of an engine with some slots of a context.

    Attributes:
        context: tokens of a text, the prompt included.
        slots: requests that run at once.
        cache_bytes: the most that all caches take at a time, without those of earlier prompts.
        total_bytes: with weights, executables and temporary memory.
        fits: whether that is within the budget; None: no budget is given.
    """

    context: int
    slots: int
    cache_bytes: int
    total_bytes: int
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory that one target of a bundle needs, by context and slots.

    Attributes:
        target: its name.
        weights_bytes: the weights. On a CPU they are pages of a mapped file, which processes share.
        executables_bytes: about what all its executables take when they are loaded.
        temporary_bytes: the most that one program needs while it runs.
        adapters_bytes: the room for adapters, which is taken when they are loaded.
        buckets: the memory of each bucket.
    """

    target: str
    weights_bytes: int
    executables_bytes: int
    temporary_bytes: int
    adapters_bytes: int
    buckets: tuple[SlotMemory, ...]


def capacity(target: str, content: Contents, budget_bytes: int | None) -> Capacity:
    """Return what a target needs.

    Args:
        target: its name.
        content: its table and layers.
        budget_bytes: the memory that there is; None: it is not known.

    Raises:
        UsageError: the bundle has no decoder.
    """
    # The import loads NumPy, which `inspect` of other bundles does not need.
    from prejit.runtime.generation.cache_plan import (
        TableBuckets,
        executables_bytes,
        peak_bytes,
        stacks_bytes,
    )

    config = content.config
    if config.decoder is None:
        raise UsageError(
            f"--capacity: expected a bundle with a decoder, found none in {config.bundle}",
            hint="only a decoder has slots: functions and encoders take memory for each run alone",
        )
    buckets = TableBuckets.of(config, config.decoder)
    has_weights = content.manifest.has_layer(WEIGHTS_MEDIA_TYPE)
    weights = content.manifest.layer(WEIGHTS_MEDIA_TYPE).size if has_weights else 0
    executables = executables_bytes(config)
    adapters = stacks_bytes(config.decoder)
    temporary = max(each.memory.temp_bytes for each in config.programs)
    found = []
    for context in buckets.contexts:
        for slots in buckets.batches:
            caches = peak_bytes(buckets, slots, context, buckets.batches[0])
            total = weights + executables + temporary + adapters + caches
            fits = None if budget_bytes is None else total <= budget_bytes
            found.append(SlotMemory(context, slots, caches, total, fits))
    return Capacity(target, weights, executables, temporary, adapters, tuple(found))


def capacity_table(found: Capacity, budget_bytes: int | None) -> str:
    """Return the memory as a table of contexts by slots, and what the budget holds."""
    slots = sorted({each.slots for each in found.buckets})
    rows: dict[int, list[str]] = {}
    for each in found.buckets:
        mark = "" if each.fits is not False else " (too much)"
        rows.setdefault(each.context, []).append(f"{size(each.total_bytes)}{mark}")
    parts = (
        f"weights {size(found.weights_bytes)}",
        f"executables {size(found.executables_bytes)}",
        f"temporary memory {size(found.temporary_bytes)}",
        *([f"adapters {size(found.adapters_bytes)}"] if found.adapters_bytes else ()),
    )
    lines = [
        f"{found.target}: {', '.join(parts)}; the rest of each sum is caches",
        table(
            ["context", *(f"{count} slots" if count > 1 else "1 slot" for count in slots)],
            [(f"{context:,} tokens", *cells) for context, cells in rows.items()],
        ),
    ]
    if budget_bytes is not None:
        lines.append(_held(found, budget_bytes))
    return "\n".join(lines)


def _held(found: Capacity, budget_bytes: int) -> str:
    """Return how many slots the budget holds at each context."""
    most = {each.context: each.slots for each in found.buckets if each.fits}
    if not most:
        least = min(each.total_bytes for each in found.buckets)
        return f"{size(budget_bytes)} hold no slot: the smallest bucket needs {size(least)}"
    held = ", ".join(f"{slots} of {context:,} tokens" for context, slots in most.items())
    return f"{size(budget_bytes)} hold {held}: as many clients at once; the requests of others wait"
