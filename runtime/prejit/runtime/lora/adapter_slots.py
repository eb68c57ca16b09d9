"""The adapters that a bundle holds at a time, and the programs that run while a row of a batch has one."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.base.wording import did_you_mean, few
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import DeviceArray, aligned_zeros
from prejit.runtime.errors import UsageError
from prejit.runtime.format.bundle_schema import Decoder, ProgramEntry
from prejit.runtime.format.checks.adapter_stacks import StackPair, stack_pairs
from prejit.runtime.format.names import ADAPTED
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.lora.peft_files import AdapterValues, read_adapter
from prejit.runtime.programs.ready_programs import Programs

NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,127}", re.ASCII)
"""The name of an adapter. It has no colon, which divides it from the name of a bundle in requests."""


@final
@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. Its slot is free again when nothing holds it any more.

    Attributes:
        name: the name under which requests choose it.
        path: where it was read.
        digest: of its files.
        rank: its largest rank.
        slot: its place in the stacks, from 1.
        holder: equal for the adapters of one loaded bundle. A reference to the bundle would be a cycle.
    """

    name: str
    path: str
    digest: str
    rank: int
    slot: int
    holder: object = field(repr=False)


class Kept(NamedTuple):
    """An adapter for calls that belong together, whatever is unloaded or loaded between them."""

    adapter: Adapter


