"""The programs of a decoder: which one serves which batch, context and prompt length, and how to call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prejit.runtime.device.transfer import DeviceArray, aligned_zeros
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import PACKED
from prejit.runtime.format.bundle_schema import Decoder, ProgramEntry
from prejit.runtime.format.checks.program_interfaces import (
    cache_arrays,
    is_rewindable,
    source_array,
)
from prejit.runtime.format.names import DRAFT
from prejit.runtime.programs.ready_programs import Programs
from prejit.runtime.records import replace

_LEAST_CHUNK = 32
"""Prompts are cut into no smaller chunks: for fewer positions, reading the weights takes most of the time."""
_LESS_PADDING = 0.8
"""A prompt is cut where that computes less than this share of the positions: larger chunks run faster."""


class DecoderPrograms:
    """The programs of a decoder by bucket. Safe to use from many threads.

    Attributes:
        decoder: the bundle's description of the model.
        programs: all programs of the bundle.
        device: where they run.
        batches, contexts: the sizes of the buckets, ascending.
        cache: the arrays of a cache, at one row and one position.
        copies_rows: whether the host copies rows of caches (host_caches.py), and no program does.
        source: what an encoder-decoder reads, at one row and one place; None: the model is another.
        is_rewindable: whether a row of a cache can go back to an earlier position.
        draft_tokens: the longest draft that the bundle can verify; 0 if it has no verify programs.
        draft: the programs of the bundle's draft model; None: it has none.
        spares: caches of zeros by batch and context, whose pages take no memory (host_caches.py).
        paces: a `DraftPace` by where drafts come from: all batches of a bundle learn it together.
    """

    def __init__(self, decoder: Decoder, programs: Programs) -> None:
        """Sort the programs of a bundle into buckets."""
        self.decoder = decoder
        self.programs = programs
        self.device = programs.device
        self._prefill: dict[tuple[int, int], list[ProgramEntry]] = {}
        self._decode: dict[tuple[int, int], ProgramEntry] = {}
        self._verify: dict[tuple[int, int], ProgramEntry] = {}
        self._copy: dict[tuple[int, ...], ProgramEntry] = {}
        for program in self.entries():
            bucket = program.bucket
            if program.kind == "copy":
                names = ("source_batch", "source_context", "batch", "context")
                self._copy[tuple(bucket[name] for name in names)] = program
            elif program.kind == "prefill":
                self._prefill.setdefault((bucket["batch"], bucket["context"]), []).append(program)
            elif program.kind in ("decode", "verify"):
                found = self._decode if program.kind == "decode" else self._verify
                found[bucket["batch"], bucket["context"]] = program
        for rows in self._prefill.values():
            rows.sort(key=lambda program: program.bucket["prompt"])
        self.batches = sorted({batch for batch, _ in self._decode})
        self.contexts = sorted({context for _, context in self._decode})
        self.draft_tokens = max((p.bucket["draft"] for p in self._verify.values()), default=0)
        self.paces: dict[str, Any] = {}
        self.spares: dict[tuple[int, int], list[DeviceArray]] = {}
        self.draft: DecoderPrograms | None = None
        if (draft := programs.config.draft) is not None and draft is not decoder:
            self.draft = DecoderPrograms(draft, programs)
        self.cache = cache_arrays(decoder)  # check_config has parsed them
        packed = any(array.dtype in PACKED for array in self.cache)
        self.copies_rows = self.device.cpu_sharding is not None and not packed
        self.source = source_array(decoder)
        self.is_rewindable = is_rewindable(decoder)
        self._calls: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._zeros: dict[tuple[int, Any], DeviceArray] = {}

    def entries(self) -> Iterable[ProgramEntry]:
        """Return the programs, among others; those of a draft model alone, with the kinds of a decoder's."""
        table = self.programs.table.values()
        if self.decoder is not self.programs.config.draft:
            return table
        own = (each for each in table if each.kind.startswith(DRAFT))
        return [replace(each, kind=each.kind.removeprefix(DRAFT)) for each in own]

    # ------------------------------------------------------------------ which program

    def batch_for(self, rows: int) -> int:
        """Return the smallest batch bucket for this many rows.

        Raises:
            UsageError: no bucket is large enough.
        """
        for batch in self.batches:
            if batch >= rows:
                return batch
        raise UsageError(
            f"expected at most {self.batches[-1]} rows at once, found {rows}",
            hint=f"add a batch of {rows} to [generate] of the manifest",
        )

    def context_for(self, tokens: int) -> int:
        """Return the smallest context bucket for this many tokens, or the largest one there is."""
        return next((c for c in self.contexts if c >= tokens), self.contexts[-1])

    def context_after(self, context: int) -> int:
        """Return the next longer context bucket. There must be one."""
        return next(c for c in self.contexts if c > context)

    def bucket_for(
        self, rows: int, tokens: int, largest: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Return the smallest (batch, context) bucket that fits, preferring one whose programs are ready.

        Raises:
            UsageError: no bucket is large enough.
        """
        batch, context = self.batch_for(rows), self.context_for(tokens)
        most = largest or (self.batches[-1], self.contexts[-1])
        larger = [
            (b, c)
            for b in self.batches
            for c in self.contexts
            if batch <= b <= max(batch, most[0]) and context <= c <= max(context, most[1])
        ]
        return min(larger, key=self._missing)  # the first of several with the same count

    def _missing(self, bucket: tuple[int, int]) -> int:
        """Return how many programs of a bucket a request has to wait for."""
        ready = self.programs.ready
        some = any(ready(prefill.name) for prefill in self._prefill[bucket])
        return (not some) + (not ready(self._decode[bucket].name))

    def prefill_for(self, batch: int, context: int, tokens: int) -> ProgramEntry:
        """Return the smallest prefill program that takes this many tokens at once, or else the largest.

        It chooses among the programs that are ready. If none is, it returns the shortest.
        """
        programs = self._prefill[batch, context]
        ready = [program for program in programs if self.programs.ready(program.name)]
        return _fitting(ready or programs[:1], tokens)

    def chunk_for(self, batch: int, context: int, tokens: int) -> ProgramEntry:
        """Return the prefill program for the next of so many tokens: the one that pads them the least in all.

        The time on a CPU grows with the positions, those of padding too. So 100 tokens are computed as 64 and
        36 in a program of 64, rather than in one of 256. An accelerator takes them whole.
        """
        whole = self.prefill_for(batch, context, tokens)
        size = whole.bucket["prompt"]
        if self.device.platform != "cpu" or tokens >= size:
            return whole
        shorter = {  # by how many positions they compute
            -(-tokens // each.bucket["prompt"]) * each.bucket["prompt"]: each
            for each in self._prefill[batch, context]
            if _LEAST_CHUNK <= each.bucket["prompt"] < tokens and self.programs.ready(each.name)
        }
        least = min(shorter, default=size)
        return shorter[least] if least < _LESS_PADDING * size else whole

    def prefills(self, batch: int, context: int) -> tuple[ProgramEntry, ...]:
        """Return the prefill programs of a bucket, the shortest first."""
        return tuple(self._prefill[batch, context])

    def decode_for(self, batch: int, context: int) -> ProgramEntry:
        """Return the decode program of a bucket."""
        return self._decode[batch, context]

    def verify_for(self, batch: int, context: int) -> ProgramEntry | None:
        """Return the verify program of a bucket, or None if the bundle has none."""
        return self._verify.get((batch, context))

    def reusable(self, cached: Sequence[int], prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt need not be computed, given a row that holds other tokens.

        The last token is always computed, for its logits. A state serves only if the prompt continues exactly
        what it has seen. What an encoder-decoder holds belongs to one source.
        """
        return self.reusable_of(common_length(cached, prompt), len(cached), len(prompt))

    def reusable_of(self, common: int, cached: int, prompt: int) -> int:
        """Return what `reusable` does, given how many tokens both have in common, and their lengths."""
        if self.source is not None:
            return 0
        if self.is_rewindable:
            return min(common, prompt - 1)
        return common if common == cached < prompt else 0

    def copy_for(self, source: tuple[int, int], to: tuple[int, int]) -> ProgramEntry:
        """Return the program that copies rows from one cache into another; both are (batch, context).

        Raises:
            UsageError: the bundle has none for these sizes.
        """
        if found := self._copy.get((*source, *to)):
            return found
        raise UsageError(
            f"expected a program that copies caches of {source[0]} x {source[1]} to "
            f"{to[0]} x {to[1]}, found none",
            hint="every decoder copies caches of its smallest batch to the others, and to longer contexts",
        )

    def copying(self, source: tuple[int, int], to: tuple[int, int]) -> tuple[str, ...]:
        """Return the program that such a copy runs, unless the host copies; both are (batch, context)."""
        return () if self.copies_rows else (self.copy_for(source, to).name,)

    def can_copy(self, source: tuple[int, int], to: tuple[int, int]) -> bool:
        """Return whether rows of a cache can be copied into another; both are (batch, context)."""
        return (*source, *to) in self._copy

    def can_fill_aside(
        self, batch: int, context: int, tokens: int, rows: int | None = None
    ) -> bool:
        """Return whether prompts can be computed in a batch of `rows`, or else the smallest, and copied here.

        The answer is no while a program for it is not ready: waiting for one would cost more than it saves.
        """
        smaller = self.batches[0] if rows is None else rows
        if not self.can_copy((smaller, context), (batch, context)):
            return False
        prefill = self.prefill_for(smaller, context, tokens).name
        copies = self.copying((smaller, context), (batch, context))
        return all(map(self.programs.ready, (prefill, *copies)))

    # ------------------------------------------------------------------ ready before they are needed

    def prepare(self, rows: int, tokens: int, prompt: int, bucket: tuple[int, int]) -> None:
        """Begin to make the programs of a request ready, then those that would have served it better.

        A decode program that comes out of the bundle is left until the prompt is computed: loading it now
        would take a core away from the first token.

        Raises:
            BuildError, RejectError: a better program failed in the background before, and fails again.
        """
        first = [self.prefill_for(*bucket, prompt).name] if prompt > 1 else []
        later = first and self.programs.are_loaded
        self.programs.prepare(*first, *(() if later else (self._decode[bucket].name,)))
        best = self.batch_for(rows), self.context_for(tokens)
        better = _fitting(self._prefill[best], prompt), self._decode[best]
        self.programs.prepare_later(*(p.name for p in better if not self.programs.ready(p.name)))

    # ------------------------------------------------------------------ how to call it

    def run(
        self, program: ProgramEntry, inputs: Mapping[str, DeviceArray], cache: Sequence[DeviceArray]
    ) -> tuple[dict[str, DeviceArray], list[DeviceArray]]:
        """Run prefill, decode or verify. `KVCache.run` is the way to call it.

        Args:
            program: which one.
            inputs: its arguments by name, without weights and cache. More than it takes is allowed.
            cache: the arrays of a cache, which are donated.

        Returns:
            Its results by name, and the new arrays of the cache.
        """
        names, results = self._call(program.name)
        given = self.programs[program.name].run(
            [*self.programs.weights(program.weights), *(inputs[name] for name in names), *cache]
        )
        return dict(zip(results, given, strict=False)), given[len(results) :]

    @property
    def adapters(self) -> Any:
        """The adapters beside the weights, of a bundle that takes some. Raises UsageError for others."""
        raise UsageError(
            f"expected a bundle that takes adapters, found {self.programs.bundle}",
            hint="add [adapters] to the manifest and build again",
        )

    def check_text(self, tokens: Sequence[int]) -> None:
        """Check a prompt without images. Raises UsageError for what only a model that reads some refuses."""

    def beside(self, requests: Sequence[Any]) -> dict[str, DeviceArray]:
        """Return further inputs for the requests of the rows of a batch; None: the row is free."""
        return {}

    def _call(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the arguments and results of a program, without weights and cache."""
        if (found := self._calls.get(name)) is None:
            arguments, results = (
                tuple(str(array.path[0]) for array in arrays if array.path[0] != "cache")
                for arrays in (self.programs.arguments(name), self.programs.results(name))
            )
            found = self._calls[name] = arguments, results
        return found

    def max_steps(self, program: ProgramEntry) -> int:
        """Return the most steps that one call of a decode program can take."""
        results = self.programs.results(program.name)
        return next(array.shape[0] for array in results if array.path == ("tokens",))

    def cache_sharding(self, batch: int, context: int) -> tuple[str, ...]:
        """Return how the mesh splits the arrays of a cache; empty if there is no mesh."""
        if self.device.mesh is None:
            return ()
        return self.programs.arguments(self._decode[batch, context].name)[-1].sharding

    def zeros(self, batch: int, dtype: Any) -> DeviceArray:
        """Return shared zeros [B, V] on the device. No program may take them donated."""
        if (found := self._zeros.get((batch, dtype))) is None:
            size = (batch, self.decoder.vocab_size)
            found = self._zeros[batch, dtype] = self.device.put(
                aligned_zeros(size, np.dtype(dtype))
            )
        return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginnings."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _fitting(prefills: Sequence[ProgramEntry], tokens: int) -> ProgramEntry:
    return next((p for p in prefills if p.bucket["prompt"] >= tokens), prefills[-1])
