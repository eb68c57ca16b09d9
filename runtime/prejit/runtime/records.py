"""Dataclasses of the standard library, but for one thing: classes share their methods.

`dataclasses` writes and compiles methods for each class, which takes 0.7 ms, and a start makes 37. Type
checkers see the standard library, and its functions (`dataclasses.replace`) take these classes as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import fields as fields
    from dataclasses import is_dataclass as is_dataclass
    from dataclasses import replace as replace

else:
    _MISSING = object()
    _put = object.__setattr__

    class field:  # noqa: N801  its name in the standard library
        """A field: what users of `dataclasses.Field` read."""

        def __init__(self, **told):
            self.name, self.type, self.told = "", "", told
            self.default = told.get("default", _MISSING)
            self.metadata = told.get("metadata", {})

    def dataclass(*, frozen=False, slots):
        """Make a dataclass with slots of a class."""

        def made(cls):
            namespace = {"__hash__": None, **_METHODS, **(_FROZEN if frozen else {})} | vars(cls)
            of = namespace["__record_fields__"] = {}
            for name, annotation in vars(cls)["__annotations__"].items():
                given = namespace.pop(name, None) if name in namespace else field()
                of[name] = each = given if isinstance(given, field) else field(default=given)
                each.name, each.type = name, annotation
            namespace["__slots__"] = namespace["__match_args__"] = tuple(of)
            del namespace["__dict__"], namespace["__weakref__"]
            return type(cls)(cls.__name__, cls.__bases__, namespace)

        assert slots
        return made

    def fields(kind):
        """Return the fields of a dataclass."""
        cls = kind if isinstance(kind, type) else type(kind)
        if (of := vars(cls).get("__record_fields__")) is not None:
            return tuple(of.values())
        from dataclasses import fields as fields_of_others

        return fields_of_others(kind)

    def is_dataclass(kind):
        """Return whether a class, or the class of a value, is a dataclass."""
        return hasattr(kind, "__record_fields__") or hasattr(kind, "__dataclass_fields__")

    def replace(value, /, **changes):
        """Return a dataclass with other values of some fields."""
        kept = {each.name: getattr(value, each.name) for each in fields(value)}
        return type(value)(**(kept | changes))

    def _init(self, /, *given, **named):
        of = self.__record_fields__
        values = dict(zip(of, given, strict=False)) if given else {}
        if len(given) > len(of):
            _refuse_arguments(self, f"takes {len(of)} arguments but {len(given)} were given")
        if given or not named.keys() <= of.keys():
            for name in named:
                if name not in of or name in values:
                    _refuse_arguments(self, f"got an unexpected keyword argument {name!r}")
        values |= named
        for name, each in of.items():
            value = values.get(name, each.default)
            if value is _MISSING:
                if "default_factory" not in each.told:
                    _refuse_arguments(self, f"missing 1 required positional argument: {name!r}")
                value = each.told["default_factory"]()
            _put(self, name, value)
        self.__post_init__()

    def _refuse_arguments(self, problem):
        raise TypeError(f"{type(self).__name__}.__init__() {problem}")

    def _values(self):
        return [getattr(self, name) for name in self.__record_fields__]

    def _state(self):
        return [getattr(self, each.name) for each in fields(self)]

    def _set_state(self, state):
        for each, value in zip(fields(self), state, strict=True):
            _put(self, each.name, value)

    def _repr(self):
        pairs = zip(self.__record_fields__, _values(self), strict=True)
        return (
            f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in pairs)})"
        )

    def _eq(self, other):
        return _values(self) == _values(other) if type(self) is type(other) else NotImplemented

    def _hash(self):
        return hash(tuple(_values(self)))

    def _refuse(self, name, value=None):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    class _OfStandard:
        """An attribute that `dataclasses` looks for in a class. It is made when it is first read."""

        def __init__(self, name):
            self.name = name

        def __get__(self, value, kind):
            from dataclasses import field, make_dataclass

            of = [(each.name, each.type, field(**each.told)) for each in fields(kind)]
            made = make_dataclass(kind.__name__, of, frozen=kind.__setattr__ is _refuse)
            kind.__dataclass_fields__ = made.__dataclass_fields__
            kind.__dataclass_params__ = made.__dataclass_params__
            return getattr(kind, self.name)

    _METHODS = {
        "__init__": _init,
        "__post_init__": lambda self: None,
        "__repr__": _repr,
        "__eq__": _eq,
        "__getstate__": _state,
        "__setstate__": _set_state,
        "__dataclass_fields__": _OfStandard("__dataclass_fields__"),
        "__dataclass_params__": _OfStandard("__dataclass_params__"),
    }
    _FROZEN = {"__hash__": _hash, "__setattr__": _refuse, "__delattr__": _refuse}
