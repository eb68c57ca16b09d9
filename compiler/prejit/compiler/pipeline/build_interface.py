"""Input and output of a build: options and services, its shard, and the result of each build.

Several machines make one build without a scheduler: each is a shard, and one of them packs the bundle. Every
shard plans the same programs. It begins with its own part of them and goes on with the parts of others;
`Store.making` lets one shard at a time make a result. In the end every shard has all executables of a bundle,
and the first one packs it. The store then has a mark of it, which says to the others that they are done.

Marks have numbers: a shard looks which ones are there when it begins, and counts only later ones. So another
build of the same programs, a day later, packs its own bundle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, final

from prejit.compiler.compile.executor import Executor
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.pipeline.executable_jobs import Jobs
from prejit.compiler.pipeline.pack.weights_layer import FewBits
from prejit.compiler.progress import Progress
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.errors import PrejitError, UsageError
from prejit.runtime.format.bundle_schema import Accuracy


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How to build: the services that a build uses, and its options.

    Attributes:
        store: keeps results.
        executor: compiles programs and forms of products. The build closes it once all is compiled.
        progress: shows every step.
        forms: a table of measured forms, which goes before all others.
        measure: which products are measured. True: those that this machine has not measured itself; False:
            none, nor an encoder's programs unless there are shards; None: large ones that no table has.
        timeout_seconds: time limit of measuring one product, of measuring an encoder's programs for a target,
            and of asking all programs for their golden answers.
        retrace: whether the user's code is traced again, whatever the store has.
        shard: which part of the build this is; None: the build has one machine.
        kernels_by: identity of the C++ compiler that is tried first for each target's kernels, by target; a
            target that is not named gets no kernels. None: every target, with the first compiler.
    """

    store: Store
    executor: Executor
    progress: Progress
    forms: Path | None = None
    measure: bool | None = None
    timeout_seconds: float = JOB_SECONDS
    retrace: bool = False
    shard: Shard | None = None
    kernels_by: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Services(BuildOptions):
    """The options of a command, and what all its builds share.

    Attributes:
        output: directory of bundles.
        jobs: gets each program once, whichever build needs it.
        packings: by bundle, decides which shard packs it; empty: the build has no shards.
    """

    output: Path
    jobs: Jobs
    packings: Mapping[str, Packing]


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """A program of a bundle for one target.

    Attributes:
        key: digest of the key of its executable.
        compile_milliseconds: time that the compiler took, now or in an earlier build.
        new: whether it was compiled now, for this program.
    """

    program: str
    target: str
    key: str
    compile_milliseconds: int
    new: bool


@dataclass(frozen=True)
class Built:
    """The result of a build.

    Attributes:
        path: directory of the bundle.
        digest: digest of the bundle.
        compiled: number of programs x targets that were compiled now.
        cached: number of those that were in the store.
        written: whether the directory was changed.
        accuracy: what the dtypes of weights and cache cost; None: all are float32.
        programs: every program for every target.
        packed_by: number of the shard that packed the bundle; None: the build had no shards.
        packed_here: whether the bundle is in `path`, and not in the directory of another shard.
        few_bits: what became of matrices that were published in few bits; None: there are none.
        int4: what decided how matrices were rounded to int4; empty: there are none.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool
    accuracy: Accuracy | None = None
    programs: tuple[BuiltProgram, ...] = ()
    packed_by: int | None = None
    packed_here: bool = True
    few_bits: FewBits | None = None
    int4: str = ""


@dataclass(frozen=True)
class Failed:
    """A build that failed beside others: what it was to build, and why it failed."""

    manifest: Manifest
    error: PrejitError


_Item = TypeVar("_Item")

MAX_SHARDS = 10_000
"""Maximum number of shards of a build."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a build: its number, from 1, and the number of shards."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `2/4` names.

        Raises:
            UsageError: the text names none.
        """
        found = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MAX_SHARDS:
            raise UsageError(
                f"--shard: expected i/N with i from 1 to N, found {text!r:.40}",
                hint='a job that counts from 0 says --shard "$((INDEX + 1))/$COUNT"',
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def ordered(self, items: Sequence[_Item]) -> list[_Item]:
        """Return all items: this shard's own, then those of others, whose own order is the reverse."""
        parts = [
            items[(self.number - 1 + step) % self.count :: self.count] for step in range(self.count)
        ]
        return [*parts[0], *(each for part in parts[1:] for each in reversed(part))]


@dataclass(frozen=True, slots=True)
class Packed:
    """The result of a shard: its number, and the digest of the bundle that it packed."""

    shard: int
    digest: str


class Turn(Enum):
    """The answers to whether it is this shard's turn to pack."""

    NOW = "pack now"
    LATER = "another shard packs, and may fail"


@final
class Packing:
    """Lets one shard pack. A context manager, which lets another one try if this one fails."""

    def __init__(self, shard: Shard, bundle: str, store: Store) -> None:
        """Look which marks of a bundle there are."""
        self.shard = shard
        self._bundle = bundle
        self._store = store
        self._number = self._count_marks()
        self._stack = ExitStack()
        self._executables = ""

    def wait(
        self, executables: str, progress: Progress, *, give_up: Callable[[], bool] = lambda: False
    ) -> Packed | Turn:
        """Wait while another shard packs; return what it has packed, or whose turn it is.

        `executables` is the digest of the keys of all executables. If `give_up`, which is called during the
        wait, returns true, the turn is LATER.
        """
        self._executables = executables
        with progress.phase("waiting for the shard that packs"):
            while True:
                key = self._mark(self._number)
                with ExitStack() as making:
                    if not making.enter_context(self._store.making(key, give_up=give_up)):
                        return Turn.LATER
                    if (mark := self._store.get(key)) is None:
                        self._stack = making.pop_all()
                        return Turn.NOW
                if mark["executables"] == executables:
                    return Packed(mark["shard"], mark["digest"])
                self._number += 1  # that of another build with the same name

    def finish(self, digest: str) -> None:
        """Say to the other shards that the bundle is packed."""
        mark: Mapping[str, Any] = {
            "executables": self._executables,
            "shard": self.shard.number,
            "digest": digest,
        }
        self._store.put(self._mark(self._number), mark)
        self._stack.close()

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _mark(self, number: int) -> Key:
        return Key("packed", self._bundle, (("bundle", self._bundle), ("number", str(number))))

    def _count_marks(self) -> int:
        """Return the number of the first mark that is not there, with few questions."""
        step = 1
        while self._store.get(self._mark(step - 1)) is not None:
            step *= 2
        low, high = step // 2, step - 1  # the mark below `low` is there, and `high` is not
        while low < high:
            middle = (low + high) // 2
            if self._store.get(self._mark(middle)) is None:
                high = middle
            else:
                low = middle + 1
        return low
