"""Calls of the user's programs that share runs: rows of several callers along the batch axis of a program.

A program declares a batch axis by a variable `batch` in `pad`. Its rows must not depend on each other then,
because zeros may stand beside them, and so may rows of other callers.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np

from prejit.runtime.device import _jax_parts
from prejit.runtime.device.jax_arrays import weakened
from prejit.runtime.device.transfer import aligned_zeros, dtype_of, to_numpy
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.trees import Path
from prejit.runtime.programs.bucket_choice import Fitted
from prejit.runtime.programs.dispatched_calls import DispatchedCalls
from prejit.runtime.programs.known_calls import ChosenBucket
from prejit.runtime.programs.user_programs import Calls
from prejit.server.engine.fair_queue import NO_LIMITS, Limits
from prejit.server.engine.microbatch import Lane
from prejit.server.engine.request_recorder import Cost, RequestRecorder
from prejit.server.engine.shared_jobs import Ran, Share, SharedJob, are_over
from prejit.server.engine.sleeper import Sleeper

BATCH = "batch"
"""The variable in `pad` that declares a batch axis."""
_COMPARED_BYTES = 4096
"""Arguments without a batch axis are compared byte by byte up to this size, and else by digest."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Buckets of a program that differ in their number of rows only.

    Attributes:
        sizes: the numbers of rows, ascending.
        programs: a bucket for each.
        axes: the batch axis of each argument; None: it has none, and all rows of a run share it.
        result_axes: the batch axis of each result.
    """

    sizes: tuple[int, ...]
    programs: tuple[ProgramEntry, ...]
    axes: tuple[int | None, ...]
    result_axes: tuple[int, ...]

    def bucket_for(self, rows: int) -> int:
        """Return the place of the smallest bucket for this many rows."""
        return bisect_left(self.sizes, rows)


class _Rows(NamedTuple):
    """A call whose rows may share a run.

    Attributes:
        family: the buckets that take them.
        fitted: the arguments in order.
    """

    family: _Family
    fitted: Fitted


_Call = _Rows | ChosenBucket
"""A call whose rows may share a run, or the bucket that runs it alone."""


class _Glance(NamedTuple):
    """The place of the array that shows how many rows a call has.

    Attributes:
        path: path of the first argument with a batch axis.
        axis: its batch axis.
        sizes: the numbers of rows of the buckets that every call of the program can take, ascending.
    """

    path: Path
    axis: int
    sizes: tuple[int, ...]


@final
class Calling:
    """The shared calls of a bundle's programs. Safe to use from many threads.

    Programs with a batch axis share runs. Calls of all others run one by one: those without a padded
    variable `batch`, with results that have no batch axis, with donated arguments, or with a mask over rows,
    which says that rows depend on each other.
    """

    def __init__(
        self,
        calls: Calls,
        dispatched: DispatchedCalls,
        *,
        queue: int,
        recorder: Callable[[str], RequestRecorder],
        sleeper: Sleeper,
    ) -> None:
        """Make no lane yet."""
        self._sleeper = sleeper
        self._calls = calls
        self._dispatched = dispatched
        self._queue = queue
        self._recorder = recorder
        self._lanes: dict[str, Lane[_Call]] = {}
        self._families: dict[str, tuple[_Family, ...]] = {}
        self._glances: dict[str, _Glance] = {}
        self._end: str = ""
        self._lock = threading.Lock()

    def submit(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        client: str = "",
        limits: Limits = NO_LIMITS,
    ) -> Future[Any]:
        """Begin a call and return its future result. The arguments are copied.

        Results are those of `Bundle.call`. A call may have more rows than the largest bucket. `client` and
        `limits` are as of `Engine.submit_client_call`.

        Raises:
            UsageError: there is no such program, or no bucket of it takes these arguments.
            QueueFullError: too many calls of the program wait.
            ClosedError: `close` or `drain` was called.
        """
        lane = self._lane(name)
        job = self._job(name, args, kwargs, copy=True)
        job.client, job.limits = client, limits
        lane.submit(job)
        return job.future

    def call(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call. Arguments and errors as `submit`.

        If the program is idle it runs in the caller's thread, as `Bundle.call`.
        """
        lane = self._lane(name)
        if (size := self._size(name, args, kwargs)) is not None:
            rows, padded_rows = size
            with lane.alone(rows) as ran:
                if ran is not None:
                    if padded_rows:
                        ran.cost = Cost(padded_rows)
                    with self._sleeper:
                        return self._dispatched.call(name, args, kwargs)
        return lane.result(self._job(name, args, kwargs, copy=False))

    def drain(self, deadline: float | None) -> bool:
        """Refuse new calls and wait, until a time.monotonic, for those under way; return if none is left."""
        return all([lane.drain(deadline) for lane in self._ending("drain")])

    def undrain(self) -> None:
        """Take calls again, unless `close` was called."""
        for lane in self._ending(""):
            lane.undrain()

    def close(self) -> None:
        """Refuse new calls, fail those that wait with ClosedError, and wait for those that run."""
        for lane in self._ending("close"):
            lane.close()

    # ------------------------------------------------------------------ which calls share a run

    def _ending(self, end: str) -> list[Lane[_Call]]:
        with self._lock:
            self._end = "close" if self._end == "close" else end
            return list(self._lanes.values())

    def _lane(self, name: str) -> Lane[_Call]:
        """Return the lane of a program.

        Raises:
            UsageError: there is no such program.
        """
        if (lane := self._lanes.get(name)) is not None:
            return lane
        families = self._families_of(name)
        with self._lock:
            if name not in self._lanes:
                self._families[name] = families
                if families:
                    self._glances[name] = self._glance(families)
                programs = self._calls.programs
                lane = Lane(
                    name,
                    self._run,
                    queue=self._queue,
                    recorder=self._recorder(name),
                    compiled=lambda: programs.compiled,
                )
                if self._end:  # the lane refuses every job
                    lane.drain(0.0)
                if self._end == "close":
                    lane.close()
                self._lanes[name] = lane
            return self._lanes[name]

    def _families_of(self, name: str) -> tuple[_Family, ...]:
        """Return the buckets of a program in families; none: its calls do not share runs."""
        programs = self._calls.programs
        found: dict[Any, list[ProgramEntry]] = {}
        for program in self._calls.choice.buckets(name):
            others = {key: size for key, size in program.bucket.items() if key != BATCH}
            static = sorted((program.static or {}).items())
            key = (tuple(sorted(others.items())), tuple(static), program.arguments_tree)
            found.setdefault(key, []).append(program)
        families = []
        for members in found.values():
            members.sort(key=lambda program: program.bucket.get(BATCH, 0))
            last = members[-1]
            takes, gives = programs.arguments(last.name), programs.results(last.name)
            if not all(_has_batch_axis(p, takes, gives) for p in members):
                return ()
            forms = {
                tuple(map(_form, (*programs.arguments(p.name), *programs.results(p.name))))
                for p in members
            }
            if len(forms) > 1:  # rows of one do not fit into another
                return ()
            families.append(
                _Family(
                    tuple(program.bucket[BATCH] for program in members),
                    tuple(members),
                    tuple(_axis(array) for array in takes),
                    tuple(array.variables.index(BATCH) for array in gives),
                )
            )
        return tuple(families)

    def _size(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Return the rows of a call and the rows that would pad it, at a glance.

        None: a glance does not tell, or the rows do not fit into one bucket.
        """
        if (glance := self._glances.get(name)) is None:
            return 0, 0
        value: Any = args if isinstance(glance.path[0], int) else kwargs
        try:
            for key in glance.path:
                value = value[key]
            rows = int(value.shape[glance.axis])
        except (LookupError, TypeError, AttributeError):
            return None
        if not 0 < rows <= glance.sizes[-1]:
            return None
        return rows, glance.sizes[bisect_left(glance.sizes, rows)] - rows

    def _glance(self, families: Sequence[_Family]) -> _Glance:
        family = families[0]
        place, axis = next(pair for pair in enumerate(family.axes) if pair[1] is not None)
        assert axis is not None
        array = self._calls.programs.arguments(family.programs[-1].name)[place]
        most = min(each.sizes[-1] for each in families)
        return _Glance(array.path, axis, tuple(size for size in family.sizes if size <= most))

    def _job(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, copy: bool
    ) -> SharedJob[_Call]:
        """Return a job of a call. Raises UsageError as `submit`."""
        candidates: list[tuple[int, int, _Family, Fitted]] = []
        for family in self._families[name]:
            program = family.programs[-1]
            fitted = self._calls.fitted(program, args, kwargs)
            if fitted is not None and _is_shareable(program, fitted):
                others = [size for key, size in program.bucket.items() if key != BATCH]
                candidates.append((math.prod(others), len(candidates), family, fitted))
        if not candidates:
            chosen = self._calls.choose_for(name, args, kwargs)
            if copy:
                chosen = chosen._replace(values=list(map(_copied, chosen.values)))
            return SharedJob(chosen, 1, 0, object(), _only)
        _, _, family, fitted = min(candidates)
        if copy:
            fitted = fitted._replace(values=list(map(_copied, fitted.values)))
        call = _Rows(family, fitted)

        def finish(returned: Sequence[Any]) -> Any:
            return self._joined(call, returned)

        rows = fitted.sizes[BATCH]
        return SharedJob(call, rows, family.sizes[-1], _key(family, fitted), finish)

    # ------------------------------------------------------------------ a run

    def _run(self, shares: Sequence[Share[_Call]]) -> Ran:
        self._sleeper.begin(partial(are_over, shares))
        try:
            return self._run_awake(shares)
        finally:
            self._sleeper.end()

    def _run_awake(self, shares: Sequence[Share[_Call]]) -> Ran:
        """Run the rows of several calls in one bucket, or a call that runs alone."""
        call = shares[0].job.payload
        if isinstance(call, ChosenBucket):
            results = self._calls.run_checked(call, self._calls.put(call))
            rebuilt = self._calls.rebuild(call, results)
            self._calls.finish()
            return Ran([rebuilt])
        rows = sum(share.rows for share in shares)
        place = call.family.bucket_for(rows)
        program = call.family.programs[place]
        arrays = self._calls.programs.arguments(program.name)
        inputs = [
            self._calls.placed(array, _gathered(array, axis, number, shares), copy=False)
            for number, (array, axis) in enumerate(zip(arrays, call.family.axes, strict=True))
        ]
        values = [to_numpy(result) for result in self._calls.run(program, inputs)]
        gives = self._calls.programs.results(program.name)
        returned, first = [], 0
        for share in shares:
            end = first + share.rows
            sizes = _fitted(share).sizes
            returned.append(
                [_cut(*pair, first, end, sizes) for pair in zip(gives, values, strict=True)]
            )
            first = end
        self._calls.finish()
        return Ran(returned, Cost(call.family.sizes[place] - rows))

    def _joined(self, call: _Rows, returned: Sequence[Sequence[Any]]) -> Any:
        """Return the result of a call from what its shares returned.

        Raises:
            FloatingPointError: as `run_checked`; rows of other callers have no part in it.
        """
        family, convert = call.family, call.fitted.convert
        values = [
            parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
            for axis, parts in zip(family.result_axes, zip(*returned, strict=True), strict=True)
        ]
        program = family.programs[-1]
        if _jax_parts.looks_for_nans():
            self._calls.check_values(program.name, values)
        if convert is not to_numpy:
            gives = self._calls.programs.results(program.name)
            values = [
                convert(weakened(value) if array.weak else value)
                for value, array in zip(values, gives, strict=True)
            ]
        return self._calls.nested(self._calls.programs.results_tree(program.name), values)


def _only(returned: Sequence[Any]) -> Any:
    return returned[0]


def _axis(array: Array) -> int | None:
    return array.variables.index(BATCH) if BATCH in array.variables else None


def _form(array: Array) -> tuple[Any, ...]:
    """Return what an array has in all buckets of a family."""
    return array.path, array.dtype, array.weak, array.variables, array.shape_at({BATCH: 0})


def _has_batch_axis(program: ProgramEntry, takes: Sequence[Array], gives: Sequence[Array]) -> bool:
    """Return whether rows of several callers may share a run of a program."""
    masks = [array for array in takes if program.mask is not None and _is_mask(program, array)]
    return (
        BATCH in (program.pad or ())
        and BATCH in program.bucket  # a call of another one is refused
        and any(BATCH in array.variables for array in takes)
        and all(array.variables.count(BATCH) <= 1 for array in takes)
        and all(array.variables.count(BATCH) == 1 for array in gives)
        and not any(array.donated for array in takes)
        and not any(BATCH in array.variables for array in masks)
    )


def _is_mask(program: ProgramEntry, array: Array) -> bool:
    return bool(array.path) and str(array.path[0]) == program.mask


def _is_shareable(program: ProgramEntry, fitted: Fitted) -> bool:
    """Return whether the arrays of a call are on the host, and fit but for their number of rows."""
    return all(isinstance(value, np.ndarray) for value in fitted.values) and all(
        size <= program.bucket[name] for name, size in fitted.sizes.items() if name != BATCH
    )


def _key(family: _Family, fitted: Fitted) -> Any:
    """Return what calls must have in common to share a run: the buckets, and arguments without rows."""
    common = []
    for axis, value in zip(family.axes, fitted.values, strict=True):
        if axis is None:
            assert isinstance(value, np.ndarray)
            common.append((value.shape, _content(value)))
    return (id(family), *common)


def _content(value: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of an array, or their digest if they are many."""
    if value.nbytes <= _COMPARED_BYTES:
        return value.tobytes()
    from blake3 import blake3  # few programs have such arguments

    return blake3(np.ascontiguousarray(value).view(np.uint8).data).digest()


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _fitted(share: Share[_Call]) -> Fitted:
    call = share.job.payload
    assert isinstance(call, _Rows)
    return call.fitted


def _gathered(
    array: Array, axis: int | None, number: int, shares: Sequence[Share[_Call]]
) -> np.ndarray[Any, Any]:
    """Return an argument of a run: the rows of all shares, one after another, and zeros up to the bucket.

    Args:
        array: the argument.
        axis: its batch axis; None: the shares have equal values.
        number: its place among the arguments.
        shares: the rows.
    """
    parts = list(_parts(axis, number, shares))
    if len(parts) == 1 and parts[0].shape == array.shape:
        return parts[0]
    whole = aligned_zeros(array.shape, dtype_of(array.dtype))
    first = 0
    for part in parts:
        place = [slice(extent) for extent in part.shape]
        if axis is not None:
            end = first + part.shape[axis]
            place[axis], first = slice(first, end), end
        whole[tuple(place)] = part
    return whole


def _parts(
    axis: int | None, number: int, shares: Sequence[Share[_Call]]
) -> Iterator[np.ndarray[Any, Any]]:
    for share in shares if axis is not None else shares[:1]:
        value = _fitted(share).values[number]
        assert isinstance(value, np.ndarray)
        if axis is None or share.rows == share.job.rows:
            yield value
        else:
            yield value[(*[slice(None)] * axis, slice(share.start, share.end))]


def _cut(
    array: Array, value: np.ndarray[Any, Any], first: int, end: int, sizes: Mapping[str, int]
) -> np.ndarray[Any, Any]:
    """Return the rows of one share, without padding. They are a copy, unless they are the whole result."""
    within = tuple(
        slice(first, end) if name == BATCH else slice(sizes.get(name)) for name in array.variables
    )
    found = value[within]
    return found if found.shape == value.shape else found.copy()
