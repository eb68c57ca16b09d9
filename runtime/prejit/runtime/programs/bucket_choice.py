"""Choose the bucket of a user's program for a call, by the structure, shapes and dtypes of its arguments.

For sizes that no bucket has, a program is made from one with symbolic sizes, if the bundle has that.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from prejit.runtime.base import arguments
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.device.jax_arrays import OnDevice, is_jax_array
from prejit.runtime.errors import FallbackWarning, UsageError
from prejit.runtime.fallback_reporting import count_axis
from prejit.runtime.format import trees
from prejit.runtime.format.bundle_schema import ProgramEntry, Segment
from prejit.runtime.programs import pytree
from prejit.runtime.programs.fitted_arguments import (
    EVERYTHING,
    Value,
    fit,
    narrows,
    static_misfit,
)
from prejit.runtime.programs.known_calls import ChosenBucket, Held
from prejit.runtime.programs.placing import Convert, converter, is_random_key
from prejit.runtime.programs.ready_programs import Programs
from prejit.runtime.programs.usage_hint import functions_of

_log = logging.getLogger(__name__)

SIZE_AXIS = "bucket"
"""The name in `fallback_counts` of a program that is compiled because no bucket has its sizes."""

Flatten = Callable[[trees.Tree], list[Any]]
"""Returns the leaves that a caller gave for a tree, or raises `pytree.MisfitError`."""


class Fitted(NamedTuple):
    """Arguments as a bucket takes them, but for the sizes of variables that are padded.

    Attributes:
        values: the arguments in order.
        sizes: the caller's size of each variable that is padded.
        convert: makes a result of the kind that the caller uses: jax.Array or NumPy array.
    """

    values: list[Value]
    sizes: dict[str, int]
    convert: Convert


@final
class BucketChoice:
    """The buckets of the user's programs, and which of them takes a call. Safe to use from many threads."""

    def __init__(self, programs: Programs, *, compiles: bool) -> None:
        """Find the buckets of each program.

        `compiles`: whether other sizes than those of the buckets may be compiled here.
        """
        self._programs = programs
        self._compiles = compiles
        self._buckets = functions_of(programs.table.values())
        self._static = {
            name: frozenset(key for program in buckets for key in program.static or ())
            for name, buckets in self._buckets.items()
        }

    def buckets(self, name: str) -> list[ProgramEntry]:
        """Return the buckets of a program.

        Raises:
            UsageError: there is no such program.
        """
        arguments.text("name", name)
        if (buckets := self._buckets.get(name)) is None:
            raise UsageError(
                f"{self._programs.bundle}: no program {name!r:.200}{did_you_mean(name, self._buckets)}",
                hint=self._programs.usage,
            )
        return buckets

    def static_names(self, name: str) -> frozenset[str]:
        """Return the names of the static arguments of a program."""
        self.buckets(name)
        return self._static[name]

    def choose(self, name: str, static: Mapping[str, Any], flatten: Flatten) -> ChosenBucket:
        """Return the bucket of a program that takes what a caller gave. It looks at no settings of jax.

        Args:
            name: of the program.
            static: values of static arguments by name.
            flatten: returns the arrays for the tree of arguments of a bucket.

        Raises:
            UsageError: there is no such program, or none of its buckets takes them.
        """
        buckets = self.buckets(name)
        first = self.leaves(buckets[0], flatten)
        known = {buckets[0].arguments_tree or buckets[0].name: first}  # by the text of the tree
        complaints = []
        larger: list[ChosenBucket] = []
        for program in buckets:
            text = program.arguments_tree or program.name
            if text not in known:
                known[text] = self.leaves(program, flatten)
            given = known[text]
            fitted = self.fit(program, static, given, program.pad or ())
            if isinstance(fitted, str):
                complaints.append(f"{program.name}: {fitted}")
                continue
            values, sizes, convert = fitted
            chosen = ChosenBucket(program, values, convert, sizes, are_on_device(given))
            if not sizes:
                return chosen
            larger.append(chosen)
        if larger:
            return min(larger, key=lambda chosen: math.prod(chosen.program.bucket.values()))
        if (specialized := self._specialized(name, static, known)) is not None:
            return specialized
        from prejit.runtime.programs.misfits import hint_of  # only errors need it

        raise UsageError(
            f"no bucket of {name!r} takes these arguments: {'; '.join(complaints)}",
            hint=hint_of(self._programs, buckets, static, known, complaints, self._compiles),
        )

    def _specialized(
        self, name: str, static: Mapping[str, Any], known: Mapping[str, list[Any] | str]
    ) -> ChosenBucket | None:
        """Return a bucket that is made for this call from a program with open sizes; None: there is none."""
        if not self._compiles:
            return None
        for program in self.buckets(name):
            given = known.get(program.arguments_tree or program.name, "")
            if not program.open_sizes:
                continue
            fitted = self.fit(program, static, given, program.open_sizes, any_size=True)
            if isinstance(fitted, str):
                continue
            values, sizes, convert = fitted
            entry = _specialize(self._programs, program, sizes)
            self._buckets[name] = [*self._buckets[name], entry]
            return ChosenBucket(entry, values, convert, is_on_device=are_on_device(given))
        return None

    def fit(
        self,
        program: ProgramEntry,
        static: Mapping[str, Any],
        given: list[Any] | str,
        open_sizes: Sequence[str],
        *,
        any_size: bool = False,
    ) -> Fitted | str:
        """Return what `leaves` returned as a program takes it, or why it does not. Sizes as for `fit`."""
        if isinstance(given, str):
            return given
        if misfit := static_misfit(self._programs.static(program.name), static):
            return misfit
        arrays = self._programs.arguments(program.name)
        leaves = trees.leaves(self._programs.arguments_tree(program.name))
        narrow = narrows(program)
        found = fit(arrays, leaves, given, open_sizes, any_size=any_size, narrows=narrow)
        return found if isinstance(found, str) else Fitted(*found, converter(arrays, given))

    def leaves(self, program: ProgramEntry, flatten: Flatten) -> list[Any] | str:
        """Return the leaves that a caller gave, or why they do not have the program's structure."""
        try:
            return flatten(self._programs.arguments_tree(program.name))
        except pytree.MisfitError as misfit:
            return str(misfit)
        except RecursionError:
            raise UsageError(
                f"{program.name:.80}: expected arguments nested less deeply than Python's recursion limit"
            ) from None


