"""Leave out of an XLA:CPU executable what XLA reads at each load and never runs.

An executable holds the HLO that it was compiled from, each instruction of each fusion and loop, and says
where their values lie. XLA builds all of that anew at a load, which takes four fifths of the time, and then
runs thunks. Of the HLO a load needs the arguments, the constants and the results, and where these lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prejit.compiler.compile.worker.disassembly import split_executable
from prejit.compiler.compile.worker.xla_messages import Message, new_message, read_message

_TUPLE = 13
"""In xla/xla_data.proto, a PrimitiveType."""
_KEPT = {"parameter", "constant"}
_Index = tuple[int, ...]
"""The way to a part of a result that is a tuple; empty: the whole."""


def with_kept_hlo(serialized: bytes) -> bytes:
    """Return a lean executable with the HLO behind it, for people and profiles.

    An executable in a form that is not known stays as it is, before the HLO.
    """
    result = read_message("Executable", split_executable(serialized)[1]).result
    module = result.hlo.module.SerializeToString(deterministic=True)
    kept = new_message("Kept", module=module, size=len(module))
    return (lean(serialized) or serialized) + bytes(kept.SerializeToString())


def lean(serialized: bytes) -> bytes | None:
    """Return an executable of XLA:CPU without the HLO that no load needs; None: its form is not known."""
    try:
        header, content = split_executable(serialized)
        executable = read_message("Executable", content)
        _shorten(executable.result)
    except (LookupError, ValueError):
        return None
    return header + bytes(executable.SerializeToString(deterministic=True))


def _shorten(result: Message) -> None:
    """Leave the HLO out of a Result that no load needs.

    The new entry has the old one's arguments and constants. Each result is a custom call that nobody runs, in
    the place that XLA gave the result. XLA makes a fusion of its library YNNPACK from its HLO, so these stay.

    Raises:
        LookupError, ValueError: it is in a form that is not known. It may have changed.
    """
    module, buffers = result.hlo.module, result.buffers
    computations = {each.id: each for each in module.computations}
    instructions = {one.id: one for each in module.computations for one in each.instructions}
    old = computations[module.entry_id]
    root = instructions[old.root_id]
    constants = {
        assigned.buffer_id
        for each in buffers.allocations
        if each.is_constant
        for assigned in each.assigned
    }
    entry = _Entry(old.id, [])
    kept = [one.id for one in old.instructions if one.opcode == "parameter"]
    kept += [each.place.instruction_id for each in buffers.buffers if each.id in constants]
    if {instructions[number].opcode for number in kept} - _KEPT:
        raise ValueError("a constant that is computed")
    numbers = {number: entry.add(instructions[number]) for number in dict.fromkeys(kept)}
    is_tuple = root.shape.element_type == _TUPLE
    shapes = {(n,): part for n, part in enumerate(root.shape.parts)}
    if is_tuple and root.id in numbers:
        raise ValueError("an argument with parts is the result")
    results: list[int] = []
    made: dict[int, _Lies] = {}
    values = _Values(computations, instructions, buffers)
    for index, shape in shapes.items() if is_tuple else [((), root.shape)]:
        if shape.element_type == _TUPLE:
            raise ValueError("a result with parts")
        at = values.find(root, index)
        number = None if at.index else numbers.get(at.instruction)
        if number is None:
            number = entry.add_call(shape)
            made[number] = at
        results.append(number)
    if is_tuple:
        whole = new_message("Instruction", opcode="tuple", operand_ids=results)
        whole.shape.CopyFrom(root.shape)
        if root.HasField("sharding"):
            whole.sharding = root.sharding
        results = [entry.add(whole)]
        made[results[0]] = values.find(root, ())
    called = _keep_fusions(result.thunks, instructions, entry)
    fused = [computations[each] for each in _with_called(called, computations)]
    _place(buffers, numbers, made)
    for computation in fused:
        for one in computation.instructions:
            one.ClearField("metadata")
    computation = new_message("Computation")
    computation.CopyFrom(old)
    computation.ClearField("instructions")
    computation.instructions.extend(entry.instructions)
    computation.root_id = results[0]
    _replace(module.computations, [*fused, computation])
    for name in ("profiles", "stack_frames", "recovery_table", "payloads"):
        module.ClearField(name)
    ids = {each.id for each in fused}
    sequences = module.schedule.sequences
    _replace(sequences, [each for each in sequences if each.computation_id in ids])
    order = sequences.add(computation_id=old.id).order
    order.instruction_ids.extend(one.id for one in entry.instructions)


@dataclass(frozen=True)
class _Entry:
    """The instructions of the new entry, in order. The upper half of their ids is that of the computation."""

    computation_id: int
    instructions: list[Message]

    def add(self, instruction: Message) -> int:
        """Add a copy of an instruction, and return its id."""
        number = len(self.instructions)
        one = new_message("Instruction")
        one.CopyFrom(instruction)
        one.id, one.name = self.computation_id << 32 | number, f"prejit.{number}"
        one.ClearField("metadata")
        one.ClearField("predecessor_ids")
        self.instructions.append(one)
        return int(one.id)

    def add_call(self, shape: Message) -> int:
        """Add an instruction that stands for a value of this shape."""
        one = new_message("Instruction", opcode="custom-call", custom_call_target="not run")
        one.shape.CopyFrom(shape)
        return self.add(one)


@dataclass(frozen=True)
class _Lies:
    """Where a value lies, and what defines it.

    Attributes:
        instruction: the id of the instruction that defines it.
        index: which part of that instruction's result it is; empty: the whole.
        allocation, offset, size: its bytes.
        color: XLA's number of the memory.
    """

    instruction: int
    index: _Index
    allocation: int
    offset: int
    size: int
    color: int


class _Values:
    """The values of a module's instructions, as XLA's HloDataflowAnalysis finds them."""

    def __init__(
        self, computations: dict[int, Message], instructions: dict[int, Message], buffers: Message
    ) -> None:
        self._computations = computations
        self._instructions = instructions
        by_id = {each.id: each for each in buffers.buffers}
        self._defined: dict[tuple[int, _Index], _Lies] = {}
        for each in buffers.allocations:
            for one in each.assigned:
                buffer = by_id[one.buffer_id]
                place = buffer.place.instruction_id, tuple(buffer.place.index)
                self._defined[place] = _Lies(
                    *place, each.number, one.offset, one.size, buffer.color
                )

    def find(self, instruction: Message, index: _Index) -> _Lies:
        """Return where a part of an instruction's result lies.

        Raises:
            LookupError, ValueError: an instruction that forwards its value is not known.
        """
        while (place := (instruction.id, index)) not in self._defined:
            number, *_ = instruction.operand_ids
            match instruction.opcode:
                case "get-tuple-element":
                    index = (instruction.tuple_index, *index)
                case "tuple":
                    number, index = instruction.operand_ids[index[0]], index[1:]
                case "bitcast" | "while":  # a loop's state lies in one place, from its beginning on
                    pass
                case "call" | "conditional":  # all branches give it in one place
                    number = self._computations[instruction.called_ids[0]].root_id
                case _:
                    raise ValueError(f"{instruction.opcode} defines no value of its own")
            instruction = self._instructions[number]
        return self._defined[place]


def _place(buffers: Message, numbers: dict[int, int], made: dict[int, _Lies]) -> None:
    """Keep the buffers of instructions that stay, by their new ids, and add those of new ones."""
    kept = []
    for each in buffers.buffers:
        number = numbers.get(each.place.instruction_id)
        if number is not None:
            each.place.instruction_id = number
            kept.append(each)
    ids = {each.id for each in kept}
    free = 1 + max((each.id for each in buffers.buffers), default=0)
    for each in buffers.allocations:
        _replace(each.assigned, [one for one in each.assigned if one.buffer_id in ids])
    allocations = {each.number: each for each in buffers.allocations}
    for buffer_id, (number, lies) in enumerate(made.items(), free):
        buffer = new_message("Buffer", id=buffer_id, size=lies.size, color=lies.color)
        buffer.place.instruction_id = number
        kept.append(buffer)
        allocations[lies.allocation].assigned.add(
            buffer_id=buffer_id, offset=lies.offset, size=lies.size
        )
    _replace(buffers.buffers, kept)
    for name in ("aliases", "traces", "peaks"):
        buffers.ClearField(name)


def _keep_fusions(
    thunks: Message, instructions: dict[int, Message], entry: _Entry
) -> dict[int, None]:
    """Add the fusions that thunks refer to, and return the ids of their computations."""
    computations: dict[int, None] = {}
    for fusion in _fusions(thunks):
        one = new_message("Instruction")
        one.CopyFrom(instructions[fusion.instruction_id])
        one.operand_ids[:] = [entry.add_call(instructions[each].shape) for each in one.operand_ids]
        fusion.instruction_id = entry.add(one)
        computations |= dict.fromkeys(one.called_ids)
    return computations


def _with_called(numbers: Iterable[int], computations: dict[int, Message]) -> dict[int, None]:
    """Return the ids of computations and of all that they call, which come before them."""
    found: dict[int, None] = {}
    for number in numbers:
        for one in computations[number].instructions:
            found |= _with_called(one.called_ids, computations)
        found[number] = None
    return found


def _fusions(thunks: Message) -> Iterator[Message]:
    for each in thunks.thunks:
        if each.HasField("fusion"):
            yield each.fusion
        inner = [each.call.called, *each.conditional.branches, each.loop.condition, each.loop.body]
        for one in inner:
            yield from _fusions(one)


def _replace(repeated: Any, messages: list[Message]) -> None:
    """Let a repeated field have these messages, which may be its own."""
    copies = [type(each).FromString(each.SerializeToString()) for each in messages]
    del repeated[:]
    repeated.extend(copies)
