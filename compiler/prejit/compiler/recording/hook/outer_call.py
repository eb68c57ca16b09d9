"""The call that made jax compile: where its function can be imported, and the shapes of its arguments.

jax calls its listeners inside the call of the jitted function, so a frame above has the arguments. Values
stay here: only shapes, dtypes, classes and static arguments are written.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from prejit.runtime.recorded.hook.jax_texts import CALL_FRAME, CALL_LOCALS
from prejit.runtime.recorded.hook.plain_functions import is_plain

_NUMBERS = (bool, int, float, complex)
"""The classes of Python's numbers: jax gives them weak types."""


_Parameter = inspect.Parameter


class _UnknownError(Exception):
    """A manifest cannot name a function or an argument; the text says why."""


def outer_call() -> dict[str, Any] | None:
    """Return the innermost call of a jitted function above, as JSON; None: it is jax's own, or there is none.

        {"name": "serve:score",              how its function is imported; None: it cannot be
         "home": "/app",                     the directory where its module is found; None: an installed one
         "arguments": [["x", tree], ...],    in the order of the call
         "by_place": false,                  whether the manifest must pass them by position
         "static": {"mode": "fast"},         texts, integers and booleans
         "fixed": {"limit": "=1e-06"},       other static arguments: "=" and a literal, or a name to import
         "donated": ["state"],
         "lowering": {"placed": ["x"],       the names that the call passed by position
                      "keep_unused": false,  as jax.jit was given it
                      "x64": false},         the setting jax_enable_x64
         "trouble": "..."}                   why no manifest can name it; empty: one can

    A tree is {"kind": ..., "of": ..., "items": [[key, tree], ...]}. Kinds with items are list, tuple, dict,
    and mapping and new, "of" the class to import; new has "constants": [[field, literal], ...]. The others
    are none, array and weak "of" a shape such as "float32[8,128]", number "of" a class of Python, and object
    "of" the name to import.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_call(frame):
        frame = frame.f_back
    if frame is None:
        return None
    function, info, args, kwargs = (frame.f_locals[name] for name in CALL_LOCALS)
    function, args, kwargs = _of_flax(frame, function, args, kwargs)
    if str(getattr(function, "__module__", "")).partition(".")[0] in ("jax", "jaxlib"):
        return None
    call: dict[str, Any] = {"name": None, "home": None, "trouble": ""}
    try:
        names = _Names(frame)
        call["name"] = names.of_function(function)
        call |= _described(function, call["name"], info, args, kwargs, names)
    except _UnknownError as error:
        call["trouble"] = str(error)
    except Exception as error:  # of a class of the user, which must not end the watch
        call["trouble"] = f"its arguments cannot be read: {type(error).__name__}: {error}"
    return call


def _is_call(frame: Any) -> bool:
    return frame.f_code.co_name == CALL_FRAME and {*CALL_LOCALS} <= {*frame.f_locals}


def _of_flax(frame: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return the function and arguments that flax.nnx.jit was given: it gives jax others."""
    given = getattr(function, "f", None)
    if given is None or not type(function).__module__.startswith("flax."):
        return function, args, kwargs
    while (frame := frame.f_back) is not None:
        found = frame.f_locals
        of_flax = {"self", "args", "kwargs"} <= {*found}
        if of_flax and getattr(found["self"], "__wrapped__", None) is given:
            return given, found["args"], found["kwargs"]
    return function, args, kwargs


