"""Form tables: how long each form of a product takes, and the files that hold such measurements. No JAX.

A file is JSON that people can read: the conditions of the measurements, then a line for each product.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.compiler.native.library import SOURCES, KernelLibrary
from prejit.compiler.native.products import Product
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.locks import locking
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.machine.fingerprint import Fingerprint

VERSION = 1
"""Version of the file format. Files of another version are rejected."""
RECORDED = Path(__file__).with_name("forms.json")
"""The table that ships with prejit."""
OWN_NAME = "forms.json"
"""Name of the build cache's own table. It lies beside the directory of the cache's version,
because measurements stay valid when that version changes."""

_KEPT_CONDITIONS = 16
"""Maximum number of conditions in the own table: versions and kernels come and go."""
_HINT = "measure again with `prejit build --measure`, or leave --forms out"


@dataclass(frozen=True, order=True, slots=True)
class Conditions:
    """The conditions of a measurement.

    Attributes:
        level: x86-64 level of the kernels and of the compiled code: `x86-64-v4`.
        cpu: name of the CPU, as the machine reports it.
        cpus: number of CPUs that the process could use.
        jaxlib: version of the jaxlib that compiled XLA's forms.
        compiler: compiler of the kernels: `g++ 12.2.0`.
        kernels: digest of the C++ sources of the kernel `linear`.
    """

    level: str
    cpu: str
    cpus: int
    jaxlib: str
    compiler: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cpus} CPUs, jaxlib {self.jaxlib}"


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of a product.

    Attributes:
        product: the product.
        nanoseconds: duration of one product, by form.
        conditions: the conditions of the measurement.
        date: its day, YYYY-MM-DD.
    """

    product: Product
    nanoseconds: Mapping[str, int]
    conditions: Conditions
    date: str


@dataclass(frozen=True)
class FormTable:
    """Measurements, one for each product and conditions."""

    entries: tuple[Measured, ...] = ()

    @cached_property
    def by_conditions(self) -> Mapping[tuple[Conditions, Product], Measured]:
        """The entries by conditions and product."""
        return {(each.conditions, each.product): each for each in self.entries}

    @cached_property
    def by_level(self) -> Mapping[tuple[str, Product], Measured]:
        """The latest entry for each level and product."""
        oldest_first = sorted(self.entries, key=lambda each: (each.date, each.conditions))
        return {(each.conditions.level, each.product): each for each in oldest_first}

    @cached_property
    def by_jaxlib(self) -> Mapping[tuple[str, str, Product], Measured]:
        """The latest entry for each level, version of jaxlib and product."""
        oldest_first = sorted(self.entries, key=lambda each: (each.date, each.conditions))
        return {
            (each.conditions.level, each.conditions.jaxlib, each.product): each
            for each in oldest_first
        }

    def merged(self, newer: FormTable) -> FormTable:
        """Return the entries of both tables; for the same product and conditions, the newer one."""
        entries = {**self.by_conditions, **newer.by_conditions}
        return FormTable(tuple(entries[key] for key in sorted(entries)))


def conditions_of(toolchain: Toolchain, library: KernelLibrary) -> Conditions:
    """Return the conditions of measurements for a target on this machine."""
    return Conditions(
        level=library.level,
        cpu=Fingerprint.current().cpu_model,
        cpus=len(os.sched_getaffinity(0)),
        jaxlib=toolchain.jaxlib,
        compiler=library.compiler,
        kernels=_sources_digest(SOURCES),
    )


@cache
def _sources_digest(sources: Path) -> str:
    """Return the digest of the sources of the kernel `linear`: its headers, and the sources behind them."""
    found, left = dict[str, bytes](), ["linear_ffi.cc"]
    while left:
        name = left.pop()
        if name not in found and (sources / name).is_file():
            found[name] = (sources / name).read_bytes()
            left += re.findall(r'^#include "([^"/]+)"', found[name].decode("utf-8"), re.MULTILINE)
            left.append(f"{Path(name).stem}.cc")
    hasher = hashlib.sha256()
    for name, content in sorted(found.items()):
        hasher.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"sha256:{hasher.hexdigest()}"


def read_table(path: Path) -> FormTable:
    """Return the table of a file.

    Raises:
        StoreError: the file cannot be read.
        RejectError: the file is no form table.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path}: cannot read the table of forms: {error.strerror}",
            hint="give --forms the forms.json of a build cache, or leave it out",
        ) from error
    try:
        return FormTable(tuple(_entries(json.loads(content))))
    except (ValueError, RecursionError) as error:
        raise RejectError(str(path), f"expected a table of forms: {error}", hint=_HINT) from error


def read_recorded() -> FormTable:
    """Return the table that ships with prejit, or an empty one where there is none."""
    return read_table(RECORDED) if RECORDED.is_file() else FormTable()


def read_own(path: Path) -> FormTable:
    """Return a table that builds write, or an empty one where the file is missing or damaged.

    Raises:
        StoreError: the file cannot be read.
    """
    with contextlib.suppress(RejectError):
        return read_table(path) if path.exists() else FormTable()
    return FormTable()


def own_path(root: Path) -> Path:
    """Return the path of a build cache's own table."""
    return root / OWN_NAME


