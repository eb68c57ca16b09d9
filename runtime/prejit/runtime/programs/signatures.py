"""The buckets of calls so far, by the structure and types of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from prejit.runtime.device import _jaxlib
from prejit.runtime.device.transfer import OnDevice
from prejit.runtime.format.schema import ProgramEntry
from prejit.runtime.programs.placing import Convert

_MOST = 10_000
"""Maximum number of signatures that are remembered; as many as a manifest may have programs."""
_PLAIN = (str, int, bool)
"""Types of the name of a program and of static arguments."""
_NO_SIZES: Mapping[str, int] = {}


class ChosenBucket(NamedTuple):
    """A bucket that takes what a caller gave.

    Attributes:
        program: its row of the program table.
        values: the given arguments in order, padded if necessary.
        convert: makes a result of the kind that the caller uses: jax.Array or NumPy array.
        sizes: the caller's size of each variable of the bucket that was padded; empty: none was.
    """

    program: ProgramEntry
    values: Sequence[Any]
    convert: Convert
    sizes: Mapping[str, int] = _NO_SIZES

    @property
    def padding(self) -> float:
        """The share of the bucket that is padding, from 0 to 1."""
        sizes = self.program.bucket
        return 1 - math.prod(given / sizes[name] for name, given in self.sizes.items())


class _Known(NamedTuple):
    """The bucket of a signature.

    Attributes:
        chosen: the bucket, without arguments.
        order: the place of each of its arguments among the leaves of a call.
    """

    chosen: ChosenBucket
    order: tuple[int, ...]


@final
class Signatures:
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
            choose: returns the bucket for it. It looks at no values but static ones.
            has_static: whether the program has static arguments.
        """
        if (flat := _jaxlib.flattened(given)) is None:
            return choose(given)
        leaves, structure = flat
        of_jax = _jaxlib.imported_array_class()
        key: list[Any] = [structure]
        for leaf in leaves:
            kind = type(leaf)
            if kind is np.ndarray or kind is OnDevice:
                key += kind, leaf.dtype, leaf.shape
            elif kind is of_jax:
                key += kind, leaf.aval, leaf.sharding, leaf.committed
            elif kind is str or (has_static and kind in (int, bool)):
                key += kind, leaf
            else:
                return choose(given)
        signature = tuple(key)
        try:
            known = self._known[signature]
        except KeyError:
            chosen = choose(given)
            if len(self._known) < _MOST:
                self._known[signature] = _known(chosen, leaves, structure, choose)
            return chosen
        if known is None:
            return choose(given)
        chosen, order = known
        try:
            values = [_value(leaves[place]) for place in order]
        except Exception:  # such as a deleted array of jax: this has the error
            return choose(given)
        return ChosenBucket(chosen.program, values, chosen.convert)


def _known(
    chosen: ChosenBucket,
    leaves: Sequence[Any],
    structure: Any,
    choose: Callable[[Any], ChosenBucket],
) -> _Known | None:
    """Return a bucket that takes the arrays of a call as they are; None: it does not."""
    if chosen.sizes:
        return None
    # Another array stands for each one, to be found again among the arguments.
    stand_ins = [leaf if type(leaf) in _PLAIN else _stand_in(leaf) for leaf in leaves]
    places = {id(each): place for place, each in enumerate(stand_ins) if type(each) not in _PLAIN}
    order = [places.pop(id(v), None) for v in choose(structure.unflatten(stand_ins)).values]
    if places or None in order:
        return None
    return _Known(chosen._replace(values=()), tuple(order))


def _stand_in(array: Any) -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray | OnDevice) else np.asarray(leaf)
