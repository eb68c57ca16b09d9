"""How much memory a decoder needs for its slots, and how many slots a memory budget holds."""

from __future__ import annotations

from dataclasses import dataclass

from prejit.runtime.base.wording import size, table
from prejit.runtime.errors import UsageError
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import Contents


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