def merge_into(path: Path, newer: FormTable) -> FormTable:
    """Add measurements to the file of a table, and return all that it holds then.

    A missing file is created and a damaged one replaced. Builds that write at the same time lose nothing.

    Raises:
        StoreError: the file cannot be written.
    """
    with _locked(path):
        merged = _without_old(read_own(path).merged(newer))
        write_file(path, to_text(merged).encode("ascii"))
    return merged


def to_text(table: FormTable) -> str:
    """Return the content of a table's file: a line for each product, the same text for the same entries."""
    by_conditions: dict[tuple[Conditions, str], list[Measured]] = {}
    for each in table.entries:
        by_conditions.setdefault((each.conditions, each.date), []).append(each)
    sections = []
    for conditions, date in sorted(by_conditions):
        header = json.dumps({**asdict(conditions), "date": date}, indent=3).removesuffix("\n}")
        lines = (
            f"    {json.dumps(str(each.product))}: {json.dumps(each.nanoseconds, sort_keys=True)}"
            for each in sorted(by_conditions[conditions, date], key=lambda each: each.product)
        )
        listed = ",\n".join(lines)
        sections.append(f'  {header},\n   "nanoseconds": {{\n{listed}\n   }}\n  }}')
    listed = ",\n".join(sections)
    return f'{{\n "version": {VERSION},\n "measured": [\n{listed}\n ]\n}}\n'


def _entries(data: Any) -> Iterator[Measured]:
    _check_keys(data, ("version", "measured"), "the file")
    if data["version"] != VERSION:
        raise ValueError(f"version: expected {VERSION}, found {shown(data['version'])}")
    if not isinstance(data["measured"], list):
        raise ValueError(f"measured: expected a list, found {shown(data['measured'])}")
    for place, section in enumerate(data["measured"]):
        where = f"measured[{place}]"
        names = [field.name for field in fields(Conditions)]
        _check_keys(section, (*names, "date", "nanoseconds"), where)
        for name in (*names, "date"):
            kind = int if name == "cpus" else str
            if type(section[name]) is not kind:
                what = "a number" if kind is int else "a text"
                raise ValueError(f"{where}.{name}: expected {what}, found {shown(section[name])}")
        conditions = Conditions(**{name: section[name] for name in names})
        if not isinstance(section["nanoseconds"], dict):
            found = shown(section["nanoseconds"])
            raise ValueError(
                f"{where}.nanoseconds: expected an object with products, found {found}"
            )
        for text, times in section["nanoseconds"].items():
            at = f"{where}.nanoseconds[{text!r}]"
            try:
                product = Product.parse(text)
            except ValueError as error:
                raise ValueError(f"{at}: {error}") from error
            _check_times(times, product, at)
            yield Measured(product, times, conditions, section["date"])


def _check_keys(value: Any, expected: tuple[str, ...], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {shown(value)}")
    for key in sorted(value.keys() - set(expected)):
        raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(key, list(expected))}")
    if missing := [key for key in expected if key not in value]:
        raise ValueError(f"{where}: expected the key {missing[0]!r}, found none")


def _check_times(times: Any, product: Product, at: str) -> None:
    if not isinstance(times, dict) or not times:
        raise ValueError(
            f"{at}: expected an object with a time for each form, found {shown(times)}"
        )
    for form, time in times.items():
        if form not in product.forms:
            raise ValueError(f"{at}: expected {' or '.join(product.forms)}, found {shown(form)}")
        if type(time) is not int or time < 1:
            raise ValueError(f"{at}.{form}: expected nanoseconds, 1 or more, found {shown(time)}")


def _without_old(table: FormTable) -> FormTable:
    """Return a table without the conditions that were measured longest ago."""
    last: dict[Conditions, str] = {}
    for each in table.entries:
        last[each.conditions] = max(each.date, last.get(each.conditions, ""))
    kept = sorted(last, key=lambda each: (last[each], each))[-_KEPT_CONDITIONS:]
    return FormTable(tuple(each for each in table.entries if each.conditions in kept))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a table's file, so that no other build changes it meanwhile."""
    try:
        lock = os.open(
            path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        raise StoreError(
            f"{path}: cannot write: {error.strerror}",
            hint="give --cache DIR, or set PREJIT_CACHE to a directory that you can write",
        ) from error
    with locking(lock):
        yield