def _described(
    function: Any, name: str | None, info: Any, args: Any, kwargs: Any, names: _Names
) -> dict[str, Any]:
    import jax

    if name is None:
        raise _without_name(function)
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise _UnknownError("its parameters are not known") from error
    kinds = {name: each.kind for name, each in signature.parameters.items()}
    order = list(kinds)
    if not is_plain(function):  # a wrapper may treat names otherwise: pass each as the call did
        for place, key in enumerate(order):
            if kinds[key] is _Parameter.POSITIONAL_OR_KEYWORD:
                is_placed = place < len(args)
                kinds[key] = _Parameter.POSITIONAL_ONLY if is_placed else _Parameter.KEYWORD_ONLY

    def named(places: Any, by_name: Any) -> set[str]:
        """Return what jax takes by its place or its name, as this call has it."""
        placed = {key for place, key in enumerate(order[: len(args)]) if place in places}
        return placed.union(key for key in by_name if key in kwargs)

    is_static = named(info.static_argnums, info.static_argnames)
    donated = named(info.donate_argnums, info.donate_argnames)
    arguments: list[tuple[str, Any]] = []
    static, fixed = dict[str, Any](), dict[str, str]()
    places, by_name = set[str](), {*bound.kwargs}
    for key, value in bound.arguments.items():
        kind = kinds[key]
        if key in is_static and key == order[0] and "." in name.partition(":")[2]:
            # A method whose object is static: the method of the same object has the rest.
            name = f"{names.of_object(value, key)}.{name.rpartition('.')[2]}"
        elif key in is_static and kind is _Parameter.POSITIONAL_ONLY:
            raise _UnknownError(f"it takes the static argument {key} by position only")
        elif key in is_static and type(value) in (str, int, bool):
            static[key] = value
        elif key in is_static:
            fixed[key] = _literal(value) or names.of_object(value, key)
        elif kind is _Parameter.VAR_KEYWORD:
            arguments += value.items()
        elif kind is _Parameter.VAR_POSITIONAL:
            arguments += [(key, each) for each in value]
            places.add(key)
        else:
            arguments.append((key, value))
            if kind is _Parameter.POSITIONAL_ONLY:
                places.add(key)
            elif kind is _Parameter.KEYWORD_ONLY:
                by_name.add(key)
    if places and {key for key, _ in arguments} & by_name:
        raise _UnknownError("it takes some arrays by position only and others by name only")
    return {
        "name": name,
        "home": names.home(name),
        "arguments": [[key, _tree(value, key, names)] for key, value in arguments],
        "by_place": bool(places),
        "static": static,
        "fixed": fixed,
        "donated": [key for key, _ in arguments if key in donated],
        "lowering": {
            "placed": [
                key for key in order[: len(args)] if key in {*dict(arguments), *static, *fixed}
            ],
            "keep_unused": info.keep_unused,
            "x64": jax.config.jax_enable_x64,
        },
    }


def _without_name(function: Any) -> _UnknownError:
    script = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")
    is_of_script = script and getattr(function, "__module__", None) == "__main__"
    if is_of_script and not _module_name("__main__"):
        return _UnknownError(
            f"it is in {script!r}, whose name no import statement can have: rename the file, to letters, "
            "digits and underscores before .py"
        )
    return _UnknownError("no name was found by which its function can be imported")


