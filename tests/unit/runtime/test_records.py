"""Our dataclasses are those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime import records


def made(kind, **options):
    """Return the same class, made by `records` or by `dataclasses`."""

    @kind.dataclass(slots=True, **options)
    class Point:
        """A point."""

        x: int
        y: int = 2
        tags: list[str] = kind.field(default_factory=list, metadata={"help": "names"})

        def __post_init__(self) -> None:
            if self.x == 13:
                raise ValueError("unlucky")

        def sum(self) -> int:
            return self.x + self.y

    return Point


Frozen = made(records, frozen=True)  # pickle finds it here
Frozen.__qualname__ = "Frozen"


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error)


@given(
    st.lists(st.integers(0, 20), max_size=4),
    st.dictionaries(st.sampled_from(["x", "y", "tags", "z"]), st.integers(0, 20)),
)
@pytest.mark.parametrize("options", [{}, {"frozen": True}], ids=str)
def test_they_do_what_those_of_the_standard_library_do(options, given, named):
    def seen(kind):
        cls = made(kind, **options)
        point = cls(*given, **named)

        def changed():
            point.y = 5
            return point.y

        def removed():
            del point.y

        return [
            outcome(call)
            for call in (
                lambda: repr(point).replace(cls.__qualname__, ""),
                lambda: (point.sum(), point.tags, cls.__match_args__, cls.__slots__, cls.__doc__),
                lambda: point == cls(*given, **named),
                lambda: point == (point.x, point.y),
                lambda: hash(point) == hash(cls(*given, **named)),
                lambda: kind.replace(point, x=7).x,
                lambda: dataclasses.replace(point, x=13),
                lambda: dataclasses.asdict(point),
                lambda: [(one.name, one.type, dict(one.metadata)) for one in kind.fields(point)],
                lambda: [each.name for each in records.fields(cls)],
                lambda: [records.is_dataclass(each) for each in (point, cls, 3)],
                lambda: copy.copy(point) == point == copy.deepcopy(point),
                changed,
                removed,
                lambda: vars(point),
            )
        ]

    assert outcome(lambda: seen(records)) == outcome(lambda: seen(dataclasses))


def test_errors_name_the_argument():
    said = r"Point.__init__\(\) missing 1 required positional argument: 'x'"
    with pytest.raises(TypeError, match=said):
        Frozen()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Frozen(1, z=2)
    with pytest.raises(TypeError, match="takes 3 arguments but 4 were given"):
        Frozen(1, 2, [], 4)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        Frozen(1).x = 2


@dataclasses.dataclass(frozen=True)
class More(Frozen):
    z: int = 0


def test_they_pickle_and_a_dataclass_of_the_standard_library_may_inherit_from_one():
    assert pickle.loads(pickle.dumps(Frozen(1, 3))) == Frozen(1, 3)
    more = More(1, z=4)
    assert (more.sum(), more, more == More(1)) == (3, copy.copy(more), False)
    assert [each.name for each in records.fields(more)] == ["x", "y", "tags", "z"]
