"""The buckets of calls so far, by the structure and types of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from prejit.runtime.device import _jax_parts, _jit_dispatch
from prejit.runtime.device.jax_arrays import OnDevice, default_device
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.programs.placing import Convert
from prejit.runtime.programs.pytree import has_registered_tuple

_MOST = 10_000
"""Maximum number of signatures that are remembered; as many as a manifest may have programs. The next one
forgets them all: those in use soon come back, and those that never come again go."""
_PLAIN = (str, int, bool)
"""Types of the name of a program and of static arguments."""
_NO_SIZES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Held:
    """In place of an argument that is on the device already.

    Attributes:
        dtype: its dtype.
        shape: the shape of the whole array.
        weak_type: whether jax's type of it is weak.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    weak_type: bool


class ChosenBucket(NamedTuple):
    """A bucket that takes what a caller gave.

    Attributes:
        program: its row of the program table.
        values: the given arguments in order, each of the size that the caller gave.
        convert: makes a result of the kind that the caller uses: jax.Array or NumPy array.
        sizes: the caller's size of each variable of the bucket that was padded; empty: none was.
        is_on_device: whether all arguments lie on devices, so that jax's transfer guards let them pass.
    """

    program: ProgramEntry
    values: Sequence[Any]
    convert: Convert
    sizes: Mapping[str, int] = _NO_SIZES
    is_on_device: bool = False

    @property
    def padding(self) -> float:
        """The share of the bucket that is padding, from 0 to 1."""
        sizes = self.program.bucket
        return 1 - math.prod(given / sizes[name] for name, given in self.sizes.items())

    def emptied(self) -> ChosenBucket:
        """Return it without arguments, which would live as long as it is kept."""
        return self._replace(values=())


class _Known(NamedTuple):
    """The bucket of a signature.

    Attributes:
        chosen: the bucket, without arguments.
        order: the place of each of its arguments among the leaves of a call.
    """

    chosen: ChosenBucket
    order: tuple[int, ...]


@final
class KnownCalls:
    """The signatures of calls so far. Safe to use from many threads."""

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[Any, _Known | None] = {}

    def choose(
        self, given: Any, choose: Callable[[Any], ChosenBucket], *, has_static: bool
    ) -> ChosenBucket:
        """Return the bucket that takes what a caller gave.

        Args:
            given: the name of the program and its arguments, nested in tuples and dicts.
            choose: returns the bucket for it. It looks at no values but static ones and those that it makes
                arrays of another dtype of.
            has_static: whether the program has static arguments.
        """
        if (flat := _jit_dispatch.flattened(given)) is None:
            return choose(given)
        leaves, structure = flat
        of_jax = _jax_parts.imported_array_class()
        key: list[Any] = [structure]
        uses_jax = False
        for leaf in leaves:
            kind = type(leaf)
            if kind is np.ndarray:
                key += kind, leaf.dtype, leaf.shape
            elif kind is OnDevice:
                key += kind, leaf.dtype, leaf.shape, leaf.weak_type
            elif kind is of_jax:
                key += kind, leaf.aval, leaf.sharding, leaf.committed
                uses_jax = True
            elif kind is str or (has_static and kind in (int, bool)):
                key += kind, leaf
            else:
                return choose(given)
        if uses_jax:
            key.append(default_device())
        signature = tuple(key)
        try:
            known = self._known[signature]
        except KeyError:
            chosen = choose(given)
            if len(self._known) >= _MOST:
                self._known.clear()
            known = (
                None if has_registered_tuple(given) else _known(chosen, leaves, structure, choose)
            )
            self._known[signature] = known
            return chosen
        if known is None:
            return choose(given)
        chosen, order = known
        try:
            values = [_value(leaves[place]) for place in order]
        except Exception:  # such as a deleted array of jax: this has the error
            return choose(given)
        return chosen._replace(values=values)


def _known(
    chosen: ChosenBucket,
    leaves: Sequence[Any],
    structure: Any,
    choose: Callable[[Any], ChosenBucket],
) -> _Known | None:
    """Return a bucket that takes all arrays of a call's types as they are; None: it does not."""
    if chosen.sizes:
        return None
    # Another value stands for each array, to be found again among the arguments.
    stand_ins = [leaf if type(leaf) in _PLAIN else _stand_in(leaf) for leaf in leaves]
    places = {id(each): place for place, each in enumerate(stand_ins) if type(each) not in _PLAIN}
    try:
        found = choose(structure.unflatten(stand_ins))
    except Exception:  # of the class of a named tuple
        return None
    order = [places.pop(id(value), -1) for value in found.values]
    if places or -1 in order or found.program is not chosen.program:
        return None
    return _Known(chosen.emptied(), tuple(order))


def _stand_in(array: Any) -> np.ndarray[Any, Any] | Held:
    if isinstance(array, np.ndarray):  # zeros of 64 bits that become 32 are not found again
        return np.broadcast_to(np.zeros((), array.dtype), array.shape)
    return Held(array.dtype, array.shape, array.weak_type)


def _value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray | OnDevice) else np.asarray(leaf)
