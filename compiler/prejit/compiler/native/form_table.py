"""What was measured of the forms of products, and which form a product gets by it. No JAX.

    FILE      `prejit build --forms FILE`: what somebody measured elsewhere
    own       `forms.json` in the build cache: what builds on this machine measured (measuring.py)
    recorded  `forms.json` beside this module: what ships

A table is JSON for people: the conditions, and below them a line for each product.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from prejit.compiler.base.wording import did_you_mean, shown
from prejit.compiler.native.library import SOURCES, KernelLibrary
from prejit.compiler.native.products import Product
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.files import write_file
from prejit.runtime.base.locks import locking
from prejit.runtime.errors import RejectError, StoreError
from prejit.runtime.machine.fingerprint import Fingerprint

VERSION = 1
"""Of the files. Another one is not read."""
RECORDED = Path(__file__).with_name("forms.json")
OWN_NAME = "forms.json"
"""In the root of the build cache, beside the directory of its version: what is measured outlives that."""
MARGIN = 1.05
"""A form must be so many times faster than that which is taken unmeasured: less is noise, and a form that
differs from program to program costs a lowering and a compile."""
LEAST_BYTES = 1 << 20
"""Of a matrix that is measured. Of smaller ones the call takes as long as the product."""

_KEPT_CONDITIONS = 16
"""In the own table: versions and kernels come and go."""
_HINT = "measure again with `prejit build --measure`, or leave --forms out"


@dataclass(frozen=True, order=True, slots=True)
class Conditions:
    """What was measured with.

    Attributes:
        level: of the kernels and of the code: `x86-64-v4`.
        cpu: as the machine names it.
        cpus: how many the process might run on.
        jaxlib: the version that compiled XLA's forms.
        compiler: of the kernels: `g++ 12.2.0`.
        kernels: digest of the sources of the kernel of products.
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
    """What was measured of a product.

    Attributes:
        product: the product.
        nanoseconds: of one, by form.
        conditions: what it was measured with.
        date: of the day, YYYY-MM-DD.
    """

    product: Product
    nanoseconds: Mapping[str, int]
    conditions: Conditions
    date: str

    def form(self, product: Product) -> str | None:
        """The fastest form of a product that is like this one; None: none of its forms was measured."""
        known = {form: self.nanoseconds[form] for form in product.forms if form in self.nanoseconds}
        if not known:
            return None
        fastest, unmeasured = min(known, key=known.__getitem__), product.forms[-1]
        if known.get(unmeasured, math.inf) <= MARGIN * known[fastest]:
            return unmeasured
        return fastest


@dataclass(frozen=True, slots=True)
class Choice:
    """The form that a product gets.

    Attributes:
        product: the product.
        form: one of its forms.
        measured: why: of this product, or of the nearest one; None: nothing like it was measured.
    """

    product: Product
    form: str
    measured: Measured | None


@dataclass(frozen=True)
class FormTable:
    """What was measured, one entry for each product and conditions."""

    entries: tuple[Measured, ...] = ()

    @cached_property
    def by_conditions(self) -> Mapping[tuple[Conditions, Product], Measured]:
        """Each entry."""
        return {(each.conditions, each.product): each for each in self.entries}

    @cached_property
    def by_level(self) -> Mapping[tuple[str, Product], Measured]:
        """The latest entry for a level and a product."""
        oldest_first = sorted(self.entries, key=lambda each: (each.date, each.conditions))
        return {(each.conditions.level, each.product): each for each in oldest_first}

    def merged(self, newer: FormTable) -> FormTable:
        """Both, where they have the same product and conditions the newer one."""
        entries = {**self.by_conditions, **newer.by_conditions}
        return FormTable(tuple(entries[key] for key in sorted(entries)))