def are_on_device(given: Sequence[Any]) -> bool:
    """Return whether no argument comes from the host, as for jax's transfer guards."""
    return all(
        value is EVERYTHING
        or isinstance(value, Held | OnDevice)
        or is_jax_array(value)
        or is_random_key(value)
        for value in given
    )


def _specialize(
    programs: Programs, program: ProgramEntry, sizes: Mapping[str, int]
) -> ProgramEntry:
    """Return a program of the user for sizes that no bucket has, and say that it is compiled here.

    `program` is a bucket whose manifest leaves these sizes open.

    Raises:
        RejectError: the program with symbolic sizes is damaged.
        BuildError: it does not work for these sizes.
    """
    from prejit.runtime.device import portable as portable_programs  # rare

    assert program.symbolic is not None
    symbolic, platform = programs._portable.unpack(program.symbolic), programs.device.platform
    arguments = [
        replace(each, shape=each.shape_at(sizes)) for each in programs.arguments(program.name)
    ]
    weights = programs._weight_arguments(program.weights)
    shapes = [array.shape for array in (*weights, *arguments)]
    portable, found = portable_programs.specialize(
        symbolic, program.platforms or (), platform, shapes
    )
    gives = programs.results(program.name)
    results = [replace(array, shape=shape) for array, shape in zip(gives, found, strict=True)]
    bucket = {**program.bucket, **sizes}
    section, _, rest = program.name.partition("/")
    old = "-".join(f"{name}{size}" for name, size in program.bucket.items())
    new = "-".join(f"{name}{size}" for name, size in bucket.items())
    entry = replace(
        program,
        name=f"{section}/{new}{rest.removeprefix(old)}",
        bucket=bucket,
        arguments=tuple(map(str, arguments)),
        results=tuple(map(str, results)),
        portable=Segment(0, 0, "", len(portable), digest_of(portable)),
        platforms=(platform,),
    )
    with programs._lock:
        if entry.name not in programs.table:
            programs._specialized[entry.name] = portable
            programs._locks[entry.name] = threading.Lock()
            programs.table[entry.name] = entry
            _count_open_size(programs.bundle, entry.name)
            _log.info("%s: %s: no bucket has these sizes", programs.bundle, entry.name)
    return entry


def _count_open_size(bundle: str, name: str) -> None:
    """Warn that a program is compiled here because no bucket has its sizes, and count it."""
    count_axis(SIZE_AXIS)
    warnings.warn(
        f"{bundle}: no bucket has the sizes of {name}, so it is compiled here, once; add them to the "
        "manifest's buckets to compile it ahead of time",
        FallbackWarning,
        stacklevel=arguments.callers_level(),
    )
