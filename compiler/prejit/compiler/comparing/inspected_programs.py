"""Programs as `prejit inspect` shows them: as text, and by their cost.

The texts are StableHLO, HLO as XLA optimized it, and machine code. All of it is read out of the bundle:
nothing is compiled or run, so the target may be one of another machine.

A roofline says how near a program's speed comes to the limits of this machine, which are how fast it reads
memory and multiplies. Williams, Waterman and Patterson, "Roofline: an insightful visual performance model"
(CACM 2009): a program takes at least the longer of the time to move its bytes and to do its arithmetic.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from prejit.compiler.comparing.difference import ReadBundle, ReadTarget
from prejit.compiler.compile.stablehlo_contents import as_text, count_flops
from prejit.compiler.compile.worker.xla_messages import message_bytes, read_executable
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.bundle import Bundle
from prejit.runtime.device import _jax_parts
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.checks.elf import read_sections
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE
from prejit.runtime.machine.compare import compare, preference
from prejit.runtime.machine.fingerprint import Fingerprint

_SHT_SYMTAB, _STT_FUNC = 2, 2
_PROGRAM_SECONDS, _LEAST_RUNS = 0.2, 3
"""Least time and number of runs in which one turn measures a program."""
_READ_BYTES = 512 << 20
"""Size of the array that is read: larger than the caches of most machines."""
_PRODUCT_SIDE = 2048
"""Rows and columns of the matrices that are multiplied."""
_LIMIT_SECONDS, _LEAST_PASSES = 0.5, 5
"""Least time and number of passes in which a limit of the machine is measured."""


def find_target(bundle: ReadBundle, name: str | None) -> ReadTarget:
    """Return a target by its name; None: the one that this machine loads, or else the first.

    Raises:
        UsageError: the bundle has no such target, or its programs were recorded.
    """
    targets = list(bundle.targets.values())
    if name is None:
        here = Fingerprint.current()
        fitting = [each for each in targets if compare(each.name, each.requirement, here).matches]
        key = lambda each: preference(each.requirement, here)  # noqa: E731
        found = min(fitting, key=key, default=targets[0])
    elif name in bundle.targets:
        found = bundle.targets[name]
    else:
        raise UsageError(
            f"{bundle.path}: expected a target, found {name!r}{did_you_mean(name, bundle.targets)}",
            hint=f"its targets are: {', '.join(bundle.targets)}",
        )
    if found.contents.config.recorded is not None:
        raise UsageError(
            f"{bundle.path}: expected programs that `prejit build` compiled, found recorded ones",
            hint="a recorded program is in the form of jax's cache, which only jax reads",
        )
    return found


def find_program(bundle: ReadBundle, target: ReadTarget, name: str) -> ProgramEntry:
    """Return a program of a target by its name.

    Raises:
        UsageError: there is none.
    """
    programs = {each.name: each for each in target.contents.config.programs}
    if name not in programs:
        raise UsageError(
            f"{bundle.path}: expected a program of {target.name}, found {name!r}"
            f"{did_you_mean(name, programs)}",
            hint="`prejit inspect BUNDLE` lists them",
        )
    return programs[name]


def stablehlo(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> str:
    """Return a portable program, for the platform of a target, as MLIR."""
    content = bundle.frame(target, PORTABLE_MEDIA_TYPE, program.portable)
    return as_text(content, program.platforms or (), target.requirement.platform)


def optimized_hlo(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> str:
    """Return the HLO of an executable, as XLA optimized it.

    Raises:
        UsageError: it is not an executable of XLA:CPU.
    """
    with _reading(bundle, program):
        serialized = _serialized(bundle, target, program)
        module = _jax_parts.kept_hlo(serialized)
        if module is None:  # a build before decision 0138
            whole = read_executable(serialized)[1].result.hlo.module
            module = _jax_parts.parse_hlo(message_bytes(whole))
        return str(module.to_string())


def assembly(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> str:
    """Return the machine code of an executable, function by function, in Intel's syntax.

    Raises:
        UsageError: it is not an executable of XLA:CPU for x86-64.
    """
    if target.requirement.architecture != "x86_64":
        raise UsageError(
            f"{bundle.path}: expected a target for x86_64, found {target.name} for "
            f"{target.requirement.architecture}",
            hint="--hlo and --stablehlo show the programs of every architecture",
        )
    with _reading(bundle, program):
        objects = read_executable(_serialized(bundle, target, program))[1].result.objects
        return "\n".join(line for each in objects for line in _disassembled(each.content))


@contextmanager
def _reading(bundle: ReadBundle, program: ProgramEntry) -> Iterator[None]:
    """Turn the errors of bytes that have another form than an executable's into one that names it."""
    try:
        yield
    except (BuildError, ValueError, IndexError, struct.error) as error:
        raise UsageError(
            f"{bundle.path}: {program.name}: expected an executable of XLA:CPU as jaxlib 0.10 to 0.12 "
            f"serialize it, found another form: {error}",
            hint="--stablehlo shows the programs of every version",
        ) from error


def _serialized(bundle: ReadBundle, target: ReadTarget, program: ProgramEntry) -> bytes:
    platform = target.requirement.platform
    if platform != "cpu":
        raise UsageError(
            f"{bundle.path}: expected a target for CPUs, found {target.name} for {platform}",
            hint="--stablehlo shows the programs of every platform",
        )
    return bundle.frame(target, EXECUTABLES_MEDIA_TYPE, program.executable)


