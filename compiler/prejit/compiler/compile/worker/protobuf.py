"""Read and edit serialized protobuf messages without their schema.

A message is a list of (field number, value) pairs. A value is an integer or bytes; bytes may hold a text, a
submessage or anything else. XLA's messages use no other wire types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Fields = list[tuple[int, bytes | int]]
"""The fields of a message in order: number and value."""


def edit_protobuf(message: bytes, path: tuple[int, ...], values: Mapping[int, bytes]) -> bytes:
    """Return a message in which fields of the submessage at `path` have other values.

    Args:
        message: the whole message.
        path: field numbers that lead to the submessage.
        values: new values by field number. A field that the submessage lacks is not added.

    Raises:
        ValueError: the bytes are not such a message.
    """
    return _with_changed_fields(
        message, path, lambda fields: [(number, values.get(number, v)) for number, v in fields]
    )


def sort_protobuf(message: bytes, path: tuple[int, ...], number: int) -> bytes:
    """Return a message in which one repeated field of the submessage at `path` is sorted by its bytes.

    Args:
        message: the whole message.
        path: field numbers that lead to the submessage.
        number: the repeated field.

    Raises:
        ValueError: the bytes are not such a message.
    """

    def change(fields: Fields) -> Fields:
        ordered = iter(sorted(v for n, v in fields if n == number and isinstance(v, bytes)))
        return [
            (n, next(ordered) if n == number and isinstance(v, bytes) else v) for n, v in fields
        ]

    return _with_changed_fields(message, path, change)


def protobuf_fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the fields of a message: number, and bytes or the integer of a varint.

    Raises:
        ValueError: the bytes are not such a message.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at == len(message) or shift > 63:
                raise ValueError("a varint without an end")
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            size = varint()
            if size > len(message) - at:
                raise ValueError(f"a field of {size} bytes where {len(message) - at} are left")
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"unexpected protobuf wire type {tag & 7}")


def _with_changed_fields(
    message: bytes, path: tuple[int, ...], change: Callable[[Fields], Fields]
) -> bytes:
    fields = list(protobuf_fields(message))
    if not path:
        fields = change(fields)
    out = bytearray()
    for number, value in fields:
        if path and number == path[0] and isinstance(value, bytes):
            value = _with_changed_fields(value, path[1:], change)
        if isinstance(value, bytes):
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
        else:
            out += _varint(number << 3) + _varint(value)
    return bytes(out)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
