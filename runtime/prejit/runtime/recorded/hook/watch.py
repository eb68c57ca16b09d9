"""Watch what jax compiles in this process and what it reads from its cache, and write a line for each.

jax reports through `jax.monitoring`, which is public, and through its loggers. A program that disables
logging hides the ingredients of its keys, not its hits and misses. No failure here may break the program.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prejit.runtime.recorded.hook.jax_texts import (
    COMPILE_EVENT,
    COMPILER_LOGGER,
    FLAG,
    HIT,
    HIT_EVENT,
    INGREDIENT,
    KEY_LOGGER,
    MISS,
    NOT_WRITTEN,
    REQUEST_EVENT,
    SAVED_EVENT,
    SHAPES,
    SHAPES_LOGGER,
    TOO_QUICK,
    TRACING_EVENTS,
)

if TYPE_CHECKING:
    from prejit.runtime.recorded.hook.kept_calls import KeptCalls

CACHE_DIRECTORY = "jax_compilation_cache_dir"
"""The public setting of jax that names its cache."""

_AHEAD = "jax compiled it outside a call, as `jax.jit(f).lower().compile()` does"
"""Why a program is traced that no call asked for."""


class NotRecordedError(RuntimeError):
    """`prejit run --require-aot` met a program that the bundle does not hold."""


@dataclass(frozen=True)
class Orders:
    """The orders for the hook.

    Attributes:
        settings: jax's settings by name. The program may not change them.
        events: the directory for the lines; None: write none.
        refuse: whether a program that is not in the cache raises NotRecordedError.
        recorder: the compiler's package that describes and keeps what jax compiles, whose name this process
            may not find; None: nothing is recorded.
        calls: whether it records calls, too, for starts without traces.
        recorded: conditions of recorded programs; in a build for other machines what jax hashes about the
            recorded devices, hexadecimal, by `devices_text`.
        serve: whether calls run without a trace where the bundle has them.
        checked: the share of these that is traced and compared, from 0 to 1.
    """

    settings: dict[str, Any]
    events: str | None = None
    refuse: bool = False
    recorder: str | None = None
    calls: bool = False
    recorded: dict[str, str] | None = None
    serve: bool = False
    checked: float = 0.0


Load = Callable[[str, str], Any]
"""Returns a module that this process may not find by its name, of its name and file."""


def install(orders: Orders, load: Load) -> None:
    """Register listeners with jax, and with its loggers where lines are wanted."""
    import jax
    from jax import monitoring

    watch = _Watch(orders, load)
    monitoring.register_scalar_listener(watch.begin)
    if jax.__version_info__ < (0, 11):
        from prejit.runtime.recorded.hook.jax_calls import keep_callbacks

        watch.guarded(keep_callbacks)()
    watch.guarded(watch.hook_keys)()
    if orders.calls or orders.serve:
        watch.guarded(watch.hook_calls)()
    if orders.events is None and not orders.refuse and not orders.checked:
        return
    monitoring.register_event_listener(watch.event)
    monitoring.register_event_duration_secs_listener(watch.duration)
    for name in (KEY_LOGGER, COMPILER_LOGGER, SHAPES_LOGGER):
        logger = logging.getLogger(name)
        logger.addFilter(_Reader(logger, watch))
        logger.setLevel(logging.DEBUG)


class StartClock:
    """Counts the seconds of this process since the kernel started it."""

    def __init__(self) -> None:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        self._started = ticks / os.sysconf("SC_CLK_TCK")
        self._tracing = 0.0
        self._spans: list[tuple[float, float]] = []

    def traced(self, seconds: float) -> None:
        """jax has traced or lowered something for so long, until now."""
        began = time.perf_counter() - seconds
        while self._spans and self._spans[-1][0] >= began:  # it was inside this one
            self._tracing -= self._spans.pop()[1]
        self._spans.append((began, seconds))
        self._tracing += seconds

    def read(self) -> dict[str, float]:
        """Return the seconds up to now, and those of them for imports, for tracing and lowering."""
        imports: Any = builtins.__import__  # of sitecustomize, unless the program has set its own
        began = getattr(imports, "began", None)
        return {
            "seconds": time.clock_gettime(time.CLOCK_BOOTTIME) - self._started,
            "imports": getattr(imports, "seconds", 0.0)
            + (0.0 if began is None else time.perf_counter() - began),
            "tracing": self._tracing,
        }


@dataclass
class _Compile:
    """One program on its way from jax's request to its end.

    Attributes:
        function: its name as jax reports it, such as `jit(score)`.
        asked: whether jax looked into its cache.
        hit: whether it was there.
        refused: whether NotRecordedError was raised for it.
        said: the fields of its line.
    """

    function: str
    asked: bool = False
    hit: bool = False
    refused: bool = False
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """Return what became of it, as `events.JaxRequest` has it."""
        if self.hit or self.refused:
            return "hit" if self.hit else "refused"
        return "miss" if self.asked else "uncached"


class _Reader(logging.Filter):
    """Reads the messages of one logger of jax. They go no further than they did before."""

    def __init__(self, logger: logging.Logger, watch: _Watch) -> None:
        super().__init__()
        self._parent = logger.parent or logging.getLogger()
        self._own_level = logger.level
        self._watch = watch

    def filter(self, record: logging.LogRecord) -> bool:
        self._watch.message(record)
        return record.levelno >= (self._own_level or self._parent.getEffectiveLevel())


class _Watch:
    """Collects what jax reports of one program after the other, for each thread apart."""

    def __init__(self, orders: Orders, load: Load) -> None:
        self._orders = orders
        self._recorder: Any = None
        if orders.recorder is not None:
            self._recorder = load("prejit.compiler.recording.hook", orders.recorder)
        self._clock = StartClock()
        self._kept: KeptCalls | None = None
        self._thread = threading.local()
        self._name = os.urandom(4).hex()
        self._failed = False
        self._found_directory: str | None = None

    # Keys of programs, calls without traces

    def hook_keys(self) -> None:
        """Keep programs as jax lowered them, or have jax look for the keys of another machine."""
        if self._recorder is not None:
            self._recorder.keep_programs(self._orders.events)
        if recorded := self._orders.recorded:
            from prejit.runtime.recorded.hook.jax_calls import hash_machine

            hash_machine(recorded)

    def hook_calls(self) -> None:
        """Record the calls that jax traces, or serve those that were recorded."""
        from prejit.runtime.recorded.hook.jax_calls import hook_calls

        settings = tuple(self._orders.settings)
        if self._orders.calls:
            recorder = self._recorder.call_recorder(settings, self._take_key, self._write_all)
            hook_calls(*map(self.guarded, (recorder.started, recorder.traced, recorder.ended)))
        else:
            from prejit.runtime.recorded.hook.kept_calls import KeptCalls

            directory = Path(self._orders.settings[CACHE_DIRECTORY])
            self._kept = KeptCalls(directory, settings, self._orders.checked, self._note_call)
            hook_calls(self._started, ended=self._ended)

    def _started(self, token: object, call: Any) -> Any:
        assert self._kept is not None
        self._thread.call = id(token)
        return self._kept.started(token, call)

    def _ended(self, token: object, compiled: object) -> None:
        """A call is over. If jax had its program in memory, what comes next has another reason."""
        if getattr(self._thread, "call", None) == id(token):
            self._thread.reason = None

    def guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return a function whose failure the program does not see."""

        def guarded(*arguments: Any) -> None:
            try:
                call(*arguments)
            except Exception as error:
                self._fail(error)

        return guarded

    def _take_key(self) -> str | None:
        """Return the key of the program that this thread compiled or read last, and forget it."""
        found: str | None = vars(self._thread).pop("key", None)
        return found

    def _note_call(self, name: str, reason: str | None, seconds: float) -> None:
        """Note a call that runs without a trace, or why jax traces it."""
        self._thread.reason = reason
        if reason is not None or self._orders.events is None:
            return
        self._write(
            {
                "function": f"jit({name})",
                "outcome": "untraced",
                "seconds": seconds,
                "where": _where(),
                "start": self._clock.read(),
            }
        )

    def _check(self, name: str, key: str) -> None:
        """Compare the key of a program with that of the recorded call, if it was traced for that."""
        from prejit.runtime.recorded.hook.kept_calls import CHECKED

        reason = getattr(self._thread, "reason", None) or ""
        if not reason.startswith(CHECKED) or reason == CHECKED + key:
            return
        assert self._kept is not None
        self._kept.stop(name.removeprefix("jit_"))
        text = f"the trace of {name} gives another program than the recorded one: it is always traced now"
        print(f"prejit: warning: {text}", file=sys.stderr)
        self._thread.reason = text

    # What jax calls

    def begin(self, event: str, value: float, **details: Any) -> None:
        """jax begins with a program."""
        if event != COMPILE_EVENT:
            return
        try:
            self._keep_settings()
            now = _Compile(str(details.get("fun_name", "")))
            lowered = self._lowered().pop(now.function, [])
            if len(lowered) == 1:  # of several, nothing tells which is compiled first
                now.said["arguments"] = lowered[0]
            self._thread.now = now
        except Exception as error:
            self._fail(error)

    def event(self, event: str, **details: Any) -> None:
        """jax looks into its cache, or has found a program there."""
        now = getattr(self._thread, "now", None)
        if now is not None:
            now.asked |= event == REQUEST_EVENT
            now.hit |= event == HIT_EVENT

    def duration(self, event: str, seconds: float, **details: Any) -> None:
        """jax has finished something."""
        if event in TRACING_EVENTS:
            self._clock.traced(seconds)
        now = getattr(self._thread, "now", None)
        if now is None:
            return
        if event == SAVED_EVENT:
            now.said["saved_seconds"] = seconds
        if event != COMPILE_EVENT:
            return
        self._thread.now = None
        try:
            self._write(self._line(now, seconds))
        except Exception as error:
            self._fail(error)
        if not now.hit and not now.refused:
            self._refuse(now)  # logging is disabled, or jax's cache is: found after it compiled

    def message(self, record: logging.LogRecord) -> None:
        """jax logs something."""
        text, now = str(record.msg), getattr(self._thread, "now", None)
        arguments: tuple[Any, ...] = record.args if isinstance(record.args, tuple) else ()
        try:
            if text == SHAPES:
                spelled = [_spelled(each) for each in arguments[1]]
                before = self._lowered().get(str(arguments[0]), [])
                self._lowered()[str(arguments[0])] = [*before[:1], spelled]  # more say no more
            elif now is None:
                return
            elif text == INGREDIENT:
                now.said.setdefault("ingredients", {})[arguments[0]] = arguments[1]
            elif text == FLAG:
                now.said.setdefault("flags", []).append(arguments[0])
            elif text in (HIT, MISS):
                now.said["name"], now.said["key"] = arguments
                self._thread.key = arguments[1]
                self._check(*map(str, arguments))
            elif text.startswith(NOT_WRITTEN) and TOO_QUICK not in text:
                now.said["not_kept"] = record.getMessage()
        except Exception as error:
            self._fail(error)
        if text == MISS:  # also where the program removed the listeners
            self._refuse(now or _Compile(str(arguments[0])))

    def _lowered(self) -> dict[str, list[list[str]]]:
        """Return the arguments of what this thread has lowered and not compiled yet, by jax's name of it."""
        if not hasattr(self._thread, "lowered"):
            self._thread.lowered = {}
        found: dict[str, list[list[str]]] = self._thread.lowered
        return found

    # What the orders say

    def _keep_settings(self) -> None:
        """Set jax's settings again if the program changed them: it would write to the cache, or miss it."""
        import jax

        for name, value in self._orders.settings.items():
            found = getattr(jax.config, name)
            if found != value:
                if name == CACHE_DIRECTORY:
                    self._found_directory = str(found)
                jax.config.update(name, value)

    def _refuse(self, now: _Compile) -> None:
        """Raise NotRecordedError if the orders allow no compile."""
        if not self._orders.refuse:
            return
        now.refused = True
        shapes = ", ".join(now.said.get("arguments") or ())
        where = now.said.setdefault("where", _where())
        raise NotRecordedError(
            f"{where}: {now.function or 'a program'} of ({shapes}) is not in the recorded bundle, and "
            "--require-aot allows no compile. hint: `prejit run --report` says why; `prejit record` with the "
            "same bundle adds it"
        )

    # The lines

    def _line(self, now: _Compile, seconds: float) -> dict[str, Any]:
        line = {
            "function": now.function,
            "outcome": now.outcome,
            "seconds": seconds,
            "start": self._clock.read(),
            "conditions": _conditions(now.said.pop("flags", [])),
            **now.said,
        }
        line.setdefault("where", _where())
        reason = vars(self._thread).pop("reason", None)
        if self._kept is not None:
            reason = reason or _AHEAD
        if reason is not None:
            line["traced"] = reason
        if self._recorder is not None:
            line["call"] = self._recorder.outer_call()
        return line

    def _write(self, line: dict[str, Any]) -> None:
        self._write_all([line])

    def _write_all(self, lines: list[dict[str, Any]]) -> None:
        """Append lines to the file of this process, whose first writer adds what the process is.

        A process that is killed has written all before. No lock: a fork would inherit it as it is.
        """
        if self._orders.events is None:
            return
        if self._found_directory is not None:
            lines = [*lines, {"found_directory": self._found_directory}]
            self._found_directory = None
        path = os.path.join(self._orders.events, f"{os.getpid()}-{self._name}.jsonl")
        if not os.path.exists(path):
            lines = [_process(), *lines]
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in lines))

    def _fail(self, error: Exception) -> None:
        """Print and report the first failure."""
        if self._failed:
            return
        self._failed = True
        text = f"{type(error).__name__}: {error}"
        print(f"prejit: cannot watch jax any more: {text}", file=sys.stderr)
        with contextlib.suppress(Exception):  # the same failure, perhaps
            self._write({"failure": text})