def _disassembled(content: bytes) -> Iterator[str]:
    """Yield the functions of an ELF object: a line for the name of each, and one for each instruction."""
    import iced_x86

    formatter = iced_x86.Formatter(iced_x86.FormatterSyntax.INTEL)
    sections = read_sections(content)
    for table in (each for each in sections if each.kind == _SHT_SYMTAB):
        names = bytes(sections[table.strings].content)
        for name, info, _, place, start, size in struct.iter_unpack("<IBBHQQ", table.content):
            if info & 15 != _STT_FUNC or not 0 < place < len(sections):
                continue
            yield f"{names[name : names.index(0, name)].decode('utf-8', 'replace')}:"
            code = bytes(sections[place].content[start : start + size])
            for each in iced_x86.Decoder(64, code, ip=start):
                yield f"{each.ip:8x}  {formatter.format(each)}"
            yield ""


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """The cost of one run of a program.

    Attributes:
        program: its name.
        flops: floating-point operations of its portable program, by XLA's count: native kernels and fusions
            hide none of them. A loop counts as one turn.
        moved_bytes: bytes of its arguments, weights included, and of its results. A cache that it changes in
            place counts once. It moves at least these, unless it reads some rows of a table alone.
        temp_bytes: peak of the memory beside them.
    """

    program: str
    flops: float
    moved_bytes: int
    temp_bytes: int

    @property
    def flops_per_byte(self) -> float:
        """The arithmetic intensity."""
        return self.flops / max(1, self.moved_bytes)


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """A program beside the limits of a machine.

    Attributes:
        cost: of one run.
        seconds: least time of a run.
        bound: `memory` or `arithmetic`: which limit is the nearer one.
        share: the least time that the limits allow, as a share of `seconds`. More than 1: the caches held
            what it read, or it multiplies numbers narrower than float32.
    """

    cost: ProgramCost
    seconds: float
    bound: str
    share: float

    @classmethod
    def of(cls, cost: ProgramCost, seconds: float, limits: MachineLimits) -> RooflineRow:
        """Compare a run with the limits."""
        moving = cost.moved_bytes / limits.read_bytes_per_second
        computing = cost.flops / limits.flops_per_second
        bound = "memory" if moving >= computing else "arithmetic"
        return cls(cost, seconds, bound, max(moving, computing) / seconds)


def costs(bundle: ReadBundle, target: ReadTarget) -> list[ProgramCost]:
    """Return the cost of each program of a target."""
    platform = target.requirement.platform
    known: dict[str, float] = {}

    def flops(entry: ProgramEntry) -> float:
        digest = entry.portable.raw_digest
        if digest not in known:
            content = bundle.frame(target, PORTABLE_MEDIA_TYPE, entry.portable)
            known[digest] = count_flops(content, entry.platforms or (), platform)
        return known[digest]

    return [
        ProgramCost(
            entry.name,
            flops(entry),
            entry.memory.argument_bytes + entry.memory.output_bytes - entry.memory.alias_bytes,
            entry.memory.temp_bytes,
        )
        for entry in target.contents.config.programs
    ]


def run_times(
    bundle: Bundle, programs: Sequence[str], say: Callable[[str], None]
) -> dict[str, float]:
    """Run programs on the arguments of their golden answers; return the least seconds of a run, by name."""
    least = {}
    for place, name in enumerate(programs, 1):
        say(f"running program {place} of {len(programs)}: {name}")
        run = bundle.timed_runner(name)
        run()  # the first run builds what XLA makes lazily
        times = [run() for _ in range(_LEAST_RUNS)]
        while sum(times) < _PROGRAM_SECONDS:
            times.append(run())
        least[name] = min(times)
    return least


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The most that the CPUs of this process can do together.

    Attributes:
        read_bytes_per_second: reading an array that no cache holds.
        flops_per_second: multiplying square matrices of float32 with XLA; an addition and a multiplication
            count as two.
    """

    read_bytes_per_second: float
    flops_per_second: float

    def best_of(self, other: MachineLimits) -> MachineLimits:
        """Return the better of two measurements."""
        return MachineLimits(
            max(self.read_bytes_per_second, other.read_bytes_per_second),
            max(self.flops_per_second, other.flops_per_second),
        )


def measure_limits() -> MachineLimits:
    """Measure the limits of this machine, in about two seconds: the best pass of each counts."""
    return MachineLimits(measure_reading(), 2 * _PRODUCT_SIDE**3 * max(_product_rates()))


def measure_reading() -> float:
    """Return the bytes per second at which this process reads memory, in about a second."""
    words = np.ones(_READ_BYTES // 8, np.uint64)
    return max(read_rates(words, len(os.sched_getaffinity(0))))


def read_rates(words: np.ndarray[Any, np.dtype[np.uint64]], threads: int) -> list[float]:
    """Return the bytes per second of each pass over all words, by so many threads at once.

    `bitwise_or` over 64-bit words is as fast as a loop that gcc vectorizes (33 GB/s of CPU time on one core,
    AVX-512) and needs no compiler; NumPy releases the GIL in it.
    """
    parts = np.array_split(words, threads)
    with ThreadPoolExecutor(threads) as pool:
        rates = _passes(lambda: list(pool.map(np.bitwise_or.reduce, parts)))
    return [words.nbytes * rate for rate in rates]


def _product_rates() -> list[float]:
    """Return the products of two matrices per second, of each product."""
    import jax

    one = np.ones((_PRODUCT_SIDE, _PRODUCT_SIDE), np.float32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        multiply, placed = jax.jit(jax.numpy.matmul), jax.numpy.asarray(one)
        return _passes(lambda: multiply(placed, placed).block_until_ready())


def _passes(work: Callable[[], object]) -> list[float]:
    """Do the work again and again; return passes per second, a value for each but the first."""
    rates: list[float] = []
    work()  # maps pages, starts threads, compiles
    end = time.perf_counter() + _LIMIT_SECONDS
    while (started := time.perf_counter()) < end or len(rates) < _LEAST_PASSES:
        work()
        rates.append(1 / (time.perf_counter() - started))
    return rates
