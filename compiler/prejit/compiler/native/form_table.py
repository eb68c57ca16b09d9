"""Form tables, which say how long each form of a product takes, and the choice that follows. No JAX.

A file is JSON that people can read: the conditions of the measurements, then a line for each product. A build
reads three tables. The first that has a product decides:

    given     `prejit build --forms FILE`: measured elsewhere
    own       `forms.json` in the build cache: measured by builds on this machine
    recorded  `forms.json` beside this module: ships with prejit
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.compiler.native.kernel_library import SOURCES, KernelLibrary
from prejit.compiler.native.products import Product
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.base.written_files import locking, write_file
from prejit.runtime.errors import RejectError
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
    """The measurement of a product."""

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
    def oldest_first(self) -> list[Measured]:
        """The entries in the order of their dates."""
        return sorted(self.entries, key=lambda each: (each.date, each.conditions))

    @cached_property
    def _of_product(self) -> Mapping[Product, list[Measured]]:
        """The entries of each product, the oldest first."""
        found: dict[Product, list[Measured]] = {}
        for each in self.oldest_first:
            found.setdefault(each.product, []).append(each)
        return found

    def latest(self, product: Product, **conditions: str) -> Measured | None:
        """Return the latest entry of a product whose conditions have these values; None: there is none."""
        for each in reversed(self._of_product.get(product, ())):
            if all(getattr(each.conditions, name) == conditions[name] for name in conditions):
                return each
        return None

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
        kernels=_sources_digest(),
    )


@cache
def _sources_digest() -> str:
    """Return the digest of the sources of the kernel `linear`: its headers, and the sources behind them."""
    found, left = dict[str, bytes](), ["linear_ffi.cc"]
    while left:
        name = left.pop()
        if name not in found and (SOURCES / name).is_file():
            found[name] = (SOURCES / name).read_bytes()
            left += re.findall(r'^#include "([^"/]+)"', found[name].decode("utf-8"), re.MULTILINE)
            left.append(f"{Path(name).stem}.cc")
    parts = (f"{name}\0{len(found[name])}\0".encode() + found[name] for name in sorted(found))
    return digest_of(b"".join(parts))


def read_table(path: Path) -> FormTable:
    """Return the table of a file.

    Raises:
        StoreError: the file cannot be read.
        RejectError: the file is no form table.
    """
    with store_errors(
        path,
        "read the table of forms",
        hint="give --forms the forms.json of a build cache, or leave it out",
    ):
        content = path.read_bytes()
    try:
        return FormTable(tuple(_entries(json.loads(content))))
    except (ValueError, RecursionError) as error:
        raise RejectError(str(path), f"expected a table of forms: {error}", hint=_HINT) from error


def read_recorded() -> FormTable:
    """Return the table that ships with prejit, or an empty one where there is none."""
    return read_table(RECORDED) if RECORDED.is_file() else FormTable()


def read_own(path: Path) -> FormTable:
    """Return a table that builds write, or an empty one where the file is missing or damaged."""
    with contextlib.suppress(RejectError):
        return read_table(path) if path.exists() else FormTable()
    return FormTable()


def own_path(root: Path) -> Path:
    """Return the path of a build cache's own table."""
    return root / OWN_NAME


def merge_into(path: Path, newer: FormTable) -> FormTable:
    """Add measurements to the file of a table, and return all that it holds then.

    A missing file is created and a damaged one replaced. Builds that write at the same time lose nothing.
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
    with store_errors(
        path,
        "write",
        hint="give --cache DIR, or set PREJIT_CACHE to a directory that you can write",
    ):
        lock = os.open(
            path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666
        )
    with locking(lock):
        yield


MARGIN = 1.1
"""A form is chosen if it is more than this many times as fast as the default form. The product alone is
measured, but the kernel adds bias, activation and residual too, while XLA needs another pass for them: 5 % of
an encoder's layer. And a form that differs from program to program costs a lowering and a compile."""
LEAST_BYTES = 1 << 20
"""Minimum size of a matrix that is measured. With a smaller one the call takes as long as the product."""


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The form chosen for a product."""

    product: Product
    form: str
    measured: Measured | None


@dataclass(frozen=True)
class KnownForms:
    """The form tables of a build.

    Attributes:
        given: the table of --forms.
        own: the table of the build cache.
        recorded: the table that ships with prejit.
    """

    given: FormTable = field(default_factory=FormTable)
    own: FormTable = field(default_factory=FormTable)
    recorded: FormTable = field(default_factory=FormTable)

    def exact(
        self, product: Product, conditions: Conditions, *, fresh: bool = False
    ) -> Measured | None:
        """Return the measurement of a product, or None.

        Args:
            product: the product.
            conditions: the conditions of this build. An own measurement under other conditions counts only
                in `nearest`.
            fresh: whether to ignore the recorded table.
        """
        level, given, recorded = conditions.level, self.given, self.recorded
        found = given.latest(product, level=level, jaxlib=conditions.jaxlib)
        found = found or given.latest(product, level=level)
        found = found or self.own.by_conditions.get((conditions, product))
        if found or fresh:
            return found
        on_this_cpu = recorded.latest(product, level=level, cpu=conditions.cpu)
        return on_this_cpu or recorded.latest(product, level=level)

    def missing(
        self, products: Iterable[Product], conditions: Conditions, *, fresh: bool = False
    ) -> tuple[Product, ...]:
        """Return the products that are worth measuring, sorted: large ones, or all if `fresh`."""
        return tuple(
            product
            for product in sorted(set(products))
            if len(product.forms) > 1
            and (fresh or product.matrix_bytes >= LEAST_BYTES)
            and self.exact(product, conditions, fresh=fresh) is None
        )

    def choice(self, product: Product, conditions: Conditions) -> FormChoice:
        """Choose the form of a product by its own measurement, or by that of the nearest product.

        Own measurements of other products are ignored: they are from builds of other models, which must not
        change the programs of this one.
        """
        measured = self.exact(product, conditions) or self.nearest(product, conditions)
        form = None if measured is None else fastest_form(measured, product)
        if form is None:
            return FormChoice(product, product.default_form, None)
        return FormChoice(product, form, measured)

    def nearest(self, product: Product, conditions: Conditions) -> Measured | None:
        """Return the measurement of the most similar product, or None if no matrix has its dtype and order.

        From the own table only measurements of the same product count, under other conditions.
        """
        alike = (
            each
            for table in (self.given, self.own, self.recorded)
            for each in reversed(table.oldest_first)
            if (each.product.dtype, each.product.in_out) == (product.dtype, product.in_out)
            and (table is not self.own or each.product == product)
        )
        return min(
            alike,
            key=lambda each: (
                each.conditions.level != conditions.level,
                _distance(each.product, product),
                each.conditions.cpu != conditions.cpu,
                each.product,
                each.conditions.level,
            ),
            default=None,
        )


def fastest_form(measured: Measured, product: Product) -> str | None:
    """Return the form that a measurement suggests for a similar product.

    Returns:
        The fastest form, the default form if that is fast enough, or None if no form of the product was
        measured.
    """
    times = measured.nanoseconds
    known = {form: times[form] for form in product.forms if form in times}
    if not known:
        return None
    fastest, default = min(known, key=known.__getitem__), product.default_form
    if known.get(default, math.inf) <= MARGIN * known[fastest]:
        return default
    return fastest


def _distance(one: Product, other: Product) -> float:
    """Return how different two products are: 1 for each size that is e times the other's."""
    names = ("rows", "inputs", "outputs")
    return sum(abs(math.log(getattr(one, name) / getattr(other, name))) for name in names)
