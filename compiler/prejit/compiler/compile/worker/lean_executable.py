"""Leave out of an XLA:CPU executable what XLA reads at each load and never runs.

An executable holds the HLO that it was compiled from, each instruction of each fusion and loop, and says
where their values lie. XLA builds all of that anew at a load, which takes four fifths of the time, and then
runs thunks. Of the HLO a load needs the arguments, the constants and the results, and where these lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prejit.compiler.compile.worker.xla_messages import (
    Message,
    message_bytes,
    new_message,
    read_executable,
    replace_messages,
)
from prejit.runtime.device import _jax_parts
from prejit.runtime.errors import BuildError

_FLOAT32, _TUPLE = 11, 13
"""In xla/xla_data.proto, PrimitiveTypes."""
_WORK_OF_A_THREAD = 1_000
"""XLA runs programs of less operations in the caller's thread (TfrtCpuClient's `CheapExecution`)."""
_Index = tuple[int, ...]
"""The way to a part of a result that is a tuple; empty: the whole."""


def with_kept_hlo(serialized: bytes) -> bytes:
    """Return a lean executable with the HLO behind it, for people and profiles.

    An executable in a form that is not known stays as it is, before the HLO.
    """
    module = message_bytes(read_executable(serialized)[1].result.hlo.module)
    kept = new_message("Kept", module=module, size=len(module))
    return (lean(serialized) or serialized) + message_bytes(kept)


def lean(serialized: bytes) -> bytes | None:
    """Return an executable of XLA:CPU without the HLO that no load needs; None: its form is not known."""
    try:
        header, executable = read_executable(serialized)
        _shorten(executable.result)
    except (BuildError, LookupError, RuntimeError, ValueError):  # XLA does not read it
        return None
    return header + message_bytes(executable)


def _shorten(result: Message) -> None:
    """Leave the HLO out of a Result that no load needs.

    The new entry has the old one's arguments and constants. Each result is a custom call that nobody runs, in
    the place that XLA gave the result. XLA makes a fusion of its library YNNPACK from its HLO, so these stay.

    Raises:
        LookupError, ValueError: it is in a form that is not known. It may have changed.
    """
    module, buffers = result.hlo.module, result.buffers
    work = _work(module)
    computations = {each.id: each for each in module.computations}
    instructions = {one.id: one for each in module.computations for one in each.instructions}
    old = computations[module.entry_id]
    kept = [one for one in old.instructions if one.opcode == "parameter"]
    kept += [instructions[number] for number in _constants(buffers)]
    if any(one.opcode not in ("parameter", "constant") for one in kept):
        raise ValueError("a constant that is computed")
    entry = _Entry(old.id, [])
    numbers = {one.id: entry.add(one) for one in kept}
    values = _Values(computations, instructions, buffers)
    root, made = _add_results(entry, instructions[old.root_id], values, numbers)
    called = _keep_fusions(result.thunks, instructions, entry)
    fused = [computations[each] for each in _with_called(called, computations)]
    for each in fused:
        for one in each.instructions:
            one.ClearField("metadata")
    _place(buffers, numbers, made)
    for name in ("profiles", "stack_frames", "recovery_table"):
        module.ClearField(name)
    new = new_message("Computation")
    new.CopyFrom(old)
    new.root_id = root
    sequences = module.schedule.sequences
    ids = {each.id for each in fused}
    scheduled = [each for each in sequences if each.computation_id in ids]

    if work >= _WORK_OF_A_THREAD:
        entry.add_work(work)
    replace_messages(new.instructions, entry.instructions)
    replace_messages(module.computations, [*fused, new])
    replace_messages(sequences, scheduled)
    order = sequences.add(computation_id=old.id).order
    order.instruction_ids.extend(one.id for one in entry.instructions)


def _work(module: Message) -> int:
    """Return the operations that XLA counts."""
    cost = _jax_parts.hlo_module_cost(_jax_parts.parse_hlo(message_bytes(module)))
    return round(cost.get("flops", 0))


def _constants(buffers: Message) -> dict[int, None]:
    """Return the ids of the instructions whose values lie in allocations of constants."""
    ids = {
        assigned.buffer_id
        for each in buffers.allocations
        if each.is_constant
        for assigned in each.assigned
    }
    return {each.place.instruction_id: None for each in buffers.buffers if each.id in ids}


def _add_results(
    entry: _Entry, root: Message, values: _Values, numbers: dict[int, int]
) -> tuple[int, dict[int, _Lies]]:
    """Add what stands for the results of the old root.

    Args:
        entry: the new entry.
        root: the old root.
        values: where values lie.
        numbers: new ids of instructions by their old ones.

    Returns:
        The id of the new root, and where the values of new instructions lie, by id.
    """
    is_tuple = root.shape.element_type == _TUPLE
    if is_tuple and root.id in numbers:
        raise ValueError("an argument with parts is the result")
    parts: dict[_Index, Message] = {(n,): part for n, part in enumerate(root.shape.parts)}
    results: list[int] = []
    made: dict[int, _Lies] = {}
    for index, shape in (parts if is_tuple else {(): root.shape}).items():
        if shape.element_type == _TUPLE:
            raise ValueError("a result with parts")
        lies = values.find(root, index)
        number = None if lies.index else numbers.get(lies.instruction)
        if number is None:
            number = entry.add_call(shape)
            made[number] = lies
        results.append(number)
    if not is_tuple:
        return results[0], made
    whole = new_message("Instruction", opcode="tuple", operand_ids=results)
    whole.shape.CopyFrom(root.shape)
    if root.HasField("sharding"):
        whole.sharding = root.sharding
    number = entry.add(whole)
    return number, {**made, number: values.find(root, ())}


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

    def add_work(self, count: int) -> None:
        """Add an instruction that nobody runs, for which XLA counts so many operations for the entry."""
        # It counts each custom call as one operation less than none.
        size = count + len(self.instructions) + 1
        shape = new_message("Shape", element_type=_FLOAT32, dimensions=[size])
        shape.layout.minor_to_major.append(0)
        value = self.add_call(shape)
        one = new_message("Instruction", opcode="negate", operand_ids=[value])
        one.shape.CopyFrom(shape)
        self.add(one)


@dataclass(frozen=True)
class _Lies:
    """The memory of a value, and the instruction that computes it.

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
        callers: list[Message] = []
        while (place := (instruction.id, index)) not in self._defined:
            if instruction.opcode == "parameter" and callers:
                caller = callers.pop()
                # The first operand of a conditional says which branch runs.
                first = 0 if caller.opcode == "call" else 1
                number = caller.operand_ids[first + instruction.parameter_number]
                instruction = self._instructions[number]
                continue
            number, *_ = instruction.operand_ids
            match instruction.opcode:
                case "get-tuple-element":
                    index = (instruction.tuple_index, *index)
                case "tuple":
                    number, index = instruction.operand_ids[index[0]], index[1:]
                case "bitcast" | "while":  # a loop's state lies in one place, from its beginning on
                    pass
                case "call" | "conditional":  # all branches give it in one place
                    callers.append(instruction)
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
        replace_messages(each.assigned, [one for one in each.assigned if one.buffer_id in ids])
    allocations = {each.number: each for each in buffers.allocations}
    for buffer_id, (number, lies) in enumerate(made.items(), free):
        buffer = new_message("Buffer", id=buffer_id, size=lies.size, color=lies.color)
        buffer.place.instruction_id = number
        kept.append(buffer)
        allocations[lies.allocation].assigned.add(
            buffer_id=buffer_id, offset=lies.offset, size=lies.size
        )
    replace_messages(buffers.buffers, kept)
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
