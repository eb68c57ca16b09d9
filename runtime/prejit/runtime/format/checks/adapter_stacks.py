"""The stacks of adapters that programs take beside the weights, as docs/bundle-format.md has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Config, Decoder, ProgramEntry
from prejit.runtime.format.names import ADAPTABLE_KINDS, ADAPTED

_Signature = tuple[tuple[str, ...], tuple[str, ...]]
_MAX_ELEMENTS = 1 << 38


@dataclass(frozen=True, slots=True)
class StackPair:
    """The stacks of the matrices of one name, A and B.

    Attributes:
        down: A, float32 [slots, L, rank, in].
        up: B, float32 [slots, L, rank, out].
        modules: the L matrices, as adapters name them.
    """

    down: Array
    up: Array
    modules: tuple[str, ...]


def stack_pairs(decoder: Decoder) -> tuple[StackPair, ...]:
    """Return the stacks of a decoder, in the order in which programs take them; none if it has none.

    Raises:
        ValueError: a text is no such array, or two do not fit each other.
    """
    if decoder.adapters is None:
        return ()
    arrays = [_parse(text) for text in decoder.adapters]
    if not arrays or len(arrays) % 2:
        raise ValueError(f"adapters: expected pairs of arrays, found {len(arrays)}")
    found = []
    slots, _, rank, _ = arrays[0].shape
    for down, up in zip(arrays[::2], arrays[1::2], strict=True):
        stack, modules = str(down.path[0]).removesuffix(".A"), down.path[1:]
        shape = (slots, len(modules), rank)
        if (down.path[0], up.path) != (f"{stack}.A", (f"{stack}.B", *modules)) or not (
            down.shape[:3] == up.shape[:3] == shape
        ):
            raise ValueError(f"adapters: expected A and B of the same matrices, found {up!s:.80}")
        found.append(StackPair(down, up, tuple(map(str, modules))))
    names = [name for pair in found for name in pair.modules]
    if len({*names}) < len(names) or len({array.path[0] for array in arrays}) < len(arrays):
        raise ValueError("adapters: expected each matrix once, found one twice")
    return tuple(found)


def stack_texts(decoder: Decoder) -> Iterator[str]:
    """Yield the stacks as programs list them: their paths are their names alone."""
    for pair in stack_pairs(decoder):
        for array in (pair.down, pair.up):
            yield str(replace(array, path=array.path[:1]))


def adapted_signature(
    without: Callable[[ProgramEntry], _Signature], decoder: Decoder | None, program: ProgramEntry
) -> _Signature:
    """Return the signature of a program whose rows may have adapters.

    Args:
        without: returns that of another program.
        decoder: the one of the bundle.
        program: its kind begins with ADAPTED.

    Raises:
        ValueError: the stacks of the decoder are damaged.
    """
    arguments, results = without(replace(program, kind=program.kind.removeprefix(ADAPTED)))
    stacks = () if decoder is None else stack_texts(decoder)
    return (f'["adapter"] int32[{program.bucket["batch"]}]', *stacks, *arguments), results


def check_adapted(config: Config) -> None:
    """Check that each program whose rows may have adapters stands beside one without, and each has one.

    Raises:
        ValueError: one is missing.
    """
    buckets = {program.name: (program.kind, program.bucket) for program in config.programs}
    for name, (kind, bucket) in buckets.items():
        if kind in ADAPTABLE_KINDS:
            other, wanted = f"{ADAPTED}{name}", f"{ADAPTED}{kind}"
        elif kind.startswith(ADAPTED):
            other, wanted = name.removeprefix(ADAPTED), kind.removeprefix(ADAPTED)
        else:
            continue
        if buckets.get(other) != (wanted, bucket):
            raise ValueError(f"{name}: expected {other}, of the same bucket, beside it; found none")


def _parse(text: str) -> Array:
    try:
        array = Array.parse(text)
    except ValueError as error:
        raise ValueError(f"adapters: {error}") from error
    if (
        len(array.shape) != 4
        or array.dtype != "float32"
        or 0 in array.shape
        or len(array.path) < 2
        or math.prod(array.shape) > _MAX_ELEMENTS
        or array != Array(array.path, array.dtype, array.shape)
    ):
        raise ValueError(
            f"adapters: expected a float32 array [slots, L, rank, in] with the names of L matrices, "
            f"found {text!r:.80}"
        )
    return array
