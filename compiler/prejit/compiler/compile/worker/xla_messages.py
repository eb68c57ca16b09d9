"""XLA's protobuf messages as far as a build reads or changes them: serialized executables, and topologies.

A serialized executable of jaxlib 0.10 to 0.12 is two messages: IFRT's SerializedXlaExecutableMetadata with
its length before it (shardings, layouts), then an Executable. Fields that are not listed stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

from prejit.runtime.errors import BuildError

_MESSAGES = {
    "Parts": "1 *bytes parts",
    # xla/pjrt/proto/executable_metadata.proto: ExecutableAndOptionsProto
    "Executable": "1 Result result",
    # xla/service/cpu/executable.proto: CompilationResultProto, and what it holds
    "Result": "1 ModuleWithConfig hlo, 2 BufferAssignment buffers, 6 Thunks thunks, 7 *Symbol symbols, "
    "8 *Object objects, 9 Machine machine",
    # behind an Executable, where XLA reads neither: the module before it was shortened, as the last bytes
    "Kept": "1000 bytes module, 1001 fixed64 size",
    "Symbol": "2 string name",
    "Object": "1 bytes content",
    "Machine": "2 string cpu, 3 string features",
    # xla/service/hlo.proto
    "ModuleWithConfig": "1 Module module",
    "Module": "3 *Computation computations, 6 int64 entry_id, 7 Schedule schedule, 13 *bytes profiles, "
    "17 bytes stack_frames, 20 bytes recovery_table",
    "Computation": "2 *Instruction instructions, 5 int64 id, 6 int64 root_id",
    "Instruction": "1 string name, 2 string opcode, 3 Shape shape, 7 bytes metadata, "
    "9 int64 parameter_number, 13 int64 tuple_index, 28 string custom_call_target, 35 int64 id, "
    "36 *int64 operand_ids, 37 *int64 predecessor_ids, 38 *int64 called_ids, 40 bytes sharding",
    "Shape": "2 int64 element_type, 3 *int64 dimensions, 4 *Shape parts, 5 Layout layout",
    "Layout": "1 *int64 minor_to_major",
    "Schedule": "1 *Sequence sequences",
    "Sequence": "1 int64 computation_id, 2 Order order",
    "Order": "1 *int64 instruction_ids",
    "BufferAssignment": "1 *Buffer buffers, 2 *bytes aliases, 3 *Allocation allocations, "
    "4 *bytes traces, 5 *bytes peaks",
    "Buffer": "1 int64 id, 2 int64 size, 3 Place place, 4 int64 color",
    "Place": "3 *int64 index, 4 int64 instruction_id",
    "Allocation": "1 int64 number, 9 *Assigned assigned, 12 bool is_constant",
    "Assigned": "1 int64 buffer_id, 2 int64 offset, 3 int64 size",
    # xla/backends/cpu/runtime/thunk.proto
    "Thunks": "1 *Thunk thunks",
    "Thunk": "3 Call call, 4 Conditional conditional, 10 While loop, 21 Fusion fusion",
    "Call": "1 Thunks called",
    "Conditional": "1 *Thunks branches",
    "While": "1 Thunks condition, 2 Thunks body",
    "Fusion": "2 int64 instruction_id",
    # xla/pjrt/proto/topology_description.proto, whose field 9 is an Any of a CpuTopologyProto
    "Topology": "9 Any platform",
    "Any": "2 CpuTopology value",
    "CpuTopology": "5 Machine machine",
}
"""The fields of each message by its name: number, type, `*` for a repeated one, name. The names are ours."""


Message = Any
"""A message of one of these classes, which are made at run time."""


@functools.cache
def _classes() -> dict[str, Any]:
    # Environments of targets that are no CPUs lack this package.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="prejit_xla.proto", package="prejit_xla")
    described = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, kind, field_name = field.split(" ")
            label = "REPEATED" if kind.startswith("*") else "OPTIONAL"
            kind = kind.removeprefix("*")
            added = message.field.add(
                name=field_name, number=int(number), label=described.Label.Value(f"LABEL_{label}")
            )
            if kind in _MESSAGES:
                added.type_name = f".prejit_xla.{kind}"
            else:
                added.type = described.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"prejit_xla.{name}") for name in _MESSAGES)
    return dict(zip(_MESSAGES, map(message_factory.GetMessageClass, found), strict=True))


def new_message(name: str, **fields: Any) -> Message:
    """Return a message with some of its fields."""
    return _classes()[name](**fields)


def read_message(name: str, content: bytes) -> Message:
    """Return a message.

    Raises:
        ValueError: the bytes are none.
    """
    from google.protobuf.message import DecodeError

    try:
        return _classes()[name].FromString(content)
    except DecodeError as error:
        raise ValueError(str(error)) from error


def message_bytes(message: Message) -> bytes:
    """Return a message as bytes: the same for the same content."""
    return bytes(message.SerializeToString(deterministic=True))


def read_executable(serialized: bytes) -> tuple[bytes, Message]:
    """Return what comes before the Executable in an executable of XLA:CPU, and this.

    Raises:
        BuildError: the bytes are no such executable.
    """
    try:
        # With a tag before the length of the first message, both read as fields 1.
        header, *_ = read_message("Parts", b"\x0a" + serialized).parts
        start = max(1, (len(header).bit_length() + 6) // 7) + len(header)  # its length is a varint
        executable = read_message("Executable", serialized[start:])
        if not executable.result.HasField("machine"):
            raise ValueError("no machine")
    except ValueError as error:
        raise BuildError(
            "expected an executable of XLA:CPU as jaxlib 0.10 to 0.12 serialize it, found"
            f" {len(serialized)} bytes of another form",
            hint="a newer jaxlib may write executables in another form: build with jaxlib 0.10 to 0.12",
        ) from error
    return serialized[:start], executable


def replace_messages(repeated: Any, messages: list[Message]) -> None:
    """Let a repeated field have these messages, which may be its own."""
    copies = [type(each).FromString(each.SerializeToString()) for each in messages]
    del repeated[:]
    repeated.extend(copies)
