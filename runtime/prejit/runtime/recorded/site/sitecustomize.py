"""Python imports this file at its start: `prejit record` and `run` put its directory on PYTHONPATH.

It does three things: it removes its directory from `sys.path`, it waits for an import of jax to start
`prejit.runtime.recorded.hook`, and it imports the sitecustomize that would have been imported without it. It
imports nothing that Python has not imported by then, so a program without jax pays nothing.
"""

# No `from __future__ import annotations`: that is an import, too.
import os
import sys

TYPE_CHECKING = False  # `typing` takes milliseconds to import
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_SITE = os.path.dirname(os.path.abspath(__file__))
_HOOK = os.path.join(os.path.dirname(_SITE), "hook", "__init__.py")
_HOOK_NAME = "prejit.runtime.recorded.hook"
"""The name by which the hook imports itself, without the packages above it."""


class _JaxFinder:
    """Finds jax as the other finders do, and starts the hook after it was imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if name != "jax":
            return None
        sys.meta_path[:] = [each for each in sys.meta_path if each is not _JaxFinder]
        from importlib.util import find_spec

        spec = find_spec(name)
        try:
            if spec is not None:
                _start_after(spec.loader)
        except Exception as error:
            _warn(error)
        return spec


def _start_after(loader: "Any") -> None:
    """Start the hook when this loader has executed its module."""
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        # The attribute of this very loader, which hides the method of its class.
        del loader.exec_module
        execute(module)
        try:
            _start()
        except Exception as error:
            _warn(error)

    loader.exec_module = exec_module


def _start() -> None:
    _load(_HOOK_NAME, _HOOK).start(_load)


def _load(name: str, file: str) -> "Any":
    """Return a module or a package that this process may not find by its name."""
    from importlib.util import module_from_spec, spec_from_file_location

    packages = [os.path.dirname(file)] if file.endswith("__init__.py") else None
    spec = spec_from_file_location(name, file, submodule_search_locations=packages)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _watch_inputs() -> None:
    """Start what `prejit record --untraced` orders to watch from the beginning."""
    import json

    orders = json.loads(os.environ["PREJIT_HOOK"])
    here, theirs = os.path.dirname(_HOOK), os.path.dirname(orders["recorder"])
    facts = _load("prejit_input_facts", os.path.join(here, "input_facts.py"))
    watch = _load("prejit_process_watch", os.path.join(theirs, "process_watch.py"))
    ours = os.path.dirname(_SITE), os.path.dirname(theirs)
    watch.start([*ours, os.path.dirname(orders["events"])], facts)


def _time_imports() -> None:
    """Count the seconds of the imports of this thread, for the report of a run: `StartClock` reads them."""
    import builtins
    from _thread import get_ident
    from time import perf_counter

    plain, main = builtins.__import__, get_ident()

    def timed(*arguments: "Any", **named: "Any") -> "Any":
        if spent.began is not None or get_ident() != main:
            return plain(*arguments, **named)
        spent.began = perf_counter()
        try:
            return plain(*arguments, **named)
        finally:
            spent.seconds += perf_counter() - spent.began
            spent.began = None

    # Warnings that say "of whoever imports this" and tracebacks leave out frames of this name.
    timed.__code__ = timed.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    spent: Any = timed
    spent.seconds, spent.began = 0.0, None
    builtins.__import__ = timed


def _warn(error: Exception) -> None:
    print(
        f"prejit: cannot watch jax in this process: {type(error).__name__}: {error}",
        file=sys.stderr,
    )


def _import_other() -> None:
    """Import the sitecustomize that is next on `sys.path`, in the place of this one."""
    this = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


if __name__ == "sitecustomize":
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _SITE]
    sys.modules["prejit_environment"] = type(sys)("prejit_environment")
    vars(sys.modules["prejit_environment"])["at_start"] = dict(os.environ)  # for `input_facts`
    if '"events": "' in os.environ.get("PREJIT_HOOK", ""):
        _time_imports()
    if '"calls": true' in os.environ.get("PREJIT_HOOK", ""):
        try:
            _watch_inputs()
        except Exception as error:
            _warn(error)
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, _JaxFinder)
    _import_other()