@dataclass(frozen=True)
class KnownForms:
    """All tables of a build.

    Attributes:
        given: FILE.
        own: of this machine's builds.
        recorded: what ships.
    """

    given: FormTable = FormTable()
    own: FormTable = FormTable()
    recorded: FormTable = FormTable()

    def exact(
        self, product: Product, conditions: Conditions, *, fresh: bool = False
    ) -> Measured | None:
        """What was measured of a product for a level; None: nothing.

        Args:
            product: the product.
            conditions: of this build. What this machine measured with others counts as `nearest` only.
            fresh: whether what ships does not count.
        """
        at = (conditions.level, product)
        found = self.given.by_level.get(at) or self.own.by_conditions.get((conditions, product))
        return found or (None if fresh else self.recorded.by_level.get(at))

    def missing(
        self, products: Iterable[Product], conditions: Conditions, *, fresh: bool = False
    ) -> tuple[Product, ...]:
        """Products that are worth measuring, sorted: all of them if `fresh`, else large ones."""
        return tuple(
            product
            for product in sorted(set(products))
            if len(product.forms) > 1
            and (fresh or product.matrix_bytes >= LEAST_BYTES)
            and self.exact(product, conditions, fresh=fresh) is None
        )

    def choice(self, product: Product, conditions: Conditions) -> Choice:
        """The form of a product: by what was measured of it, or of the nearest one.

        What this machine measured of other products does not count: that was for another model, whose
        build must not change this one's programs.
        """
        measured = self.exact(product, conditions) or self.nearest(product, conditions.level)
        form = None if measured is None else measured.form(product)
        if form is None:
            return Choice(product, product.forms[-1], None)
        return Choice(product, form, measured)

    def nearest(self, product: Product, level: str) -> Measured | None:
        """What was measured of the product most like one; None: of none with such a matrix.

        What this machine measured counts for the same product alone, under other conditions.
        """
        alike = (
            each
            for table in (self.given, self.own, self.recorded)
            for each in table.by_level.values()
            if (each.product.dtype, each.product.in_out) == (product.dtype, product.in_out)
            and (table is not self.own or each.product == product)
        )
        return min(
            alike,
            key=lambda each: (
                each.conditions.level != level,
                _distance(each.product, product),
                each.product,
                each.conditions.level,
            ),
            default=None,
        )


def _distance(one: Product, other: Product) -> float:
    """How unlike two products are: 1 for each size that is e times the other's."""
    sizes = (
        (one.rows, other.rows),
        (one.inputs, other.inputs),
        (one.outputs, other.outputs),
    )
    return sum(abs(math.log(a / b)) for a, b in sizes)


def conditions_of(toolchain: Toolchain, library: KernelLibrary) -> Conditions:
    """What forms for a target are measured with, on this machine."""
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
    """Digest of the sources of the kernel of products: what it includes, and what that is the head of."""
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
    """Reads a table.

    Raises:
        StoreError: it cannot be read.
        RejectError: it is none.
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
    """The table that ships; an empty one where none does."""
    return read_table(RECORDED) if RECORDED.is_file() else FormTable()


def read_own(path: Path) -> FormTable:
    """A table of our own making; an empty one where there is none, or it is damaged.

    Raises:
        StoreError: it cannot be read.
    """
    with contextlib.suppress(RejectError):
        return read_table(path) if path.exists() else FormTable()
    return FormTable()


def own_path(root: Path) -> Path:
    """Where a build cache's own table is."""
    return root / OWN_NAME


def merge_into(path: Path, newer: FormTable) -> FormTable:
    """Adds what was measured to a table's file, which need not be there; gives all that is in it now.

    Two builds that do it at once lose nothing. A file that is damaged is begun anew.

    Raises:
        StoreError: it cannot be written.
    """
    with _alone(path):
        merged = _without_old(read_own(path).merged(newer))
        write_file(path, to_text(merged).encode("ascii"))
    return merged


def to_text(table: FormTable) -> str:
    """A table as its file says it: the same text for the same entries, a line for each product."""
    by_conditions: dict[tuple[Conditions, str], list[Measured]] = {}
    for each in table.entries:
        by_conditions.setdefault((each.conditions, each.date), []).append(each)
    sections = []
    for conditions, date in sorted(by_conditions):
        said = json.dumps({**asdict(conditions), "date": date}, indent=3).removesuffix("\n}")
        lines = (
            f"    {json.dumps(str(each.product))}: {json.dumps(each.nanoseconds, sort_keys=True)}"
            for each in sorted(by_conditions[conditions, date], key=lambda each: each.product)
        )
        listed = ",\n".join(lines)
        sections.append(f'  {said},\n   "nanoseconds": {{\n{listed}\n   }}\n  }}')
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
            raise ValueError(f"{where}.nanoseconds: expected products, found {found}")
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
        raise ValueError(f"{at}: expected a time for each form, found {shown(times)}")
    for form, time in times.items():
        if form not in product.forms:
            raise ValueError(f"{at}: expected {' or '.join(product.forms)}, found {shown(form)}")
        if type(time) is not int or time < 1:
            raise ValueError(f"{at}.{form}: expected nanoseconds, 1 or more, found {shown(time)}")


def _without_old(table: FormTable) -> FormTable:
    """Without what was measured under the conditions that are the longest gone."""
    last: dict[Conditions, str] = {}
    for each in table.entries:
        last[each.conditions] = max(each.date, last.get(each.conditions, ""))
    kept = sorted(last, key=lambda each: (last[each], each))[-_KEPT_CONDITIONS:]
    return FormTable(tuple(each for each in table.entries if each.conditions in kept))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other build changes the file meanwhile. The system releases the lock with the process."""
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