class Adapters:
    """The adapters that a bundle holds. Safe to use from many threads.

    Attributes:
        slots: how many it holds at most.
        rank: the largest rank of one.
        chosen: how many requests chose an adapter, by its name.
    """

    def __init__(
        self, pairs: Sequence[StackPair], device: Device, bundle: str, policies: Sequence[str]
    ) -> None:
        """Begin with free slots. The stacks are zeros, which take no memory until one is loaded."""
        self.slots, _, self.rank, _ = pairs[0].down.shape
        self._bundle, self._policies = bundle, policies
        self.chosen: Counter[str] = Counter()
        self._pairs = pairs
        self._device = device
        self._values: dict[str, np.ndarray[Any, Any]] = {}
        self._placed: dict[str, DeviceArray] = {}
        self._named: dict[str, Adapter] = {}
        self._free = list(range(self.slots, 0, -1))
        self._lock = threading.RLock()

    @property
    def loaded(self) -> dict[str, Adapter]:
        """The adapters that requests may choose, by name."""
        return dict(self._named)

    @property
    def modules(self) -> tuple[str, ...]:
        """The matrices that adapters may change."""
        return tuple(name for pair in self._pairs for name in pair.modules)

    def load(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Read an adapter and let requests choose it. Loading the same one again changes nothing.

        Args:
            name: letters, digits and . _ / -, at most 128.
            path: the directory that PEFT's save_pretrained wrote.

        Raises:
            UsageError: the name is taken by another adapter, or no slot is free.
            CheckpointError: the adapter does not fit the bundle, or a file is damaged.
            UntrustedError: a policy does not let it be loaded.
        """
        if not isinstance(name, str) or not NAME.fullmatch(name):
            arguments.refuse("adapter", "a name of letters, digits and . _ / -", name)
        at = Path(os.path.abspath(path))
        values = read_adapter(at, self._pairs, partial(self._check_trust, at))
        with self._lock:
            if (known := self._named.get(name)) is not None:
                if known.digest == values.digest:
                    return known
                raise UsageError(
                    f"adapter {name!r}: expected {known.digest:.19}, which has this name; found "
                    f"{values.digest:.19}",
                    hint="unload it first, or give the other one another name",
                )
            slot = self._take_slot()
            self._write(slot, values)
            adapter = Adapter(name, str(at), values.digest, values.rank, slot, self._free)
            weakref.finalize(adapter, self._free.append, slot).atexit = False
            self._named[name] = adapter
            return adapter

    def unload(self, name: str) -> None:
        """Let no more requests choose an adapter. Those that run keep it; its slot is free after the last.

        Raises:
            UsageError: there is none of this name.
        """
        with self._lock:
            del self._named[self[name].name]
            del self.chosen[name]

    def keep(self, name: str) -> Kept:
        """Return a loaded adapter as the option of several calls. Errors as those of a name."""
        return Kept(self[name])

    def __getitem__(self, name: str | Adapter | Kept) -> Adapter:
        """Return a loaded adapter, or one that was kept.

        Raises:
            UsageError: there is none of this name, or it is another than the one given.
        """
        if isinstance(name, Kept):
            return name.adapter
        given = name
        if isinstance(name, Adapter):
            name = name.name
        if not isinstance(name, str) or (found := self._named.get(name)) is None:
            known = few(sorted(self._named)) or "none"
            guess = did_you_mean(str(name), self._named)
            raise UsageError(
                f"adapter: expected one that is loaded: {known}; found {arguments.described(name)}{guess}",
                hint="load it first: `bundle.adapters.load(name, path)`, or POST /v1/load_lora_adapter",
            )
        if isinstance(given, Adapter) and found is not given:
            raise UsageError(
                f"adapter {name!r}: expected {found.digest:.19}, which is loaded in this bundle; found "
                f"{given.digest:.19}, which is unloaded or of another bundle",
                hint="give its name, or what `bundle.adapters.load` returns now",
            )
        self.chosen[name] += 1
        return found

    def check(self, adapter: Adapter) -> None:
        """Check that an adapter was loaded into this bundle; the slots of others mean nothing here."""
        if adapter.holder is not self._free:
            raise UsageError(
                f"adapter {adapter.name!r}: expected one of this bundle, found another bundle's"
            )

    def _check_trust(self, path: Path, digest: str) -> None:
        if self._policies:
            from prejit.runtime.lora.adapter_trust import check_adapter  # it needs cryptography

            check_adapter(self._policies, self._bundle, path, digest)

    def _take_slot(self) -> int:
        if not self._free:
            gc.collect()  # a cycle may hold what nobody uses
        if not self._free:
            raise UsageError(
                f"expected a free slot for an adapter, found {self.slots} taken by "
                f"{few(sorted(self._named))}, and by requests that still run",
                hint="unload one, or build with more slots in [adapters]",
            )
        return self._free.pop()

    def _write(self, slot: int, values: AdapterValues) -> None:
        """Write an adapter into its slot, which no request reads now."""
        for pair in self._pairs:
            for side, array in enumerate((pair.down, pair.up)):
                name = str(array.path[0])
                if name not in self._values:
                    self._values[name] = aligned_zeros(array.shape, np.dtype(np.float32))
                stack = self._values[name][slot - 1]
                for layer, module in enumerate(pair.modules):
                    if (change := values.changes.get(module)) is None:
                        stack[layer] = 0
                        continue
                    rank = len(change[0])
                    stack[layer, :rank] = change[1].T if side else change[0]
                    stack[layer, rank:] = 0
        # One CPU reads this memory as it is; all other devices have copies.
        if self._device.platform != "cpu" or self._device.mesh is not None:
            self._placed = {}

    def stacks(self) -> Mapping[str, DeviceArray]:
        """Return the stacks on the device, by the names of the arguments of programs."""
        if not (placed := self._placed):
            with self._lock:
                placed = {name: self._device.put(values) for name, values in self._values.items()}
                self._placed = placed
        return placed


class AdaptedPrograms(DecoderPrograms):
    """The programs of a decoder whose rows may have adapters.

    While a row of a batch has an adapter, `adapted-decode` runs in place of `decode`, and so on.
    """

    def __init__(self, decoder: Decoder, programs: Programs, policies: Sequence[str] = ()) -> None:
        """Sort the programs of a bundle into buckets; `policies` decide which adapters may be loaded."""
        super().__init__(decoder, programs)
        self._adapters = Adapters(stack_pairs(decoder), programs.device, programs.bundle, policies)

    @property
    def adapters(self) -> Adapters:
        """The adapters beside the weights."""
        return self._adapters

    def beside(self, requests: Sequence[Any]) -> dict[str, DeviceArray]:
        """Return the slots of the rows' adapters; nothing if no row has one."""
        slots = [
            0 if each is None or each.adapter is None else each.adapter.slot for each in requests
        ]
        if not any(slots):
            return {}
        # A free row takes the adapter of another: programs compute rows without one in other steps.
        if not any(each is not None and each.adapter is None for each in requests):
            slots = [slot or max(slots) for slot in slots]
        return {"adapter": self.device.put(np.array(slots, np.int32))}

    def run(
        self, program: ProgramEntry, inputs: Mapping[str, DeviceArray], cache: Sequence[DeviceArray]
    ) -> tuple[dict[str, DeviceArray], list[DeviceArray]]:
        """Run a program, or the one in its place if a row has an adapter. As `DecoderPrograms.run`."""
        if "adapter" in inputs:
            program = self.programs.table[f"{ADAPTED}{program.name}"]
            inputs = {**inputs, **self.adapters.stacks()}
        return super().run(program, inputs, cache)