class _Names:
    """The names by which what a call uses can be imported, from modules of the program and of its callers."""

    def __init__(self, frame: Any) -> None:
        self._modules: dict[str, Mapping[str, Any]] = {}
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            if name in sys.modules and sys.modules[name].__dict__ is frame.f_globals:
                self._modules[name] = frame.f_globals
            frame = frame.f_back
        library = os.path.join(os.path.dirname(os.__file__), "")
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None) or library
            if name == "__main__" or not (file.startswith(library) or "site-packages" in file):
                self._modules.setdefault(name, vars(module))
        self._guarded = _guarded(getattr(sys.modules["__main__"], "__file__", None))

    def of_function(self, function: Any) -> str | None:
        """Return the name of a function, or of what jax.jit made of it; None: it was not found."""
        for name, value in self._candidates(function):
            if value is function or (
                hasattr(value, "lower") and getattr(value, "__wrapped__", None) is function
            ):
                return name
        owner = getattr(function, "__self__", None)
        if owner is not None and not inspect.ismodule(owner):
            with contextlib.suppress(_UnknownError):
                return f"{self.of_object(owner, 'self')}.{function.__name__}"
        return None

    def of_object(self, value: Any, what: str) -> str:
        """Return the name of an object.

        Raises:
            _UnknownError: it was not found.
        """
        for name, found in self._candidates(value):
            if found is value:
                return name
        raise _UnknownError(
            f"{what} is of {type(value).__module__}.{type(value).__qualname__}, which only code can make: "
            "make it at the top of a module"
        )

    def _candidates(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield objects that can be imported, with their names: first where a value says that it is."""
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(module, str) and isinstance(path, str) and module in sys.modules:
            found: Any = sys.modules[module]
            for part in path.split("."):
                found = inspect.getattr_static(found, part, None)
            if found is not None and self._is_importable(module, path):
                yield f"{_module_name(module)}:{path}", found
        for name, members in self._modules.items():
            for key, each in list(members.items()):
                if key.isidentifier() and self._is_importable(name, key):
                    yield f"{_module_name(name)}:{key}", each

    def _is_importable(self, module: str, path: str) -> bool:
        if module == "__main__" and path.partition(".")[0] in self._guarded:
            return False
        return _module_name(module) is not None

    def home(self, name: str) -> str | None:
        """Return the directory in which Python finds the module of a name; None: it is an installed one."""
        module = name.partition(":")[0]
        found = sys.modules.get(module)
        if found is None or _module_name("__main__") == module:
            found = sys.modules["__main__"]
        file = getattr(found, "__file__", None)
        if file is None or "site-packages" in file:
            return None
        depth = module.count(".") + (os.path.basename(file) == "__init__.py")
        directory = os.path.dirname(os.path.abspath(str(file)))
        for _ in range(depth):
            directory = os.path.dirname(directory)
        return directory


def _module_name(module: str) -> str | None:
    """Return the name by which another process imports a module; None: it cannot."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    stem, ending = os.path.splitext(os.path.basename(getattr(main, "__file__", None) or ""))
    return stem if stem.isidentifier() and ending == ".py" else None


def _guarded(file: str | None) -> frozenset[str]:
    """Return the names that a script makes only if it is run, behind `if __name__ == "__main__"`."""
    try:
        with open(file or "", "rb") as opened:
            body = ast.parse(opened.read()).body
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    inside = [
        node
        for each in body
        if isinstance(each, ast.If) and "'__name__'" in ast.dump(each.test)
        for node in ast.walk(each)
    ]
    made = [each.name for each in inside if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    names = [each for each in inside if isinstance(each, ast.Name)]
    return frozenset([*made, *(each.id for each in names if isinstance(each.ctx, ast.Store))])


def _literal(value: Any) -> str:
    """Return `=` and the literal of a value; empty: it has none."""
    text = repr(value)
    with contextlib.suppress(Exception):
        if ast.literal_eval(text) == value:
            return f"={text}"
    return ""


def _tree(value: Any, what: str, names: _Names) -> dict[str, Any]:
    """Return an argument as `outer_call` describes."""
    import jax

    kind = type(value)
    if value is None:
        return {"kind": "none"}
    if kind in _NUMBERS:
        return {"kind": "number", "of": kind.__name__}
    if hasattr(value, "shape") and hasattr(value, "dtype") and jax.tree.leaves(value)[0] is value:
        return _array(value, what)
    try:
        return _container(value, what, names)
    except _UnknownError:
        return {"kind": "object", "of": names.of_object(value, what)}


def _container(value: Any, what: str, names: _Names) -> dict[str, Any]:
    """Return an argument that holds others, or raise _UnknownError."""
    import jax

    parts, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    items = [
        [_key(path[0]), _tree(part, f"{what}{jax.tree_util.keystr(path[:1])}", names)]
        for path, part in parts
        if path
    ]
    kind, keys = type(value), {key for key, _ in items}
    if kind in (list, tuple):
        return {"kind": kind.__name__, "items": items}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in keys):
        if kind is dict:
            return {"kind": "dict", "items": items}
        return {"kind": "mapping", "of": names.of_object(kind, what), "items": items}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [[key, tree] for key, (_, tree) in zip(value._fields, items, strict=True)]
        return {"kind": "new", "of": names.of_object(kind, what), "items": items, "constants": []}
    if dataclasses.is_dataclass(value):
        fields = {each.name: each.init for each in dataclasses.fields(value)}
        left = {name: _literal(getattr(value, name)) for name in fields.keys() - keys}
        if fields.keys() >= keys and all(fields.values()) and all(left.values()):
            constants, of = sorted(left.items()), names.of_object(kind, what)
            return {"kind": "new", "of": of, "items": items, "constants": constants}
    raise _UnknownError(f"{what} is of a class that only code can make")


def _key(key: Any) -> Any:
    """Return a step of the path to a leaf: a key, an index or the name of a field."""
    return next(
        (getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)), str(key)
    )


def _array(value: Any, what: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    sizes = ",".join(map(str, value.shape))
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        if value.dtype != jax.eval_shape(lambda: jax.random.key(0)).dtype:
            raise _UnknownError(f"{what} holds random keys of another kind than jax's default")
        return {"kind": "array", "of": f"key[{sizes}]"}
    text = f"{jax.dtypes.canonicalize_dtype(value.dtype)}[{sizes}]"
    return {"kind": "weak" if getattr(value, "weak_type", False) else "array", "of": text}
