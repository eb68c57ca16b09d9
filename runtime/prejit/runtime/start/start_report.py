"""A start in parts: where the time went from the start of the process to the first result.

The stages of a start note spans, each with its thread. `split` gives every moment to one part only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from prejit.runtime.base import process_facts, process_usage
from prejit.runtime.base.process_facts import Span


@dataclass(frozen=True, slots=True)
class StartReport:
    """The time of a start in parts, from the start of the process to the first result.

    The first seven parts add up to `total_seconds`, which is time on a wall clock. They follow the thread
    that loads, and then the thread that gets the first result. What other threads do meanwhile counts only
    while this thread waits for it. If a part is inside another, such as an import while loading, the inner
    one has the time.

    A later `load` of the same process starts when it is called: it has no `process_seconds`.

    Attributes:
        process_seconds: from the start of the process to the first line of prejit: Python itself, and what
            the program did before it imported prejit. Up to 10 ms too long, because the kernel counts in
            steps of 10 ms.
        imports_seconds: importing prejit, NumPy, jaxlib and, if text is needed, the tokenizers package.
        reading_seconds: opening the bundle, reading its index, manifests and program table, and the part of
            the waiting for verification that was reading.
        verifying_seconds: the rest of the waiting for verification. It is divided as the work of all its
            threads was. Verification that nobody waits for costs nothing here.
        loading_seconds: the rest of `load`; making programs ready; placing weights; the tokenizer.
        first_run_seconds: from the beginning of the first request to its first token or result, without the
            parts above. If files with receipts or fs-verity are not in memory, programs read them here.
            It is 0 before the first result.
        other_seconds: what the program did itself before `load` and between `load` and the first request.
        total_seconds: from the start of the process to the first result.
        hashed_bytes: size of the files that this start verified, or still verifies.
        receipt_bytes: size of the files whose receipt made that unnecessary.
        verity_bytes: size of the files that the kernel verifies by fs-verity, when programs read them.
        hints: why a part was slow, for reasons that can be changed, and what to do.
    """

    process_seconds: float
    imports_seconds: float
    reading_seconds: float
    verifying_seconds: float
    loading_seconds: float
    first_run_seconds: float
    other_seconds: float
    total_seconds: float
    hashed_bytes: int
    receipt_bytes: int
    verity_bytes: int
    hints: tuple[str, ...] = ()


def split(
    loaded: Span,
    asked: tuple[float, int] | None,
    answered: tuple[float, int] | None,
    spans: Sequence[Span],
    *,
    is_first: bool,
    read_share: float,
    hashed_bytes: int,
    receipt_bytes: int,
    verity_bytes: int,
) -> StartReport:
    """Return the parts of a start, without hints.

    Args:
        loaded: the call of `load`.
        asked: when the first request began, and in which thread; None: there was none.
        answered: the same of its first result.
        spans: of all threads, without imports.
        is_first: whether it was the first call of `load` in this process.
        read_share: the part of verification that was reading, 0 to 1.
        hashed_bytes: size of the files that were verified.
        receipt_bytes: size of the files with a receipt.
        verity_bytes: size of the files that the kernel verifies.
    """
    began, spans = loaded.start, [loaded, *spans, *process_facts.imports]
    threads, ended = {loaded.thread}, loaded.end
    if is_first:
        began = process_usage.exec_time()
        package = import_module("prejit.runtime")  # by name, because it imports every room
        spans.append(Span("process", loaded.thread, began, package.first_line))
    if asked is not None and answered is not None:
        threads |= {asked[1], answered[1]}
        ended = answered[0]
        spans.append(Span("first_run", answered[1], asked[0], ended))
    mine = [one for one in spans if one.thread in threads or one.end <= loaded.start]
    ended = max(began, ended)  # a process that is forked after `load` began later
    seconds = dict.fromkeys(
        ("process", "imports", "reading", "verification", "loading", "first_run", "other"), 0.0
    )
    for part, start, end in _exclusive(mine, began, ended):
        seconds[part] += end - start
    reading = seconds["verification"] * read_share
    return StartReport(
        process_seconds=seconds["process"],
        imports_seconds=seconds["imports"],
        reading_seconds=seconds["reading"] + reading,
        verifying_seconds=seconds["verification"] - reading,
        loading_seconds=seconds["loading"],
        first_run_seconds=seconds["first_run"],
        other_seconds=seconds["other"],
        total_seconds=ended - began,
        hashed_bytes=hashed_bytes,
        receipt_bytes=receipt_bytes,
        verity_bytes=verity_bytes,
    )


def _exclusive(spans: Sequence[Span], began: float, ended: float) -> list[tuple[str, float, float]]:
    """Return every moment with its part: of the spans that hold it, the one that began last."""
    inside = [one for one in spans if one.start < ended and one.end > began and one.start < one.end]
    edges = {began, ended, *(edge for one in inside for edge in (one.start, one.end))}
    found = []
    for start, end in itertools.pairwise(sorted(edge for edge in edges if began <= edge <= ended)):
        holding = [one for one in inside if one.start <= start and one.end >= end]
        part = max(holding, key=lambda one: one.start).part if holding else "other"
        found.append((part, start, end))
    return found