def _process() -> dict[str, Any]:
    """Return the first line of a process's file."""
    from importlib import metadata

    python = ".".join(map(str, sys.version_info[:3]))
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")} | {"python": python}
    return {"process": os.getpid(), "program": (sys.argv or [""])[0], "versions": versions}


def _conditions(flags: list[str]) -> dict[str, str]:
    """Return what lies behind the ingredients, as text for people."""
    import jax

    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "backend version": device.client.platform_version,
        "device kind": device.device_kind,
        "device count": str(jax.device_count()),
        "XLA flags": " ".join(sorted(set(flags))),
    }


def _spelled(aval: Any) -> str:
    """Return an argument as `float32[8,128]`, or `weak float32[]` as a Python number."""
    weak = "weak " * bool(getattr(aval, "weak_type", False))
    return f"{weak}{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _where() -> str:
    """Return the line of the program that led to this compile, such as `serve.py:12`.

    It is the innermost one that is in no installed package, if there is one. Lines of jax, of logging and of
    this hook do not count.
    """
    import jax

    ours = tuple(
        os.path.join(os.path.dirname(os.path.abspath(file)), "")
        for file in (__file__, jax.__file__, logging.__file__)
    )
    frame: Any = sys._getframe(1)
    frames = []
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<") and not os.path.abspath(name).startswith(ours):
            frames.append(frame)
        frame = frame.f_back
    own = [f for f in frames if "site-packages" not in f.f_code.co_filename] or frames
    return f"{os.path.basename(own[0].f_code.co_filename)}:{own[0].f_lineno}" if own else "?"
