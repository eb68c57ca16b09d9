"""The memory of an engine's caches, computed before any of them is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prejit.runtime.base.process_facts import control_groups, text_of
from prejit.runtime.base.process_memory import free_memory_bytes
from prejit.runtime.device.device import Device
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.cache_plan import TableBuckets, executables_bytes, peak_bytes
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.kv_cache import cache_bytes

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle

_SHARE = 0.8
"""The share of the free memory that caches may take, if the caller names no number of bytes."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The largest cache of an engine.

    Attributes:
        batch, context: its bucket; longer texts are refused.
        peak_bytes: the most that all caches can take at a time, prefixes included: also while one is copied
            into a larger one.
        budget_bytes: how much they may take.
        prefix_bytes: the part of it for prefixes.
        together: the largest batch in which prompts are computed together before they are copied.
    """

    batch: int
    context: int
    peak_bytes: int
    budget_bytes: int
    prefix_bytes: int
    together: int


def plan_caches(
    decoder: DecoderPrograms, slots: int, budget_bytes: int, prefix_bytes: int | None
) -> CachePlan:
    """Return the largest cache with this many slots whose peak fits into a budget.

    Args:
        decoder: the programs.
        slots: how many requests are to run at a time.
        budget_bytes: how much all caches may take.
        prefix_bytes: how much of it prefixes may take; None: as much as the cache of the slots, and at most
            a quarter of what is left.

    Raises:
        UsageError: the bundle has no batch for this many slots.
        NoRoomError: not even its shortest context fits.
    """
    buckets = TableBuckets.of(decoder.programs.config, decoder.decoder)
    batch = decoder.batch_for(slots)
    kept = prefix_bytes or 0
    for context in reversed(decoder.contexts):
        peaks = {
            rows: peak_bytes(buckets, batch, context, rows) + kept
            for rows in decoder.batches
            if rows == decoder.batches[0]
            or (rows < batch and decoder.can_copy((rows, context), (batch, context)))
        }
        if fitting := [rows for rows, peak in peaks.items() if peak <= budget_bytes]:
            together = fitting[-1]
            peak = peaks[together]
            if prefix_bytes is None:
                kept = min(cache_bytes(decoder.cache, batch, context), (budget_bytes - peak) // 4)
                peak += kept
            return CachePlan(batch, context, peak, budget_bytes, kept, together)
    need = peak_bytes(buckets, batch, decoder.contexts[0], decoder.batches[0]) + kept
    raise NoRoomError(
        f"memory: expected at least {need:,} bytes for {batch} slots of {decoder.contexts[0]} tokens"
        f"{f' and {kept:,} bytes of prefixes' if kept else ''}, found {budget_bytes:,}",
        hint="give more memory, or ask for fewer slots",
    )


def batches_between(decoder: DecoderPrograms, plan: CachePlan) -> list[int]:
    """Return the batches that an engine moves between, ascending; the last one is the plan's."""
    sizes = [plan.batch]
    for batch in reversed([size for size in decoder.batches if size < plan.batch]):
        context = decoder.contexts[0]
        if decoder.can_copy((batch, context), (sizes[0], context)):
            sizes.insert(0, batch)
    return sizes


class NoRoomError(UsageError):
    """A bundle does not fit into the memory that is left."""

    code: ClassVar[str] = "no-room"


def programs_bytes(bundle: Bundle) -> int:
    """Return about how much all executables of a bundle take, and the largest run of one.

    On a CPU weights are mapped files, which count as free memory. An accelerator holds a copy of them.
    """
    memories = [program.memory for program in bundle.config.programs]
    runs = [each.temp_bytes + each.output_bytes - each.alias_bytes for each in memories]
    if bundle.config.requirement.platform != "cpu":
        runs = [run + each.argument_bytes for run, each in zip(runs, memories, strict=True)]
    return executables_bytes(bundle.config) + max(runs, default=0)


def free_bytes(device: Device | None) -> int:
    """Return how much memory caches may take on a device, by what is free there now; None: on the host."""
    free = None if device is None else device.free_memory_bytes()
    return int((free_memory_bytes() if free is None else free) * _SHARE) // _MIB * _MIB


def wake_bytes(device: Device | None) -> int:
    """Return how much memory an engine may wake into on a device; None: on the host.

    The kernel drops files for it, such as the weights that the engine has used before.
    """
    free = None if device is None else device.free_memory_bytes()
    return free_memory_bytes(with_files=True) if free is None else free


def host_memory_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def host_memory_limit_bytes(root: str = "/") -> int:
    """Return how much memory this process may use, by its control groups or the machine.

    `root` is the directory that holds `proc` and `sys`.
    """
    limit: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for directory, is_second in control_groups(root, "memory"):
        file = "memory.max" if is_second else "memory.limit_in_bytes"
        if (text := text_of(os.path.join(directory, file)).strip()).isdecimal():  # and not `max`
            limit = min(limit, int(text))
    return limit
