"""No two processes lower the same program, and none is started for less than it costs."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.pipeline.lower.crew import process_count, split
from prejit.compiler.pipeline.plan import PlannedProgram
from prejit.compiler.pipeline.stored_traces import Known
from prejit.compiler.store.build_cache_key import Key


def function(section, number):
    """A bucket of a function of the user."""
    spec = ProgramSpec(f"{section}/n{number}", "call", {"n": number}, section)
    return PlannedProgram(spec, trace=Known(spec.name, (), {}))


def model(kind, number):
    spec = ProgramSpec(f"{kind}/{number}", kind, {"context": number})
    return PlannedProgram(spec, key=Key("lower", spec.name, (("number", str(number)),)))


programs = st.builds(
    lambda decodes, f, g: [
        *(model("decode", number) for number in range(decodes)),
        *(function("f", number) for number in range(f)),
        *(function("g", number) for number in range(g)),
    ],
    *(st.integers(0, 40), st.integers(0, 90), st.integers(0, 5)),
)


@given(programs, st.integers(1, 64))
def test_every_program_is_in_one_unit(left, processes):
    units = split(left, processes)
    assert list(chain(*units)) == left
    assert all(len({each.spec.section for each in unit}) == 1 for unit in units)


def test_units_and_processes_are_worth_their_start():
    assert [len(unit) for unit in split([model("decode", n) for n in range(5)], 2)] == [1] * 5
    assert all(len(unit) >= 4 for unit in split([function("f", n) for n in range(40)], 64))
    assert len(split([function("f", n) for n in range(400)], 4)) >= 16
    models = [model("decode", n) for n in range(64)]
    assert process_count(models, 16) == 16
    assert process_count(models, 0) == 0, "too few cores: they compile"
    assert process_count(models, 1) == 0, "no faster than the build itself"
    assert process_count(models[:9], 16) == 3
    assert process_count([function("f", n) for n in range(100)], 16) == 3
